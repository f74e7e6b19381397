"""Every file, object and command that docs/equations.md names exists, and its numbers have no gaps."""

from __future__ import annotations

import importlib
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest

from glocal.algorithms import ALGORITHMS
from glocal.challenges import catalogue
from glocal.cli.main import COMMANDS
from glocal.lens.instruments import INSTRUMENTS
from glocal.paper import EXPERIMENTS

ROOT = Path(__file__).parents[1]


class Entry(NamedTuple):
    """A row of the page."""

    number: str
    label: str
    what: str
    where: str
    command: str


def entries() -> list[Entry]:
    lines = (ROOT / "docs" / "equations.md").read_text().splitlines()
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]
    return [Entry(*(cell.replace("`", "") for cell in row)) for row in rows[2:]]


ENTRIES = entries()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.number} {entry.label}")
def test_objects_and_commands_exist(entry: Entry) -> None:
    for reference in entry.where.split("<br>"):
        file, _, name = reference.partition(":")
        assert (ROOT / "src" / file).is_file(), file
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        reduce(getattr, name.split("."), module)
    program, command, *arguments = entry.command.split()
    assert program == "glocal" and command in COMMANDS
    match command, arguments:
        case "paper", [name]:
            assert name in EXPERIMENTS
        case "run", [challenge, algorithm]:
            assert challenge in {known.name for known in catalogue()} and algorithm in ALGORITHMS
        case "lens", [_, "--show", instrument]:
            assert instrument in INSTRUMENTS
        case "list", [kind]:
            assert kind in ("algorithms", "experiments")
        case _:
            pytest.fail(f"unexpected command: {entry.command}")


def test_numbers_follow_the_order_of_the_paper() -> None:
    for kind in ("Eq.", "Figure", "Table"):
        texts = [part for entry in ENTRIES for part in entry.number.split(", ") if part.startswith(kind)]
        numbers = [int(text.split()[1]) for text in texts]
        assert numbers == list(range(1, len(numbers) + 1))
