"""Avalanche, by its own strategies and plugins, without evaluation, metrics or loggers. Runs in its own environment."""

from __future__ import annotations

import sys
import time
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import setting
from benchmarks.tensors import Task, read
from benchmarks.worker import serve


def without_torchvision_operators() -> None:
    """Let torchvision be imported beside a PyTorch its compiled operators were not built for; none of them is used."""
    register = torch.library.register_fake

    def patched(op: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *arguments, **options)

    torch.library.register_fake = patched


without_torchvision_operators()

from avalanche.benchmarks import tensors_benchmark  # noqa: E402
from avalanche.core import SupervisedPlugin  # noqa: E402
from avalanche.training.plugins import ReplayPlugin  # noqa: E402
from avalanche.training.supervised import AGEM, EWC, Naive  # noqa: E402


class Stopwatch(SupervisedPlugin):
    """Times training epochs and counts their iterations; what a strategy does before and after a task stays outside."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.steps += 1

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._started


STRATEGIES: dict[str, Any] = {
    "sgd": Naive,
    "er": Naive,
    "ewc": partial(EWC, ewc_lambda=setting.EWC_PENALTY, mode="online", decay_factor=1.0),
    "agem": partial(AGEM, patterns_per_exp=setting.STORED_PER_TASK, sample_size=setting.BATCH),
}


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(setting.WIDTHS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def measure(name: str, tasks: list[Task]) -> float:
    """Learn the first task for an epoch, then time an epoch of the second. The strategy's memory grows with every
    task, so that each measurement begins anew."""
    torch.manual_seed(setting.SEEDS[0])
    stream = tensors_benchmark(tasks, tasks, task_labels=[0] * len(tasks)).train_stream
    model, watch = network(), Stopwatch()
    plugins: list[SupervisedPlugin] = [watch]
    if name == "er":
        plugins.append(ReplayPlugin(mem_size=setting.RESERVOIR, batch_size_mem=setting.BATCH))
    strategy = STRATEGIES[name](
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setting.LEARNING_RATE),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=setting.BATCH,
        train_epochs=1,
        plugins=plugins,
        evaluator=None,
    )
    strategy.train(stream[0])
    watch.reset()
    strategy.train(stream[1])
    return 1000 * watch.seconds / watch.steps


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    tasks = read(Path(sys.argv[1]))
    versions = {"torch": torch.__version__, "avalanche-lib": version("avalanche-lib")}
    serve(versions, {name: partial(measure, name, tasks) for name in STRATEGIES})


if __name__ == "__main__":
    main()
