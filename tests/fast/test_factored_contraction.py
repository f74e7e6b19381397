"""Answers paired with δ, and back, against the sums written down; on a GPU the kernels, mapped and differentiated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from glocal.curvature.jacobian import contract, scale_deltas
from glocal.fast import factored_contraction

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
SIZES = pytest.mark.parametrize(("each", "inputs"), [(1, 500), (10, 50), (3, 7), (1, 1)])
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
WIDTHS, MARGIN = (100, 33, 10), 40


class Stored:
    """Three runs' δ and answers: the first layer's a part of a wider tensor, as those of a wide layer are."""

    def __init__(self, each: int, inputs: int, device: str) -> None:
        draw = torch.Generator(device).manual_seed(each + inputs)

        def some(*shape: int) -> Tensor:
            return torch.randn(3, *shape, generator=draw, device=device)

        self.deltas = some(sum(WIDTHS), each, inputs)
        self.wide = some(WIDTHS[0], MARGIN + inputs)
        self.z = [some(width, inputs) for width in WIDTHS[1:]]
        self.b = [some(width) for width in WIDTHS[1:]]
        self.c = some(inputs, each)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.deltas, self.wide, *self.z, *self.b

    def expected(self) -> Tensor:
        shifted = [z + b.unsqueeze(-1) for z, b in zip(self.z, self.b, strict=True)]
        return torch.einsum("rdcn,rdn->rnc", self.deltas, torch.cat([self.wide[..., MARGIN:], *shifted], 1))


def together(deltas: Tensor, wide: Tensor, z2: Tensor, z3: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return contract(deltas, [(wide[:, MARGIN:], None), (z2, b2), (z3, b3)])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@SIZES
@DEVICES
def test_answers_are_paired_with_their_deltas(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)
    close(vmap(together)(*stored.arguments), stored.expected())
    close(together(*(t[1] for t in stored.arguments)), stored.expected()[1])


@SIZES
@DEVICES
def test_the_way_back_weighs_the_deltas(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)
    expected = torch.einsum("rdcn,rnc->rdn", stored.deltas, stored.c)

    def both(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        products, sums = scale_deltas(deltas, c)
        return products, products.sum(1) if sums is None else sums

    for found, wanted in zip(vmap(both)(stored.deltas, stored.c), (expected, expected.sum(2)), strict=True):
        close(found, wanted)
    close(both(stored.deltas[2], stored.c[2])[1], expected[2].sum(1))


@SIZES
@DEVICES
def test_they_are_differentiated_as_the_sums_are(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)

    def slopes(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        slope = grad(lambda *given: f(*given).square().sum(), argnums=tuple(range(1, 6)))
        found: tuple[Tensor, ...] = vmap(slope)(*stored.arguments)
        return found

    def plainly(deltas: Tensor, wide: Tensor, z2: Tensor, z3: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
        z = torch.cat([wide[:, MARGIN:], z2 + b2.unsqueeze(1), z3 + b3.unsqueeze(1)])
        return (deltas * z.unsqueeze(1)).sum(0).mT

    for found, wanted in zip(slopes(together), slopes(plainly), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


@DEVICES
def test_each_is_the_other_s_transpose(device: str) -> None:
    stored = Stored(3, 7, device)
    deltas, c = stored.deltas[0], stored.c[0]
    slope = grad(lambda c: scale_deltas(deltas, c)[0].square().sum() / 2)(c)
    close(slope, contract(deltas, [(scale_deltas(deltas, c)[0], None)]))


@DEVICES
def test_runs_may_share_some_of_it(device: str) -> None:
    stored = Stored(1, 7, device)
    shared = [t if i in (0, 2) else t[0] for i, t in enumerate(stored.arguments)]  # δ and one layer's z are their own
    found = vmap(together, in_dims=(0, None, 0, None, None, None))(*shared)
    alone = [together(*(t[run] if i in (0, 2) else t for i, t in enumerate(shared))) for run in range(3)]
    close(found, torch.stack(alone))


def test_more_numbers_than_the_kernels_can_count_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored_contraction, "supports", lambda deltas: True)
    number = torch.zeros(1)
    assert factored_contraction._supported(number.expand(2**10, 1, 2**20))
    assert not factored_contraction._supported(number.expand(2**11, 1, 2**20))
    assert not factored_contraction._supported(number.double())


@DEVICES
def test_deltas_are_constants(device: str) -> None:
    stored = Stored(3, 7, device)
    z, c = stored.wide[0][:, MARGIN:], stored.c[0]
    deltas = stored.deltas[0][: WIDTHS[0]]
    assert not grad(lambda d: contract(d, [(z, None)]).sum())(deltas).any()
    assert not grad(lambda d: scale_deltas(d, c)[0].sum())(deltas).any()


@DEVICES
def test_numbers_need_not_lie_side_by_side(device: str) -> None:
    stored = Stored(3, 7, device)
    deltas, z = stored.deltas[0][: WIDTHS[0]], stored.wide[0][:, MARGIN:]
    expected = contract(deltas, [(z, None)])
    turned = [t.mT.contiguous().mT for t in (deltas, z)]
    assert not any(t.is_contiguous() for t in turned)
    close(contract(turned[0], [(turned[1], None)]), expected)
    close(scale_deltas(turned[0], stored.c[0])[0], scale_deltas(deltas, stored.c[0])[0])
    one = z[:, :1]
    close(contract(deltas, [(one.expand_as(z), None)]), contract(deltas, [(one.repeat(1, z.shape[1]), None)]))
