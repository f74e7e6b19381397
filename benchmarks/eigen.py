"""Time of eigenpairs of a Hessian: glocal's Lanczos method, curvlinops with ARPACK, and hessian-eigenthings.

    python -m benchmarks.eigen                              ten pairs of the MLP on 2,000 digits, on a CPU
    python -m benchmarks.eigen --device cuda --data DIR     ten pairs of ResNet-18 on 2,000 images of CIFAR-10, and all
                                                            eigenvalues of a dense Hessian of the MLP 784-22-22-10
    python -m benchmarks.eigen --tiny                       check that the GPU part runs, on any device

It writes results/eigen-DEVICE.json. On a CPU all solvers reach the same accuracy: each gets the smallest effort
(tolerance or number of steps) at which all ten pairs have ‖H v − λ v‖ ≤ 2·10⁻⁵ |λ_1|, measured in float64. As in
`benchmarks.step`, solvers alternate, each in its own process, and ratios are taken within rounds. glocal's preparation
of a problem, shared by all products, is included in its time.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.common import RESULTS, Quartiles, choose_device, save, timed
from benchmarks.eigen_worker import EFFORTS, EIGENTHINGS_FOLDER, NUM_PAIRS
from benchmarks.worker import Worker, WorkerError, run_command
from glocal import __version__, challenges, losses
from glocal.curvature.hessian import hessian
from glocal.curvature.lanczos import Eigenpairs, lanczos
from glocal.curvature.operators import Operator, hessian_operator
from glocal.errors import GlocalError
from glocal.networks import NETWORKS
from glocal.networks.mlp import mlp
from glocal.networks.preprocess import InputTransform
from glocal.precision import full_precision
from glocal.risk import Risk
from glocal.tree import Params

NUM_IMAGES, NUM_ROUNDS = 2_000, 24
MAX_RESIDUAL = 2e-5
"""Relative to |λ_1|, the residual that every solver must reach on a CPU."""
MIN_SPEEDUP = 1.5
GPU_GOALS = {"resnet18": 20.0, "dense": 60.0}
"""In seconds."""
GPU_TOLERANCE, GPU_MAX_STEPS = 1e-4, 200
"""Relative to |λ_1|, the residual at which Lanczos stops on a GPU, and the largest number of its steps."""
FLOAT64_CHUNK_SIZE = 250
EIGENTHINGS = "hessian-eigenthings==1.0.0a5"
MAX_QUIET_LOAD = 0.5
"""The load average before the benchmark, up to which the machine counts as quiet."""


def write_problem(path: Path) -> None:
    """Train the MLP for three epochs on the digits; write its parameters and the digits."""
    x, y = challenges.make("rotated-digits", tasks=1).task(0, 1).train
    x, y = x[:NUM_IMAGES].flatten(1).float() / 255, y[:NUM_IMAGES]
    torch.manual_seed(0)
    module = setting.make_mlp()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        for x_batch, y_batch in zip(x.split(50), y.split(50), strict=True):
            optimizer.zero_grad()
            cross_entropy(module(x_batch), y_batch).backward()
            optimizer.step()
    arrays: dict[str, Any] = {f"state/{k}": t.numpy() for k, t in module.state_dict().items()}
    np.savez(path, x=x.numpy(), y=y.numpy(), **arrays)


def install_eigenthings() -> None:
    """Install hessian-eigenthings into its own folder, without the torch that it depends on."""
    if not (EIGENTHINGS_FOLDER / "hessian_eigenthings").exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        run_command([*pip, "--target", str(EIGENTHINGS_FOLDER), EIGENTHINGS])


def smallest_effort(worker: Worker, solver: str) -> tuple[float, float]:
    """Return the first effort that reaches MAX_RESIDUAL, and its residual."""
    for effort in EFFORTS[solver]:
        residual = worker.measure(f"residual {effort}")
        if residual <= MAX_RESIDUAL:
            return effort, residual
    raise WorkerError(f"no effort reaches a residual of {MAX_RESIDUAL:g}; the last one had {residual:.2g}")


def compare_solvers(threads: int, console: Console) -> dict[str, Any]:
    load = os.getloadavg()[0]
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)  # for ARPACK, which uses numpy's BLAS
    skipped: dict[str, str] = {}
    efforts: dict[str, tuple[float, float]] = {}
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "problem.npz"
        write_problem(data)
        for name in EFFORTS:
            try:
                with console.status(f"{name}: searching the smallest effort"):
                    if name == "eigenthings":
                        install_eigenthings()
                    worker = Worker(Path(sys.executable), "eigen_worker", name, str(data), str(threads))
                    stack.enter_context(worker)
                    efforts[name] = smallest_effort(worker, name)
                    workers[name] = worker
            except WorkerError as error:
                if name == "glocal":
                    raise
                skipped[name] = str(error)
                console.print(f"{name} is skipped: {error}")
        times: dict[str, list[float]] = {name: [] for name in workers}
        order = list(workers)
        for number in track(range(NUM_ROUNDS + 1), "rounds", console=console, transient=True):
            for name in order:
                seconds = workers[name].measure(f"seconds {efforts[name][0]}")
                if number:  # the first round warms up
                    times[name].append(seconds)
            order = [*order[1:], order[0]]
        versions = {name: worker.versions for name, worker in workers.items()}
    return {
        "versions": {**versions, "glocal": {**versions["glocal"], "glocal": __version__}},
        "load_before": load,
        "quiet": load <= MAX_QUIET_LOAD,
        "skipped": skipped,
        "threads": threads,
        "widths": setting.WIDTHS,
        "images": NUM_IMAGES,
        "pairs": NUM_PAIRS,
        "max_residual": MAX_RESIDUAL,
        "solvers": {
            name: {
                "effort": efforts[name][0],
                "residual": efforts[name][1],
                "seconds": asdict(Quartiles.of(times[name])),
                "glocal_speedup": asdict(Quartiles.of_ratios(times[name], times["glocal"])),
                "rounds_s": times[name],
            }
            for name in times
        },
    }


def show(results: dict[str, Any], console: Console) -> None:
    title = f"Top {NUM_PAIRS} eigenpairs, MLP of 89,610 parameters, {NUM_IMAGES:,} digits, {results['threads']} threads"
    table = Table(title=title, show_lines=True)
    for column in ("", "effort", "residual / λ_1", "seconds", "speed-up\nof glocal"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results["solvers"].items():
        time, ratio = Quartiles(**result["seconds"]), Quartiles(**result["glocal_speedup"])
        color = "green" if ratio.median >= MIN_SPEEDUP else "red"
        speedup = f"[{color}]{ratio.median:.2f} (≥ {MIN_SPEEDUP:g})[/]\n[dim]{ratio.q1:.2f}–{ratio.q3:.2f}[/]"
        seconds = f"{time.median:.3f}\n[dim]{time.q1:.3f}–{time.q3:.3f}[/]"
        residual = f"{result['residual']:.1e}"
        table.add_row(name, f"{result['effort']:g}", residual, seconds, "" if name == "glocal" else speedup)
    console.print(table)
    note = "" if results["quiet"] else f" The machine was not quiet: its load average was {results['load_before']:.1f}."
    console.print(f"Medians over {NUM_ROUNDS} rounds; dim: quartiles.{note}")


def load_images(count: int, data: Path | None) -> tuple[str, Tensor, Tensor]:
    """Return normalised training images of CIFAR-10, equally many of every task, or noise if there is no CIFAR-10."""
    try:
        challenge = challenges.make("split-cifar10", data=data)
    except GlocalError:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(count, 3, 32, 32, generator=generator)
        return "noise", x, torch.randint(10, (count,), generator=generator)
    tasks = [challenge.task(t, 0).train for t in range(challenge.tasks)]
    x, y = (torch.cat([task[i][: -(-count // len(tasks))] for task in tasks])[:count] for i in range(2))
    return "CIFAR-10", InputTransform(challenge.normalise).normalize(x), y


def risk_of(module: nn.Module, x: Tensor, y: Tensor, chunk_size: int) -> Risk:
    params = {k: p.detach() for k, p in module.named_parameters()}
    return Risk(module, params, dict(module.named_buffers()), x, y, losses.get("cross-entropy"), chunk_size)


@full_precision()
def top_pairs(risk: Risk, count: int, steps: int) -> tuple[Eigenpairs, int]:
    """Return the top eigenpairs of the Hessian and the number of products that Lanczos made."""
    operator = hessian_operator(risk)
    num_products = 0

    def product(v: Params) -> Params:
        nonlocal num_products
        num_products += 1
        return operator @ v

    start = torch.randn(risk.num_params, generator=torch.Generator().manual_seed(0)).to(risk.x.device)
    pairs = lanczos(Operator(product, risk.params), start, count, steps, tolerance=GPU_TOLERANCE)
    return pairs, num_products


@full_precision()
def dense_spectrum(risk: Risk) -> Tensor:
    return torch.linalg.eigvalsh(hessian(risk, block_size=512))


def float64_residuals(module: nn.Module, x: Tensor, y: Tensor, pairs: Eigenpairs) -> list[float]:
    """Return ‖H v − λ v‖ of the first, the middle and the last pair, in float64."""
    operator = hessian_operator(risk_of(copy.deepcopy(module).double(), x.double(), y, FLOAT64_CHUNK_SIZE))
    residuals = []
    for i in (0, len(pairs.values) // 2, len(pairs.values) - 1):
        value, vector = pairs.values[i].double(), pairs.vectors[i].double()
        residuals.append(float((operator @ vector - value * vector).norm()))
    return residuals


def measure_gpu(
    device: torch.device, tiny: bool, chunk_size: int, data: Path | None, console: Console
) -> dict[str, Any]:
    """Time the two problems that need a GPU, each twice: kernels are compiled in the first call."""
    num_images = 2 if tiny else NUM_IMAGES
    source, x, y = load_images(num_images, data)
    x, y = x.to(device), y.to(device)
    torch.manual_seed(0)
    resnet = NETWORKS["resnet18"][0]((3, 32, 32), 10).to(device).eval()
    resnet_risk = risk_of(resnet, x, y, chunk_size)
    count, steps = (2, 3) if tiny else (NUM_PAIRS, GPU_MAX_STEPS)
    (first, _), (seconds, (pairs, products)) = (
        timed(lambda: top_pairs(resnet_risk, count, steps), device) for _ in range(2)
    )
    largest = float(pairs.values[0].abs())
    residuals = (pairs.residuals / largest).tolist()
    results: dict[str, Any] = {
        "resnet18": {
            **_times("resnet18", resnet_risk, seconds, first),
            "products": products,
            "converged": max(residuals) < 2 * GPU_TOLERANCE,
            "eigenvalues": pairs.values.tolist(),
            "residuals": residuals,
            "residuals_in_float64": [r / largest for r in float64_residuals(resnet, x, y, pairs)],
        }
    }
    side, width = (8, 4) if tiny else (28, 22)
    small = mlp((1, side, side), 10, (width, width)).to(device).eval()
    flat = torch.rand(num_images, 1, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    dense_risk = risk_of(small, flat, y, min(chunk_size, 2_000))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    (first, _), (seconds, spectrum) = (timed(lambda: dense_spectrum(dense_risk), device) for _ in range(2))
    extremes = {"largest": float(spectrum[-1]), "smallest": float(spectrum[0])}
    results["dense"] = {**_times("dense", dense_risk, seconds, first), **extremes}
    table = Table("", "parameters", "seconds", "goal", title=f"Curvature on {device}")
    for name, result in results.items():
        table.add_row(name, f"{result['parameters']:,}", f"{result['seconds']:.2f}", f"< {result['goal']:g}")
    console.print(table)
    return {"images": num_images, "data": source, "chunk_size": chunk_size, "tf32": False, **results}


def _times(name: str, risk: Risk, seconds: float, first: float) -> dict[str, Any]:
    times: dict[str, Any] = {"parameters": risk.num_params, "seconds": seconds, "first_seconds": first}
    times["goal"] = GPU_GOALS[name]
    if risk.x.is_cuda:
        times["peak_bytes"] = torch.cuda.max_memory_allocated()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="run the GPU part with two images; write no file")
    parser.add_argument("--chunk-size", type=int, default=NUM_IMAGES, help="images that a GPU differentiates at once")
    parser.add_argument("--data", type=Path, help="folder with data sets, for the GPU part")
    parser.add_argument("--threads", type=int, default=setting.THREADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, device = Console(), choose_device(args.device)
    if args.tiny or device.type == "cuda":
        results = measure_gpu(device, args.tiny, args.chunk_size, args.data, console)
    else:
        results = compare_solvers(args.threads, console)
        show(results, console)
    if not args.tiny:
        save(RESULTS / f"eigen-{device.type}.json", results, device)


if __name__ == "__main__":
    main()
