"""fp32 convolutions from fp16 products, against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.curvature.operators import hessian_operator
from glocal.fast import fp32_from_fp16
from glocal.fast.fp32_from_fp16 import Residue, split
from glocal.precision import allow_tf32, full_precision
from glocal.risk import Risk
from glocal.tree import to_vector

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
def test_residues_list_the_taps_that_reach_each_position(k: int, stride: int, padding: int, side: int) -> None:
    """Output o uses input o s + a − p at tap a."""
    positions = []
    for residue in (Residue.of(r, k, stride, padding, side) for r in range(stride)):
        for i in range(residue.positions):
            position = residue.residue + stride * i
            positions.append(position)
            found = {(residue.first + i + t, a) for t, a in enumerate(residue.taps)}
            expected = {
                (o, a) for a in range(k) for o in range(-k, side + padding + 1) if o * stride + a - padding == position
            }
            assert found == expected
            for o, _ in found:
                assert -residue.border(3) <= o <= 2 + residue.border(3)
    assert sorted(positions) == list(range(side))


def contractions(
    shape: tuple[int, ...], device: str, scales: tuple[float, float] = (1.0, 1.0)
) -> list[tuple[Tensor, Tensor]]:
    """Return each contraction from fp16 products, and in fp64."""
    n, channels, width, h, w, k, stride, padding = shape
    stream = torch.Generator().manual_seed(0)
    x = scales[0] * torch.randn(n, channels, h, w, generator=stream)
    weight = scales[1] * torch.randn(width, channels, k, k, generator=stream)
    a, b = (t.double().to(device).requires_grad_() for t in (x, weight))
    y = functional.conv2d(a, b, None, stride, padding)
    dy = torch.randn(y.shape, generator=stream)
    wanted = [y, *torch.autograd.grad(y, (a, b), dy.double().to(device))]
    x, weight, dy = (t.to(device) for t in (x, weight, dy))
    found = [
        fp32_from_fp16.conv(x, weight, stride, padding),
        fp32_from_fp16.conv_input_grad(dy, weight, stride, padding, (h, w)),
        fp32_from_fp16.conv_weight_grad(x, dy, stride, padding, k),
    ]
    return [(one, other.detach()) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_errors_are_those_of_fp32(shape: tuple[int, ...], device: str) -> None:
    """In fp16 or TF32 they would be 5e-4."""
    if device == "cpu" and shape in LARGE:
        pytest.skip("takes too long in the interpreter")
    for found, wanted in contractions(shape, device):
        assert found.shape == wanted.shape and found.dtype == torch.float32
        assert (found.double() - wanted).norm() <= 5e-7 * wanted.norm()


@pytest.mark.parametrize("scales", [(1e-30, 1e25), (1e30, 1e-30), (0.0, 1.0), (1e36, 1e-36)], ids=str)
def test_scales_do_not_matter(scales: tuple[float, float], device: str) -> None:
    for found, wanted in contractions(SHAPES[0], device, scales):
        assert (found.double() - wanted).norm() <= 5e-7 * wanted.norm()


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 3e15])
def test_splitting_has_the_documented_error(scale: float, device: str) -> None:
    stream = torch.Generator().manual_seed(0)
    sizes = 2.0 ** -torch.arange(48).repeat_interleave(16)
    x = scale * sizes * torch.randn(768, generator=stream).clamp(-2, 2)
    parts, largest = split(x.view(1, 1, 48, 16).to(device), 0, "image")
    unit = 2.0 ** max(-126, math.frexp(float(largest))[1] - 15)
    found = unit * parts.double().cpu().sum(0).flatten()
    error, largest_value = (found - x.double()).abs(), x.double().abs().max()
    assert float(largest) == float(x.abs().max())
    bound = torch.maximum(2.0**-22 * x.double().abs(), 2.0**-39 * largest_value)
    assert (error <= bound).all()
    if scale > 1e-30:  # smaller values have fewer digits themselves
        assert (error > 2.0**-22 * x.double().abs()).any()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e18])
def test_images_and_channels_do_not_affect_each_other(bad: float, device: str) -> None:
    """Runs that share their images are channels of one convolution, and one of them may have diverged."""
    stream = torch.Generator().manual_seed(0)
    x, w, y = (torch.randn(3, 16, *size, generator=stream).to(device) for size in ((4, 4), (3, 3), (4, 4)))
    w = torch.cat([w] * 4)
    before = (
        fp32_from_fp16.conv(x, w, 1, 1),
        fp32_from_fp16.conv_input_grad(y[:, :12], w, 1, 1, (4, 4)),
        fp32_from_fp16.conv_weight_grad(x, y, 1, 1, 3),
    )
    x[1, 3, 1, 1] = w[5, 2, 0, 0] = y[2, 5, 0, 3] = bad
    output, dw = fp32_from_fp16.conv(x, w, 1, 1), fp32_from_fp16.conv_weight_grad(x, y, 1, 1, 3)
    others = [i for i in range(12) if i != 5]
    assert (output[[0, 2]][:, others] == before[0][[0, 2]][:, others]).all()
    assert (dw[others[:4]][:, :3] == before[2][others[:4]][:, :3]).all()
    if not math.isfinite(bad):
        assert output[1].isnan().all() and output[:, 5].isnan().all() and dw[5].isnan().all()
        assert dw[:, 3].isnan().all()
    dx = fp32_from_fp16.conv_input_grad(y[:, :12], w, 1, 1, (4, 4))
    assert (dx[:2, 3:] == before[1][:2, 3:]).all()
    if not math.isfinite(bad):
        assert dx[2].isnan().all() and dx[:, 2].isnan().all()


def test_a_wrong_number_of_channels_raises(device: str) -> None:
    with pytest.raises(ValueError, match="has 3 channels, but the weight takes 5"):
        fp32_from_fp16.conv(torch.ones(1, 3, 4, 4, device=device), torch.ones(2, 5, 3, 3, device=device), 1, 1)


def test_a_cuda_graph_computes_the_same(gpu: str) -> None:
    device = gpu
    x, w = torch.randn(4, 16, 6, 6, device=device), torch.randn(32, 16, 3, 3, device=device)
    dy = torch.randn(4, 32, 3, 3, device=device)

    def everything() -> list[Tensor]:
        found = fp32_from_fp16.conv(x, w, 2, 1), fp32_from_fp16.conv_input_grad(dy, w, 2, 1, (6, 6))
        return [*found, fp32_from_fp16.conv_weight_grad(x, dy, 2, 1, 3)]

    everything()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    x.normal_().mul_(1e6)
    dy.normal_()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, everything(), strict=True))


def test_hessian_products_use_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    calls: list[str] = []

    def recorded(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            calls.append(name)
            return function(*args)

        return call

    for name in ("conv", "conv_input_grad", "conv_weight_grad"):
        monkeypatch.setattr(fp32_from_fp16, name, recorded(name, getattr(fp32_from_fp16, name)))
    monkeypatch.setattr(fp32_from_fp16, "MIN_PRODUCTS", 0)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 48, 3, 2, 1), nn.Tanh(), nn.Conv2d(48, 8, 1)
    network = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(8 * 25, 4)).double().eval()
    x, y, loss = torch.randn(20, 3, 10, 10, dtype=torch.float64), torch.arange(20) % 4, losses.get("cross-entropy")
    params = {k: p.detach() for k, p in network.named_parameters()}
    v = {k: torch.randn_like(p) for k, p in params.items()}
    wanted = to_vector(hessian_operator(Risk(network, params, {}, x, y, loss)) @ v)
    assert not calls
    there, x, y = network.float().cuda(), x.float().cuda(), y.cuda()
    params, v = ({k: t.float().cuda() for k, t in tree.items()} for tree in (params, v))
    risk = Risk(there, params, {}, x, y, loss)
    with allow_tf32(True):
        rough = to_vector(hessian_operator(risk) @ v).double().cpu()
    assert not calls
    with full_precision():
        found = to_vector(hessian_operator(risk) @ v).double().cpu()
    assert set(calls) == {"conv", "conv_input_grad", "conv_weight_grad"}
    assert (found - wanted).norm() <= 2e-6 * wanted.norm() < (rough - wanted).norm()
