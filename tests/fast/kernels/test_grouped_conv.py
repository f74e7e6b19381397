"""Grouped convolutions by gathered patches against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from glocal.fast import grouped_conv
from glocal.fast.grouped_conv import Patches, gather, scatter
from glocal.precision import matmul_precision

SHAPES = pytest.mark.parametrize(
    "patches",
    [
        Patches(2, 3, 4, 6, 6, k=3, stride=2, padding=1),
        Patches(2, 2, 4, 8, 8, k=3, stride=1, padding=1),
        Patches(3, 2, 5, 7, 7, k=1, stride=2, padding=0),
        Patches(2, 3, 3, 9, 5, k=3, stride=2, padding=1),
        Patches(1, 7, 70, 4, 4, k=3, stride=1, padding=1),
    ],
)


@SHAPES
def test_gather_is_unfold_and_scatter_is_its_transpose(patches: Patches, device: str) -> None:
    n, groups, channels, height, width, k, stride, padding = patches
    x = torch.randn(n, groups * channels, height, width, device=device)
    rows = gather(x, patches)
    unfolded = functional.unfold(x, k, padding=padding, stride=stride)
    expected = unfolded.view(n, groups, channels, k**2, -1).permute(1, 0, 4, 3, 2)
    assert torch.equal(rows, expected.reshape(rows.shape))
    other = torch.randn_like(rows)
    back = scatter(other, patches)
    assert back.shape == x.shape
    torch.testing.assert_close((rows * other).double().sum(), (x * back).double().sum(), rtol=1e-4, atol=1e-3)
    folded = other.view(groups, n, -1, k**2, channels).permute(1, 0, 4, 3, 2)
    sums = functional.fold(folded.reshape(unfolded.shape), (height, width), k, 1, padding, stride)
    torch.testing.assert_close(back, sums, rtol=1e-4, atol=1e-5)


@SHAPES
@pytest.mark.parametrize("cudnn_is_fast", [False, True])
def test_contractions_are_those_of_torch(
    patches: Patches, cudnn_is_fast: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, groups, channels, height, side, k, stride, padding = patches
    width, options = 6, (stride, padding, groups)
    torch.manual_seed(0)
    x = torch.randn(n, groups * channels, height, side, device=device).double().requires_grad_()
    w = torch.randn(groups * width, channels, k, k, device=device).double().requires_grad_()
    y = functional.conv2d(x, w, None, stride, padding, 1, groups)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w, y, dy, dx, dw = (t.detach().float() for t in (x, w, y, dy, dx, dw))
    monkeypatch.setattr(grouped_conv, "cudnn_is_fast", lambda *_: cudnn_is_fast)
    with matmul_precision("fp32"):
        found = (
            grouped_conv.conv(x, w, *options),
            grouped_conv.conv_input_grad(dy, w, *options, (height, side)),
            grouped_conv.conv_weight_grad(x, dy, *options, k),
        )
    tolerance = 1e-3 if device == "cuda" else 1e-4
    for ours, theirs in zip(found, (y, dx, dw), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
