"""Hessian products of chains against dense Hessians by plain autograd, in float64, and which networks are chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import CLASSES, apart, joined, some_vector
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

from glocal import losses
from glocal.curvature.alive import alive
from glocal.curvature.chained import links
from glocal.curvature.products import hessian_product
from glocal.losses import AutogradLoss, Loss
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
LOSSES: dict[str, Loss] = {**losses.LOSSES, "own": AutogradLoss(functional.cross_entropy)}


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
    (first, *_) = links(module, params, x)
    assert (alive(x, first, params) is not None) is (dead > 1)  # one of twelve is not enough
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

    if shared == "x":
        found = vmap(lambda p: vmap(lambda v: times(p, v))(block))(stack(runs))
    else:
        each = [vmap(partial(times, v=select(block, i)))(stack(runs)) for i in range(4)]
        found = {k: t.transpose(0, 1) for k, t in stack(each).items()}
    for run, params in enumerate(runs):
        matrix = dense(module, params, x, y, LOSSES["cross-entropy"])
        for i in range(4):
            expected = matrix @ joined(select(block, i))
            torch.testing.assert_close(joined(select(select(found, run), i)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("what", ["x", "y", "layers.1.weight", "v"])
def test_anything_may_be_mapped_alone(what: str) -> None:
    (module, params), loss = network(CHAINS["mlp"]), LOSSES["cross-entropy"]
    v = some_vector(params)
    given = {"x": inputs(5), "y": labels("cross-entropy"), "v": v["layers.1.bias"], **params}
    some = torch.stack([given[what], given[what].flip(0)])

    def times(one: Tensor, alike: bool = False) -> Params:
        own = {**given, what: one}
        weights = {k: own[k] for k in params}
        product = hessian_product(module, weights, {}, own["x"], own["y"], loss, alike=alike)
        return product({**v, "layers.1.bias": own["v"]})

    def slope(one: Tensor) -> Tensor:
        return joined(times(one)).square().sum()

    for i in range(2):
        expected = times(some[i], alike=True)
        torch.testing.assert_close(select(vmap(times)(some), i), expected, rtol=1e-9, atol=1e-12)
        if what in ("layers.1.weight", "v"):
            alone = grad(slope)(some[i])
            torch.testing.assert_close(vmap(grad(slope))(some)[i], alone, rtol=1e-9, atol=1e-12)


def test_alike_runs_round_alike_alone_and_mapped() -> None:
    """Which is what `alike` is for: without it they do not."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 49, generator=draw)
    x[:, :20] = 0
    y = torch.randint(10, (1000,), generator=draw)
    module = MLP(49, 10, (20, 20))
    runs = [{k: torch.randn(p.shape, generator=draw) / 5 for k, p in module.named_parameters()} for _ in range(3)]
    v = {k: torch.randn(p.shape, generator=draw) for k, p in module.named_parameters()}

    def same(alike: bool) -> bool:
        def times(params: Params) -> Tensor:
            return joined(hessian_product(module, params, {}, x, y, LOSSES["cross-entropy"], alike=alike)(v))

        mapped = vmap(times)(stack(runs))
        return all(mapped[i].equal(times(params)) for i, params in enumerate(runs))

    assert same(True) and not same(False)


def test_what_is_zero_in_one_chunk_need_not_be_in_another() -> None:
    (module, params), x, y = network(CHAINS["mlp"]), inputs(), labels("cross-entropy")
    x[:4, :5], x[4:8, 6:9], x[:, 9] = 0, 0, -x[:, 9].abs()
    x[3, 9] = 0  # at most zero is not zero
    v, loss = some_vector(params), LOSSES["cross-entropy"]
    expected = dense(module, params, x, y, loss) @ joined(v)
    assert alive(x[:4], "layers.0", params) and alive(x, "layers.0", params) is None
    found = hessian_product(module, params, {}, x, y, loss, 4)(v)
    torch.testing.assert_close(joined(found), expected, rtol=1e-9, atol=1e-12)


def test_a_product_may_be_changed_by_who_asked_for_it() -> None:
    (module, params), x, y = network(CHAINS["mlp"]), inputs(5), labels("squared-error")
    product, v = hessian_product(module, params, {}, x, y, LOSSES["squared-error"]), some_vector(params)
    expected = {k: t.clone() for k, t in product(v).items()}
    found = product(v)
    assert all(t.is_contiguous() for t in found.values())
    found["layers.1.bias"].add_(1.0)
    torch.testing.assert_close(found["layers.1.weight"], expected["layers.1.weight"], rtol=0, atol=0)
    for t in found.values():
        t.fill_(7.0)
    torch.testing.assert_close(product(v), expected, rtol=0, atol=0)
    single = product({k: t.float() for k, t in v.items()})
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=1e-5)


def test_labels_that_no_class_has_are_refused() -> None:
    module, params = network(CHAINS["mlp"])
    with pytest.raises((RuntimeError, IndexError)):
        hessian_product(module, params, {}, inputs(), labels("cross-entropy") + CLASSES, LOSSES["cross-entropy"])


def test_no_number_stays_none() -> None:
    """A weight of a feature that is zero everywhere: zero times it is no number either."""
    module, params = network(CHAINS["mlp"])
    params["layers.0.weight"][0, 2] = torch.nan
    found = hessian_product(module, params, {}, inputs(5), labels("cross-entropy"), LOSSES["cross-entropy"])
    assert joined(found(some_vector(params))).isnan().any()


class Own(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def hooked() -> nn.Module:
    bend = nn.ReLU()
    bend.register_forward_hook(lambda *given: given[-1] * 2)
    return nn.Sequential(nn.Linear(FEATURES, 4), bend, nn.Linear(4, CLASSES))


def prepared(how: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        enter = nn.Linear(FEATURES, 4)
        if how == "forward":
            vars(enter)["forward"] = lambda x: functional.linear(x, enter.weight, enter.bias) * 2
        else:
            getattr(enter, f"register_{how}_hook")(lambda *_: None)
        return nn.Sequential(enter, nn.ReLU(), nn.Linear(4, CLASSES))

    return make


def shared() -> nn.Module:
    """Two rectifiers and a layer are used again: five names stand for seven parts."""
    twice, again = nn.Linear(4, 4), nn.ReLU()
    enter, between = nn.Linear(FEATURES, 4), nn.Linear(4, 4)
    return nn.Sequential(enter, again, twice, nn.ReLU(), between, again, twice)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another forward": lambda: Own(FEATURES, CLASSES, (4,)),
    "a hook": hooked,
    **{f"a {how}": prepared(how) for how in ("forward", "forward_pre", "full_backward", "full_backward_pre")},
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
    assert links(module, params, inputs()[:0]) == () == links(module, params, inputs()[:, :0])
    with torch.autocast("cpu"):
        assert links(module, params, inputs()) == ()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert links(module, params, inputs()) == ()
    handle.remove()
    partly, params = network(lambda: nn.Sequential(nn.Flatten(1, 1), nn.Linear(FEATURES, CLASSES)))
    assert links(partly, params, inputs().unsqueeze(1)) == ()
    flat, params = network(CHAINS["named"])
    assert links(flat, params, inputs().unsqueeze(1)) == ("last", "first")
