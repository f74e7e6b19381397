"""Gradients of single samples of recurrent networks, which torch cannot map, against one backward pass for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal import losses
from glocal.curvature.diagonal import diagonal
from glocal.curvature.jacobian import dense_jacobian, every_output
from glocal.risk import Risk


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(6, 6), kind(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x).unflatten(1, (-1, 2)))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_and_the_diagonal(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    before = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    module, x = Recurrent(kind).double().eval(), torch.randn(5, 6, dtype=torch.float64)
    params = {k: p.detach() for k, p in module.named_parameters()}
    risk = Risk(module, params, {}, x, torch.arange(5) % 3, losses.get("cross-entropy"))
    found, squares = dense_jacobian(risk, every_output), diagonal(risk, every_output)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    outputs = functional_call(module, leaves, (x,))
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for i in range(5):
        for c in range(3):
            slopes = torch.autograd.grad(outputs[i, c], list(leaves.values()), retain_graph=True)
            for k, slope in zip(leaves, slopes, strict=True):
                torch.testing.assert_close(found[k][i, c], slope)
                total[k] += slope.square() / 5
    torch.testing.assert_close(squares, total)
    assert (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled) == before
