"""docs/equations.md is what docs/equations.py writes, and every file, object and command that it names exists."""

from __future__ import annotations

import importlib.util
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from glocal.algorithms import ALGORITHMS
from glocal.challenges import catalogue
from glocal.cli.main import COMMANDS
from glocal.lens.instruments import INSTRUMENTS
from glocal.paper import EXPERIMENTS

ROOT = Path(__file__).parents[1]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("equations", ROOT / "docs" / "equations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "equations.md").read_text() == SCRIPT.page(), "run python docs/equations.py"


@pytest.mark.parametrize("entry", SCRIPT.ENTRIES, ids=lambda entry: f"{entry.number} {entry.label}")
def test_objects_and_commands_exist(entry: Any) -> None:
    for reference in entry.where.split():
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
        texts = [part for entry in SCRIPT.ENTRIES for part in entry.number.split(", ") if part.startswith(kind)]
        numbers = [int(text.split()[1]) for text in texts]
        assert numbers == list(range(1, len(numbers) + 1))
