"""Top eigenpairs of a Hessian: glocal's Lanczos beside curvlinops with ARPACK and hessian-eigenthings.

python -m benchmarks.eigen                    ten pairs of the MLP of 89,610 parameters, 2,000 digits, on a CPU
python -m benchmarks.eigen --device cuda      ten pairs of ResNet-18, 2,000 images of CIFAR-10 (of noise, if they are
                                              not there); a dense Hessian of 784-22-22-10 with all its eigenvalues
                                              (--tiny: a rehearsal, any device)

Everybody is as exact: before the rounds each is given the least effort (tolerance, or steps) at which all ten pairs
have ‖H v − λ v‖ ≤ 2·10⁻⁵ λ_1, measured in float64 by plain autograd. As in `step`, contenders take turns, each in a
process of its own, three times in a row, of which the median counts; ratios are taken within rounds. What is prepared
for a problem (passes that all products share) is timed. What can be saved has a bound: of the multiplications of a
product, a forward, a backward and a second backward pass, the last alone is 54 % here: with the same number of
products no method is more than 1.9 times as fast as one that repeats all passes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.device import chosen
from benchmarks.eigen_contender import EFFORTS, PAIRS, SIDE, network
from benchmarks.process import ROOT, Worker, WorkerError
from benchmarks.results import Spread, machine
from glocal import __version__, challenges, losses
from glocal.curvature.hessian import hessian
from glocal.curvature.lanczos import Eigenpairs, lanczos, start_vector
from glocal.curvature.products import Operator, hessian_operator
from glocal.errors import GlocalError
from glocal.networks import NETWORKS
from glocal.networks.mlp import mlp
from glocal.networks.preprocess import InputTransform
from glocal.precision import full_precision
from glocal.risk import Risk
from glocal.tree import Params

IMAGES, ROUNDS, EXACT, GOAL = 2_000, 24, 2e-5, 2.0
GOALS = {"resnet18": 20.0, "dense": 60.0}
"""Seconds that a GPU may take."""
CONVERGED, MOST = 1e-4, 200
"""Of the largest eigenvalue, the residual that ends a GPU's Lanczos; and the most products it may make."""
CHUNK_IN_DOUBLE = 250
EIGENTHINGS = "hessian-eigenthings==1.0.0a5"
QUIET = 0.5
"""The load of the machine, before anything is timed, up to which it counts as quiet."""


def prepare(path: Path) -> None:
    """The network, after three passes over the digits, and the digits."""
    x, y = challenges.make("rotated-digits", tasks=1).task(0, 1).train
    x, y = x[:IMAGES].flatten(1).float() / 255, y[:IMAGES]
    torch.manual_seed(0)
    module = network()
    optimiser = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        for a, b in zip(x.split(50), y.split(50), strict=True):
            optimiser.zero_grad()
            cross_entropy(module(a), b).backward()
            optimiser.step()
    arrays: dict[str, Any] = {f"state/{k}": t.numpy() for k, t in module.state_dict().items()}
    np.savez(path, x=x.numpy(), y=y.numpy(), **arrays)


def side_library() -> None:
    """hessian-eigenthings in a folder of its own, without the torch that it would bring."""
    if (SIDE / "hessian_eigenthings").exists():
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(SIDE), EIGENTHINGS], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise WorkerError(lines[-1] if lines else f"pip ended with status {done.returncode}")


def least_effort(worker: Worker, name: str) -> tuple[float, float]:
    """The first effort that is exact enough, and how exact it is."""
    for effort in EFFORTS[name]:
        found = worker.measure(f"residual {effort}")
        if found <= EXACT:
            return effort, found
    raise WorkerError(f"no effort reaches a residual of {EXACT:g}; the last had {found:.2g}")


