"""The idx format of MNIST's files, read strictly.

Two zero bytes, a byte for the element type, a byte for the number of axes d, d sizes as big-endian 32-bit integers,
then the elements, big-endian, the last axis running fastest, and nothing after them. A file may be gzipped.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from glocal.errors import GlocalError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def parse_idx(content: bytes, name: str = "the data") -> np.ndarray:
    """The array that unzipped idx bytes hold, in the machine's byte order; `name` is what errors call them."""

    def malformed(why: str) -> GlocalError:
        return GlocalError(f"{name} is not an idx file: {why}; put the original file in its place.")

    if len(content) < 4:
        raise malformed(f"it ends after {len(content)} of the header's first 4 bytes")
    zero, kind, axes = struct.unpack(">HBB", content[:4])
    if zero != 0:
        raise malformed(f"it starts with the bytes {content[:4].hex()} instead of 0000")
    if kind not in TYPES:
        allowed = ", ".join(f"{code:#04x}" for code in TYPES)
        raise malformed(f"its element type is {kind:#04x} (allowed: {allowed})")
    if axes == 0:
        raise malformed("it has no axes (allowed: 1 or more)")
    start = 4 + 4 * axes
    if len(content) < start:
        raise malformed(f"it ends after {len(content)} of the header's {start} bytes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    dtype = np.dtype(TYPES[kind])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        raise malformed(f"its shape {shape} needs {expected} bytes of elements and {len(content) - start} are there")
    # A copy, because an array on top of `bytes` could never be written to.
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="), copy=True)


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file, gzipped or not, whatever its name says."""
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise GlocalError(f"{path} cannot be read ({error}); put the original file in its place.") from error
    return parse_idx(content, str(path))
