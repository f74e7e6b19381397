"""Convolutions in single precision by products in half precision, against double precision. The kernels need a GPU, or
Triton's interpreter (TRITON_INTERPRET=1, where Triton is installed)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.curvature.products import hessian_product
from glocal.curvature.vector import flatten
from glocal.fast import fp32_from_fp16
from glocal.fast.fp32_from_fp16 import Reach
from glocal.precision import allow_tf32, full_precision

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="no GPU")
SHAPES = [  # n, channels, width, h, w, k, stride, padding
    (2, 16, 16, 6, 6, 3, 1, 1),
    (2, 3, 20, 6, 6, 3, 1, 1),
    (2, 16, 32, 7, 5, 3, 2, 1),
    (2, 16, 8, 7, 8, 1, 2, 0),
    (2, 8, 8, 6, 6, 3, 1, 0),
    (1, 16, 16, 5, 5, 2, 3, 0),
    (2, 16, 16, 4, 5, 3, 2, 4),
    (2, 16, 24, 4, 4, 1, 1, 2),
]
LARGE = [(64, 64, 128, 32, 32, 3, 2, 1), (300, 128, 128, 16, 16, 3, 1, 1), (70, 512, 512, 4, 4, 3, 1, 1)]


@given(k=st.integers(1, 5), stride=st.integers(1, 4), padding=st.integers(0, 4), side=st.integers(1, 9))
def test_positions_reach_what_convolutions_made_of_them(k: int, stride: int, padding: int, side: int) -> None:
    """Output o has used input o s + a − p at tap a."""
    seen = []
    for reach in (Reach.of(r, k, stride, padding, side) for r in range(stride)):
        for i in range(reach.many):
            position = reach.residue + stride * i
            seen.append(position)
            made = {(reach.first + i + t, a) for t, a in enumerate(reach.taps)}
            wanted = {
                (o, a) for a in range(k) for o in range(-k, side + padding + 1) if o * stride + a - padding == position
            }
            assert made == wanted
            for o, _ in made:
                assert -reach.beyond(3) <= o <= 2 + reach.beyond(3)
    assert sorted(seen) == list(range(side))


def contractions(shape: tuple[int, ...], scales: tuple[float, float] = (1.0, 1.0)) -> list[tuple[Tensor, Tensor]]:
    """By halves, and in double precision."""
    n, channels, width, h, w, k, stride, padding = shape
    stream = torch.Generator().manual_seed(0)
    x = scales[0] * torch.randn(n, channels, h, w, generator=stream)
    weight = scales[1] * torch.randn(width, channels, k, k, generator=stream)
    a, b = (t.double().to(DEVICE).requires_grad_() for t in (x, weight))
    y = functional.conv2d(a, b, None, stride, padding)
    slope = torch.randn(y.shape, generator=stream)
    wanted = [y, *torch.autograd.grad(y, (a, b), slope.double().to(DEVICE))]
    x, weight, slope = (t.to(DEVICE) for t in (x, weight, slope))
    found = [
        fp32_from_fp16.output(x, weight, stride, padding),
        fp32_from_fp16.input(slope, weight, stride, padding, (h, w)),
        fp32_from_fp16.weight(x, slope, stride, padding, k),
    ]
    return [(one, other.detach()) for one, other in zip(found, wanted, strict=True)]


@kernels
@pytest.mark.parametrize(
    "shape", SHAPES + [pytest.param(s, marks=pytest.mark.skipif(INTERPRETED, reason="long")) for s in LARGE]
)
def test_as_exact_as_single_precision(shape: tuple[int, ...]) -> None:
    """Products of single numbers would be 5e-4 away in half precision, or in tf32."""
    for found, wanted in contractions(shape):
        assert found.shape == wanted.shape and found.dtype == torch.float32
        assert (found.double() - wanted).norm() <= 5e-7 * wanted.norm()


@kernels
@pytest.mark.parametrize("scales", [(1e-30, 1e25), (1e30, 1e-30), (0.0, 1.0), (1e36, 1e-36)], ids=str)
def test_units_follow_the_numbers(scales: tuple[float, float]) -> None:
    for found, wanted in contractions(SHAPES[0], scales):
        assert (found.double() - wanted).norm() <= 5e-7 * wanted.norm()


@kernels
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 3e15])
def test_numbers_taken_apart_are_as_far_off_as_it_is_said(scale: float) -> None:
    from glocal.fast.fp32_from_fp16_triton import halved

    stream = torch.Generator().manual_seed(0)
    sizes = 2.0 ** -torch.arange(48).repeat_interleave(16)
    x = scale * sizes * torch.randn(768, generator=stream).clamp(-2, 2)
    parts, largest = halved(x.view(1, 1, 48, 16).to(DEVICE), 0, "image")
    unit = 2.0 ** max(-126, math.frexp(float(largest))[1] - 15)
    found = unit * parts.double().cpu().sum(0).flatten()
    off, whole = (found - x.double()).abs(), x.double().abs().max()
    assert float(largest) == float(x.abs().max())
    bound = torch.maximum(2.0**-22 * x.double().abs(), 2.0**-39 * whole)
    assert (off <= bound).all()
    if scale > 1e-30:  # below, numbers have fewer digits themselves
        assert (off > 2.0**-22 * x.double().abs()).any()


@kernels
@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e18])
def test_images_and_channels_do_not_disturb_each_other(bad: float) -> None:
    """Runs that share their images have the channels of one convolution, and one of them may have diverged."""
    stream = torch.Generator().manual_seed(0)
    x, w, y = (torch.randn(3, 16, *size, generator=stream).to(DEVICE) for size in ((4, 4), (3, 3), (4, 4)))
    w = torch.cat([w] * 4)
    before = (
        fp32_from_fp16.output(x, w, 1, 1),
        fp32_from_fp16.input(y[:, :12], w, 1, 1, (4, 4)),
        fp32_from_fp16.weight(x, y, 1, 1, 3),
    )
    x[1, 3, 1, 1] = w[5, 2, 0, 0] = y[2, 5, 0, 3] = bad
    output, slope = fp32_from_fp16.output(x, w, 1, 1), fp32_from_fp16.weight(x, y, 1, 1, 3)
    others = [i for i in range(12) if i != 5]
    assert (output[[0, 2]][:, others] == before[0][[0, 2]][:, others]).all()
    assert (slope[others[:4]][:, :3] == before[2][others[:4]][:, :3]).all()
    if not math.isfinite(bad):
        assert output[1].isnan().all() and output[:, 5].isnan().all() and slope[5].isnan().all()
        assert slope[:, 3].isnan().all()
    slopes = fp32_from_fp16.input(y[:, :12], w, 1, 1, (4, 4))
    assert (slopes[:2, 3:] == before[1][:2, 3:]).all()
    if not math.isfinite(bad):
        assert slopes[2].isnan().all() and slopes[:, 2].isnan().all()


@kernels
def test_channels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="images of 3 channels were given to a weight for 5"):
        fp32_from_fp16.output(torch.ones(1, 3, 4, 4, device=DEVICE), torch.ones(2, 5, 3, 3, device=DEVICE), 1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_makes_the_same() -> None:
    x, w = torch.randn(4, 16, 6, 6, device=DEVICE), torch.randn(32, 16, 3, 3, device=DEVICE)
    slope = torch.randn(4, 32, 3, 3, device=DEVICE)

    def everything() -> list[Tensor]:
        found = fp32_from_fp16.output(x, w, 2, 1), fp32_from_fp16.input(slope, w, 2, 1, (6, 6))
        return [*found, fp32_from_fp16.weight(x, slope, 2, 1, 3)]

    everything()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    x.normal_().mul_(1e6)
    slope.normal_()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, everything(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_users_hessian_products_are_made_so_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noting(name: str, ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*given: Any) -> Tensor:
            made.append(name)
            return ours(*given)

        return noted

    for name in ("output", "input", "weight"):
        monkeypatch.setattr(fp32_from_fp16, name, noting(name, getattr(fp32_from_fp16, name)))
    monkeypatch.setattr(fp32_from_fp16, "WORTH", 0)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 48, 3, 2, 1), nn.Tanh(), nn.Conv2d(48, 8, 1)
    network = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(8 * 25, 4)).double().eval()
    x, y, loss = torch.randn(20, 3, 10, 10, dtype=torch.float64), torch.arange(20) % 4, losses.get("cross-entropy")
    params = {k: p.detach() for k, p in network.named_parameters()}
    v = {k: torch.randn_like(p) for k, p in params.items()}
    wanted = flatten(hessian_product(network, params, {}, x, y, loss)(v))
    assert not made
    there, x, y = network.float().cuda(), x.float().cuda(), y.cuda()
    params, v = ({k: t.float().cuda() for k, t in tree.items()} for tree in (params, v))
    with allow_tf32(True):
        rough = flatten(hessian_product(there, params, {}, x, y, loss)(v)).double().cpu()
    assert not made
    with full_precision():
        found = flatten(hessian_product(there, params, {}, x, y, loss)(v)).double().cpu()
    assert set(made) == {"output", "input", "weight"}
    assert (found - wanted).norm() <= 2e-6 * wanted.norm() < (rough - wanted).norm()
