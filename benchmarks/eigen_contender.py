"""One contender for the top eigenpairs of a Hessian, in a process of its own: only glocal's imports glocal.

python -m benchmarks.eigen_contender NAME FILE THREADS: answers "seconds EFFORT" and "residual EFFORT", EFFORT what
makes it more exact: a tolerance, or a number of steps.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import setting
from benchmarks.worker import serve

PAIRS = 10
SIDE = Path(__file__).resolve().parent.parent / ".venv-eigenthings"
EFFORTS: dict[str, tuple[float, ...]] = {
    "glocal": (1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    "curvlinops": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    "eigenthings": (20, 25, 30, 35, 40, 45, 50, 60, 80, 100),
}
"""From the least on: glocal's tolerance, ARPACK's, Lanczos steps."""

Pairs = tuple[Tensor, Tensor]  # λ (k,), largest magnitude first, and v (k, P)
Solve = Callable[[float], Pairs]


def network(state: dict[str, Tensor] | None = None) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in zip(setting.WIDTHS, setting.WIDTHS[1:], strict=False)]
    made = nn.Sequential(layers[0], *(m for layer in layers[1:] for m in (nn.ReLU(), layer)))
    if state is not None:
        made.load_state_dict(state)
    return made


def glocal(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    from glocal import losses
    from glocal.curvature.lanczos import eigenpairs
    from glocal.risk import Risk

    params = {k: p.detach() for k, p in module.named_parameters()}

    risk = Risk(module, params, {}, x, y, losses.get("cross-entropy"))

    def solve(effort: float) -> Pairs:
        found = eigenpairs(risk, PAIRS, steps=200, tolerance=effort)
        return found.values, found.vectors

    return solve


def curvlinops(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    def solve(effort: float) -> Pairs:
        params = list(module.parameters())
        matrix = HessianLinearOperator(module, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False)
        start = np.random.default_rng(0).normal(size=matrix.shape[0])
        values, vectors = eigsh(matrix.to_scipy(), k=PAIRS, which="LM", v0=start, tol=effort)
        order = np.argsort(-np.abs(values))
        return torch.from_numpy(values[order]), torch.from_numpy(vectors.T[order])

    return solve


def eigenthings(module: nn.Module, x: Tensor, y: Tensor) -> Solve:
    sys.path.insert(0, str(SIDE))
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    def solve(effort: float) -> Pairs:
        matrix = HessianOperator(module, [(x, y)], supervised_loss(cross_entropy))
        found = lanczos(matrix, k=PAIRS, max_iter=int(effort), reorthogonalize=True, seed=0)
        return found.eigenvalues, found.eigenvectors

    return solve


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Solve]] = {
    "glocal": glocal,
    "curvlinops": curvlinops,
    "eigenthings": eigenthings,
}


def residual(module: nn.Module, x: Tensor, y: Tensor, pairs: Pairs) -> float:
    """The largest ‖H v − λ v‖ / (‖v‖ |λ_1|), with products in float64 by plain autograd; inf if a pair is missing."""
    exact = copy.deepcopy(module).double()
    params = list(exact.parameters())
    gradient = torch.autograd.grad(cross_entropy(exact(x.double()), y), params, create_graph=True)
    values, vectors = (part.detach().double() for part in pairs)
    worst = torch.zeros((), dtype=torch.float64)
    for value, vector in zip(values, vectors, strict=True):
        parts = [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in params]), params, strict=True)]
        product = torch.autograd.grad(gradient, params, parts, retain_graph=True)
        rest = torch.cat([h.flatten() for h in product]) - value * vector
        worst = torch.maximum(worst, rest.norm() / vector.norm() / values[0].abs())
    return float(worst) if len(values) == PAIRS else float("inf")


def seconds(solve: Solve, effort: float) -> float:
    """The median of three: a machine's hiccup is as long as a solution."""
    spent = []
    for _ in range(3):
        begun = time.perf_counter()
        solve(effort)
        spent.append(time.perf_counter() - begun)
    return median(spent)


def read(path: Path) -> tuple[nn.Sequential, Tensor, Tensor]:
    with np.load(path) as held:
        state = {k.removeprefix("state/"): torch.from_numpy(held[k]) for k in held.files if k.startswith("state/")}
        return network(state).eval(), torch.from_numpy(held["x"]), torch.from_numpy(held["y"])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(sys.argv[3]))
    name, (module, x, y) = sys.argv[1], read(Path(sys.argv[2]))
    solve = CONTENDERS[name](module, x, y)
    asked: dict[str, Any] = {}
    for effort in EFFORTS[name]:
        asked[f"seconds {effort}"] = partial(seconds, solve, effort)
        asked[f"residual {effort}"] = lambda effort=effort: residual(module, x, y, solve(effort))
    versions = {"torch": str(torch.__version__)}
    if name == "curvlinops":
        versions |= {p: version(p) for p in ("curvlinops-for-pytorch", "scipy")}
    elif name == "eigenthings":
        from hessian_eigenthings import __version__

        versions["hessian-eigenthings"] = __version__
    serve(versions, asked)


if __name__ == "__main__":
    main()
