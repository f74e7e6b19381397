"""Expansions with the whole Hessian, by products, against the matrix itself."""

from __future__ import annotations

import pytest
import torch
from quadratics import anywhere, at, dense_hessian, network, theta_of
from torch import nn

from glocal.curvature.vector import flatten
from glocal.errors import GlocalError
from glocal.lens.approximation import curves, order, taylor_curves
from glocal.lens.subject import of_module
from glocal.lens.taylor import taylor
from glocal.lens.taylor_full import whole, within
from glocal.lens.trajectory import Moment


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_products_tell_what_the_matrix_does(loss: str) -> None:
    subject = network(3, loss=loss)
    found, matrix = whole(subject, 1), dense_hessian(subject, 1)
    slope = torch.autograd.functional.jacobian(lambda t: subject.value(1, at(subject, t)), theta_of(subject, 1))
    moved = torch.randn(slope.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = subject.value(1, subject.solutions[2]) + moved @ slope + moved @ matrix @ moved / 2
    torch.testing.assert_close(found(at(subject, theta_of(subject, 1) + moved).params), expected)


def test_within_a_span_few_products_are_enough() -> None:
    subject = network(5)
    draw = torch.Generator().manual_seed(1)
    directions = torch.randn(3, len(theta_of(subject, 0)), dtype=torch.float64, generator=draw)
    short, long = within(subject, 0, directions), whole(subject, 0)
    for coordinates in ([0.3, 0.0, 0.0], [0.0, -2.0, 0.0], [0.5, 0.1, -0.4]):
        moved = torch.tensor(coordinates, dtype=torch.float64) @ directions
        params = at(subject, theta_of(subject, 0) + moved).params
        torch.testing.assert_close(short(params), long(params))
    # What is orthogonal to all of them has a slope and no curvature.
    aside = torch.randn(directions.shape[1], dtype=torch.float64, generator=draw)
    aside = aside - torch.linalg.lstsq(directions.T, aside[:, None]).solution[:, 0] @ directions
    params = at(subject, theta_of(subject, 0) + aside).params
    torch.testing.assert_close(short(params), taylor(subject, 0, 1)(params))
    assert abs(float(long(params) - short(params))) > 1e-3


def test_curves_of_any_approximation() -> None:
    subject = anywhere(1).subject
    moments = [Moment(t, -1, point) for t, point in enumerate(subject.solutions)]
    found = curves(subject, moments, [whole(subject, o) for o in range(4)])
    expected = taylor_curves(subject, 2, "full")
    torch.testing.assert_close(found.approximate, expected.approximate, equal_nan=True)
    assert found.error[found.known].max() < 1e-12 * found.true[found.known].max()


def test_directions_that_depend_on_each_other_are_refused() -> None:
    subject = network(0)
    one = torch.ones(1, len(theta_of(subject, 0)), dtype=torch.float64)
    with pytest.raises(GlocalError, match="independent; 2 of rank 1"):
        within(subject, 0, torch.cat([one, -one]))


@pytest.mark.parametrize("layer", [nn.Tanh, nn.Softplus, nn.ReLU])
def test_kinks_take_the_second_orders_last_power(layer: type[nn.Module]) -> None:
    """A smooth network's expansion leaves out r³. On the way some rectifiers open and close, the more the longer
    it is, and change a slope that no derivative at its beginning tells of: r² at most. In double precision."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 30), layer(), nn.Linear(30, 4)).double()
    x, y = torch.randn(2_000, 10, dtype=torch.float64), torch.randint(4, (2_000,))
    states = [{k: p + 0.3 * torch.randn_like(p) for k, p in module.state_dict().items()} for _ in range(2)]
    subject = of_module(module, "cross-entropy", [(x, y)], states)
    direction = flatten({k: torch.randn_like(p) for k, p in subject.solutions[1].params.items()})
    found = order(subject, 0, whole(subject, 0), direction, [10 ** (-i / 4) for i in range(4, 11)])
    assert found.exponent < 2.25 if layer is nn.ReLU else found.exponent == pytest.approx(3, abs=0.1)
