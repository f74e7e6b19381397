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
