"""Expansions against closed forms, dense matrices and the losses themselves where these are quadratics."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from quadratics import anywhere, at, dense_hessian, diverged, network, theta_of
from torch import Tensor, nn

from glocal.algorithms.hessian_structures import Structure
from glocal.curvature.hessian import ggn as dense_ggn
from glocal.errors import GlocalError
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.taylor import taylor
from glocal.lens.training_trace import TrainingTrace
from glocal.tree import from_vector, to_vector


def far_from(theta: Tensor, seed: int, by: float = 3.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return theta + by * torch.randn(theta.shape, dtype=torch.float64, generator=draw)


def two_outputs(seed: int = 0) -> TrainingTrace:
    """Linear regression with a bias in a layer that has a name, at a point that is no minimum."""
    draw = torch.Generator().manual_seed(seed)
    number = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=draw)  # noqa: E731
    state = {"0.weight": number(2, 3), "0.bias": number(2)}
    module = nn.Sequential(nn.Linear(3, 2)).double()
    return trace_checkpoints(module, "squared-error", [(number(9, 3), number(9, 2))], [state, state])


@pytest.mark.parametrize("seed", range(3))
def test_the_second_order_is_the_loss_itself_where_that_is_a_quadratic(seed: int) -> None:
    problem = anywhere(seed)
    for o in range(3):
        expansion = taylor(problem.trace, o)
        for far in (0.1, 10.0, 1e4):
            theta = far_from(theta_of(problem.trace, o), seed, far)
            found = float(expansion(at(problem.trace, theta).params))
            np.testing.assert_allclose(found, problem.loss(o, theta.numpy()), rtol=1e-10)


@pytest.mark.parametrize("structure", ["kronecker", "low-rank"])
def test_so_it_is_in_forms_that_are_exact_there(structure: str) -> None:
    """Kronecker factors of linear regression; all eigenpairs of a small Hessian."""
    trace = two_outputs()
    expansion = taylor(trace, 0, structure=structure)  # type: ignore[arg-type]
    point = at(trace, far_from(theta_of(trace, 0), 1))
    torch.testing.assert_close(expansion(point.params), trace.value(0, point), rtol=1e-10, atol=0)


def test_every_order_by_its_closed_form() -> None:
    problem = anywhere(5)
    centre = problem.solution(1)
    theta = far_from(torch.from_numpy(centre), 2)
    moved = theta.numpy() - centre
    expected = problem.loss(1, centre)
    terms = [0.0, moved @ problem.gradient(1, centre), moved @ problem.hessian(1) @ moved / 2]
    for order, term in enumerate(terms):
        expected += term
        found = taylor(problem.trace, 1, order)(at(problem.trace, theta).params)
        np.testing.assert_allclose(float(found), expected, rtol=1e-12)


def quadratic_part(trace: TrainingTrace, task: int, theta: Tensor, **form: object) -> float:
    """½ Δᵀ H Δ alone: the second order less the first."""
    point = at(trace, theta)
    both = (taylor(trace, task, order, **form)(point.params) for order in (2, 1))  # type: ignore[arg-type]
    second, first = both
    return float(second - first)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_the_forms_are_parts_of_dense_matrices(loss: str) -> None:
    trace = network(3, loss=loss)
    hessian = dense_hessian(trace, 1)
    ggn = dense_ggn(trace.risk(1))
    theta = far_from(theta_of(trace, 1), 4)
    moved = theta - theta_of(trace, 1)
    values, vectors = torch.linalg.eigh(hessian)
    top = values.abs().argsort(descending=True)[:3]
    truncated = vectors[:, top] @ values[top].diag() @ vectors[:, top].mT
    for form, matrix in (
        ({"structure": "full"}, hessian),
        ({"structure": "full", "matrix": "ggn"}, ggn),
        ({"structure": "low-rank", "rank": 3}, truncated),
        ({"structure": "diagonal"}, ggn.diag().diag()),
    ):
        expected = float(moved @ matrix @ moved / 2)
        np.testing.assert_allclose(quadratic_part(trace, 1, theta, **form), expected, rtol=1e-7, err_msg=str(form))


def test_the_kronecker_form_by_its_factors() -> None:
    """G ⊗ A of the first layer, written out from the network's own derivatives."""
    trace = network(1)
    point, data = trace.checkpoints[1], trace.tasks[0]
    moved = {k: torch.zeros_like(p) for k, p in point.params.items()}
    name = "0.layers.0"
    draw = torch.Generator().manual_seed(0)
    for kind in ("weight", "bias"):
        shape = moved[f"{name}.{kind}"].shape
        moved[f"{name}.{kind}"] = torch.randn(shape, dtype=torch.float64, generator=draw)
    z = data.x @ point.params[f"{name}.weight"].T + point.params[f"{name}.bias"]
    hidden = z.tanh()
    outputs = hidden @ point.params["2.weight"].T + point.params["2.bias"]
    p = outputs.softmax(-1)
    back = point.params["2.weight"] * (1 - hidden.square()).unsqueeze(1)  # ∂f/∂z, (n, K, out)
    curvature = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    g = (back.mT @ curvature @ back).mean(0)
    a = torch.cat([data.x, torch.ones(len(data.x), 1, dtype=torch.float64)], 1)
    v = torch.cat([moved[f"{name}.weight"], moved[f"{name}.bias"].unsqueeze(1)], 1)
    expected = float((v * (g @ v @ (a.T @ a / len(a)))).sum() / 2)
    theta = theta_of(trace, 0) + to_vector(moved)
    np.testing.assert_allclose(quadratic_part(trace, 0, theta, structure="kronecker"), expected, rtol=1e-9)


