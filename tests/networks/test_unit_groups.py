"""Wiring: which layers read and write which units, in which networks that can be told, and gates on them, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from glocal.errors import GlocalError
from glocal.networks.hat import GatedNetwork
from glocal.networks.mlp import MLP
from glocal.networks.resnet import resnet18
from glocal.networks.unit_groups import Link, Norm, wiring

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


def test_in_a_chain_every_layer_reads_the_one_before_it() -> None:
    links = (
        Link("layers.0", None, 0, units=6, each=0, dims=0),
        Link("layers.1", 0, 1, units=5, each=1, dims=0),
        Link("layers.2", 1, None, units=4, each=1, dims=0),
    )
    assert wiring(MLP(72, 4, (6, 5)), IMAGE, "x") == ((6, 5), links, ())
    images = (
        Link("0", None, 0, units=3, each=0, dims=2),
        Link("3", 0, 1, units=5, each=1, dims=2),
        Link("7", 1, 2, units=7, each=4, dims=0),
        Link("9", 2, None, units=4, each=1, dims=0),
    )
    assert wiring(convolutional(), IMAGE, "x") == ((3, 5, 7), images, ())


def test_what_a_residual_network_adds_up_is_one_group() -> None:
    """Four streams, one a stage, and the inside of every block."""
    found = wiring(resnet18((3, 8, 8), 5, width=2), (3, 8, 8), "x")
    read = {link.name: (link.reads, link.writes) for link in found.links}
    assert {group for ends in read.values() for group in ends} == {None, *range(12)}
    streams = [read["conv"][1], *(read[f"blocks.{2 * stage}.shortcut.0"][1] for stage in (1, 2, 3))]
    insides = [read[f"blocks.{block}.conv1"][1] for block in range(8)]
    assert {*streams, *insides} == set(range(12))
    for block, inside in enumerate(insides):
        before, after = streams[max(0, block - 1) // 2], streams[block // 2]
        assert read[f"blocks.{block}.conv1"] == (before, inside)
        assert read[f"blocks.{block}.conv2"] == (inside, after)
        if f"blocks.{block}.shortcut.0" in read:
            assert read[f"blocks.{block}.shortcut.0"] == (before, after)
    assert read["head"] == (streams[3], None)
    assert [found.groups[k] for k in streams if k is not None] == [2, 4, 8, 16]
    assert {norm.name: norm.of for norm in found.norms if "norm1" in norm.name} == {
        f"blocks.{block}.norm1": inside for block, inside in enumerate(insides)
    }
    assert len(found.norms) == 20 and found.norms[0] == Norm("norm", streams[0], 1)


@pytest.mark.parametrize("network", [convolutional(), resnet18(IMAGE, 3, width=2)], ids=["chain", "residual"])
def test_looking_at_a_network_changes_nothing(network: nn.Module) -> None:
    network.train()
    learns = [p.requires_grad_(number % 3 > 0).requires_grad for number, p in enumerate(network.parameters())]
    before = {k: t.clone() for k, t in network.state_dict().items()}
    state = torch.get_rng_state()
    wiring(network, IMAGE, "x")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())
    assert [p.requires_grad for p in network.parameters()] == learns
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())


@pytest.mark.parametrize("shut", range(5))
def test_gates_act_on_units_whatever_lies_between_them_and_the_next_layer(shut: int) -> None:
    """Shutting channel j is taking its weights out of the linear layer that follows, positions and all."""
    torch.manual_seed(0)
    network = convolutional().eval()
    gated = GatedNetwork(network, IMAGE, 2).eval()
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
    torch.testing.assert_close(GatedNetwork(network, (5,), 2)(x, *gates), head(hidden))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class Skipping(Three):
    """Two writes what it reads, and is normalised with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean, self.norm.running_var = torch.randn(6), torch.rand(6) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.head(self.norm(x + self.two(x.tanh())))


class Flattened(nn.Module):
    """Normalises channels, and then channels at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(12, 2)
        self.norm, self.last = nn.BatchNorm1d(3), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.norm(self.conv(x[:, None])).flatten(1)))


def with_outputs_normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))


def residual() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Upsample(scale_factor=3), resnet18((6, 3, 3), 3, 3))


def gated_and_drawn(network: nn.Module, seed: int) -> tuple[GatedNetwork, list[Tensor], Tensor]:
    """A network with gates that are open and shut, and inputs; BatchNorm with statistics of its own."""
    torch.manual_seed(seed)
    for b in network.buffers():
        if b.is_floating_point():
            b.copy_(torch.rand(b.shape) + 0.5)
    gated = GatedNetwork(network, (6,), 2).double().eval()
    gates = [(torch.randperm(units) < (units + 1) // 2).double() for units in gated.wiring.groups]
    return gated, gates, torch.randn(16, 6).double()


@pytest.mark.parametrize("make", [Skipping, Flattened, with_outputs_normalised, residual, lambda: MLP(6, 3, (7, 5))])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_that_shut_units_leave_free_can_be_anything(make: Callable[[], nn.Module], seed: int) -> None:
    gated, gates, x = gated_and_drawn(make(), seed)
    before = gated(x, *gates)
    free = gated.free(gates, begun=True)
    with torch.no_grad():
        for k, p in gated.named_parameters():
            if k.startswith("network"):
                p.add_(torch.randn_like(p) * free[k])
    torch.testing.assert_close(gated(x, *gates), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [Skipping, Flattened, with_outputs_normalised])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_more_is_kept_than_open_units_need(make: Callable[[], nn.Module], seed: int) -> None:
    """Smooth networks: every single number that is not free has a slope."""
    gated, gates, x = gated_and_drawn(make(), seed)
    free = gated.free(gates, begun=True)
    weighed = (gated(x, *gates) * torch.randn(3 if make is not Flattened else 2).double()).square().sum()
    params = {k: p for k, p in gated.named_parameters() if k.startswith("network")}
    for (k, p), slope in zip(params.items(), torch.autograd.grad(weighed, list(params.values())), strict=True):
        assert torch.equal(slope != 0, (free[k] == 0).expand_as(p)), k


def test_before_the_first_task_outputs_are_free() -> None:
    gated, gates, _ = gated_and_drawn(with_outputs_normalised(), 0)
    free = gated.free([torch.zeros_like(gate) for gate in gates], begun=False)
    assert all(bool((f == 1).all()) for f in free.values())


class SeesTheInputAgain(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)) + x)


class NormalisesInputs(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.norm(x))))


class NormalisesTwice(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.two(self.norm(self.one(x)))))


class PenalisesScales(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.two(self.one(x)))) + self.norm.weight.sum()


class ReadsItsOutput(Three):
    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x)
        return self.head(self.two(first)).repeat(1, 2) + first


class LeadsNowhere(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.one(x))
        self.two(first)
        return self.head(first)


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(x), self.two(x)], 1))


class AddsPairs(nn.Module):
    """Three units and six, each of the three added to two of the six."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x) + self.two(x).repeat_interleave(2, 1))


