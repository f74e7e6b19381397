"""Worker of `benchmarks.eigen`: one solver for the top eigenpairs of a Hessian; only glocal's imports glocal.

    python -m benchmarks.eigen_worker SOLVER FILE THREADS

It serves "seconds EFFORT" and "residual EFFORT" for each effort: a tolerance, or a number of Lanczos steps.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.worker import ROOT, Measure, serve

NUM_PAIRS = 10
EIGENTHINGS_FOLDER = ROOT / ".venv-eigenthings"
EFFORTS: dict[str, tuple[float, ...]] = {
    "glocal": (1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    "curvlinops": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    "eigenthings": (20, 25, 30, 35, 40, 45, 50, 60, 80, 100),
}
"""In increasing order: tolerances of glocal and of ARPACK, Lanczos steps of hessian-eigenthings."""

Pairs = tuple[Tensor, Tensor]
"""Eigenvalues (k,), the largest magnitude first, and eigenvectors (k, P)."""
Solve = Callable[[float], Pairs]


def glocal(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    from glocal import losses
    from glocal.curvature.lanczos import eigenpairs
    from glocal.risk import Risk

    params = {k: p.detach() for k, p in module.named_parameters()}
    risk = Risk(module, params, {}, x, y, losses.get("cross-entropy"))

    def solve(tolerance: float) -> Pairs:
        pairs = eigenpairs(risk, NUM_PAIRS, steps=200, tolerance=tolerance)
        return pairs.values, pairs.vectors

    return solve


def curvlinops(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    def solve(tolerance: float) -> Pairs:
        params = list(module.parameters())
        hessian = HessianLinearOperator(module, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False)
        start = np.random.default_rng(0).normal(size=hessian.shape[0])
        values, vectors = eigsh(hessian.to_scipy(), k=NUM_PAIRS, which="LM", v0=start, tol=tolerance)
        order = np.argsort(-np.abs(values))
        return torch.from_numpy(values[order]), torch.from_numpy(vectors.T[order])

    return solve


def eigenthings(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    sys.path.insert(0, str(EIGENTHINGS_FOLDER))
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    def solve(steps: float) -> Pairs:
        hessian = HessianOperator(module, [(x, y)], supervised_loss(cross_entropy))
        pairs = lanczos(hessian, k=NUM_PAIRS, max_iter=int(steps), reorthogonalize=True, seed=0)
        return pairs.eigenvalues, pairs.eigenvectors

    return solve


SOLVERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Solve]] = {
    "glocal": glocal,
    "curvlinops": curvlinops,
    "eigenthings": eigenthings,
}


def max_residual(module: nn.Module, x: Tensor, y: Tensor, pairs: Pairs) -> float:
    """Return max ‖H v − λ v‖ / (‖v‖ |λ_1|), with products by plain autograd in float64; inf if pairs are missing."""
    double = copy.deepcopy(module).double()
    params = list(double.parameters())
    gradient = torch.autograd.grad(cross_entropy(double(x.double()), y), params, create_graph=True)
    values, vectors = (part.detach().double() for part in pairs)
    largest = torch.zeros((), dtype=torch.float64)
    for value, vector in zip(values, vectors, strict=True):
        parts = [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in params]), params, strict=True)]
        product = torch.autograd.grad(gradient, params, parts, retain_graph=True)
        residual = torch.cat([h.flatten() for h in product]) - value * vector
        largest = torch.maximum(largest, residual.norm() / vector.norm() / values[0].abs())
    return float(largest) if len(values) == NUM_PAIRS else float("inf")


def solve_residual(module: nn.Module, x: Tensor, y: Tensor, solve: Solve, effort: float) -> float:
    return max_residual(module, x, y, solve(effort))


def median_seconds(solve: Solve, effort: float) -> float:
    """Return the median of three solutions, which excludes single interruptions."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        solve(effort)
        times.append(time.perf_counter() - start)
    return median(times)


def read_problem(path: Path) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the trained network and the data that `benchmarks.eigen` wrote."""
    with np.load(path) as arrays:
        state = {k.removeprefix("state/"): torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith("state/")}
        module = setting.make_mlp().eval()
        module.load_state_dict(state)
        return module, torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


def main() -> None:
    warnings.simplefilter("ignore")
    name, path, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    module, x, y = read_problem(Path(path))
    solve = SOLVERS[name](module, x, y)
    measurements: dict[str, Measure] = {}
    for effort in EFFORTS[name]:
        measurements[f"seconds {effort}"] = partial(median_seconds, solve, effort)
        measurements[f"residual {effort}"] = partial(solve_residual, module, x, y, solve, effort)
    versions = {"torch": str(torch.__version__)}
    if name == "curvlinops":
        versions |= {package: version(package) for package in ("curvlinops-for-pytorch", "scipy")}
    elif name == "eigenthings":
        from hessian_eigenthings import __version__

        versions["hessian-eigenthings"] = __version__
    serve(versions, measurements)


if __name__ == "__main__":
    main()
