"""Time of a training step for networks that nothing is tuned for, beside a plain PyTorch loop.

    python -m benchmarks.gallery --device cpu|cuda                       writes results/gallery-DEVICE.json
    python -m benchmarks.gallery --only vit cnn-batchnorm --precision bf16
    python -m benchmarks.gallery --device cpu --tiny                     check that it runs; writes no file

Networks of `benchmarks.gallery_networks` train on noise in batches of 32. The loop (an `nn.Module`, `torch.optim.SGD`,
data on the device, bf16 by `torch.autocast`), glocal with one run and glocal with ten runs take turns in one process.
Steps belong to the second task. A network or contender that fails becomes a row with its error.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, choose_device, machine, save
from benchmarks.gallery_networks import GALLERY, VOCABULARY, GalleryNetwork
from benchmarks.step_glocal import PreparedCohort, prepare, run_until_traced
from glocal import __version__, challenges
from glocal.algorithms import ER, EWC, SGD, Algorithm
from glocal.challenges.challenge import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.errors import first_line
from glocal.precision import Precision, matmul_precision

BATCH_SIZE = 32
CLASSES = 10
SLOTS = 200
PENALTY = 1.0
NUM_ROUNDS = 3
LONG_TRAINING = 1_000_000
"""Epochs, so that all executors are timed before one is chosen."""
COHORTS = 1, 10
GOALS = {"cuda": {1: 5.0, 10: 12.0}, "cpu": {1: 0.9, 10: 0.9}}
"""How many times as fast as the loop glocal must be, per model-step, with one and with ten runs."""
ALGORITHMS: dict[str, Algorithm] = {
    "sgd": SGD(),
    "er": ER(slots=SLOTS, replay=BATCH_SIZE),
    "ewc": EWC(penalty=2 * PENALTY, fisher="empirical"),  # glocal's penalty has a factor ½
}
Row = dict[str, Any]


class Loop:
    """The algorithms as a plain training loop on the second task."""

    def __init__(
        self, module: nn.Module, algorithm: str, data: tuple[Tensor, Tensor], precision: Precision, device: torch.device
    ) -> None:
        self.module, self.algorithm, self.device = module.to(device).train(), algorithm, device
        self.x, self.y = (part.to(device) for part in data)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        bf16 = precision == "bf16"
        self.autocast: Any = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        rows = torch.arange(SLOTS) % len(self.y)
        self.stored_x, self.stored_y, self.seen = self.x[rows], self.y[rows], len(self.y)
        self.solution = [p.detach().clone() for p in self.parameters]
        self.fisher = [torch.rand_like(p) for p in self.parameters]

    def epoch(self) -> int:
        batches = torch.randperm(len(self.y), device=self.device).split(BATCH_SIZE)
        for rows in batches:
            self.step(self.x[rows], self.y[rows])
        return len(batches)

    def step(self, x: Tensor, y: Tensor) -> None:
        inputs, labels = x, y
        if self.algorithm == "er":
            replay = torch.randperm(SLOTS, device=self.device)[:BATCH_SIZE]
            inputs, labels = torch.cat([x, self.stored_x[replay]]), torch.cat([y, self.stored_y[replay]])
        self.optimizer.zero_grad()
        with self.autocast:
            loss = cross_entropy(self.module(inputs), labels)
        if self.algorithm == "ewc":
            for p, f, s in zip(self.parameters, self.fisher, self.solution, strict=True):
                loss = loss + PENALTY * (f * (p - s).square()).sum()
        loss.backward()
        self.optimizer.step()
        if self.algorithm == "er":
            self.store(x, y)

    def store(self, x: Tensor, y: Tensor) -> None:
        """Reservoir sampling; its draws are made on the host, so that the device need not wait."""
        slots = (torch.rand(len(y), dtype=torch.double) * torch.arange(self.seen + 1, self.seen + len(y) + 1)).long()
        indices = (slots < SLOTS).nonzero().squeeze(1)
        self.seen += len(y)
        if len(indices):
            rows, slots = indices.to(self.device), slots[indices].to(self.device)
            self.stored_x[slots], self.stored_y[slots] = x[rows], y[rows]


def make_data(network: GalleryNetwork, shape: tuple[int, ...], examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noise, or random tokens, with random labels of which every class occurs."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (examples, *shape), generator=draw)
    x = tokens if network.tokens else torch.randn(examples, *shape, generator=draw)
    return x, torch.arange(examples) % CLASSES


def make_challenge(network: GalleryNetwork, shape: tuple[int, ...], examples: int) -> Challenge:
    parts = [make_data(network, shape, n, seed) for seed, n in enumerate((examples, CLASSES) * 2)]
    return challenges.from_tasks("noise", [(parts[0], parts[1]), (parts[2], parts[3])], setting="domain")


class Contender:
    """What is timed: `epoch` returns its number of model-steps. `us` collects the microseconds of each per round."""

    def __init__(self, epoch: Callable[[], int], device: torch.device, prepared: PreparedCohort | None = None) -> None:
        self.epoch, self.device, self.prepared = epoch, device, prepared
        self.us: list[float] = []

    @property
    def note(self) -> str:
        return "" if self.prepared is None else self.prepared.executor.note or self.prepared.executor.name

    def measure(self, seconds: float) -> None:
        """Run whole epochs for at least `seconds`."""
        steps, start, elapsed = 0, time.perf_counter(), 0.0
        while not steps or elapsed < seconds:
            steps += self.epoch()
            synchronize(self.device)
            elapsed = time.perf_counter() - start
        self.us.append(1e6 * elapsed / steps)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def prepare_cohort(
    challenge: Challenge, make: Any, algorithm: str, runs: int, precision: Precision, options: argparse.Namespace
) -> Contender:
    """Prepare a cohort for its second task and run an epoch of it, which captures graphs; on a CPU until it is traced.

    On a CPU that takes at most `warm_up` seconds.
    """
    device = options.torch_device
    members = tuple(Member(seed, lr, ALGORITHMS[algorithm]) for seed, lr in product(range(5), (0.01, 0.02)))[:runs]
    options_of_cohort: Any = {"train_eval": 10, "device": device, "precision": precision}
    cohort = Cohort(challenge, make, members, LONG_TRAINING, BATCH_SIZE, **options_of_cohort)
    prepared = prepare(cohort, strict=False)
    numbers = count(1)
    contender = Contender(lambda: prepared.epoch(prepared.state, next(numbers)), device, prepared)
    if device.type == "cpu":
        run_until_traced(prepared, options.warm_up)
    else:
        contender.epoch()
    return contender


def measure(name: str, algorithm: str, precision: Precision, options: argparse.Namespace) -> Row:
    """Time the contenders on one network; an error of one of them is reported in its place."""
    network, device = GALLERY[name], options.torch_device
    make, shape = (network.make_small, network.small_shape) if options.tiny else (network.make, network.shape)
    examples = options.steps * BATCH_SIZE
    row: Row = {"network": name, "algorithm": algorithm, "precision": precision, "errors": {}, "notes": {}}

    def prepare_loop() -> Contender:
        torch.manual_seed(0)
        data = make_data(network, shape, examples, 2)
        contender = Contender(Loop(make(shape, CLASSES), algorithm, data, precision, device).epoch, device)
        contender.epoch()
        return contender

    def prepare_runs(runs: int) -> Callable[[], Contender]:
        return lambda: prepare_cohort(
            make_challenge(network, shape, examples), make, algorithm, runs, precision, options
        )

    contenders: dict[str, Contender] = {}
    with matmul_precision(precision):
        preparations = {"loop": prepare_loop, **{str(runs): prepare_runs(runs) for runs in COHORTS}}
        for key, preparation in preparations.items():
            start = time.perf_counter()
            try:
                contenders[key] = preparation()
                synchronize(device)
                row[f"prepare_s_{key}"] = round(time.perf_counter() - start, 2)
            except Exception as error:
                row["errors"][key] = f"{type(error).__name__}: {first_line(error)}"
        for turn in range(NUM_ROUNDS):
            for key in rotated(list(contenders), turn):
                try:
                    contenders[key].measure(options.seconds / NUM_ROUNDS)
                except Exception as error:
                    row["errors"][key] = f"{type(error).__name__}: {first_line(error)}"
                    del contenders[key]
    for key, contender in contenders.items():
        row["notes"] |= {key: contender.note} if contender.note else {}
        row[f"us_{key}"] = median(contender.us)
        if key != "loop" and "loop" in contenders:
            row[f"ratio_{key}"] = median(a / b for a, b in zip(contenders["loop"].us, contender.us, strict=True))
    return row


def rotated(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


def benchmark(options: argparse.Namespace, console: Console) -> Iterator[list[Row]]:
    """Yield the rows of one network after the other; print each with the errors and notes in it."""
    for name in options.only:
        rows = []
        for precision, algorithm in product(options.precision, options.algorithms):
            with console.status(f"{name} {algorithm} {precision}"):
                rows.append(measure(name, algorithm, precision, options))
            console.print(format_row(rows[-1]), markup=False, highlight=False, soft_wrap=True)
            if options.torch_device.type == "cuda":
                torch.cuda.empty_cache()
        yield rows


def format_row(row: Row) -> str:
    parts = [f"{key} {row[f'us_{key}']:.0f} µs" for key in ("loop", "1", "10") if f"us_{key}" in row]
    parts += [f"{key}: {text}" for kind in ("errors", "notes") for key, text in row[kind].items()]
    return f"{row['network']} {row['algorithm']} {row['precision']}: " + ", ".join(parts)


def show(rows: list[Row], device: torch.device, console: Console) -> None:
    goals = GOALS[device.type]
    table = Table(title=f"Microseconds per model-step on {device.type}, medians; the loop's time divided by glocal's")
    for column in ("network", "algorithm", "precision", "loop", "1 run", "10 runs"):
        table.add_column(column, justify="right")
    for runs in COHORTS:
        table.add_column(f"loop / {runs} (goal {goals[runs]:g})", justify="right")
    table.add_column("failed")
    for row in rows:
        times = [f"{row[key]:.0f}" if (key := f"us_{name}") in row else "–" for name in ("loop", "1", "10")]
        ratios = []
        for runs in COHORTS:
            ratio = row.get(f"ratio_{runs}")
            color = "green" if ratio is not None and ratio >= goals[runs] else "red"
            ratios.append("–" if ratio is None else f"[{color}]{ratio:.2f}[/]")
        table.add_row(row["network"], row["algorithm"], row["precision"], *times, *ratios, " ".join(row["errors"]))
    console.print(table)


def earlier_rows(file: Path, device: torch.device) -> list[Row]:
    """Return the rows of an earlier call on the same machine with the same versions."""
    if not file.exists():
        return []
    content = json.loads(file.read_text())
    current = machine(device), {"torch": str(torch.__version__), "glocal": __version__}
    return content["rows"] if (content["machine"], content["versions"]) == current else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=list(GALLERY), default=list(GALLERY), help="only these networks")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=0.3, help="time to measure each contender for")
    parser.add_argument("--warm-up", type=float, default=3.0, help="most seconds of steps before, on a CPU")
    parser.add_argument("--steps", type=int, help="steps per epoch; by default 20 on a GPU and 2 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small networks; writes no file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    device = options.torch_device = choose_device(options.device)
    options.steps = options.steps or (20 if device.type == "cuda" else 2)
    console, file = Console(), options.out / f"gallery-{device.type}.json"
    rows: list[Row] = [] if options.tiny else earlier_rows(file, device)
    for new in benchmark(options, console):
        case = lambda row: (row["network"], row["algorithm"], row["precision"])  # noqa: E731
        rows = [row for row in rows if case(row) not in map(case, new)] + new
        if not options.tiny:  # after every network, so that an interruption does not lose the others
            save(file, {"rounds": NUM_ROUNDS, "seconds": options.seconds, "rows": rows}, device)
    show(rows, device, console)


if __name__ == "__main__":
    main()
