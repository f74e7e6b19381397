"""A GPU at work on the paper's two networks: how long a cohort's step takes, what it must at least take, where it goes.

The MLP on images of 28 × 28 with batches of 128, and ResNet-18 on images of 32 × 32, cropped and flipped, with batches
of 32, both as the engine trains them; the images are noise, for the time does not depend on them. Every algorithm has
one task behind it; ogd and ogd-gtl have 500 gradients stored, er replays as many examples as it streams.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device import chosen
from benchmarks.results import Spread, machine
from glocal import __version__, challenges
from glocal.algorithms import AGEM, ER, EWC, OGD, OGDGTL, SGD, SI, Algorithm
from glocal.challenges.challenge import Augment, Challenge, Normalise
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Executor
from glocal.engine.loader import Loader
from glocal.engine.loop import choose
from glocal.engine.memory_budget import initial_state
from glocal.engine.state import State, arrange
from glocal.networks import NETWORKS
from glocal.precision import Precision, matmul_precision
from glocal.tree import nbytes

RATES = (0.001, 0.005, 0.01, 0.05, 0.1)
ROUNDS = 7
LONGEST = 12
"""Kernels that are named in a profile."""
BYTES_A_SECOND = 4.8e12
"""What an H200's memory moves."""
OPERATIONS_A_SECOND: dict[Precision, float] = {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12}
"""What an H200 multiplies and adds, without sparsity."""


@dataclass(frozen=True)
class Case:
    """A cohort to be timed, and the time in microseconds, of a cohort's step or of a model-step, that is the goal."""

    network: str
    algorithm: Algorithm
    runs: int
    precision: Precision
    goal: float | None = None

    @property
    def name(self) -> str:
        return f"{self.network} {self.algorithm.name} {self.precision} {self.runs}"


CASES = (
    Case("mlp", SGD(), 25, "fp32", 300),
    Case("mlp", ER(slots=500, replay=128), 25, "fp32", 500),
    Case("mlp", EWC(penalty=1.4, fisher="published"), 25, "fp32", 400),
    Case("mlp", SI(penalty=1.0, damping=1.0, importance="published"), 25, "fp32", 400),
    Case("mlp", AGEM(slots=500, replay=128), 25, "fp32", 650),
    Case("mlp", OGDGTL(slots=1000), 25, "fp32", 750),
    Case("mlp", OGD(slots=1000), 25, "fp32"),
    Case("mlp", SGD(), 1, "fp32"),
    Case("mlp", OGDGTL(slots=1000), 1, "fp32"),
    *(Case("resnet18", SGD(), runs, "bf16", 600 if runs >= 8 else None) for runs in (1, 5, 10, 25)),
    Case("resnet18", ER(slots=200, replay=32), 10, "bf16", 1100),
    Case("resnet18", OGDGTL(slots=200), 5, "bf16"),
    Case("resnet18", SGD(), 10, "tf32"),
    Case("resnet18", SGD(), 10, "fp32"),
)


def noise(network: str, examples: int) -> Challenge:
    """Two tasks of random images of the network's challenge."""
    draw = torch.Generator().manual_seed(0)
    side = (1, 28, 28) if network == "mlp" else (3, 32, 32)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(256, (n, *side), dtype=torch.uint8, generator=draw), torch.arange(n) % 10

    made = challenges.from_tasks("noise", [(part(examples), part(100)) for _ in range(2)], setting="domain")
    if network == "mlp":
        return made
    return replace(made, normalise=Normalise((0.5,) * 3, (0.25,) * 3), augment=Augment(4, True))


@dataclass
class Ready:
    """A cohort with a task behind it, in the middle of the second one."""

    executor: Executor
    loader: Loader
    state: State

    def epoch(self, number: int) -> None:
        self.loader.load_epoch(number)
        self.executor.epoch(self.state, self.loader, number, lambda steps: None)


