"""Time of a cohort's step on a GPU for the paper's two networks, a lower bound, and the share of each kind of kernel.

    python -m benchmarks.gpu --network mlp|resnet18                  writes results/gpu-NETWORK.json
    python -m benchmarks.gpu --device cpu --steps 2 --only sgd       check that it runs; no times

The MLP trains on images of 28 × 28 with batches of 128, ResNet-18 on randomly cropped and flipped images of 32 × 32
with batches of 32. The images are noise, which does not change the time. Steps belong to the second task: ogd and
ogd-gtl have stored gradients, er and agem replay as many examples as a mini-batch has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.common import RESULTS, Quartiles, choose_device, save
from benchmarks.step_glocal import PreparedCohort, prepare
from glocal import __version__, challenges
from glocal.algorithms import AGEM, ER, EWC, OGD, OGDGTL, SGD, SI, Algorithm
from glocal.challenges.challenge import Augment, Challenge, Normalise
from glocal.engine.cohort import Cohort, Member
from glocal.networks import NETWORKS
from glocal.precision import Precision, matmul_precision
from glocal.tree import nbytes

LRS = (0.001, 0.005, 0.01, 0.05, 0.1)
NUM_ROUNDS = 7
NUM_KERNELS = 12
"""How many of the longest kernels are listed by name."""
BATCH_SIZES = {"mlp": 128, "resnet18": 32}
BYTES_PER_SECOND = 4.8e12
"""Memory bandwidth of an H200."""
FLOPS_PER_SECOND: dict[Precision, float] = {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12}
"""Peak arithmetic rates of an H200, without sparsity."""


@dataclass(frozen=True)
class Case:
    """A cohort to time. The goal is in microseconds, per cohort step (mlp) or per model-step (resnet18)."""

    network: str
    algorithm: Algorithm
    runs: int
    precision: Precision
    goal: float | None = None

    @property
    def name(self) -> str:
        return f"{self.network} {self.algorithm.name} {self.precision} × {self.runs}"


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
KERNEL_KINDS = {
    "convolutions": ("implicit", "cudnn", "conv", "fprop", "dgrad", "wgrad", "Slice"),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "gemv"),
    "elementwise": ("elementwise", "copy", "reduce", "Memcpy", "Memset", "index", "scatter", "gather", "cat"),
}
"""Parts of the names of library kernels."""
BATCHNORM_KERNELS = ("moments", "merge_moments", "normalize", "grad_sums", "merge_sums", "grad")
GLOCAL_KERNELS = {
    **{f"_{name}_kernel": "batch norm" for name in BATCHNORM_KERNELS},
    "_gather_kernel": "patches",
    "_scatter_kernel": "patches",
}
"""The kind of each Triton kernel in `glocal.fast`."""


def make_noise_challenge(network: str, examples: int) -> Challenge:
    """Return two tasks of random images in the shape of the network's challenge."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if network == "mlp" else (3, 32, 32)

    def make_data(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(256, (n, *shape), dtype=torch.uint8, generator=generator), torch.arange(n) % 10

    tasks = [(make_data(examples), make_data(100)) for _ in range(2)]
    challenge = challenges.from_tasks("noise", tasks, setting="domain")
    if network == "mlp":
        return challenge
    return replace(challenge, normalise=Normalise((0.5,) * 3, (0.25,) * 3), augment=Augment(4, True))


def prepare_case(case: Case, device: torch.device, steps: int) -> PreparedCohort:
    """Prepare a cohort for its second task and run one epoch of it, which captures CUDA graphs."""
    members = tuple(Member(seed, lr, case.algorithm) for seed, lr in product(range(5), LRS))[: case.runs]
    batch_size = BATCH_SIZES[case.network]
    cohort = Cohort(
        make_noise_challenge(case.network, steps * batch_size),
        NETWORKS[case.network][0],
        members,
        epochs=1,
        batch_size=batch_size,
        train_eval=100,
        device=device,
        precision=case.precision,
    )
    prepared = prepare(cohort, "vectorised" if device.type == "cpu" else "auto")
    prepared.epoch(prepared.state, 1)
    return prepared


def measure(prepared: PreparedCohort) -> list[float]:
    """Return the microseconds per cohort step of each round, one epoch per round; no times on a CPU."""
    times = []
    for number in range(2, 2 + NUM_ROUNDS):
        prepared.loader.load_epoch(number)
        if prepared.loader.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            prepared.executor.epoch(prepared.state, prepared.loader, number, lambda steps: None)
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / prepared.loader.steps)
    return times


