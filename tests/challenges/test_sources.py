"""Finding, verifying and fetching the files of a data set."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from glocal.challenges import download
from glocal.challenges.download import SOURCES, data_folders, fetch, locate, status
from glocal.errors import GlocalError

MNIST = SOURCES["mnist"]
FILES = [file.name for file in MNIST.files]


@pytest.mark.parametrize("unzipped", [False, True])
@pytest.mark.parametrize("inner", ["", "mnist", "MNIST/raw"])
def test_files_are_found_in_every_layout(tmp_path: Path, tiny_mnist: Any, inner: str, unzipped: bool) -> None:
    tiny_mnist.write(tmp_path / inner, unzipped)
    paths = locate("mnist", tmp_path)
    assert list(paths) == FILES
    for name, path in paths.items():
        content = path.read_bytes()
        assert (content if not unzipped else gzip.compress(content, mtime=0)) == tiny_mnist.contents[name]
    (record,) = status(tmp_path)
    assert (record.name, record.state, record.where) == ("mnist", "ready", str(tmp_path / inner))
    assert record.bytes == sum(path.stat().st_size for path in paths.values())


def test_search_order_is_argument_environment_cache(
    tmp_path: Path, tiny_mnist: Any, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argument, environment = tmp_path / "argument", tmp_path / "environment"
    monkeypatch.setenv("GLOCAL_DATA", str(environment))
    assert data_folders(argument) == [argument, environment, own_folders]
    for folder in (own_folders, environment, argument):
        tiny_mnist.write(folder)
        assert {path.parent for path in locate("mnist", argument).values()} == {folder}


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folders() == [Path("/home/somebody/.cache/glocal")]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_folders() == [Path("/home/somebody/.cache/glocal")]


def test_the_error_names_missing_files_folders_and_remedy(tmp_path: Path, tiny_mnist: Any, own_folders: Path) -> None:
    tiny_mnist.write(tmp_path)
    (tmp_path / FILES[2]).unlink()
    with pytest.raises(GlocalError) as raised:
        locate("mnist", tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    for text in (FILES[2], str(tmp_path), f"{own_folders} (no such folder)", "glocal data fetch mnist", "GLOCAL_DATA"):
        assert text in message
    assert FILES[0] not in message
    (record,) = status(tmp_path)
    assert record.state == "missing"
    assert FILES[2] in record.note


def damage_length(content: bytes) -> bytes:
    return content[:-1]


def damage_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "message"), [(damage_length, "bytes instead of"), (damage_bit, "wrong checksum")], ids=["length", "bit"]
)
def test_a_damaged_file_is_reported_and_another_copy_is_used(
    tmp_path: Path, tiny_mnist: Any, own_folders: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    tiny_mnist.write(tmp_path)
    bad = tmp_path / FILES[1]
    bad.write_bytes(damage(tiny_mnist.contents[FILES[1]]))
    with pytest.raises(GlocalError, match=f"damaged: .*{message}") as raised:
        locate("mnist", tmp_path)
    assert str(bad) in str(raised.value)
    (record,) = status(tmp_path)
    assert record.state == "damaged"
    assert str(bad) in record.note
    tiny_mnist.write(own_folders)
    assert locate("mnist", tmp_path)[FILES[1]] == own_folders / FILES[1]
    assert status(tmp_path)[0].state == "ready"


def test_a_file_is_verified_once_until_it_changes(
    tmp_path: Path, tiny_mnist: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = download.checksum

    def checksum(path: Path, algorithm: Any) -> str:
        read.append(path)
        return real(path, algorithm)

    monkeypatch.setattr(download, "checksum", checksum)
    tiny_mnist.write(tmp_path)
    locate("mnist", tmp_path)
    locate("mnist", tmp_path)
    assert sorted(read) == sorted(tmp_path / name for name in FILES)
    path = tmp_path / FILES[3]
    path.write_bytes(damage_bit(tiny_mnist.contents[FILES[3]]))
    os.utime(path, ns=(1, 1))
    with pytest.raises(GlocalError, match="wrong checksum"):
        locate("mnist", tmp_path)


def test_fetch_downloads_only_missing_and_damaged_files(tmp_path: Path, tiny_mnist: Any, mirror: Callable) -> None:
    tiny_mnist.write(tmp_path / "mnist")
    (tmp_path / "mnist" / FILES[0]).unlink()
    (tmp_path / "mnist" / FILES[3]).write_bytes(b"damaged")
    server = mirror(tiny_mnist.contents)
    reports: list[tuple[int, int | None]] = []
    paths = fetch("mnist", tmp_path, [server.url + "/"], lambda done, total: reports.append((done, total)))
    assert {name: path.read_bytes() for name, path in paths.items()} == tiny_mnist.contents
    total = len(tiny_mnist.contents[FILES[0]]) + len(tiny_mnist.contents[FILES[3]])
    assert server.sent == total
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)
    assert fetch("mnist", tmp_path, [server.url]) == paths
    assert len(server.asked) == 2


@pytest.mark.parametrize("attempt", range(4))
def test_fetches_at_the_same_time(tmp_path: Path, tiny_mnist: Any, mirror: Callable, attempt: int) -> None:
    server = mirror(tiny_mnist.contents)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: fetch("mnist", tmp_path, [server.url]), range(4)))
    assert all({name: path.read_bytes() for name, path in paths.items()} == tiny_mnist.contents for paths in found)
    assert len(server.asked) == len(tiny_mnist.contents), "nothing is fetched twice"
    assert {path.name for path in (tmp_path / "mnist").iterdir()} == set(tiny_mnist.contents)


def test_fetch_downloads_to_the_cache_by_default(tiny_mnist: Any, mirror: Callable, own_folders: Path) -> None:
    paths = fetch("mnist", mirrors=[mirror(tiny_mnist.contents).url])
    assert {path.parent for path in paths.values()} == {own_folders / "mnist"}
    assert status()[0].state == "ready"


def test_fetch_into_a_file_is_an_error(tmp_path: Path, tiny_mnist: Any, mirror: Callable) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(GlocalError, match="cannot write"):
        fetch("mnist", tmp_path / "file", [mirror(tiny_mnist.contents).url])


@pytest.mark.parametrize("call", [locate, fetch])
def test_an_unknown_data_set_is_an_error_with_a_suggestion(call: Callable) -> None:
    with pytest.raises(GlocalError, match=r"unknown data set 'minst'\. Did you mean 'mnist'\?"):
        call("minst")


def test_an_empty_data_folder_is_refused() -> None:
    with pytest.raises(GlocalError, match="empty string"):
        locate("mnist", "")


def test_sizes_and_checksums_equal_those_of_the_real_files(mnist_folder: Path) -> None:
    for file in MNIST.files:
        content = (mnist_folder / "mnist" / file.name).read_bytes()
        for form in (file, *file.alternatives):
            data = content if form.name.endswith(".gz") else gzip.decompress(content)
            assert (form.bytes, form.md5) == (len(data), hashlib.md5(data).hexdigest())
    assert {path.parent.name for path in locate("mnist", mnist_folder).values()} == {"mnist"}
