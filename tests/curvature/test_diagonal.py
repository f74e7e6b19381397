"""The diagonal of the Gauss–Newton matrix against loops over single samples and against dense Jacobians, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from glocal import losses
from glocal.curvature.diagonal import diagonal
from glocal.networks.mlp import MLP, Linear
from glocal.risk import Risk
from glocal.tree import Params, select, stack

CROSS_ENTROPY = losses.get("cross-entropy")
CLASSES = 3


class ConvThenLinear(nn.Module):
    """Parameters the closed form covers beside ones it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2 * 2 * 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.view(-1, 1, 4, 5))).tanh().flatten(1))


class AppliedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(20, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.again(self.enter(x)).tanh()).tanh())


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(20, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.enter(x)).tanh()).tanh())


class TiedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class WeightUsedOutsideItsLayer(nn.Module):
    """An autoencoder's decoder that is the transpose of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(20, 4), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.encode(x).tanh() @ self.encode.weight).tanh())


class OnSequences(nn.Module):
    """A linear layer that sees (n, positions, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Linear(5, 3), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x.view(-1, 4, 5)).tanh().flatten(1))


class OnFlattenedSequences(OnSequences):
    """The same network, with the positions folded into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x.reshape(-1, 5)).tanh().reshape(-1, 12))


class Scaled(nn.Module):
    """A parameter that belongs to no layer, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale, self.idle = Linear(20, CLASSES), nn.Parameter(torch.tensor(0.7)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(x)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(20, CLASSES, (7, 6)),
    "no hidden layer": lambda: MLP(20, CLASSES, ()),
    "conv and linear": ConvThenLinear,
    "a layer applied twice": AppliedTwice,
    "tied weights": TiedWeights,
    "tied biases": TiedBias,
    "a weight used outside its layer": WeightUsedOutsideItsLayer,
    "3-d input": OnSequences,
    "positions in the batch": OnFlattenedSequences,
    "scale": Scaled,
}


