"""BatchNorm by the batch's own statistics: what PyTorch's does in training mode, and its curvature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal import losses
from glocal.curvature.operators import hessian_operator
from glocal.lens.perturbation import with_batch_statistics
from glocal.networks import resnet18
from glocal.risk import Risk


def plain() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)
    return nn.Sequential(*layers).double(), torch.randn(9, 5, dtype=torch.float64)


def residual() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return resnet18((1, 8, 8), 3, width=2).double(), torch.randn(6, 1, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("make", [plain, residual])
def test_in_evaluation_mode_it_is_the_network_in_training_mode(make) -> None:
    network, x = make()
    state = {k: v.clone() for k, v in network.state_dict().items()}
    made = with_batch_statistics(network).eval()
    expected = network.train()(x)
    torch.testing.assert_close(made(x), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(network.eval()(x), expected, rtol=1e-3), "the original is as it was"
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


def test_the_scale_of_what_is_normalised_does_not_matter() -> None:
    network, x = plain()
    made = with_batch_statistics(network).eval()
    before = made(x)
    with torch.no_grad():
        for parameter in next(network.children()).parameters():
            parameter.mul_(1e6)
    larger = with_batch_statistics(network).eval()
    torch.testing.assert_close(larger(x), before, rtol=1e-3, atol=0)
    assert not torch.allclose(network.eval()(x), before, rtol=0.1)


def test_hessian_products_against_autograd() -> None:
    network, x = plain()
    made, y = with_batch_statistics(network).eval(), torch.arange(9) % 3
    params = {k: p.detach() for k, p in made.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split(sizes)
        moved = {k: part.view_as(p) for (k, p), part in zip(params.items(), parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(made, moved, (x,)), y)

    theta = torch.cat([p.flatten() for p in params.values()])
    v = torch.randn(theta.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.functional.hessian(loss, theta) @ v
    direction = {k: part.view_as(p) for (k, p), part in zip(params.items(), v.split(sizes), strict=True)}
    risk = Risk(made, params, dict(made.named_buffers()), x, y, losses.get("cross-entropy"), 9)
    found = torch.cat([part.flatten() for part in (hessian_operator(risk) @ direction).values()])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