def prepared(case: Case, device: torch.device, steps: int) -> Ready:
    members = tuple(Member(seed, lr, case.algorithm) for seed, lr in product(range(5), RATES))[: case.runs]
    batch = 128 if case.network == "mlp" else 32
    challenge = noise(case.network, steps * batch)
    cohort = Cohort(challenge, NETWORKS[case.network][0], members, 1, batch, 100, device, case.precision)
    loader = Loader(cohort)
    loader.load_task(0)
    executor = choose(cohort, loader, "vectorised" if device.type == "cpu" else "auto")
    if executor.note:
        raise RuntimeError(executor.note)
    state = initial_state(cohort, loader)
    arrange(state, device)
    ready = Ready(executor, loader, state)
    ready.epoch(0)
    with torch.no_grad():
        executor.consolidate(state, loader)
    arrange(state, device)
    loader.load_task(1, state.memory)
    ready.epoch(1)  # captures the graphs
    return ready


def microseconds(ready: Ready, rounds: int) -> list[float]:
    """Of a cohort's step, an epoch a round."""
    found = []
    for number, _ in zip(count(2), range(rounds), strict=False):
        ready.loader.load_epoch(number)
        if ready.state.diverged.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            ready.executor.epoch(ready.state, ready.loader, number, lambda steps: None)
            end.record()
            torch.cuda.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / ready.loader.steps)
    return found


def floor(case: Case, ready: Ready) -> dict[str, float]:
    """What a model-step of sgd or er needs at least: its products, and its tensors moved once where they must be.

    Parameters are read by the forward pass and written; gradients are written and read. Of the activations every
    convolution's and every BatchNorm's output is written once and read once by each of forward, backward in the input
    and backward in the weight.
    """
    images = (2 if case.algorithm.name in ("er", "agem") else 1) * ready.loader.cohort.batch_size
    width = 2 if case.precision == "bf16" else 4
    module = ready.loader.cohort.model(vectorised=False).module
    activations, operations, calls = 0, 0, []

    def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal activations, operations
        activations += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() > 1:
            operations += 2 * weight.numel() * output.numel() // weight.shape[0]
            calls.append(layer)

    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.BatchNorm2d)
    handles = [m.register_forward_hook(note) for m in module.modules() if isinstance(m, kinds)]
    shape = ready.loader.x.shape[1:]
    with torch.no_grad():
        module.eval()(torch.zeros(1, *shape, device=ready.loader.device))
    for handle in handles:
        handle.remove()
    parameters = nbytes(ready.state.params) // len(ready.state.diverged)
    moved = 4 * parameters + 4 * width * activations * images
    work = 3 * operations * images
    return {
        "gigaflops": work / 1e9,
        "megabytes": moved / 1e6,
        "products_us": 1e6 * work / OPERATIONS_A_SECOND[case.precision],
        "memory_us": 1e6 * moved / BYTES_A_SECOND,
    }


def profile(ready: Ready, kinds: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of the GPU's time over one epoch, by kind of kernel and of the longest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    ready.loader.load_epoch(99)
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        ready.executor.epoch(ready.state, ready.loader, 99, lambda steps: None)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in seen.key_averages():
        matching = (k for k, words in kinds.items() if any(w in event.key for w in words))
        kind = OURS.get(event.key) or next(matching, "other")
        spent[kind] = spent.get(kind, 0.0) + event.self_device_time_total
        name = event.key[:120]
        kernels[name] = kernels.get(name, 0.0) + event.self_device_time_total
    whole = sum(spent.values())
    by_kind, longest = ({k: v / whole for k, v in sorted(s.items(), key=lambda i: -i[1])} for s in (spent, kernels))
    return by_kind, dict(list(longest.items())[:LONGEST])


BATCHNORM_KERNELS = ("moments", "merge_moments", "normalize", "grad_sums", "merge_sums", "grad")
OURS = {
    **{f"_{name}_kernel": "batch norm" for name in BATCHNORM_KERNELS},
    "_gather_kernel": "patches",
    "_scatter_kernel": "patches",
    "_update_kernel": "descent",
    "_to_fp32_kernel": "descent",
    "_contract_kernel": "projection",
    "_scale_deltas_kernel": "projection",
}
"""Our own kernels by their names, which others' contain."""
KERNELS = {
    "convolutions": ("implicit", "cudnn", "conv", "fprop", "dgrad", "wgrad", "Slice"),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "gemv"),
    "elementwise": ("elementwise", "copy", "reduce", "Memcpy", "Memset", "index", "scatter", "gather", "cat"),
}


