"""Experience replay that takes GLOCAL_TEST_SECONDS longer per task until Slurm requeues it, with the same results."""

import os
import time
from dataclasses import dataclass
from typing import Any

from glocal.algorithms.replay import ER


@dataclass(frozen=True)
class SlowER(ER):
    name = "slow-er"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(float(os.environ.get("GLOCAL_TEST_SECONDS", 0)))
        return super().consolidate(model, params, memory, data)
