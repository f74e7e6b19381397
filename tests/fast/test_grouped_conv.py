"""A convolution in groups by gathered patches: on the CPU as plain tensor operations, on a GPU by kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from glocal.fast import grouped_conv
from glocal.fast.patches import Patches, gather, scatter
from glocal.precision import matmul_precision

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
SHAPES = [
    Patches(2, 3, 4, 6, 6, k=3, stride=2, padding=1),
    Patches(2, 2, 4, 8, 8, k=3, stride=1, padding=1),
    Patches(3, 2, 5, 7, 7, k=1, stride=2, padding=0),
    Patches(2, 3, 3, 9, 5, k=3, stride=2, padding=1),
    Patches(1, 7, 70, 4, 4, k=3, stride=1, padding=1),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", SHAPES)
def test_rows_are_torchs_patches_and_scatter_is_the_transpose(of: Patches, device: str) -> None:
    x = torch.randn(of.images, of.groups * of.channels, of.height, of.width, device=device)
    rows = gather(x, of)
    unfolded = functional.unfold(x, of.k, padding=of.padding, stride=of.stride)
    expected = unfolded.view(of.images, of.groups, of.channels, of.k**2, -1).permute(1, 0, 4, 3, 2)
    assert torch.equal(rows, expected.reshape(rows.shape))
    other = torch.randn_like(rows)
    back = scatter(other, of)
    assert back.shape == x.shape
    torch.testing.assert_close((rows * other).double().sum(), (x * back).double().sum(), rtol=1e-4, atol=1e-3)
    folded = other.view(of.groups, of.images, -1, of.k**2, of.channels).permute(1, 0, 4, 3, 2)
    whole = functional.fold(folded.reshape(unfolded.shape), (of.height, of.width), of.k, 1, of.padding, of.stride)
    torch.testing.assert_close(back, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", SHAPES)
def test_by_products_a_convolution_is_what_the_library_makes_of_it(
    of: Patches, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, how = 6, (of.stride, of.padding, of.groups)
    x = torch.randn(of.images, of.groups * of.channels, of.height, of.width, device=device).double().requires_grad_()
    w = torch.randn(of.groups * width, of.channels, of.k, of.k, device=device).double().requires_grad_()
    y = functional.conv2d(x, w, None, of.stride, of.padding, 1, of.groups)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w, y, dy, dx, dw = (t.detach().float() for t in (x, w, y, dy, dx, dw))
    tolerance = 1e-3 if device == "cuda" else 1e-4
    for by_library in (False, True):
        monkeypatch.setattr(grouped_conv, "by_library", lambda *_, choice=by_library: choice)
        with matmul_precision("fp32"):
            found = (
                grouped_conv.output(x, w, *how),
                grouped_conv.input(dy, w, *how, (of.height, of.width)),
                grouped_conv.weight(x, dy, *how, of.k),
            )
        for ours, theirs in zip(found, (y, dx, dw), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
