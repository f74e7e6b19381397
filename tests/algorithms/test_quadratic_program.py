"""GEM's quadratic programme against an active-set solver, its optimality conditions and closed forms."""

from __future__ import annotations

import daqp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.gem import multipliers, solve_nonnegative

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
FEATURES = 30


def solved(hessian: np.ndarray, linear: np.ndarray, rows: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """daqp's argmin ½ xᵀHx + fᵀx subject to rows x ≥ lower; with no rows, x ≥ lower."""
    upper = np.full(len(lower), 1e30)
    x, _, flag, _ = daqp.solve(hessian, linear, rows, upper, lower, primal_tol=1e-12, dual_tol=1e-14)
    assert flag == 1, "the oracle found the optimum"
    return np.asarray(x)


def gradients(kind: str, tasks: int, seed: int) -> tuple[Tensor, Tensor]:
    """M (tasks, features) and g."""
    draw = torch.Generator().manual_seed(seed)
    memory = torch.randn(tasks, FEATURES, generator=draw, dtype=torch.float64)
    g = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
    numbers = torch.rand(tasks, 1, generator=draw, dtype=torch.float64)
    other = torch.randint(tasks, (tasks,), generator=draw)
    if kind == "badly scaled":
        memory *= 10 ** (8 * numbers - 4)
    elif kind == "similar":
        memory += 3 * torch.randn(FEATURES, generator=draw, dtype=torch.float64)
    elif kind == "all violated":
        g = g - 3 * memory.mean(0) * tasks**0.5
    elif kind == "duplicates":
        memory = memory[other] * (1 + 9 * numbers)
    elif kind == "zeros":
        memory *= numbers > 0.4
    elif kind == "contradictory":
        memory[-1] = -2 * memory[0]
    return memory, g


KINDS = ["independent", "badly scaled", "similar", "all violated", "duplicates", "zeros", "contradictory"]


def projected(memory: Tensor, g: Tensor, margin: float = 0.0, damping: float = 0.0) -> tuple[Tensor, Tensor]:
    v = multipliers(memory @ memory.T, memory @ g, margin, damping)
    return v, g + memory.T @ v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tasks", [1, 2, 5, 12, 20])
def test_it_is_the_projection_that_a_solver_of_the_primal_finds(kind: str, tasks: int) -> None:
    """argmin ½‖d − g‖² subject to M̂d ≥ 0, M̂ of unit rows: no Gram matrix, no dual."""
    for seed in range(6):
        memory, g = gradients(kind, tasks, seed)
        used = memory[memory.norm(dim=1) > 0]
        unit = (used / used.norm(dim=1, keepdim=True)).numpy()
        expected = solved(np.eye(FEATURES), -g.numpy(), unit, np.zeros(len(unit)))
        _, d = projected(memory, g)
        assert np.abs(d.numpy() - expected).max() < 1e-8 * float(g.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tasks", [1, 2, 5, 12, 20])
def test_with_margin_and_damping_it_is_the_dual_that_a_solver_finds(kind: str, tasks: int) -> None:
    for seed in range(6):
        memory, g = gradients(kind, tasks, seed)
        g = 20 * g  # so that more than the margin is needed
        damped = (memory @ memory.T).numpy() + 1e-3 * np.eye(tasks)
        scale = 1 / np.sqrt(np.diag(damped))
        hessian, linear = damped * np.outer(scale, scale), (memory @ g).numpy() * scale
        expected = scale * solved(hessian, linear, np.zeros((0, tasks)), 0.5 / scale)
        v, d = projected(memory, g, margin=0.5, damping=1e-3)
        assert bool((v >= 0.5).all())
        size = float(g.norm() + 0.5 * memory.norm())
        assert np.abs(d.numpy() - (g + memory.T @ torch.tensor(expected)).numpy()).max() < 1e-8 * size
        # With a condition number as high as the badly scaled ones', v itself is known to fewer digits than d.
        np.testing.assert_allclose(v.numpy() / scale, expected / scale, rtol=1e-6, atol=1e-6 * size)


@QUICK
@given(
    st.sampled_from(KINDS),
    st.integers(1, 20),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1e-3]),
)
def test_the_optimality_conditions_hold(kind: str, tasks: int, seed: int, margin: float, damping: float) -> None:
    """v ≥ margin, w = (G + damping I)v + o ≥ 0, and w_o = 0 wherever v_o > margin."""
    memory, g = gradients(kind, tasks, seed)
    v, _ = projected(memory, g, margin, damping)
    quadratic = memory @ memory.T + damping * torch.eye(tasks, dtype=torch.float64)
    w = quadratic @ v + memory @ g
    length = quadratic.diagonal().sqrt()
    size = float((g.norm() + margin * length.sum()).clamp(min=1))
    assert bool((v >= margin).all())
    assert bool((w >= -1e-9 * length * size).all())
    assert float((w * (v - margin)).abs().max()) < 1e-8 * size**2


