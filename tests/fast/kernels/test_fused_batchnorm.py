"""The BatchNorm kernels against torch's operations one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from glocal.fast.batchnorm import FusedBatchNorm
from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.model import FunctionalModule

LARGE = [(32, 130, 9, 9), (16, 640, 32, 32), (2, 4096, 2, 2)]


def reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    z = functional.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    z = z if residual is None else z + residual
    return z.relu() if relu else z


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (7, 70, 5, 5), *LARGE], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_outputs_statistics_and_gradients(shape: tuple[int, ...], residual: bool, relu: bool, device: str) -> None:
    if device == "cpu" and shape in LARGE:
        pytest.skip("takes too long in the interpreter")
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape, device=device, dtype=torch.float64)).requires_grad_()
    weight, bias = (torch.randn(shape[1], device=device, dtype=torch.float64).requires_grad_() for _ in range(2))
    added = torch.randn_like(x).requires_grad_() if residual else None
    leaves = [t for t in (x, weight, bias, added) if t is not None]
    expected = reference(x, weight, bias, added, relu)
    dy = torch.randn(shape[1], shape[0], *shape[2:], device=device, dtype=torch.float64).transpose(0, 1)
    expected_grads = torch.autograd.grad(expected, leaves, dy)
    single = [t.detach().float().requires_grad_() for t in leaves]
    running = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
    y, _, _, mean, variance = FusedBatchNorm.apply(
        *single[:3], single[3] if residual else None, *running, relu, 1e-5, 0.1
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean.double(), x.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double(), x.var((0, 2, 3), unbiased=False), rtol=1e-4, atol=1e-5)
    # Rounding may move an input across the ReLU's kink, which changes single gradients: compare norms.
    for found, right in zip(torch.autograd.grad(y, single, dy.float()), expected_grads, strict=True):
        assert (found - right).norm() <= 2e-3 * right.norm()


def test_batched_over_runs_inside_and_outside_of_grad(device: str) -> None:
    torch.manual_seed(0)
    stacked = [t.to(device) for t in (torch.randn(3, 8, 5, 6, 6), torch.randn(3, 5), torch.randn(3, 5))]

    def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        running = torch.zeros_like(bias), torch.ones_like(bias)
        y, *_ = FusedBatchNorm.apply(x, weight, bias, 0.5 * x, *running, True, 1e-5, 0.1)
        return (y * y.cos()).sum()

    def expected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = reference(x, weight, bias, 0.5 * x, True)
        return (y * y.cos()).sum()

    inside = vmap(grad(value, argnums=(0, 1, 2)))(*stacked)
    leaves = [t.clone().requires_grad_() for t in stacked]
    outside = torch.autograd.grad(vmap(value)(*leaves).sum(), leaves)
    for run in range(3):
        alone = grad(expected, argnums=(0, 1, 2))(*(t[run] for t in stacked))
        for a, b, c in zip(inside, outside, alone, strict=True):
            torch.testing.assert_close(a[run], c, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(b[run], c, rtol=1e-3, atol=1e-3)


def test_a_layers_running_statistics_are_torchs(device: str) -> None:
    torch.manual_seed(0)
    ours, theirs = BatchNorm2d(5).to(device), nn.BatchNorm2d(5).to(device)
    for _ in range(3):
        x = 1 + torch.randn(4, 5, 3, 3, device=device)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    stacked = {k: torch.stack([t, t]) for k, t in (*ours.named_parameters(), *ours.named_buffers())}
    x = torch.randn(2, 4, 5, 3, 3, device=device)
    _, buffers = vmap(FunctionalModule(ours))({k: t.detach() for k, t in stacked.items()}, x)
    for run in range(2):
        alone = nn.BatchNorm2d(5).to(device)
        alone.load_state_dict({k: t[run] for k, t in stacked.items()})
        alone(x[run])
        torch.testing.assert_close(buffers["running_var"][run], alone.running_var, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_channel(device: str) -> None:
    x = torch.randn(2, 3, 4, 4, device=device)
    x[0, 1] = torch.nan
    one, zero = torch.ones(3, device=device), torch.zeros(3, device=device)
    y, *_ = FusedBatchNorm.apply(x, one, zero, None, zero, one, True, 1e-5, 0.1)
    assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()
