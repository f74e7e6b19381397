"""The code of the pages runs: Python blocks from top to bottom, and commands, each page in a folder of its own.

A Python block that begins with a comment `# FILE.py` is saved as that file. A block below `<!-- not run: REASON -->` is
left out. Output, equations and commands of other programs are not code.
"""

from __future__ import annotations

import contextlib
import doctest
import glob
import importlib
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glocal.challenges import datasets
from glocal.challenges.challenge import Data, Task
from glocal.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = ROOT / "docs" / "own.md"  # by tests/test_own_page.py
BLOCK = re.compile(r"(?:^<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("glocal ", "python ")
REASONS = {"needs several GPUs", "needs Slurm", "needs Ray", "needs other trackers", "takes long"}


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the reason not to run it, the language and the text of every block that is code."""
    for reason, language, text in BLOCK.findall(page.read_text()):
        commands = language in ("", "sh") and any(line.startswith(PROGRAMS) for line in text.splitlines())
        if language == "python" or commands:
            yield reason, "python" if language == "python" else "sh", text


def run_command(line: str) -> None:
    """Run `glocal …` or `python file.py` as a shell would: with comments, patterns of files, and `> file`."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    with contextlib.ExitStack() as stack:
        if ">" in words:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(words.pop(), "w"))))
            words.remove(">")
        program, *arguments = [path for word in words for path in (sorted(glob.glob(word)) or [word])]
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            return
        assert program == "glocal", f"{line}: mark the block as not run"
        try:
            status: object = main(arguments)
        except SystemExit as stop:
            status = stop.code or 0
        assert status == 0, line


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(blocks(page)) and page != RUN_ELSEWHERE],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_runs(page: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On few digits: what the code prints is not compared with the page."""
    for path in (ROOT / "examples", *(ROOT / "examples").iterdir()):  # pages are read in the repository or in examples
        (elsewhere / path.name).symlink_to(path)
    monkeypatch.syspath_prepend(elsewhere)
    digits = datasets.load_digits()
    train, test = (Data(data.x[:200], data.y[:200]) for data in (digits.train, digits.test))
    monkeypatch.setattr(datasets, "load_digits", lambda: Task(train, test, digits.classes))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for reason, language, text in blocks(page):
        if reason:
            continue
        if language == "python":
            if match := re.match(r"# (\w+\.py)\n", text):
                (elsewhere / match[1]).write_text(text)
            exec(compile(text, page.name, "exec", dont_inherit=True), namespace)
            continue
        for line in text.replace("\\\n", " ").splitlines():
            run_command(line)


@pytest.mark.parametrize("name", ["sweeps.sweep", "networks", "networks.hat", "rng"])
def test_examples_of_docstrings_run(name: str, elsewhere: Path) -> None:
    results = doctest.testmod(importlib.import_module(f"glocal.{name}"))
    assert results.attempted > 0 and results.failed == 0


def test_few_blocks_are_not_run() -> None:
    reasons = [reason for page in PAGES for reason, _, _ in blocks(page) if reason]
    assert set(reasons) <= REASONS and len(reasons) <= 8


def test_every_figure_is_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs" / "images").iterdir() if f"images/{path.name}" not in text] == []