def contest(threads: int, console: Console) -> dict[str, Any]:
    load = os.getloadavg()[0]
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)  # ARPACK's products, in numpy's library
    skipped: dict[str, str] = {}
    chosen: dict[str, tuple[float, float]] = {}
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "problem.npz"
        prepare(data)
        for name in EFFORTS:
            try:
                with console.status(f"{name}: how much effort it takes"):
                    if name == "eigenthings":
                        side_library()
                    worker = stack.enter_context(
                        Worker(Path(sys.executable), "eigen_contender", name, str(data), str(threads))
                    )
                    chosen[name] = least_effort(worker, name)
                    workers[name] = worker
            except WorkerError as error:
                if name == "glocal":
                    raise
                skipped[name] = str(error)
                console.print(f"without {name}: {error}")
        times: dict[str, list[float]] = {name: [] for name in workers}
        order = list(workers)
        for number in track(range(ROUNDS + 1), "rounds", console=console, transient=True):
            for name in order:
                spent = workers[name].measure(f"seconds {chosen[name][0]}")
                if number:  # the first round warms up
                    times[name].append(spent)
            order = [*order[1:], order[0]]
        versions = {name: worker.versions for name, worker in workers.items()}
    ratios = {name: Spread.of([a / b for a, b in zip(times[name], times["glocal"], strict=True)]) for name in times}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_before": load,
        "quiet": load <= QUIET,
        "versions": {**versions, "glocal": {**versions["glocal"], "glocal": __version__}},
        "skipped": skipped,
        "threads": threads,
        "widths": setting.WIDTHS,
        "images": IMAGES,
        "pairs": PAIRS,
        "asked_residual": EXACT,
        "contenders": {
            name: {
                "effort": chosen[name][0],
                "residual": chosen[name][1],
                "seconds": asdict(Spread.of(times[name])),
                "times_slower": asdict(ratios[name]),
                "rounds_s": times[name],
            }
            for name in times
        },
    }


