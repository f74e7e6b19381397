"""What is printed: no control characters or markup from outside, and nothing that a stream cannot encode."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import glocal
from glocal import files
from glocal.cli.common import progress_bar
from glocal.cli.main import main
from glocal.engine.config import RunConfig
from glocal.store.run import Runs
from glocal.store.store import Store

HOSTILE = "\x1b]0;owned\x07[/x][red]\x9b2J$x^{$\u202e"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's store with escape sequences, markup and mathematics in its texts."""
    path = tmp_path_factory.mktemp("foreign") / "[" / "x]"
    quick: Any = {"tasks": 2, "batch_size": 2000, "store": path, "keep_parameters": True}
    for run in glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2], [1], **quick):
        assert run.path is not None
        arrays, _ = files.read_tensors(run.path / "arrays.safetensors")
        parameters, _ = files.read_tensors(run.path / "parameters.safetensors")
        shutil.rmtree(run.path)
        info = {**run.info, "label": HOSTILE, "notes": [HOSTILE]}
        Store(path).write(RunConfig(**run.config), arrays, info, {"parameters": parameters})
    return path


def test_texts_of_a_foreign_store(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for format in ("rich", "json", "csv", "latex", "markdown"):
        assert main(["table", str(store), "--format", format]) == 0
    for kind in ("forgetting", "matrix", "loss", "tradeoff"):
        assert main(["plot", str(store), "--kind", kind, "-o", str(tmp_path / f"{kind}.png")]) == 0
    run = ["run", "rotated-digits", "sgd", "--tasks", "2", "--batch-size", "2000", "--seed", "1"]
    assert main([*run, "--store", str(store)]) == 0
    lens = ["lens", str(next((store / "runs").glob("[!.]*"))), "-o", str(tmp_path / "[x].png"), "--examples", "20"]
    assert main([*lens, "--show", "forgetting"]) == 0
    out, err = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert "[/x][red]" in out, "markup is shown as it is"


def test_progress_without_a_terminal_is_a_few_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred items of 0.3 s each: a line after the first item past every 5 s, 17 items, and one at the end."""
    clock = iter([0.0, *(0.3 * item for item in range(1, 101))])
    with monkeypatch.context() as patched:
        patched.setattr("glocal.cli.common.time.perf_counter", lambda: next(clock))
        with progress_bar("lens") as report:
            for done in range(1, 101):
                report(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [f"{done}/100" for done in (17, 34, 51, 68, 85, 100)]


@pytest.mark.parametrize("kind", ["forgetting", "matrix", "loss", "tradeoff"])
def test_plots_show_dollars_as_they_are(store: Path, tmp_path: Path, kind: str) -> None:
    runs = [replace(run, info={**run.info, "label": "$x^{$ \\$ a$b"}) for run in glocal.load(store)]
    assert Runs(runs).plot(kind, tmp_path / "figure.svg").exists()
    assert "$x^{$" in (tmp_path / "figure.svg").read_text()


def test_messages_are_printable() -> None:
    with pytest.raises(glocal.GlocalError) as raised:
        glocal.sweep(HOSTILE, ["sgd"], [0.1], [1])
    assert str(raised.value).isprintable() and "owned" in str(raised.value)


def test_streams_that_cannot_encode_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONIOENCODING=ascii."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["list", "algorithms"]) == 0
    assert main(["run", "θ", "sgd"]) == 2
    sys.stderr.flush()
    assert b"unknown challenge '?'" in sys.stderr.buffer.getvalue()  # type: ignore[union-attr]


class Full(io.StringIO):
    error = errno.ENOSPC

    def write(self, text: str) -> int:
        raise OSError(self.error, os.strerror(self.error))


class Broken(Full):
    error = errno.EPIPE


def test_an_output_that_is_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["list", "networks"]) == 2
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize("stderr", [Full, Broken])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_runs_are_trained_without_a_place_for_progress(
    stderr: type[Full], workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    quick = ["--lrs", "0.1", "--seeds", "1", "--tasks", "2", "--epochs", "1", "--batch-size", "500"]
    algorithms = ["--algorithms", "sgd", "er", "--workers", workers]
    assert main(["sweep", "rotated-digits", *algorithms, *quick, "--store", str(tmp_path / "store")]) == 0
    store = Store.open(tmp_path / "store")
    assert len(store.runs()) == 2 and not store.cohorts()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls a stream None that was closed before its start."""
    monkeypatch.setattr(sys, name, None)
    assert main(["list", "networks"]) == 0
    assert main(["list", "nothing"]) == 2
    getattr(sys, name).close()


def test_bash_completes_commands_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", "bash"])
    (tmp_path / "glocal.bash").write_text(capsys.readouterr().out)
    script = """
    source glocal.bash
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
    $(complete -p glocal | sed -E 's/.*-F ([^ ]+).*/\\1/')
    echo "${COMPREPLY[@]}"
    """
    for words, expected in (
        ("swe", "sweep"),
        ("table runs --whe", "--where"),
        ("paper tab", "table1"),
        ("paper theorem1 --dem", "--demo"),
    ):
        command = ["bash", "-c", script, "bash", "glocal", *words.split()]
        reply = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert reply.split() == [expected]
