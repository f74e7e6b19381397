"""Sweeps that take milliseconds, to be disturbed.

`python tests/faults/small_sweep.py STORE` writes a store like `format1`, which was written before files had checksums:
one run without parameters, one with, and a cohort of two that was interrupted after the first of three tasks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import glocal
from glocal.challenges.from_tasks import from_tasks

HERE = Path(__file__).parent
FINISHED, WITH_PARAMETERS, INTERRUPTED = [0.1], [0.2], [0.3, 0.4]


def sweep(store: Path, lrs: list[float], **options: Any) -> glocal.Runs:
    """Train one run per learning rate on three tasks, whose numbers are exact on every machine."""
    examples, labels = torch.arange(48).reshape(12, 4), torch.arange(12) % 2
    inputs = [((examples * (task + 3)) % 7 - 3 + labels[:, None]).float() / 4 for task in range(3)]
    challenge = from_tasks("small", [((x, labels), (x, labels)) for x in inputs], setting="domain")
    chosen: dict[str, Any] = {"network": f"{HERE / 'linear.py'}:make", "epochs": 2, "batch_size": 4, **options}
    return glocal.sweep(challenge, [("er", {"slots": 4})], lrs, [1], store=store, **chosen)


def interrupt(store: Path, lrs: list[float], **options: Any) -> None:
    """Start a sweep and stop it after the checkpoint of the first task."""
    from glocal.store.store import Claim

    save = Claim.save

    def save_then_stop(self: Claim, snapshot: Any) -> None:
        save(self, snapshot)
        if snapshot.finished == 1:
            raise KeyboardInterrupt

    Claim.save = save_then_stop  # type: ignore[method-assign]
    try:
        sweep(store, lrs, **options)
    except KeyboardInterrupt:
        pass
    finally:
        Claim.save = save  # type: ignore[method-assign]


def write_store(store: Path) -> None:
    sweep(store, FINISHED)
    sweep(store, WITH_PARAMETERS, keep_parameters=True)
    interrupt(store, INTERRUPTED, keep_parameters=True)


if __name__ == "__main__":
    write_store(Path(sys.argv[1]))
