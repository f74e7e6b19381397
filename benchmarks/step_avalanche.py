"""Worker of `benchmarks.step`: Avalanche's strategies and plugins, without evaluation, metrics or loggers.

It runs in Avalanche's own environment.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import setting
from benchmarks.setting import TaskData
from benchmarks.torchvision_import import without_compiled_operators
from benchmarks.worker import serve

with without_compiled_operators():
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.core import SupervisedPlugin
    from avalanche.training.plugins import ReplayPlugin
    from avalanche.training.supervised import AGEM, EWC, Naive


class Stopwatch(SupervisedPlugin):
    """Time training epochs and count their iterations; work before and after a task is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.steps += 1

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._start


STRATEGIES: dict[str, Any] = {
    "sgd": Naive,
    "er": Naive,
    "ewc": partial(EWC, ewc_lambda=setting.EWC_PENALTY, mode="online", decay_factor=1.0),
    "agem": partial(AGEM, patterns_per_exp=setting.AGEM_SLOTS_PER_TASK, sample_size=setting.BATCH_SIZE),
}


def measure(name: str, tasks: list[TaskData]) -> float:
    """Learn the first task for an epoch, then time an epoch of the second; return milliseconds per step.

    Every measurement starts from a new strategy, because its memory grows with every task.
    """
    torch.manual_seed(setting.SEEDS[0])
    stream = tensors_benchmark(tasks, tasks, task_labels=[0] * len(tasks)).train_stream
    model, stopwatch = setting.make_mlp(), Stopwatch()
    plugins: list[SupervisedPlugin] = [stopwatch]
    if name == "er":
        plugins.append(ReplayPlugin(mem_size=setting.ER_SLOTS, batch_size_mem=setting.BATCH_SIZE))
    strategy = STRATEGIES[name](
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setting.LR),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=setting.BATCH_SIZE,
        train_epochs=1,
        plugins=plugins,
        evaluator=None,
    )
    strategy.train(stream[0])
    stopwatch.reset()
    strategy.train(stream[1])
    return 1000 * stopwatch.seconds / stopwatch.steps


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    tasks = setting.read_tasks(Path(sys.argv[1]))
    versions = {"torch": torch.__version__, "avalanche-lib": version("avalanche-lib")}
    serve(versions, {name: partial(measure, name, tasks) for name in STRATEGIES})


if __name__ == "__main__":
    main()