def measured(cases: Iterable[Case], device: torch.device, steps: int, console: Console) -> Iterator[dict]:
    for case in cases:
        with console.status(case.name), matmul_precision(case.precision):
            ready = prepared(case, device, steps)
            times = microseconds(ready, ROUNDS)
            row: dict[str, Any] = {
                "network": case.network,
                "algorithm": case.algorithm.name,
                "precision": case.precision,
            }
            row |= {"runs": case.runs, "goal_us": case.goal, "floor": floor(case, ready)}
            if times:
                spread = Spread.of(times)
                row |= {"step_us": asdict(spread), "model_step_us": spread.middle / case.runs, "rounds_us": times}
                row["kernels"], row["longest"] = profile(ready, KERNELS)
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
            del ready
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        console.print(line(row))
        yield row


def line(row: Mapping) -> str:
    """One case as it is found, for whoever waits."""
    if "step_us" not in row:
        return f"{row['network']} {row['algorithm']}: ran"
    shares = ", ".join(f"{k} {share:.0%}" for k, share in row["kernels"].items())
    return (
        f"{row['network']} {row['algorithm']} {row['precision']} × {row['runs']}: {row['step_us']['middle']:.0f} µs, "
        f"{row['model_step_us']:.0f} µs per model-step ({shares})"
    )


def show(found: list[dict], console: Console) -> None:
    table = Table(title="One GPU: microseconds, medians over rounds")
    columns = ("network", "algorithm", "precision", "runs", "cohort step", "model-step", "goal", "of sgd", "floor")
    for column in columns:
        table.add_column(column, justify="right")
    like = lambda row: (row["network"], row["precision"], row["runs"])  # noqa: E731
    plain = {like(row): row["model_step_us"] for row in found if row["algorithm"] == "sgd" and "step_us" in row}
    for row in found:
        if "step_us" not in row:
            continue
        middle, each = row["step_us"]["middle"], row["model_step_us"]
        judged = middle if row["network"] == "mlp" else each
        goal = row["goal_us"]
        colour = "" if goal is None else "green" if judged <= goal else "red"
        least = max(row["floor"]["products_us"], row["floor"]["memory_us"])
        shown = "" if goal is None else f"[{colour}]≤ {goal:g}[/]"
        cells = (row["network"], row["algorithm"], row["precision"], str(row["runs"]))
        steps = f"{each / plain[like(row)]:.2f}" if like(row) in plain else ""
        table.add_row(*cells, f"{middle:.0f}", f"{each:.1f}", shown, steps, f"{least:.1f}")
    console.print(table)
    console.print(
        "The goal is for the cohort's step (mlp) or a model-step (resnet18); the floor is a model-step's. Of sgd: how "
        "many steps of sgd, with as many runs, a step takes."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try it out, without times")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--network", default="mlp", choices=sorted({case.network for case in CASES}))
    names = sorted({case.algorithm.name for case in CASES})
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="these cases alone; nothing is written")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device, console = chosen(options.device), Console()
    some = options.only or names
    cases = (case for case in CASES if case.network == options.network and case.algorithm.name in some)
    writes = device.type == "cuda" and not options.only
    file = options.out / f"gpu-{options.network}.json"
    found: list[dict] = []
    for row in measured(cases, device, options.steps, console):
        found.append(row)
        if writes:  # after every case: one that fails or takes too long costs no other
            file.write_text(json.dumps(document(found, device), indent=1) + "\n")
    show(found, console)
    if writes:
        console.print(f"All rounds: {file}")


def document(found: list[dict], device: torch.device) -> dict[str, Any]:
    where = machine() | {"gpu": torch.cuda.get_device_name(device)}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "glocal": __version__}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "machine": where, "versions": versions, "rounds": ROUNDS, "cases": found}


if __name__ == "__main__":
    main()
