"""Gated networks: their unit groups, the effect of gates, and networks that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.errors import GlocalError
from glocal.networks.hat import GatedNetwork
from glocal.networks.mlp import MLP
from glocal.networks.resnet import ResNet18, resnet18

IMAGE = (2, 6, 6)
Groups = dict[str, tuple[str | None, str | None]]


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Conv2d(3, 5, 1),
        nn.Sigmoid(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.Softplus(),
        nn.Linear(7, 4, bias=False),
    )


def ends(gated: GatedNetwork) -> dict[str, tuple[int | None, int | None]]:
    return {layer.name: (layer.reads, layer.writes) for layer in gated.layers}


def test_in_a_chain_every_layer_reads_the_one_before_it() -> None:
    mlp = GatedNetwork(MLP(72, 4, (6, 5)), IMAGE, 2)
    assert mlp.group_sizes == (6, 5)
    assert ends(mlp) == {"layers.0": (None, 0), "layers.1": (0, 1), "layers.2": (1, None)}
    chain = GatedNetwork(convolutional(), IMAGE, 2)
    assert chain.group_sizes == (3, 5, 7)
    assert ends(chain) == {"0.0": (None, 0), "1": (0, 1), "5": (1, 2), "7": (2, None)}
    assert [layer.features_per_unit for layer in chain.layers] == [0, 1, 4, 1]


def test_the_stages_of_a_resnet_are_groups() -> None:
    """Four residual streams, and the inside of eight blocks."""
    gated = GatedNetwork(resnet18((3, 8, 8), 5, width=2), (3, 8, 8), 2)
    found = ends(gated)
    streams = [found["conv"][1], *(found[f"blocks.{2 * stage}.shortcut.0"][1] for stage in (1, 2, 3))]
    insides = [found[f"blocks.{block}.conv1"][1] for block in range(8)]
    assert {*streams, *insides} == set(range(12))
    for block, inside in enumerate(insides):
        before, after = streams[max(0, block - 1) // 2], streams[block // 2]
        assert found[f"blocks.{block}.conv1"] == (before, inside)
        assert found[f"blocks.{block}.conv2"] == (inside, after)
        assert found[f"blocks.{block}.norm2"] == (after, after)
    assert found["head"] == (streams[3], None)
    assert [gated.group_sizes[k] for k in streams if k is not None] == [2, 4, 8, 16]


@pytest.mark.parametrize("network", [convolutional(), resnet18(IMAGE, 3, width=2)], ids=["chain", "residual"])
def test_making_gates_changes_nothing_in_the_network(network: nn.Module) -> None:
    network.train()
    before = {k: t.clone() for k, t in network.state_dict().items()}
    GatedNetwork(network, IMAGE, 2)
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())


@pytest.mark.parametrize("closed", range(5))
def test_closing_a_channel_removes_its_weights_from_the_next_layer(closed: int) -> None:
    torch.manual_seed(0)
    network = convolutional().eval()
    gated = GatedNetwork(network, IMAGE, 2).eval()
    x = torch.randn(3, *IMAGE)
    ones = [torch.ones(3), torch.ones(5), torch.ones(7)]
    torch.testing.assert_close(gated(x, *ones), network(x), rtol=0, atol=0)
    gate = torch.ones(5)
    gate[closed] = 0
    actual = gated(x, torch.ones(3), gate, torch.ones(7))
    with torch.no_grad():
        network.get_parameter("5.weight").view(7, 5, 4)[:, closed] = 0
    torch.testing.assert_close(actual, network(x))
    assert not any(m._forward_pre_hooks for m in gated.modules())


def test_gates_multiply_the_units() -> None:
    torch.manual_seed(0)
    network = MLP(5, 3, (4, 6)).double()
    gates = [torch.rand(4).double(), torch.rand(6).double()]
    x = torch.randn(7, 5).double()
    first, second, head = network.layers
    hidden = second(first(x).relu() * gates[0]).relu() * gates[1]
    torch.testing.assert_close(GatedNetwork(network, (5,), 2)(x, *gates), head(hidden))


class Residual(nn.Module):
    """Two layers that are added up and normalized together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.head(self.norm(x + self.two(x.tanh())))

    def unit_groups(self) -> Groups:
        return {"one": (None, "a"), "two": ("a", "a"), "norm": ("a", "a"), "head": ("a", None)}


