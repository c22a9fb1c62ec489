"""What the bytes of an image tell without being decoded: format and colours.

Only what stands in the first bytes is read, never more than a few headers. No
bytes are refused: of what is damaged less is known.
"""

from typing import NamedTuple

from input_pipeline.ops.exif import exif_orientation

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_MODES = {1: "grey", 3: "RGB", 4: "CMYK"}
_PNG_MODES = {0: "grey", 2: "RGB", 3: "palette", 4: "grey + alpha", 6: "RGBA"}
_BMP_MODES = {8: "grey", 24: "RGB", 32: "RGBA"}
_BRANDS = {b"avif": "avif", b"heic": "heic", b"heix": "heic", b"mif1": "heic"}
_MAGIC = {
  b"\xff\xd8\xff": "jpeg",
  b"\x89PNG\r\n\x1a\n": "png",
  b"GIF8": "gif",
  b"BM": "bmp",
  b"II*\0": "tiff",
  b"MM\0*": "tiff",
  b"\0\0\0\x0cJXL ": "jxl",
  b"\xff\x0a": "jxl",
  b"\0\0\0\x0cjP  ": "jp2",
}
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND"}


class Header(NamedTuple):
  """What an image says of itself; "" where it says nothing.

  Attributes:
    format: "jpeg", "png", "gif", "bmp", "webp"; "tiff", "heic", "avif", "jxl",
      "jp2", "html" for what is often met under the name of an image.
    mode: "grey", "grey + alpha", "RGB", "RGBA", "palette" or "CMYK",
      perhaps with "16-bit " in front.
    orientation: of a JPEG's EXIF, 1 to 8; 1 is upright, or not said.
  """

  format: str = ""
  mode: str = ""
  orientation: int = 1


def read(data: bytes) -> Header:
  """Reads the header of an encoded image, whatever its name."""
  kind = _format(data)
  if kind == "jpeg":
    return Header(kind, _jpeg_mode(data), exif_orientation(data))
  if kind == "png":
    deep = "16-bit " if data[24:25] == b"\x10" else ""
    return Header(kind, deep + _look_up(_PNG_MODES, data[25:26]))
  if kind == "gif":
    return Header(kind, "palette")
  if kind == "bmp":
    return Header(kind, _look_up(_BMP_MODES, data[28:30]))
  if kind == "webp":
    return Header(kind, "RGBA" if _has_alpha(data) else "RGB")
  return Header(kind)


def complaint(data: bytes) -> str:
  """Says what is wrong with bytes that cannot be decoded; "" if not known."""
  kind = _format(data)
  if not data:
    return "the file is empty"
  if kind == "html":
    return "it holds an HTML page, no image"
  if kind in ("avif", "heic", "jp2", "jxl", "tiff"):
    return f"it holds {kind.upper()}, not supported: convert it to PNG or JPEG"
  # Some writers leave a few bytes behind the end.
  if kind in _ENDS and _ENDS[kind] not in data[-1024:]:
    return f"it is truncated: the end of the {kind.upper()} is missing"
  return ""


def _format(data: bytes) -> str:
  for magic, kind in _MAGIC.items():
    if data.startswith(magic):
      return kind
  if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
    return "webp"
  if data[4:8] == b"ftyp" and data[8:12] in _BRANDS:
    return _BRANDS[data[8:12]]
  if data[:256].lstrip().lower().startswith((b"<!doctype html", b"<html")):
    return "html"
  return ""


def _look_up(modes: dict[int, str], field: bytes) -> str:
  value = int.from_bytes(field, "little")
  return modes.get(value, "")


def _jpeg_mode(data: bytes) -> str:
  """Finds the frame header among the segments before the first scan."""
  at = 2
  while len(data) >= at + 4 and data[at] == 0xFF:
    marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
    if marker == 0xFF:  # Segments may begin with more than one of these.
      at += 1
      continue
    if marker in _START_OF_FRAME:
      return _look_up(_JPEG_MODES, data[at + 9 : at + 10])
    at += 2 + size
  return ""


def _has_alpha(data: bytes) -> bool:
  if data[12:16] == b"VP8X":  # The extended format has a byte of flags.
    return bool(int.from_bytes(data[20:21], "little") & 0x10)
  if data[12:16] == b"VP8L":  # Lossless: after two sides of 14 bits each.
    return bool(int.from_bytes(data[21:25], "little") >> 28 & 1)
  return False
