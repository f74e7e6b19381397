"""Progressive columns: the equation by hand, lateral convolutions against ordinary ones, what is frozen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from glocal.networks.mlp import mlp
from glocal.networks.progressive import Lateral, ProgressiveNetwork


def columns(tasks: int = 3, hidden: Sequence[int] = (6, 4)) -> ProgressiveNetwork:
    torch.manual_seed(0)
    return ProgressiveNetwork(lambda shape, outputs: mlp(shape, outputs, hidden), (5,), 3, tasks).double()


def by_hand(network: ProgressiveNetwork, x: Tensor, column: int) -> Tensor:
    """h_i^t = relu(W_i^t h_{i−1}^t + b_i^t + U_i^t [h_{i−1}^1, …]), from the tensors' names."""
    p = dict(network.named_parameters())
    inputs: list[list[Tensor]] = []
    for t in range(column + 1):
        h, own = x, []
        for i in range(3):
            own.append(h)
            z = h @ p[f"columns.{t}.layers.{i}.weight"].T + p[f"columns.{t}.layers.{i}.bias"]
            if t and i:
                z = z + torch.cat([before[i] for before in inputs], 1) @ p[f"laterals.{t - 1}.{i - 1}.weigh.weight"].T
            h = z.relu() if i < 2 else z
        inputs.append(own)
    return h


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_column_computes_the_papers_equation(column: int) -> None:
    network = columns()
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(network(x, column), by_hand(network, x, column), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_only_the_column_and_its_connections_have_gradients(column: int) -> None:
    network = columns()
    x = torch.randn(7, 5, dtype=torch.float64)
    params = dict(network.named_parameters())
    own = {k for k in params if k.startswith((f"columns.{column}.", f"laterals.{column - 1}."))}
    found = torch.autograd.grad(network(x, column).square().sum(), list(params.values()), allow_unused=True)
    assert {k for k, g in zip(params, found, strict=True) if g is not None} == own
    true = torch.autograd.grad(by_hand(network, x, column).square().sum(), list(params.values()), allow_unused=True)
    for k, modified, derivative in zip(params, found, true, strict=True):
        if k in own:
            assert modified is not None
            torch.testing.assert_close(modified, derivative, rtol=1e-10, atol=1e-12)
    if column:
        assert (
            sum(float(g.abs().sum()) for k, g in zip(params, true, strict=True) if k not in own and g is not None) > 1
        )


def test_columns_are_initialized_differently() -> None:
    network = columns().float()
    torch.manual_seed(0)
    plain = mlp((5,), 3, (6, 4))
    for k, p in plain.named_parameters():
        assert torch.equal(p, network.columns[0].get_parameter(k))
    weights = [network.columns[t].get_parameter("layers.0.weight") for t in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_single_layer_has_no_connections() -> None:
    assert not list(columns(hidden=()).laterals.parameters())


def test_a_layer_called_twice_is_not_connected() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.again(self.first(x)).tanh()))

    network = ProgressiveNetwork(lambda shape, outputs: Twice(), (5,), 3, 2)
    assert network.connected == ["head"]
    assert network(torch.zeros(2, 5), 1).shape == (2, 3)


def test_earlier_columns_run_in_evaluation_mode() -> None:
    def make(shape: Sequence[int], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, outputs))

    network = ProgressiveNetwork(make, (5,), 3, 3).train()
    before = {k: b.clone() for k, b in network.named_buffers()}
    network(torch.randn(8, 5), 1)
    assert all(m.training for m in network.modules())
    changed = {k for k, b in network.named_buffers() if not torch.equal(b, before[k])}
    assert changed == {f"columns.1.1.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")}
    with pytest.raises(RuntimeError):
        network(torch.randn(8, 6), 1)
    assert all(m.training and not m._forward_hooks for m in network.modules())


geometry = st.tuples(
    st.integers(0, 3),  # (kernel − 1)/2
    st.integers(1, 3),  # stride
    st.integers(0, 4),  # padding
    st.integers(1, 2),  # dilation
)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(geometry, geometry, st.integers(1, 2))
def test_a_lateral_convolution_is_the_centre_of_an_ordinary_one(
    first: tuple[int, ...], second: tuple[int, ...], heard: int
) -> None:
    half, stride, padding, dilation = zip(first, second, strict=True)
    kernel = tuple(2 * h + 1 for h in half)
    layer = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=False).double()  # type: ignore[arg-type]
    lateral = Lateral(layer, heard).double()
    whole = nn.Conv2d(2 * heard, 3, kernel, stride, padding, dilation, bias=False).double()  # type: ignore[arg-type]
    with torch.no_grad():
        whole.weight.zero_()
        whole.weight[:, :, half[0], half[1]] = lateral.weigh.weight[:, :, 0, 0]  # type: ignore[index]
    inputs = [torch.randn(2, 2, 17, 15, dtype=torch.float64) for _ in range(heard)]
    torch.testing.assert_close(lateral(inputs), whole(torch.cat(inputs, 1)), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("padding", ["same", "valid", 0, 1, 3])
@pytest.mark.parametrize("kernel", [1, 2, 4, 5])
def test_a_lateral_convolution_has_the_same_positions(kernel: int, padding: str | int) -> None:
    for make, dims in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)):
        layer = make(2, 3, kernel, padding=padding)
        x = torch.randn(2, 2, *[7] * dims)
        assert Lateral(layer, 1)([x]).shape == layer(x).shape