class Flattened(nn.Module):
    """BatchNorm of channels, and then of channels at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(12, 2)
        self.norm, self.last = nn.BatchNorm1d(3), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.norm(self.conv(x[:, None])).flatten(1)))

    def unit_groups(self) -> Groups:
        return {"conv": (None, "a"), "norm": ("a", "a"), "last": ("a", "a"), "head": ("a", None)}


class Images(ResNet18):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 6, 1, 1).expand(-1, -1, 3, 3))


def normalized_ends() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))


def gated_network(network: nn.Module, seed: int) -> tuple[GatedNetwork, list[Tensor], Tensor]:
    """Return a network with random running statistics, gates of 0 and 1, and inputs."""
    torch.manual_seed(seed)
    for b in network.buffers():
        if b.is_floating_point():
            b.copy_(torch.rand(b.shape) + 0.5)
    gated = GatedNetwork(network, (6,), 2).double().eval()
    gates = [(torch.randperm(units) < (units + 1) // 2).double() for units in gated.group_sizes]
    return gated, gates, torch.randn(16, 6).double()


@pytest.mark.parametrize(
    "make", [Residual, Flattened, normalized_ends, lambda: Images(6, 3, 3), lambda: MLP(6, 3, (7, 5))]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_free_parameters_do_not_change_the_outputs(make: Callable[[], nn.Module], seed: int) -> None:
    gated, gates, x = gated_network(make(), seed)
    before = gated(x, *gates)
    free = gated.free(gates, begun=True)
    with torch.no_grad():
        for k, p in gated.named_parameters():
            if k.startswith("network"):
                p.add_(torch.randn_like(p) * free[k])
    torch.testing.assert_close(gated(x, *gates), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [Residual, Flattened, normalized_ends])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_other_parameters_do(make: Callable[[], nn.Module], seed: int) -> None:
    """In smooth networks every element that is not free has a gradient."""
    gated, gates, x = gated_network(make(), seed)
    free = gated.free(gates, begun=True)
    outputs = gated(x, *gates)
    value = (outputs * torch.randn(outputs.shape[1]).double()).square().sum()
    params = {k: p for k, p in gated.named_parameters() if k.startswith("network")}
    for (k, p), gradient in zip(params.items(), torch.autograd.grad(value, list(params.values())), strict=True):
        assert torch.equal(gradient != 0, (free[k] == 0).expand_as(p)), k


def test_before_the_first_task_everything_is_free() -> None:
    gated, gates, _ = gated_network(normalized_ends(), 0)
    free = gated.free([torch.zeros_like(gate) for gate in gates], begun=False)
    assert all(bool((f == 1).all()) for f in free.values())


def declared(groups: Groups, forward: Callable[[Residual, Tensor], Tensor] = Residual.forward) -> nn.Module:
    return type("Declared", (Residual,), {"unit_groups": lambda self: groups, "forward": forward})()


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.normalize(x), functional.normalize(self.weight))


class TopUnits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x >= x.topk(3, 1).values[:, -1:])


def between(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *middle, nn.Linear(6, 3))


def flipped(network: Residual, x: Tensor) -> Tensor:
    return network.head(network.norm(network.two(network.one(x)).flip(1)))


GOOD = Residual().unit_groups()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Undeclared(), r"which units Undeclared adds up; give the network a method unit_groups\(\)"),
        (declared({**GOOD, "nowhere": ("a", "a")}), "'nowhere' is not a linear layer"),
        (declared({k: v for k, v in GOOD.items() if k != "two"}), "no unit group for the parameter 'two.weight'"),
        (declared({**GOOD, "head": ("b", None)}), r"only read: \['b'\], only written: \[\]"),
        (declared({**GOOD, "one": (None, "b")}), r"only read: \[\], only written: \['b'\]"),
        (declared({**GOOD, "head": ("a", "a")}), "'head' does not write 6 units"),
        (declared(GOOD, flipped), "outputs do not depend on closed units, but those of Declared do"),
        (nn.Sequential(nn.Linear(6, 3)), "Sequential has none"),
        (between(nn.BatchNorm1d(6, track_running_stats=False)), "track_running_stats=True"),
        (between(nn.LayerNorm(6)), "no unit group for the parameter '1.weight'"),
        (between(nn.LayerNorm(6, elementwise_affine=False)), "mixes units"),
        (between(nn.Softmax(-1)), "mixes units"),
        (between(TopUnits()), "mixes units"),
        (between(Cosine(6, 6, bias=False)), "mixes units"),
        (
            nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()),
            "'2' of Sequential: it is a grouped convolution",
        ),
    ],
)
def test_networks_that_cannot_be_gated_are_refused(network: nn.Module, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        GatedNetwork(network, (6,), 2)
