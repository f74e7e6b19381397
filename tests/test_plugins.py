"""Users' files and what they import from beside them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glocal import plugins
from glocal.errors import GlocalError

MINE = "from helper_beside import number\n\ndef make():\n    return number()\n"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python looks where it looked, and has loaded what it had."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "FOLDERS", [])
    loaded = set(sys.modules)
    yield
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    return folder / "mine.py"


def made(path: Path) -> tuple[int, str]:
    make, digest = plugins.load(f"{path}:make", "thing")
    return make(), digest


def test_a_file_alone_is_named_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path, mine="import json\n\ndef make():\n    return 5\n", json="broken = (")
    before = [*sys.path]
    assert made(path) == (5, hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    assert sys.path == before


def test_neighbours_are_found_and_are_part_of_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, mine=MINE, helper_beside="from deeper_beside import number")
    written(tmp_path, deeper_beside="def number():\n    return 1\n", stranger="1 / 0")
    one, first = made(path)
    written(tmp_path, deeper_beside="def number():\n    return 22\n")
    other, second = made(path)
    assert (one, other) == (1, 22) and first != second
    written(tmp_path, stranger="2 / 0")
    assert made(path) == (22, second)
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)


def test_packages_are_neighbours_too(tmp_path: Path) -> None:
    path = written(tmp_path, mine="from package_beside.inner import number as make\n")
    (tmp_path / "package_beside").mkdir()
    written(tmp_path, **{"package_beside/__init__": "", "package_beside/inner": "def number():\n    return 3\n"})
    found, digest = made(path)
    written(tmp_path, **{"package_beside/inner": "def number():\n    return 4\n"})
    assert found == 3 and made(path)[0] == 4 and made(path)[1] != digest


def test_two_folders_have_neighbours_of_one_name(tmp_path: Path) -> None:
    paths = [written(tmp_path / str(n), mine=MINE, helper_beside=f"def number():\n    return {n}\n") for n in range(2)]
    assert [made(path)[0] for path in paths] == [0, 1]


def test_what_python_has_comes_first(tmp_path: Path) -> None:
    """A file beside it that is called as an installed package is not what is imported, and not part of its name."""
    path = written(tmp_path, mine="import torch\n\ndef make():\n    return torch.ones(2).sum()\n", torch="1 / 0")
    assert made(path) == (2, hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def test_a_neighbour_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, mine=MINE, helper_beside="1 / 0")
    with pytest.raises(GlocalError, match="line 1: ZeroDivisionError"):
        made(path)
