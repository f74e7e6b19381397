"""Expansions with the whole Hessian, by products, against the matrix itself."""

from __future__ import annotations

import pytest
import torch
from quadratics import anywhere, at, dense_hessian, network, theta_of
from recordings import taylor_curves
from torch import nn

from glocal.lens.approximation_error import error_curves, error_order
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.record import Snapshot
from glocal.lens.taylor import exact_taylor, taylor
from glocal.tree import to_vector


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_products_tell_what_the_matrix_does(loss: str) -> None:
    trace = network(3, loss=loss)
    found, matrix = exact_taylor(trace, 1), dense_hessian(trace, 1)
    slope = torch.autograd.functional.jacobian(lambda t: trace.value(1, at(trace, t)), theta_of(trace, 1))
    moved = torch.randn(slope.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = trace.value(1, trace.checkpoints[2]) + moved @ slope + moved @ matrix @ moved / 2
    torch.testing.assert_close(found(at(trace, theta_of(trace, 1) + moved).params), expected)


def test_within_a_span_few_products_are_enough() -> None:
    trace = network(5)
    draw = torch.Generator().manual_seed(1)
    directions = torch.randn(3, len(theta_of(trace, 0)), dtype=torch.float64, generator=draw)
    short, long = exact_taylor(trace, 0, directions), exact_taylor(trace, 0)
    for coordinates in ([0.3, 0.0, 0.0], [0.0, -2.0, 0.0], [0.5, 0.1, -0.4]):
        moved = torch.tensor(coordinates, dtype=torch.float64) @ directions
        params = at(trace, theta_of(trace, 0) + moved).params
        torch.testing.assert_close(short(params), long(params))
    # What is orthogonal to all of them has a slope and no curvature.
    aside = torch.randn(directions.shape[1], dtype=torch.float64, generator=draw)
    aside = aside - torch.linalg.lstsq(directions.T, aside[:, None]).solution[:, 0] @ directions
    params = at(trace, theta_of(trace, 0) + aside).params
    torch.testing.assert_close(short(params), taylor(trace, 0, 1)(params))
    assert abs(float(long(params) - short(params))) > 1e-3


def test_curves_of_any_approximation() -> None:
    trace = anywhere(1).trace
    moments = [Snapshot(t, -1, point) for t, point in enumerate(trace.checkpoints)]
    found = error_curves(trace, moments, {"": [exact_taylor(trace, o) for o in range(4)]})[""]
    expected = taylor_curves(trace, 2, "full")
    torch.testing.assert_close(found.approximate, expected.approximate, equal_nan=True)
    assert found.error[found.known].max() < 1e-12 * found.true[found.known].max()


def test_directions_may_be_dependent() -> None:
    trace = network(0)
    one = torch.ones(1, len(theta_of(trace, 0)), dtype=torch.float64)
    expansion, exact = exact_taylor(trace, 0, torch.cat([one, -one])), exact_taylor(trace, 0)
    params = at(trace, theta_of(trace, 0) + 0.3 * one[0]).params
    torch.testing.assert_close(expansion(params), exact(params))


@pytest.mark.parametrize("layer", [nn.Tanh, nn.Softplus, nn.ReLU])
def test_kinks_take_the_second_orders_last_power(layer: type[nn.Module]) -> None:
    """A smooth network's expansion leaves out r³. On the way some rectifiers open and close, the more the longer
    it is, and change a slope that no derivative at its beginning tells of: r² at most. In double precision."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 30), layer(), nn.Linear(30, 4)).double()
    x, y = torch.randn(2_000, 10, dtype=torch.float64), torch.randint(4, (2_000,))
    states = [{k: p + 0.3 * torch.randn_like(p) for k, p in module.state_dict().items()} for _ in range(2)]
    trace = trace_checkpoints(module, "cross-entropy", [(x, y)], states)
    direction = to_vector({k: torch.randn_like(p) for k, p in trace.checkpoints[1].params.items()})
    found = error_order(trace, 0, exact_taylor(trace, 0), direction, [10 ** (-i / 4) for i in range(4, 11)])
    assert found.exponent < 2.25 if layer is nn.ReLU else found.exponent == pytest.approx(3, abs=0.1)
