"""The paper's network for digits, and the linear layer it is made of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from glocal.networks.mlp import Linear, mlp


@pytest.fixture
def digits_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return mlp((1, 28, 28), 10)


def test_the_papers_network_has_89_610_parameters(digits_network: nn.Module) -> None:
    assert sum(p.numel() for p in digits_network.parameters()) == 89_610


def test_the_small_network_of_the_full_hessian_has_18_006_parameters() -> None:
    assert sum(p.numel() for p in mlp((1, 28, 28), 10, (22, 22)).parameters()) == 18_006


def test_weights_are_xavier_uniform_and_biases_zero(digits_network: nn.Module) -> None:
    widths = [784, 100, 100, 10]
    weights = [p for p in digits_network.parameters() if p.dim() == 2]
    for weight, inputs, outputs in zip(weights, widths, widths[1:], strict=False):
        assert weight.shape == (outputs, inputs)
        bound = math.sqrt(6 / (inputs + outputs))
        largest, deviation = float(weight.detach().abs().max()), float(weight.detach().std())
        assert 0.99 * bound < largest <= bound
        assert deviation == pytest.approx(bound / math.sqrt(3), rel=4 / math.sqrt(weight.numel()))
    assert all(not p.any() for p in digits_network.parameters() if p.dim() == 1)


def test_relu_follows_every_layer_but_the_last(digits_network: nn.Module) -> None:
    (w1, b1), (w2, b2), (w3, b3) = zip(
        *[iter(p.detach().double() for p in digits_network.parameters())] * 2, strict=True
    )
    b1, b2, b3 = (torch.linspace(-0.3, 0.4, len(b), dtype=torch.float64) for b in (b1, b2, b3))
    x = torch.randn(6, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.clamp(torch.clamp(x.view(6, 784) @ w1.T + b1, min=0) @ w2.T + b2, min=0) @ w3.T + b3
    state = dict(zip((k for k, _ in digits_network.named_parameters()), (w1, b1, w2, b2, w3, b3), strict=True))
    torch.testing.assert_close(functional_call(digits_network, state, (x,)), expected)


def test_without_hidden_layers_it_is_linear() -> None:
    network = mlp((4,), 3, ())
    assert [tuple(p.shape) for p in network.parameters()] == [(3, 4), (3,)]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs_linear(bias: bool) -> None:
    layer = Linear(5, 3, bias=bias).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias))


def test_a_run_is_bit_equal_alone_and_in_a_cohort(digits_network: nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    names = [k for k, _ in digits_network.named_parameters()]
    stacked = {k: 0.1 * torch.randn(9, *p.shape, generator=draw) for k, p in digits_network.named_parameters()}
    x = torch.rand(32, 784, generator=draw)
    together = vmap(lambda params: functional_call(digits_network, params, (x,)))(stacked)
    for run in range(9):
        assert torch.equal(functional_call(digits_network, {k: stacked[k][run] for k in names}, (x,)), together[run])
