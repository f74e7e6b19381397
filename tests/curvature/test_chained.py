"""Hessian products of chains against dense Hessians by plain autograd, in float64, and which networks are chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from cases import CLASSES, apart, joined, some_vector
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

from glocal import losses
from glocal.curvature.chained import links
from glocal.curvature.products import hessian_product
from glocal.losses import Loss, OwnLoss
from glocal.networks.mlp import MLP
from glocal.tree import Params, select, stack

SAMPLES, FEATURES = 9, 12
SHARED = nn.ReLU()
CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(FEATURES, CLASSES, (6, 5)),
    "one layer": lambda: MLP(FEATURES, CLASSES, ()),
    "sequence": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5), SHARED, nn.Linear(5, 4), SHARED, nn.Identity(), nn.Linear(4, 3)
    ),
    "named": lambda: nn.Sequential(
        OrderedDict(flat=nn.Flatten(), last=nn.Linear(FEATURES, 5), bend=nn.ReLU(), first=nn.Linear(5, CLASSES))
    ),
}
LOSSES: dict[str, Loss] = {**losses.LOSSES, "own": OwnLoss(functional.cross_entropy)}


def network(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make().double().eval()
        params = {k: p.detach() + 0.1 * torch.randn_like(p) for k, p in module.named_parameters()}
    return module, params


def inputs(dead: int = 0) -> Tensor:
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[:, 1 : 1 + dead] = 0
    return x


def labels(loss: str) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    if loss == "squared-error":
        return torch.randn(SAMPLES, CLASSES, dtype=torch.float64, generator=draw)
    return torch.randint(CLASSES, (SAMPLES,), generator=draw)


def dense(module: nn.Module, params: Params, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    def value(theta: Tensor) -> Tensor:
        return loss.per_sample(functional_call(module, apart(theta, params), (x,)), y).mean()

    return torch.autograd.functional.hessian(value, joined(params))


@pytest.mark.parametrize("dead", [0, 1, 5])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", CHAINS)
def test_product_is_that_of_the_dense_matrix(name: str, loss: str, dead: int) -> None:
    (module, params), x, y = network(CHAINS[name]), inputs(dead), labels(loss)
    assert links(module, params, x)
    v = some_vector(params)
    expected = apart(dense(module, params, x, y, LOSSES[loss]) @ joined(v), params)
    for chunk in (2000, 4):
        product = hessian_product(module, params, {}, x, y, LOSSES[loss], chunk)
        before = joined(v).clone()
        for _ in range(2):  # what is kept is not used up
            torch.testing.assert_close(product(v), expected, rtol=1e-9, atol=1e-12)
        assert joined(v).equal(before)


@pytest.mark.parametrize("dead", [0, 5])
@pytest.mark.parametrize("shared", ["x", "x and v"])
def test_mapped_over_runs_and_over_vectors_it_is_the_loop(dead: int, shared: str) -> None:
    module, _ = network(CHAINS["mlp"])
    runs = [network(CHAINS["mlp"], seed)[1] for seed in range(3)]
    x, y = inputs(dead), labels("cross-entropy")
    block = stack([some_vector(runs[0], seed) for seed in range(4)])

    def times(params: Params, v: Params) -> Params:
        return hessian_product(module, params, {}, x, y, LOSSES["cross-entropy"])(v)

    one = select(block, 0)
    if shared == "x":
        found = vmap(lambda p: select(vmap(lambda v: times(p, v))(block), 0))(stack(runs))
    else:
        found = vmap(lambda p: times(p, one))(stack(runs))
    for run, params in enumerate(runs):
        expected = dense(module, params, x, y, LOSSES["cross-entropy"]) @ joined(one)
        torch.testing.assert_close(joined(select(found, run)), expected, rtol=1e-9, atol=1e-12)


class Own(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def hooked() -> nn.Module:
    bend = nn.ReLU()
    bend.register_forward_hook(lambda *given: given[-1] * 2)
    return nn.Sequential(nn.Linear(FEATURES, 4), bend, nn.Linear(4, CLASSES))


def shared() -> nn.Module:
    """Two rectifiers and a layer are used again: five names stand for seven parts."""
    twice, again = nn.Linear(4, 4), nn.ReLU()
    enter, between = nn.Linear(FEATURES, 4), nn.Linear(4, 4)
    return nn.Sequential(enter, again, twice, nn.ReLU(), between, again, twice)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another forward": lambda: Own(FEATURES, CLASSES, (4,)),
    "a hook": hooked,
    "a layer used twice": shared,
    "tanh": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
    "no rectifier": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)),
    "one in the end": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.ReLU()),
    "no bias": lambda: nn.Sequential(nn.Linear(FEATURES, 4, bias=False), nn.ReLU(), nn.Linear(4, CLASSES)),
    "a norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(FEATURES, 4)), nn.ReLU(), nn.Linear(4, CLASSES)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_no_chains(name: str) -> None:
    module, params = network(OTHERS[name])
    assert links(module, params, inputs()) == ()


@pytest.mark.parametrize("name", ["another forward", "a hook", "no bias", "one in the end"])
def test_and_have_the_right_products_too(name: str) -> None:
    (module, params), x, y = network(OTHERS[name]), inputs(), labels("cross-entropy")
    v = some_vector(params)
    found = hessian_product(module, params, {}, x, y, LOSSES["cross-entropy"])(v)
    expected = dense(module, params, x, y, LOSSES["cross-entropy"]) @ joined(v)
    torch.testing.assert_close(joined(found), expected, rtol=1e-9, atol=1e-12)


def test_nor_are_chains_of_which_a_part_is_learnt_or_that_see_more_than_features() -> None:
    module, params = network(CHAINS["sequence"])
    assert links(module, params, inputs()) == ("0", "2", "5")
    assert links(module, {k: p for k, p in params.items() if not k.startswith("0")}, inputs()) == ()
    assert links(module, params, inputs().unsqueeze(1)) == ()
    assert links(module, params, inputs().float()) == ()
    flat, params = network(CHAINS["named"])
    assert links(flat, params, inputs().unsqueeze(1)) == ("last", "first")
