"""The idx format, compared with files written as it is defined."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glocal.challenges.readers import parse_idx, read_idx
from glocal.errors import GlocalError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
GOOD = struct.pack(">HBB2I", 0, 8, 2, 2, 3) + bytes(range(6))


@given(st.data(), st.sampled_from(sorted(CODES)), hnp.array_shapes(max_dims=4, min_side=0, max_side=4))
def test_every_type_and_shape_reads_back(data: st.DataObject, kind: str, shape: tuple[int, ...]) -> None:
    array = data.draw(hnp.arrays(np.dtype(">" + kind), shape))
    raw = struct.pack(f">HBB{len(shape)}I", 0, CODES[kind], len(shape), *shape) + array.tobytes()
    read = parse_idx(raw)
    assert read.dtype == np.dtype(kind)
    np.testing.assert_array_equal(read, array)


def test_compression_is_detected_by_content(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(GOOD)
    (tmp_path / "zipped").write_bytes(gzip.compress(GOOD))
    for name in ("plain.gz", "zipped"):
        np.testing.assert_array_equal(read_idx(tmp_path / name), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ends after 0 of the header's first 4"),
        (b"\x00\x00\x08", "ends after 3 of the header's first 4"),
        (b"\x89PNG" + GOOD, "starts with the bytes 89504e47"),
        (b"\x00\x00\x07" + GOOD[3:], "element type is 0x07"),
        (b"\x00\x00\x08\x00", "no axes"),
        (GOOD[:10], "ends after 10 of the header's 12 bytes"),
        (GOOD[:-1], r"shape \(2, 3\) needs 6 bytes of elements and it has 5"),
        (GOOD + b"\x00", "needs 6 bytes of elements and it has 7"),
        (struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4), "and it has 0"),
    ],
)
def test_malformed_content_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    for content in (raw, gzip.compress(raw)):
        path = tmp_path / "digits"
        path.write_bytes(content)
        with pytest.raises(GlocalError, match=message) as raised:
            read_idx(path)
        assert str(path) in str(raised.value)


@given(st.integers(0, len(GOOD) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(GlocalError):
        parse_idx(GOOD[:length])


@pytest.mark.parametrize("keep", [2, 15, -1])
def test_a_truncated_zip_and_a_missing_file_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "digits.gz"
    with pytest.raises(GlocalError, match="cannot be read"):
        read_idx(path)
    path.write_bytes(gzip.compress(GOOD)[:keep])
    with pytest.raises(GlocalError, match="cannot be read"):
        read_idx(path)
