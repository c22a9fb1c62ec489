"""The orientation that a camera wrote into a JPEG, to count, not to apply.

No published pipeline turns images by it, so no op does; a folder in which many
images carry one should be turned once, on disk.
"""

import struct

_ORIENTATION = 0x0112  # The TIFF tag.
_UPRIGHT = 1


def exif_orientation(data: bytes) -> int:
  """The EXIF orientation of an encoded image.

  Args:
    data: the file, or its first 64 KiB.

  Returns:
    2 to 8 for what would have to be turned or mirrored; 1 for upright images,
    and for all files without a readable tag.
  """
  try:
    return _orientation_in(_exif_segment(data))
  except struct.error:  # Cut off, or not what it claims to be.
    return _UPRIGHT


def _exif_segment(data: bytes) -> bytes:
  """The TIFF structure in the APP1 segment of a JPEG; empty without one."""
  if data[:2] != b"\xff\xd8":
    return b""
  place = 2
  while data[place : place + 1] == b"\xff":
    marker, length = struct.unpack_from(">BH", data, place + 1)
    body = data[place + 4 : place + 2 + length]
    if marker == 0xE1 and body.startswith(b"Exif\0\0"):
      return body[6:]
    if marker == 0xDA:  # From here on there are pixels.
      break
    place += 2 + length
  return b""


def _orientation_in(tiff: bytes) -> int:
  """Looks the tag up among those of the first directory."""
  order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
  if order is None:
    return _UPRIGHT
  (place,) = struct.unpack_from(order + "I", tiff, 4)
  (count,) = struct.unpack_from(order + "H", tiff, place)
  for entry in range(place + 2, place + 2 + 12 * count, 12):
    tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
    if tag == _ORIENTATION:
      return value if 1 <= value <= 8 else _UPRIGHT
  return _UPRIGHT