def show(found: dict[str, Any], console: Console) -> None:
    title = f"Top {PAIRS} eigenpairs, MLP of 89,610 parameters, {IMAGES:,} digits, {found['threads']} threads"
    table = Table(title=title, show_lines=True)
    for column in ("", "effort", "residual / λ_1", "seconds", "glocal is …\ntimes as fast"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, own in found["contenders"].items():
        spread, ratio = own["seconds"], own["times_slower"]
        colour = "green" if ratio["middle"] >= GOAL else "red"
        against = f"[{colour}]{ratio['middle']:.2f} (≥ {GOAL:g})[/]\n[dim]{ratio['low']:.2f}–{ratio['high']:.2f}[/]"
        seconds = f"{spread['middle']:.3f}\n[dim]{spread['low']:.3f}–{spread['high']:.3f}[/]"
        residual = f"{own['residual']:.1e}"
        table.add_row(name, f"{own['effort']:g}", residual, seconds, "" if name == "glocal" else against)
    console.print(table)
    note = "" if found["quiet"] else f" The machine was not quiet: its load was {found['load_before']:.1f} before."
    console.print(f"Medians over {ROUNDS} rounds; dim: quartiles.{note}")


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    begun = time.perf_counter()
    made = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, made


def pictures(images: int, data: Path | None) -> tuple[str, Tensor, Tensor]:
    """Training images of CIFAR-10, equally many of every task, as the network takes them; noise if they are not
    there."""
    try:
        challenge = challenges.make("split-cifar10", data=data)
    except GlocalError:
        stream = torch.Generator().manual_seed(0)
        return "noise", torch.rand(images, 3, 32, 32, generator=stream), torch.randint(10, (images,), generator=stream)
    each = [challenge.task(t, 0).train for t in range(challenge.tasks)]
    x, y = (torch.cat([part[i][: -(-images // len(each))] for part in each])[:images] for i in range(2))
    return "CIFAR-10", InputTransform(challenge.normalise).normalize(x), y


def large(device: torch.device, tiny: bool, chunk: int, data: Path | None, console: Console) -> dict[str, Any]:
    """What only a GPU does in seconds."""
    images = 2 if tiny else IMAGES
    of, x, y = pictures(images, data)
    stream = torch.Generator().manual_seed(0)
    x, y = x.to(device), y.to(device)
    loss = losses.get("cross-entropy")
    torch.manual_seed(0)
    resnet = NETWORKS["resnet18"][0]((3, 32, 32), 10).to(device).eval()
    params = {k: p.detach() for k, p in resnet.named_parameters()}
    size = sum(p.numel() for p in params.values())

    @full_precision()
    def pairs() -> tuple[Eigenpairs, int]:
        operator = hessian_operator(Risk(resnet, params, dict(resnet.named_buffers()), x, y, loss, chunk))
        start = start_vector(size, torch.Generator().manual_seed(0)).to(device)
        count, steps = (2, 3) if tiny else (PAIRS, MOST)
        made = 0

        def product(v: Params) -> Params:
            nonlocal made
            made += 1
            return operator @ v

        return lanczos(Operator(product, params), start, count, steps, tolerance=CONVERGED), made

    def apart(values: Tensor, vectors: Tensor) -> list[float]:
        """‖H v − λ v‖ of the first, a middle and the last pair, in float64."""
        double = copy.deepcopy(resnet).double()
        point = {k: p.detach() for k, p in double.named_parameters()}
        risk = Risk(double, point, dict(double.named_buffers()), x.double(), y, loss, CHUNK_IN_DOUBLE)
        operator = hessian_operator(risk)
        some = [0, len(values) // 2, len(values) - 1]
        pairs = [(values[i].double(), vectors[i].double()) for i in some]
        return [float((operator @ v - value * v).norm()) for value, v in pairs]

    side, width = (8, 4) if tiny else (28, 22)
    small = mlp((1, side, side), 10, (width, width)).to(device).eval()
    own = {k: p.detach() for k, p in small.named_parameters()}
    flat = torch.rand(images, 1, side, side, generator=stream).to(device)

    @full_precision()
    def spectrum() -> Tensor:
        return torch.linalg.eigvalsh(hessian(Risk(small, own, {}, flat, y, loss, min(chunk, 2_000)), block_size=512))

    made: dict[str, Any] = {"images": images, "of": of, "chunk": chunk, "tf32": False}
    table = Table("", "parameters", "seconds", "goal", title=f"Curvature on {device}")
    for name, work, parameters in (
        ("resnet18", pairs, size),
        ("dense", spectrum, sum(p.numel() for p in own.values())),
    ):
        first, found = timed(work, device)
        again, found = timed(work, device)
        made[name] = {"parameters": parameters, "seconds": again, "first_seconds": first, "goal": GOALS[name]}
        if device.type == "cuda":
            made[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
        if name == "resnet18":
            (values, vectors, residuals), products = found
            largest = float(values[0].abs())
            relative = (residuals / largest).tolist()
            made[name] |= {
                "products": products,
                "converged": max(relative) < 2 * CONVERGED,
                "eigenvalues": values.tolist(),
                "residuals": relative,
                "residuals_in_float64": [r / largest for r in apart(values, vectors)],
            }
        else:
            made[name] |= {"largest": float(found[-1]), "smallest": float(found[0])}
        table.add_row(name, f"{parameters:,}", f"{again:.2f}", f"< {GOALS[name]:g}")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    console.print(table)
    where = machine() | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
    versions = {"torch": torch.__version__, "glocal": __version__}
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": where, "versions": versions, **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="rehearse the GPU's part with a few images; write nothing")
    parser.add_argument("--chunk", type=int, default=IMAGES, help="images that are differentiated at once on a GPU")
    parser.add_argument("--data", type=Path, help="a folder with data sets, for a GPU's part")
    parser.add_argument("--threads", type=int, default=setting.THREADS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, device = Console(), chosen(given.device)
    if given.tiny or device.type == "cuda":
        found = large(device, given.tiny, given.chunk, given.data, console)
    else:
        found = contest(given.threads, console)
        show(found, console)
    if not given.tiny:
        file = ROOT / "benchmarks" / "results" / f"eigen-{device.type}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"All rounds: {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")


if __name__ == "__main__":
    main()
