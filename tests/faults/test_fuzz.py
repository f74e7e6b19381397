"""Some of the bad inputs of `fuzz` in every test run, all in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import GROUPS, Group

COUNTS = {
    "fuzz_sweep_files": (20, 500),
    "fuzz_stores": (10, 500),
    "fuzz_data_files": (100, 1_000),
    "fuzz_checkpoints": (100, 500),
    "fuzz_code": (10, 200),
    "bad_options": (20, 1_500),
    "bad_calls": (40, 2_000),
}
"""Quick and all cases of every group."""


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_bad_inputs_get_a_sentence(group: Group, slow: bool, tmp_path: Path) -> None:
    outcome = group(tmp_path, COUNTS[group.__name__][slow])
    assert outcome.survived == outcome.tried > 0, "\n".join(outcome.failures)


def test_the_harness_notices_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks, escape sequences, hanging and memory are all lost cases."""
    import fuzz

    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "BYTES", 1 << 28)

    def wait() -> None:
        while True:
            pass

    cases: dict[str, Callable[[], object]]
    cases = {"raises": lambda: 1 / 0, "leaves": exit, "hangs": wait, "fills": lambda: bytearray(1 << 30)}
    assert fuzz.try_all("faulty", cases.items())[1:4] == (4, 0, 4)
    assert fuzz.try_all("good", [("refuses", lambda: fuzz.command(["run", "x"])), ("works", lambda: 1)])[1:4] == (
        2,
        2,
        0,
    )