def made(kind: str, seed: int = 0) -> tuple[nn.Module, Params, Params]:
    """A network in evaluation mode, its parameters and its buffers, in float64; BatchNorm has seen some data."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = NETWORKS[kind]().double()
        module(torch.randn(50, 20, dtype=torch.float64))  # moves BatchNorm's running statistics
    module.eval()
    return module, {k: p.detach() for k, p in module.named_parameters()}, dict(module.named_buffers())


def inputs(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels_of(n: int) -> Tensor:
    return torch.arange(n) * 2 % CLASSES


def output_gradient(outputs: Tensor, y: Tensor) -> Tensor:
    return CROSS_ENTROPY.output_gradient(outputs, y).unsqueeze(1)


def loop_over_samples(
    module: nn.Module, params: Params, buffers: Params, x: Tensor, scalars: Callable[[Tensor, int], list[Tensor]]
) -> Params:
    """(1/n) Σ_i Σ_s (∂s/∂θ)² over the scalars of every sample, one ordinary backward pass each."""
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for i in range(x.shape[0]):
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        outputs = functional_call(module, {**leaves, **buffers}, (x[i : i + 1],))[0]
        for scalar in scalars(outputs, i):
            gradients = torch.autograd.grad(
                scalar, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            total = {k: total[k] + g**2 for k, g in zip(leaves, gradients, strict=True)}
    return {k: v / x.shape[0] for k, v in total.items()}


@pytest.mark.parametrize("kind", NETWORKS)
def test_empirical_diagonal_is_the_mean_of_squared_sample_gradients(kind: str) -> None:
    module, params, buffers = made(kind)
    x, y = inputs(9), labels_of(9)
    expected = loop_over_samples(
        module, params, buffers, x, lambda f, i: [functional.cross_entropy(f[None], y[i : i + 1])]
    )
    actual = diagonal(Risk(module, params, buffers, x, y, CROSS_ENTROPY), output_gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", NETWORKS)
def test_exact_diagonal_is_the_expectation_over_the_networks_own_labels(kind: str) -> None:
    module, params, buffers = made(kind)
    x = inputs(5)

    def weighted_log_likelihoods(f: Tensor, _: int) -> list[Tensor]:
        probability = f.detach().softmax(0)
        return [probability[c].sqrt() * functional.log_softmax(f, 0)[c] for c in range(CLASSES)]

    expected = loop_over_samples(module, params, buffers, x, weighted_log_likelihoods)
    actual = diagonal(Risk(module, params, buffers, x, labels_of(len(x)), CROSS_ENTROPY))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("loss", losses.LOSSES)
@pytest.mark.parametrize("kind", ["mlp", "conv and linear", "tied weights"])
def test_exact_diagonal_is_that_of_the_dense_gauss_newton_matrix(kind: str, loss: str) -> None:
    module, params, buffers = made(kind)
    x, chosen = inputs(6), losses.get(loss)
    names, sizes = list(params), [p.numel() for p in params.values()]

    def outputs(flat: Tensor, one: Tensor) -> Tensor:
        own = {k: part.view_as(params[k]) for k, part in zip(names, flat.split(sizes), strict=True)}
        return functional_call(module, {**own, **buffers}, (one[None],))[0]

    theta = torch.cat([p.flatten() for p in params.values()])
    dense = torch.zeros(theta.numel(), theta.numel(), dtype=torch.float64)
    some_y = torch.tensor(1) if loss == "cross-entropy" else torch.ones(CLASSES, dtype=torch.float64)
    for one in x:
        jacobian = torch.autograd.functional.jacobian(lambda flat, one=one: outputs(flat, one), theta)
        hessian = torch.autograd.functional.hessian(
            lambda f: chosen.per_sample(f[None], some_y[None]).sum(), outputs(theta, one)
        )
        dense += jacobian.T @ hessian @ jacobian / x.shape[0]
    actual = diagonal(Risk(module, params, buffers, x, labels_of(len(x)), chosen))
    torch.testing.assert_close(torch.cat([v.flatten() for v in actual.values()]), dense.diag(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", ["mlp", "conv and linear", "a layer applied twice", "3-d input"])
def test_mapped_over_stacked_parameters_it_is_the_loop_over_runs(kind: str) -> None:
    module = made(kind)[0]
    runs = [made(kind, seed)[1:] for seed in range(3)]
    params, buffers = stack([p for p, _ in runs]), stack([b for _, b in runs])
    x, y = inputs(8), labels_of(8)

    def one(params: Params, buffers: Params) -> Params:
        return diagonal(Risk(module, params, buffers, x, y, CROSS_ENTROPY), output_gradient)

    together = vmap(one)(params, buffers)
    for run, alone in enumerate(runs):
        torch.testing.assert_close(select(together, run), one(*alone), rtol=1e-10, atol=1e-14)
        expected = loop_over_samples(module, *alone, x, lambda f, i: [functional.cross_entropy(f[None], y[i : i + 1])])
        torch.testing.assert_close(select(together, run), expected, rtol=1e-9, atol=1e-13)


def test_a_parameter_that_is_never_used_has_no_curvature() -> None:
    module, params, buffers = made("scale")
    result = diagonal(Risk(module, params, buffers, inputs(4), labels_of(4), CROSS_ENTROPY))
    assert not result["idle.weight"].any()
    assert not result["idle.bias"].any()


def test_it_leaves_no_hook_behind_even_when_it_fails() -> None:
    module, params, buffers = made("mlp")
    x = inputs(4)
    before = module(x)
    diagonal(Risk(module, params, buffers, x, labels_of(len(x)), CROSS_ENTROPY))

    def fail(outputs: Tensor, y: Tensor) -> Tensor:
        raise ValueError("no cotangents")

    with pytest.raises(ValueError, match="no cotangents"):
        diagonal(Risk(module, params, buffers, x, labels_of(4), CROSS_ENTROPY), fail)
    assert not any(layer._forward_hooks for layer in module.modules())
    assert torch.equal(module(x), before)