def test_an_expansion_can_be_differentiated_and_mapped() -> None:
    trace = network(2)
    expansion = taylor(trace, 0)
    theta = theta_of(trace, 0)
    like = trace.checkpoints[1].params
    value = lambda vector: expansion(from_vector(vector, like))  # noqa: E731
    slope = torch.func.grad(value)(theta)
    torch.testing.assert_close(slope, trace.gradient(0))
    many = torch.stack([far_from(theta, seed) for seed in range(3)])
    torch.testing.assert_close(torch.func.vmap(value)(many), torch.stack([value(row) for row in many]))


def test_what_is_expanded_stays_as_it_was() -> None:
    trace = network(0, dtype=torch.float32)
    before = {k: p.clone() for k, p in trace.checkpoints[1].params.items()}
    found = taylor(trace, 0, structure="diagonal")(trace.checkpoints[2].params)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert not any(m.training for m in trace.module.modules())
    assert all(torch.equal(before[k], p) for k, p in trace.checkpoints[1].params.items())


def test_beyond_numbers_it_is_not_a_number() -> None:
    trace = diverged(network(0), 1)
    for structure in ("full", "low-rank", "kronecker", "diagonal"):
        assert taylor(trace, 0, structure=structure)(trace.checkpoints[2].params).isnan()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": 3}, "solutions of 3 tasks, counted from 0; 3"),
        ({"task": -1}, "solutions of 3 tasks, counted from 0; -1"),
        ({"task": 0, "order": 3}, "order = 3 was given; .* order 0, 1 or 2"),
        ({"task": 0, "structure": "fool"}, "Did you mean 'full'"),
        ({"task": 0, "structure": "diagonal", "matrix": "hessian"}, "structure=diagonal needs matrix=ggn"),
        ({"task": 0, "structure": "low-rank", "rank": 0}, "rank = 0 was given; it must be at least 1"),
    ],
)
def test_what_cannot_be_expanded_is_said(given: dict, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        taylor(network(0), **given)


def test_a_full_hessian_of_a_large_network_is_refused() -> None:
    module = nn.Sequential(nn.Linear(100, 100))
    state = module.state_dict()
    trace = trace_checkpoints(module, "squared-error", [(torch.zeros(2, 100), torch.zeros(2, 100))], [state, state])
    with pytest.raises(GlocalError, match="10,100 parameters"):
        taylor(trace, 0)


class Scaled(nn.Module):
    """A network that takes uint8 images and scales them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1).float() / 16)


@pytest.mark.parametrize("structure", ["full", "low-rank", "kronecker", "diagonal"])
@pytest.mark.parametrize("whole", ["images", "tokens"])
def test_whole_numbers_are_the_networks_own_business(whole: str, structure: Structure) -> None:
    """At its solution an expansion is the loss: nobody but the network scales or embeds what it is given."""
    torch.manual_seed(0)
    tokens = nn.Sequential(nn.Embedding(16, 2), nn.Flatten(), nn.Linear(8, 3))
    module = Scaled() if whole == "images" else tokens
    x = torch.randint(16, (20, 4), dtype=torch.uint8 if whole == "images" else torch.int64)
    states = [copy.deepcopy(module.state_dict())]
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    states.append(copy.deepcopy(module.state_dict()))
    trace = trace_checkpoints(module, "cross-entropy", [(x, torch.randint(3, (20,)))], states)
    point = trace.checkpoints[1]
    with torch.no_grad():
        torch.testing.assert_close(taylor(trace, 0, 2, structure)(point.params), trace.value(0, point))


def test_a_copy_in_double_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    states = [copy.deepcopy(module.state_dict()) for _ in range(2)]
    trace = trace_checkpoints(module, "cross-entropy", [(torch.randn(20, 3), torch.randint(2, (20,)))], states)
    more = trace.double()
    value, exact = (s.value(0, s.checkpoints[1]) for s in (trace, more))
    assert value.dtype == torch.float32 and exact.dtype == torch.float64
    assert float(value) == pytest.approx(float(exact), rel=1e-5) and float(value) != float(exact)
    assert next(trace.module.parameters()).dtype == torch.float32
