"""BatchNorm's kernels against torch's operations, one after the other. On a GPU alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from glocal.networks.batchnorm import BatchNorm2d, Normalised
from glocal.networks.model import FunctionalModule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def plain(x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, rectify: bool) -> Tensor:
    z = functional.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    z = z if beside is None else z + beside
    return z.relu() if rectify else z


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (32, 130, 9, 9), (16, 640, 32, 32), (2, 4096, 2, 2)], ids=str)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rectify", [False, True])
def test_outputs_statistics_and_slopes(shape: tuple[int, ...], beside: bool, rectify: bool) -> None:
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape, device="cuda", dtype=torch.float64)).requires_grad_()
    weight, bias = (torch.randn(shape[1], device="cuda", dtype=torch.float64).requires_grad_() for _ in range(2))
    added = torch.randn_like(x).requires_grad_() if beside else None
    leaves = [t for t in (x, weight, bias, added) if t is not None]
    expected = plain(x, weight, bias, added, rectify)
    slope = torch.randn(shape[1], shape[0], *shape[2:], device="cuda", dtype=torch.float64).transpose(0, 1)
    wanted = torch.autograd.grad(expected, leaves, slope)
    single = [t.detach().float().requires_grad_() for t in leaves]
    running = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda")
    y, _, _, mean, variance = Normalised.apply(*single[:3], single[3] if beside else None, *running, rectify, 1e-5, 0.1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean.double(), x.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double(), x.var((0, 2, 3), unbiased=False), rtol=1e-4, atol=1e-5)
    # A number that rounding moves across the relu's edge changes its slope: compare in the mean.
    for found, right in zip(torch.autograd.grad(y, single, slope.float()), wanted, strict=True):
        assert (found - right).norm() <= 2e-3 * right.norm()


def test_mapped_over_runs_inside_and_outside_of_grad() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 8, 5, 6, 6), torch.randn(3, 5), torch.randn(3, 5)
    given = [t.cuda() for t in (x, weight, bias)]

    def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        running = torch.zeros_like(bias), torch.ones_like(bias)
        y, *_ = Normalised.apply(x, weight, bias, 0.5 * x, *running, True, 1e-5, 0.1)
        return (y * y.cos()).sum()

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = plain(x, weight, bias, 0.5 * x, True)
        return (y * y.cos()).sum()

    inside = vmap(grad(value, argnums=(0, 1, 2)))(*given)
    leaves = [t.clone().requires_grad_() for t in given]
    outside = torch.autograd.grad(vmap(value)(*leaves).sum(), leaves)
    for run in range(3):
        alone = grad(reference, argnums=(0, 1, 2))(*(t[run] for t in given))
        for a, b, c in zip(inside, outside, alone, strict=True):
            torch.testing.assert_close(a[run], c, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(b[run], c, rtol=1e-3, atol=1e-3)


def test_a_layers_running_statistics_are_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = BatchNorm2d(5).cuda(), nn.BatchNorm2d(5).cuda()
    for _ in range(3):
        x = 1 + torch.randn(4, 5, 3, 3, device="cuda")
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    stacked = {k: torch.stack([t, t]) for k, t in (*ours.named_parameters(), *ours.named_buffers())}
    x = torch.randn(2, 4, 5, 3, 3, device="cuda")
    _, kept = vmap(FunctionalModule(ours))({k: t.detach() for k, t in stacked.items()}, x)
    for run in range(2):
        alone = nn.BatchNorm2d(5).cuda()
        alone.load_state_dict({k: t[run] for k, t in stacked.items()})
        alone(x[run])
        torch.testing.assert_close(kept["running_var"][run], alone.running_var, rtol=1e-4, atol=1e-5)


def test_a_number_that_is_none_stays_none() -> None:
    x = torch.randn(2, 3, 4, 4, device="cuda")
    x[0, 1] = torch.nan
    one, zero = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    y, *_ = Normalised.apply(x, one, zero, None, zero, one, True, 1e-5, 0.1)
    assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()
