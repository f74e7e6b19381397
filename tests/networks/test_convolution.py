"""The convolution's contractions, their derivatives and their batched forms, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.nn import functional

from glocal.networks import convolution
from glocal.networks.convolution import Conv, Conv2d, ConvInputGrad, ConvWeightGrad, ReplaceConv2d

SHAPES = [(3, 5, 6, 3, 1, 1), (4, 2, 7, 3, 2, 1), (2, 3, 5, 1, 2, 0), (1, 4, 6, 5, 1, 2)]
"""channels, width, side, k, stride, padding"""


def tensors(channels: int, width: int, side: int, k: int, *runs: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(channels)
    x = torch.randn(*runs, 2, channels, side, side, dtype=torch.float64, generator=draw)
    return x, torch.randn(*runs, width, channels, k, k, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize(("channels", "width", "side", "k", "stride", "padding"), SHAPES)
def test_first_and_second_derivatives(channels: int, width: int, side: int, k: int, stride: int, padding: int) -> None:
    x, w = (t.requires_grad_() for t in tensors(channels, width, side, k))
    y = functional.conv2d(x, w, None, stride, padding).detach().requires_grad_()
    size = (side, side)
    forms: list[tuple[Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]] = [
        (lambda a, b: Conv.apply(a, b, stride, padding, 1), (x, w)),
        (lambda a, b: ConvInputGrad.apply(a, b, stride, padding, 1, size), (y, w)),
        (lambda a, b: ConvWeightGrad.apply(a, b, stride, padding, 1, k), (x, y)),
    ]
    for form, given in forms:
        assert torch.autograd.gradcheck(form, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(form, given, fast_mode=True)


@pytest.mark.parametrize(("channels", "width", "side", "k", "stride", "padding"), SHAPES)
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_batched_over_runs(
    channels: int, width: int, side: int, k: int, stride: int, padding: int, dims: tuple[int | None, int | None]
) -> None:
    given = tensors(channels, width, side, k, 3)
    x, w = (t if dim == 0 else t[0] for t, dim in zip(given, dims, strict=True))

    def value(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: (f(x, w).sin() * f(x, w)).sum()

    ours = value(lambda x, w: Conv.apply(x, w, stride, padding, 1))
    theirs = value(lambda x, w: functional.conv2d(x, w, None, stride, padding))
    mapped = vmap(grad(ours, argnums=(0, 1)), in_dims=dims)(x, w)
    for run in range(3):
        alone = grad(theirs, argnums=(0, 1))(*(t[run] if d == 0 else t for t, d in zip((x, w), dims, strict=True)))
        for found, expected in zip(mapped, alone, strict=True):
            torch.testing.assert_close(found[run], expected, rtol=1e-9, atol=1e-10)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    outside = torch.autograd.grad(vmap(ours, in_dims=dims)(*leaves).sum(), leaves)
    for found, expected, dim in zip(outside, mapped, dims, strict=True):
        torch.testing.assert_close(found, expected if dim == 0 else expected.sum(0), rtol=1e-9, atol=1e-10)


def test_per_sample_hessians_batched_over_runs() -> None:
    """Nested vmap with a Hessian inside, as curvature uses it."""
    x, w = tensors(2, 3, 4, 3, 2)

    def curvature(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        one = lambda w, sample: (f(sample[None], w, 2, 1) ** 3).sum()  # noqa: E731
        return vmap(lambda x, w: vmap(lambda sample: jacrev(jacrev(one))(w, sample))(x))

    theirs = curvature(lambda x, w, stride, padding: functional.conv2d(x, w, None, stride, padding))
    torch.testing.assert_close(
        curvature(lambda *given: Conv.apply(*given, 1))(x, w), theirs(x, w), rtol=1e-9, atol=1e-9
    )


OPTIONS: list[dict] = [
    *({}, {"bias": False}, {"stride": 2}, {"stride": (1, 2)}, {"dilation": 2}, {"groups": 2}, {"padding": 2}),
    *({"padding": "same"}, {"padding": (0, 1)}, {"padding_mode": "circular", "padding": 1}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_is_torchs(options: dict) -> None:
    torch.manual_seed(0)
    ours, theirs = Conv2d(4, 6, 3, **options).double(), nn.Conv2d(4, 6, 3, **options).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replacing_torchs_conv2d(options: dict) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, **options).double(), torch.randn(2, 4, 9, 8, dtype=torch.float64)
    theirs = layer(x)
    with ReplaceConv2d():
        ours = layer(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    asked = options.items() - {("bias", False), ("stride", 2), ("padding", 2), ("padding", 1)}
    particular = bool(asked - {("padding_mode", "circular")})  # padded before the convolution
    before = ours.grad_fn if options.get("bias") is False else ours.grad_fn.next_functions[0][0]
    assert ("ConvBackward" in str(before)) != particular


def test_arguments_may_be_integers_pairs_and_single_images() -> None:
    x, w = tensors(3, 5, 6, 3)
    b = torch.arange(5.0, dtype=torch.float64)
    calls = [
        lambda: functional.conv2d(x, w, b, 2, 1),
        lambda: functional.conv2d(x, w, bias=b, stride=(2, 2), padding=[1, 1], dilation=(1,)),
        lambda: functional.conv2d(x[0], w, b, 2, 1),
        lambda: functional.conv2d(input=x, weight=w),
        lambda: torch.conv2d(x, w[..., :2], b),
    ]
    for call in calls:
        theirs = call()
        with ReplaceConv2d():
            torch.testing.assert_close(call(), theirs, rtol=1e-10, atol=1e-12)


def test_views_of_channels_last_outputs_become_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channels-last tensor has no such view."""
    ours = convolution.conv
    last = lambda *given: ours(*given).contiguous(memory_format=torch.channels_last)  # noqa: E731
    monkeypatch.setattr(convolution.Conv, "forward", staticmethod(last))
    x, w = tensors(3, 5, 6, 3)
    expected = functional.conv2d(x, w).flatten(1)
    with ReplaceConv2d():
        z = torch.conv2d(x, w)
        found = z.view(len(z), -1), z.view(size=(len(z), -1)), z.relu().view(torch.Size([2, 80]))
        bits = z.view(torch.int64)
    torch.testing.assert_close(found[:2], (expected, expected))
    torch.testing.assert_close(found[2], expected.relu())
    assert bits.dtype == torch.int64 and bits.shape == z.shape
    with pytest.raises(RuntimeError, match="view"):
        z.view(len(z), -1)


def test_autocast_and_complex_inputs_are_left_to_torch() -> None:
    torch.manual_seed(0)
    for kind in (torch.float32, torch.complex64):
        x, w = torch.randn(2, 3, 6, 6, dtype=kind), torch.randn(4, 3, 3, 3, dtype=kind, requires_grad=True)
        outside = torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.float32)
        with outside:
            theirs = torch.conv2d(x, w)
        with ReplaceConv2d(), outside:
            ours = torch.conv2d(x, w)
        assert ours.dtype == theirs.dtype
        slopes = (torch.autograd.grad(z.abs().square().sum(), w) for z in (ours, theirs))
        torch.testing.assert_close(*slopes)