@QUICK
@given(st.integers(2, 20), st.integers(0, 10_000), st.integers(-12, 12), st.integers(-12, 12))
def test_lengths_do_not_matter(tasks: int, seed: int, of_memory: int, of_gradient: int) -> None:
    """d scales with g, and the length of M is nothing to it."""
    memory, g = gradients("independent", tasks, seed)
    up = 2.0**of_gradient
    _, d = projected(memory, g)
    _, scaled = projected(memory * 4.0**of_memory, g * up)
    torch.testing.assert_close(scaled, d * up, rtol=1e-13, atol=1e-13 * up)


def test_one_and_two_constraints_in_closed_form() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        q, (a, b) = torch.randn(2, generator=draw, dtype=torch.float64), torch.rand(2, generator=draw).tolist()
        z = solve_nonnegative(torch.tensor([[2.0]]).double(), q[:1])
        assert float(z) == pytest.approx(max(0.0, -float(q[0]) / 2))
        off = 0.9 * (2 * a - 1)
        quadratic = torch.tensor([[1.0, off], [off, 1.0 + b]], dtype=torch.float64)
        candidates = [
            torch.zeros(2, dtype=torch.float64),
            torch.stack([-q[0], q[0] * 0]),
            torch.stack([q[0] * 0, -q[1] / (1 + b)]),
            -torch.linalg.solve(quadratic, q),
        ]
        values = [float(0.5 * z @ quadratic @ z + q @ z) for z in candidates if bool((z >= 0).all())]
        z = solve_nonnegative(quadratic, q)
        assert float(0.5 * z @ quadratic @ z + q @ z) == pytest.approx(min(values), abs=1e-12)


def test_mapped_over_runs_it_gives_the_same_bits() -> None:
    problems = [gradients(kind, 8, seed) for seed, kind in enumerate(KINDS)]
    grams, overlaps = (torch.stack(t) for t in zip(*[(m @ m.T, m @ g) for m, g in problems], strict=True))
    together = vmap(lambda a, b: multipliers(a, b, 0.5, 1e-3))(grams, overlaps)
    for run, (gram, overlap) in enumerate(zip(grams, overlaps, strict=True)):
        assert torch.equal(together[run], multipliers(gram, overlap, 0.5, 1e-3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_raises_nothing_and_stays_with_its_run(bad: float) -> None:
    memory, g = gradients("independent", 5, 0)
    lost = memory.clone()
    lost[2, 3] = bad
    for broken, of in ((lost, g), (memory, g * bad)):
        grams = torch.stack([memory @ memory.T, broken @ broken.T])
        overlaps = torch.stack([memory @ g, broken @ of])
        v = vmap(lambda a, b: multipliers(a, b, 0.0, 0.0))(grams, overlaps)
        assert torch.equal(v[0], multipliers(grams[0], overlaps[0], 0.0, 0.0))
