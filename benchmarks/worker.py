"""The worker's side of a contender in a process of its own: it answers requests, one line of JSON each.

Processes keep the contenders apart (environments, libraries' settings); long-lived ones make it cheap to take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Measure = Callable[[], float]  # milliseconds per model-step


def serve(versions: Mapping[str, str], contenders: Mapping[str, Measure]) -> None:
    """Say hello, then measure whatever is asked for until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    answer(versions=dict(versions))
    for line in sys.stdin:
        answer(value=contenders[json.loads(line)["measure"]]())


def per_step(epoch: Callable[[], int], seconds: float) -> float:
    """Milliseconds per model-step over whole epochs, repeated until `seconds` have passed; an epoch says its steps."""
    steps, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        steps += epoch()
    return 1000 * elapsed / steps
