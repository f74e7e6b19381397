"""Some of the bad inputs of `fuzz` in every test run, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable

import fuzz
import pytest

SOME = {
    "fuzz_sweep_files": 20,
    "fuzz_stores": 10,
    "fuzz_data_files": 100,
    "fuzz_checkpoints": 100,
    "fuzz_code": 10,
    "bad_options": 10,
    "bad_calls": 40,
}


@pytest.mark.parametrize("group", fuzz.GROUPS, ids=lambda group: group.__name__)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "many"])
def test_bad_inputs_get_a_sentence(group: fuzz.Group, many: bool) -> None:
    outcome = group(fuzz.GROUPS[group] // 6 if many else SOME[group.__name__])
    assert outcome.tried > 0 and not outcome.lost, "\n".join(outcome.lost[:20])


def test_the_harness_notices_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks, exits, hanging and memory are all lost cases."""
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "BYTES", 1 << 28)

    def wait() -> None:
        while True:
            pass

    cases: dict[str, Callable[[], object]]
    cases = {"raises": lambda: 1 / 0, "leaves": exit, "hangs": wait, "fills": lambda: bytearray(1 << 30)}
    assert len(fuzz.try_all("faulty", cases.items()).lost) == 4
    good = fuzz.try_all("good", [("refuses", lambda: fuzz.command(["run", "x"])), ("works", lambda: 1)])
    assert good.tried == 2 and not good.lost
