"""relu as a product with a constant: its values and derivatives are torch's, whichever way it is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn import functional

from glocal.curvature.operators import MaskedReLU

Z = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 0.5, 3.0, float("inf")])
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.ReLU(),
    "functional": functional.relu,
    "by name": lambda z: functional.relu(input=z, inplace=False),
    "torch": torch.relu,
    "method": lambda z: z.relu(),
}
ways = pytest.mark.parametrize("relu", list(WAYS.values()), ids=list(WAYS))


@ways
def test_values_and_slopes_are_those_of_relu(relu: Callable[[Tensor], Tensor]) -> None:
    def both() -> tuple[Tensor, Tensor]:
        y, pull = vjp(relu, Z)  # type: ignore[misc]
        return y, pull(torch.full_like(Z, 7))[0]

    expected = both()
    with MaskedReLU():
        found = both()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@ways
def test_products_with_second_derivatives_are_the_same_bits(relu: Callable[[Tensor], Tensor]) -> None:
    draw = torch.Generator().manual_seed(0)
    w, v = torch.randn(2, 6, 6, generator=draw)
    x = torch.randn(50, 6, generator=draw)

    def product() -> Tensor:
        value = lambda w: (relu(relu(x @ w) @ w.mT).exp() * x).sum()  # noqa: E731
        _, pull = vjp(grad(value), w)  # type: ignore[misc]
        found: Tensor = vmap(lambda v: pull(v)[0])(torch.stack([v, 2 * v]))
        return found

    expected = product()
    assert expected.abs().max() > 0
    with MaskedReLU():
        assert product().equal(expected)


def test_no_zeros_are_written_down() -> None:
    """What torch's own second derivative of relu is made of."""
    z, slope = torch.randn(5), torch.ones(5, requires_grad=True)

    def second() -> Tensor | None:
        leaf = z.clone().requires_grad_()
        (first,) = torch.autograd.grad(leaf.relu(), leaf, slope, create_graph=True)
        (found,) = torch.autograd.grad(first.sum(), leaf, allow_unused=True)
        return found

    assert second() is not None
    with MaskedReLU():
        assert second() is None


def test_what_works_in_place_still_does() -> None:
    z = torch.tensor([-1.0, 1.0])
    with MaskedReLU():
        nn.ReLU(inplace=True)(z)
        assert z.tolist() == [0.0, 1.0]
        assert functional.relu_(torch.tensor([-1.0])).item() == 0
