"""A few cases of every group of faults; `python tests/faults/count.py` tries thousands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from count import count, create_together, damaged_checkpoints, damaged_files, failing_calls, killed
from outcome import Outcome
from workers import killed_pair, signalled


@pytest.mark.parametrize(
    ("group", "cases"),
    [
        (failing_calls, 6),
        (damaged_files, 150),
        (create_together, 16),
        *(
            pytest.param(group, cases, marks=pytest.mark.slow)
            for group, cases in (
                *((failing_calls, 150), (damaged_files, 3_000), (damaged_checkpoints, 150), (killed, 60)),
                *((signalled, 9), (killed_pair, 1)),
            )
        ),
    ],
)
def test_nothing_is_lost(group: Callable[[int], Outcome], cases: int) -> None:
    outcome = count(group, cases)
    assert outcome.tried >= (cases + 1) // 2 and not outcome.lost
