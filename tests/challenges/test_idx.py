"""The idx format, compared with files written as it is defined."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from glocal.challenges.datasets import read_idx
from glocal.errors import GlocalError

GOOD = struct.pack(">HBB2I", 0, 8, 2, 2, 3) + bytes(range(6))


@given(hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=4)))
def test_every_shape_reads_back(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    path = tmp_path_factory.getbasetemp() / "digits"
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())
    np.testing.assert_array_equal(read_idx(path), array, strict=True)


def test_compression_is_detected_by_content(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(GOOD)
    (tmp_path / "zipped").write_bytes(gzip.compress(GOOD))
    for name in ("plain.gz", "zipped"):
        np.testing.assert_array_equal(read_idx(tmp_path / name), [[0, 1, 2], [3, 4, 5]])


MALFORMED = {
    "png": b"\x89PNG" + GOOD,
    "other type": b"\x00\x00\x07" + GOOD[3:],
    "too long": GOOD + b"\x00",
    "huge": struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4),
    **{f"{length} bytes": GOOD[:length] for length in range(len(GOOD))},
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed_content_is_refused(tmp_path: Path, raw: bytes) -> None:
    for content in (raw, gzip.compress(raw)):
        path = tmp_path / "digits"
        path.write_bytes(content)
        with pytest.raises(GlocalError, match="digits is damaged"):
            read_idx(path)


@pytest.mark.parametrize("keep", [2, 15, -1])
def test_a_truncated_zip_and_a_missing_file_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "digits.gz"
    with pytest.raises(GlocalError, match="cannot be read"):
        read_idx(path)
    path.write_bytes(gzip.compress(GOOD)[:keep])
    with pytest.raises(GlocalError, match="cannot be read"):
        read_idx(path)