def lower_bound(case: Case, prepared: PreparedCohort) -> dict[str, float]:
    """Return the arithmetic and the memory traffic that a model-step of sgd or er needs at least, and their times.

    Parameters are read and written, gradients are written and read. The output of every linear layer, convolution and
    BatchNorm is written once and read once by the forward pass and by both parts of the backward pass.
    """
    loader = prepared.loader
    images = (2 if case.algorithm.name in ("er", "agem") else 1) * BATCH_SIZES[case.network]
    element_bytes = 2 if case.precision == "bf16" else 4
    module = loader.cohort.model(vectorised=False).module
    activations, forward_flops = 0, 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal activations, forward_flops
        activations += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            forward_flops += 2 * weight.numel() * output.numel() // weight.shape[0]

    layer_types = (nn.Linear, nn.Conv2d, nn.BatchNorm2d)
    hooks = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, layer_types)]
    with torch.no_grad():
        module.eval()(torch.zeros(1, *loader.x.shape[1:], device=loader.device))
    for hook in hooks:
        hook.remove()
    param_bytes = nbytes(prepared.state.params) // case.runs
    moved_bytes = 4 * param_bytes + 4 * element_bytes * activations * images
    flops = 3 * forward_flops * images
    return {
        "gigaflops": flops / 1e9,
        "megabytes": moved_bytes / 1e6,
        "products_us": 1e6 * flops / FLOPS_PER_SECOND[case.precision],
        "memory_us": 1e6 * moved_bytes / BYTES_PER_SECOND,
    }


def profile(prepared: PreparedCohort) -> tuple[dict[str, float], dict[str, float]]:
    """Return the shares of GPU time in one epoch: by kind of kernel, and of the longest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    prepared.loader.load_epoch(99)
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        prepared.executor.epoch(prepared.state, prepared.loader, 99, lambda steps: None)
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in profiler.key_averages():
        matches = (kind for kind, words in KERNEL_KINDS.items() if any(word in event.key for word in words))
        kind = GLOCAL_KERNELS.get(event.key) or next(matches, "other")
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total
        name = event.key[:120]
        kernels[name] = kernels.get(name, 0.0) + event.self_device_time_total
    total = sum(kinds.values())
    by_kind, by_kernel = (
        {name: time / total for name, time in sorted(times.items(), key=lambda item: -item[1])}
        for times in (kinds, kernels)
    )
    return by_kind, dict(list(by_kernel.items())[:NUM_KERNELS])


def benchmark(cases: Iterable[Case], device: torch.device, steps: int, console: Console) -> Iterator[dict[str, Any]]:
    """Yield the results of one case after the other."""
    for case in cases:
        with console.status(case.name), matmul_precision(case.precision):
            prepared = prepare_case(case, device, steps)
            times = measure(prepared)
            result: dict[str, Any] = {
                "network": case.network,
                "algorithm": case.algorithm.name,
                "precision": case.precision,
                "runs": case.runs,
                "goal_us": case.goal,
                "floor": lower_bound(case, prepared),
            }
            if times:
                step = Quartiles.of(times)
                result |= {"step_us": asdict(step), "model_step_us": step.median / case.runs, "rounds_us": times}
                result["kernels"], result["longest"] = profile(prepared)
                result["peak_bytes"] = torch.cuda.max_memory_allocated()
            del prepared
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        console.print(format_result(case, result))
        yield result


def format_result(case: Case, result: Mapping[str, Any]) -> str:
    if "step_us" not in result:
        return f"{case.name}: ran"
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in result["kernels"].items())
    return (
        f"{case.name}: {result['step_us']['median']:.0f} µs per step, {result['model_step_us']:.0f} µs per model-step "
        f"({shares})"
    )


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Microseconds on one GPU, medians over rounds")
    for column in ("network", "algorithm", "precision", "runs", "cohort step", "model-step", "goal", "/ sgd", "floor"):
        table.add_column(column, justify="right")

    def cohort_of(result: Mapping[str, Any]) -> tuple[str, str, int]:
        return result["network"], result["precision"], result["runs"]

    sgd = {cohort_of(result): result["model_step_us"] for result in results if result["algorithm"] == "sgd"}
    for result in results:
        step, model_step, goal = result["step_us"]["median"], result["model_step_us"], result["goal_us"]
        color = "green" if goal is not None and (step if result["network"] == "mlp" else model_step) <= goal else "red"
        floor = max(result["floor"]["products_us"], result["floor"]["memory_us"])
        table.add_row(
            *(result["network"], result["algorithm"], result["precision"], str(result["runs"])),
            *(f"{step:.0f}", f"{model_step:.1f}", "" if goal is None else f"[{color}]≤ {goal:g}[/]"),
            f"{model_step / sgd[cohort_of(result)]:.2f}" if cohort_of(result) in sgd else "",
            f"{floor:.1f}",
        )
    console.print(table)
    console.print(
        "The goal is that of a cohort step (mlp) or a model-step (resnet18); the floor is that of a model-step. "
        "'/ sgd' is the time relative to sgd with as many runs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: run without timing")
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--network", default="mlp", choices=sorted(BATCH_SIZES))
    names = sorted({case.algorithm.name for case in CASES})
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="run only these algorithms; write no file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args()
    device, console = choose_device(args.device), Console()
    algorithms = args.only or names
    cases = (case for case in CASES if case.network == args.network and case.algorithm.name in algorithms)
    results: list[dict[str, Any]] = []
    for result in benchmark(cases, device, args.steps, console):
        results.append(result)
        if device.type == "cuda" and not args.only:  # after every case, so that a failure does not lose the others
            versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "glocal": __version__}
            content = {"versions": versions, "rounds": NUM_ROUNDS, "cases": results}
            save(args.out / f"gpu-{args.network}.json", content, device)
    if device.type == "cuda":
        show(results, console)


if __name__ == "__main__":
    main()
