"""Risks of small networks × losses in float64, and dense references by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal import losses
from glocal.networks.mlp import MLP
from glocal.risk import Risk
from glocal.tree import Params

CLASSES = 3


def mlp_of(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 4), activation(), nn.Linear(4, 4, bias=False), activation(), nn.Linear(4, CLASSES)
    )


class Convolutional(nn.Module):
    """Strided, padded and dilated convolutions, a grouped one among them if asked for."""

    def __init__(self, norm: bool = False, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, (2, 3), stride=(1, 2), padding=1)
        self.norm = nn.BatchNorm2d(2) if norm else nn.Identity()
        self.second = nn.Conv2d(2, 4, 2, dilation=(2, 1), groups=groups, bias=False)
        self.head = nn.Linear(4 * 3 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.first(x.view(-1, 1, 4, 5))).tanh()
        return self.head(self.second(z).tanh().flatten(1))


class Tied(nn.Module):
    """One weight in two layers, and one parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(20, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.scale = nn.Linear(4, CLASSES), nn.Parameter(torch.tensor(0.7))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.second(self.first(self.enter(x)).tanh()).sigmoid())


class FunctionOperator:
    """A linear map that is given by a function, used as `A @ v`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __matmul__(self, v: Tensor, /) -> Tensor:
        return self.function(v)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: MLP(20, CLASSES, ()),
    "relu": lambda: MLP(20, CLASSES, (5, 4)),
    "tanh": lambda: mlp_of(nn.Tanh),
    "gelu": lambda: mlp_of(nn.GELU),
    "conv": Convolutional,
    "conv with BatchNorm": lambda: Convolutional(norm=True),
    "grouped conv": lambda: Convolutional(groups=2),
    "tied weights": Tied,
}


def make(network: str, loss: str = "cross-entropy", seed: int = 0, n: int = 7) -> Risk:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = NETWORKS[network]().double()
        module(torch.randn(50, 20, dtype=torch.float64))  # moves BatchNorm's running statistics
        params = {k: p.detach().clone() for k, p in module.named_parameters()}
        params = {k: p + 0.1 * torch.randn_like(p) for k, p in params.items()}  # biases, scales and shifts too
    x = torch.randn(n, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(n) * 2 % CLASSES
    if loss == "squared-error":
        y = torch.randn(n, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if loss == "binary-cross-entropy":
        y = torch.rand(n, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).round()
    return Risk(module.eval(), params, dict(module.named_buffers()), x, y, losses.get(loss))


ON_ALL = pytest.mark.parametrize(("network", "loss"), [(n, loss) for n in NETWORKS for loss in losses.LOSSES])


def joined(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def unflatten(theta: Tensor, like: Mapping[str, Tensor]) -> Params:
    parts = theta.split([p.numel() for p in like.values()])
    return {k: part.view_as(p) for (k, p), part in zip(like.items(), parts, strict=True)}


def some_vector(params: Mapping[str, Tensor], seed: int = 3) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {k: torch.randn(p.shape, dtype=p.dtype, generator=draw) for k, p in params.items()}


def flat_loss(risk: Risk, theta: Tensor) -> Tensor:
    """L as a function of one vector."""
    outputs = functional_call(risk.module, {**unflatten(theta, risk.params), **risk.buffers}, (risk.x,))
    return risk.loss.per_sample(outputs, risk.y).mean()


def dense_hessian(risk: Risk) -> Tensor:
    return torch.autograd.functional.hessian(lambda theta: flat_loss(risk, theta), joined(risk.params))


def jacobian(risk: Risk) -> Tensor:
    """∂f/∂θ, shape (n, K, P)."""
    return torch.autograd.functional.jacobian(
        lambda theta: risk.outputs(unflatten(theta, risk.params)), joined(risk.params)
    )


def output_hessians(risk: Risk) -> Tensor:
    """∇²_f ℓ of every sample, shape (n, K, K)."""
    return torch.stack(
        [
            torch.autograd.functional.hessian(lambda f, y=y: risk.loss.per_sample(f[None], y[None]).sum(), f)
            for f, y in zip(risk.outputs(), risk.y, strict=True)
        ]
    )


def dense_gauss_newton(risk: Risk) -> Tensor:
    j = jacobian(risk)
    return torch.einsum("ikp,ikl,ilq->pq", j, output_hessians(risk), j) / risk.x.shape[0]
