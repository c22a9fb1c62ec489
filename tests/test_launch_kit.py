"""The starters in launch/: they parse, and start again only where it helps."""

import pathlib
import re
import subprocess

import pytest
import yaml

from vit_jax import hosts, launch

KIT = pathlib.Path(__file__).parent.parent / "launch"
SCRIPTS = sorted(path.name for path in KIT.glob("*.sh"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name):
  subprocess.run(["bash", "-n", KIT / name], check=True)


def test_the_gke_manifest_is_one_job_set_that_stops_where_it_must():
  (manifest,) = yaml.safe_load_all((KIT / "gke.yaml").read_text())
  assert manifest["kind"] == "JobSet"
  assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 100
  (job,) = manifest["spec"]["replicatedJobs"]
  (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
  final = [launch.REFUSED, launch.NOT_FINITE]
  assert rule["onExitCodes"]["values"] == final
  pod = job["template"]["spec"]["template"]["spec"]
  assert pod["restartPolicy"] == "Never"  # podFailurePolicy wants it.
  words = subprocess.run(
    ["bash", "-n", "-c", *pod["containers"][0]["args"]], check=False
  )
  assert words.returncode == 0
  for name in ("run.sh", "slurm.sh"):
    (statuses,) = re.findall(
      r"^ *(?:case.*)?(0 \| .*?)\)", (KIT / name).read_text(), re.M
    )
    assert [int(x) for x in statuses.split("|")] == [0, *final]


@pytest.mark.parametrize(
  ("ends", "last", "starts"),
  [
    ([0], 0, 1),
    ([launch.REFUSED], 2, 1),
    ([launch.NOT_FINITE], 3, 1),
    ([hosts.LOST, launch.TERMINATED, 137, 0], 0, 4),
  ],
)
def test_a_run_is_started_again_where_that_helps(tmp_path, ends, last, starts):
  python = tmp_path / "python"
  python.write_text(
    f'#!/bin/bash\necho "$@" >>{tmp_path}/starts\n'
    f"ends=({' '.join(map(str, ends))})\n"
    f"exit ${{ends[$(wc -l <{tmp_path}/starts) - 1]}}\n"
  )
  python.chmod(0o755)
  done = subprocess.run(
    ["bash", KIT / "run.sh", "--config=a b.py", "--workdir=gs://x/y"],
    env={"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHON": python, "PAUSE": "0"},
    check=False,
  )
  assert done.returncode == last
  words = (tmp_path / "starts").read_text().splitlines()
  assert (
    words == ["-m vit_jax.main --config=a b.py --workdir=gs://x/y"] * starts
  )


def test_sigterm_goes_on_to_the_run_and_ends_the_starting(tmp_path):
  python = tmp_path / "python"
  python.write_text(
    "#!/bin/bash\n"
    f"trap 'sleep 0.3; echo saved >>{tmp_path}/said; exit 143' TERM\n"
    f"echo started >>{tmp_path}/said\nwhile true; do sleep 0.05; done\n"
  )
  python.chmod(0o755)
  run = subprocess.Popen(
    ["bash", KIT / "run.sh"],
    env={"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHON": python, "PAUSE": "0"},
  )
  while not (tmp_path / "said").exists():
    assert run.poll() is None
  run.terminate()
  assert run.wait(timeout=20) == launch.TERMINATED
  assert (tmp_path / "said").read_text().split() == ["started", "saved"]