class Again(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.two(self.one(x))))


class Penalised(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x))) + self.one.weight.sum()


class Tied(Three):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


def between(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3))


class TwoOutputs(Three):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x)


class Offset(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)) + self.one.weight.sum())


class OutputsSeeInputs(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x))) + x[:, :3]


class Detached(Three):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.one(x)
        return self.head(self.two(first))


class Renamed(Three):
    """A layer's weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(6, 6))
        self.two.weight = self.own

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


class Gain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.gain = nn.Parameter(torch.ones(3))


class Gained(Renamed):
    def __init__(self) -> None:
        super().__init__()
        del self.own
        self.two, self.head = nn.Linear(6, 6), Gain()


class Summed(nn.Module):
    """Every unit and all that follow it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1)


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
        (SeesTheInputAgain(), "'head' depends on the network's inputs"),
        (NormalisesInputs(), "'norm' depends on the network's inputs"),
        (NormalisesTwice(), "'norm' of this one is called 2 times"),
        (PenalisesScales(), "more than one place"),
        (ReadsItsOutput(), "'two' of this one reads what is also an output"),
        (LeadsNowhere(), "nothing reads what 'two'"),
        (Concatenated(), "mixes units"),
        (AddsPairs(), "'one' and of 'two' meet"),
        (Again(), "'two' of this one is called 2 times"),
        (Penalised(), "more than one place"),
        (Tied(), "more than one place"),
        (between(nn.BatchNorm1d(6, track_running_stats=False)), "keeps no running statistics"),
        (between(nn.LayerNorm(6)), "also learns '1.weight'"),
        (between(nn.LayerNorm(6, elementwise_affine=False)), "mixes units"),
        (between(nn.Softmax(-1)), "mixes units"),
        (between(parametrizations.weight_norm(nn.Linear(6, 6))), "also learns '1.parametrizations"),
        (Shuffled(), "mixes units"),
        (
            nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()),
            "groups",
        ),
        (nn.Linear(6, 3), "no hidden units"),
        (TwoOutputs(), "no hidden units"),
        (Offset(), "more than one place"),
        (OutputsSeeInputs(), "depend on more, or less"),
        (Detached(), "'two' depends on no layer before it"),
        (Renamed(), "also learns 'own'"),
        (Gained(), "also learns 'head.gain'"),
        (between(Summed()), "mixes units"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_where_units_do_not_stay_apart_it_is_refused_with_its_reason(network: nn.Module, reason: str) -> None:
    with pytest.raises(GlocalError, match="hat needs a network of linear and convolutional layers") as error:
        GatedNetwork(network, (6,), 2)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.normalize(x), functional.normalize(self.weight))


class Winners(nn.Module):
    """The three largest units."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x >= x.topk(3, 1).values[:, -1:])


class Constant(nn.Module):
    """As if others were constants."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True).detach()


def softmax_of_nothing() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    nn.init.zeros_(norm.weight)
    return nn.Sequential(norm, nn.Softmax(-1))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Cosine(6, 3)),
        between(Winners()),
        between(Constant()),
        between(softmax_of_nothing()),
    ],
    ids=["cosine", "winners", "constant", "zero scale"],
)
def test_what_slopes_do_not_tell_numbers_do(network: nn.Module) -> None:
    with pytest.raises(GlocalError, match="shut units are of no consequence"):
        GatedNetwork(network, (6,), 2)


class Keeping(Three):
    """Remembers what it computed last."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.two(self.one(x))
        return self.head(self.features)


def test_a_network_that_keeps_tensors_is_left_as_it_was() -> None:
    network = Keeping()
    GatedNetwork(network, (6,), 2)
    assert not hasattr(network, "features")


def test_a_layer_that_is_called_by_keyword_is_named() -> None:
    class Keyword(Three):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(input=self.two(self.one(x)))

    with pytest.raises(GlocalError, match="'head' of this network is called with a keyword"):
        GatedNetwork(Keyword(), (6,), 2)
