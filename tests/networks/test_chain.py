"""Chains: which networks are, how their units meet the next layer's features, and gates on them, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from glocal.errors import GlocalError
from glocal.networks.chain import Link, chain
from glocal.networks.gated import Gated
from glocal.networks.mlp import MLP

IMAGE = (2, 6, 6)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 5, 1),
        nn.Sigmoid(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.Softplus(),
        nn.Linear(7, 4, bias=False),
    )


def test_a_chains_links() -> None:
    assert chain(MLP(72, 4, (6, 5)), IMAGE, "x") == (
        Link("layers.0", 6, 0, 0),
        Link("layers.1", 5, 1, 0),
        Link("layers.2", 4, 1, 0),
    )
    assert chain(convolutional(), IMAGE, "x") == (
        Link("0", 3, 0, 2),
        Link("3", 5, 1, 2),
        Link("7", 7, 4, 0),
        Link("9", 4, 1, 0),
    )


def test_looking_at_a_network_changes_nothing() -> None:
    network = convolutional().train()
    before = {k: t.clone() for k, t in network.state_dict().items()}
    state = torch.get_rng_state()
    chain(network, IMAGE, "x")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())
    assert all(m.training and not m._forward_hooks for m in network.modules())


@pytest.mark.parametrize("shut", range(5))
def test_gates_act_on_units_whatever_lies_between_them_and_the_next_layer(shut: int) -> None:
    """Shutting channel j is taking its weights out of the linear layer that follows, positions and all."""
    torch.manual_seed(0)
    network = convolutional().eval()
    gated = Gated(network, IMAGE, 2).eval()
    x = torch.randn(3, *IMAGE)
    ones = [torch.ones(3), torch.ones(5), torch.ones(7)]
    torch.testing.assert_close(gated(x, *ones), network(x), rtol=0, atol=0)
    gate = torch.ones(5)
    gate[shut] = 0
    actual = gated(x, torch.ones(3), gate, torch.ones(7))
    with torch.no_grad():
        network.get_parameter("7.weight").view(7, 5, 4)[:, shut] = 0
    torch.testing.assert_close(actual, network(x))
    assert not any(m._forward_pre_hooks for m in gated.modules())


def test_a_gates_derivative_is_that_of_the_units_it_multiplies() -> None:
    torch.manual_seed(0)
    network = MLP(5, 3, (4, 6)).double()
    gates = [torch.rand(4).double(), torch.rand(6).double()]
    x = torch.randn(7, 5).double()
    first, second, head = network.layers
    hidden = second(first(x).relu() * gates[0]).relu() * gates[1]
    torch.testing.assert_close(Gated(network, (5,), 2)(x, *gates), head(hidden))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.head(x + self.two(x))


class SeesTheInputAgain(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)) + x)


class Again(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.two(self.one(x))))


class Penalised(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x))) + self.one.weight.sum()


class Tied(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


def between(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3))


class Shuffled(nn.Module):
    """Flattens positions before channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x[:, None]).mT.flatten(1))


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Skipping(), "'head' depends on more"),
        (SeesTheInputAgain(), "'head' depends on more"),
        (Again(), "'two' of this one is called 2 times"),
        (Penalised(), "more than one place"),
        (Tied(), "more than one place"),
        (between(nn.BatchNorm1d(6, affine=False)), "BatchNorm"),
        (between(nn.LayerNorm(6)), "also learns '1.weight'"),
        (between(nn.LayerNorm(6, elementwise_affine=False)), "mixes units"),
        (between(nn.Softmax(-1)), "mixes units"),
        (between(parametrizations.weight_norm(nn.Linear(6, 6))), "also learns '1.parametrizations"),
        (Shuffled(), "mixes units"),
        (
            nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()),
            "groups",
        ),
        (nn.Linear(6, 3), "1 of them"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_what_is_no_chain_is_refused_with_its_reason(network: nn.Module, reason: str) -> None:
    with pytest.raises(GlocalError, match="hat needs a network that is a chain") as error:
        Gated(network, (6,), 2)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
