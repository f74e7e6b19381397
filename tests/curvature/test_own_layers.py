"""Layers that look like torch's and compute something else, against the dense Gauss–Newton matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.curvature import diagonal, ggn, kronecker_factors
from glocal.tree import to_vector


class EqualizedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 5, self.bias)


class SquaredInput(nn.Linear):
    """On inputs of zeros it is an ordinary layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x)


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight.square(), bias)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(25, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x.flatten(1))


def hooked() -> nn.Module:
    layer = nn.Linear(25, 4)
    layer.register_forward_hook(lambda module, inputs, output: 0.1 * output)
    return nn.Sequential(nn.Flatten(), layer)


def replaced() -> nn.Module:
    layer = nn.Linear(25, 4)
    layer.forward = lambda x: functional.linear(x, layer.weight.exp(), layer.bias)  # type: ignore[method-assign,assignment]
    return nn.Sequential(nn.Flatten(), layer)


FIRST: dict[str, Any] = {
    "equalized": lambda: nn.Sequential(nn.Flatten(), EqualizedLinear(25, 4)),
    "squared input": lambda: nn.Sequential(nn.Flatten(), SquaredInput(25, 4)),
    "standardized": lambda: nn.Sequential(StandardizedConv(1, 2, 3), nn.Flatten(), nn.Linear(18, 4)),
    "own convolution": lambda: nn.Sequential(OwnConvolution(1, 2, 3), nn.Flatten(), nn.Linear(18, 4)),
    "by keyword": ByKeyword,
    "hook": hooked,
    "replaced": replaced,
    "ordinary": lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, 4)),
}


@pytest.mark.parametrize("name", FIRST)
def test_curvature_is_that_of_what_a_layer_computes(name: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(FIRST[name](), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(6, 1, 5, 5, dtype=torch.float64), torch.arange(6) % 3
    problem: Any = network, nn.CrossEntropyLoss(), (x, y)
    dense = ggn(*problem).diagonal()
    torch.testing.assert_close(to_vector(diagonal(*problem)), dense, rtol=1e-9, atol=1e-12)
    factors = kronecker_factors(*problem)
    with_factors = {f"{layer}.{kind}" for layer in factors["kronecker"] for kind in ("weight", "bias")}
    assert ("0.1.weight" in with_factors) == (name in ("ordinary",))
    names = [k for k, _ in network.named_parameters()]
    parts = dict(zip(names, dense.split([p.numel() for p in network.parameters()]), strict=True))
    for key, values in factors["diagonal"].items():
        torch.testing.assert_close(values.flatten(), parts[key], rtol=1e-9, atol=1e-12)
