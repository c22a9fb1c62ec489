"""Looks at a sweep's report in a real browser; not a part of any `make test`.

  python -m pytest tests/screenshot_report.py --basetemp=/tmp/look

Chromium has to be there (apt-get install chromium); the pictures stay in the
folder.
"""

import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests import sweeps
from vit_jax.vtab import plots, report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browse(page: pathlib.Path, *flags: str) -> str:
  """What a browser without a window prints of a page."""
  browser = next(filter(None, map(shutil.which, BROWSERS)), None)
  assert browser, f"Install one of {', '.join(BROWSERS)} first."
  command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *flags]
  done = subprocess.run(
    [*command, page.as_uri()], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  directory = tmp_path_factory.mktemp("report")
  other = report.Other("runs/other", sweeps.sweep(shift=-5))
  report.write(
    directory,
    sweeps.sweep(seeds=(0, 1, 2)),
    curves=sweeps.curves(),
    compare=other,
  )
  return directory / "report.html"


def test_the_browser_reads_what_was_written(page):
  read = browse(page, "--dump-dom")
  written = page.read_text()
  for tag in ("tr", "td", "svg", "circle", "polyline", "details"):
    count = len(re.findall(f"<{tag}[ >]", written))
    assert len(re.findall(f"<{tag}[ >]", read)) == count, tag


@pytest.mark.parametrize("width", [1200, 500])
def test_something_is_to_be_seen(page, width):
  picture = page.parent / f"report_{width}.png"
  window = f"--window-size={width},3600"
  browse(page, f"--screenshot={picture}", window, "--hide-scrollbars")
  pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
  assert pixels.shape == (3600, width, 3)
  # Two sweeps and three rows of the paper; a narrow window has to scroll.
  for colour in plots.COLOURS[: 5 if width > 1000 else 2]:
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    near = np.abs(pixels - wanted).max(-1) < 12
    assert near.sum() > 25, colour
  # The page ends at its edge: nothing runs out of it to the right.
  assert (pixels[:, -8:] == pixels[0, 0]).all()
