"""Gradients kept as factors against the dense Jacobian they stand for, in float64."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import register_parametrization

from glocal import losses
from glocal.curvature.jacobian import (
    CONV,
    FactoredJacobian,
    batch_invariant_matmul,
    concatenate,
    empty_like,
    gram,
    jacobian,
    jvp_and_vjp,
    normalize,
)
from glocal.networks.convolution import Conv2d
from glocal.networks.mlp import MLP
from glocal.precision import matmul_precision
from glocal.risk import Risk
from glocal.tree import Params, flatten, map_tree, select, stack

CLASSES = 3
PIXELS = 36


class Convolutions(nn.Module):
    """A convolution with many positions and few weights, one with few positions, stride and padding, one in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 32, 3, stride=2, padding=1, padding_mode="circular")
        self.narrow = nn.Conv2d(32, 32, 1, bias=False)
        self.grouped = nn.Conv2d(32, 32, 2, groups=2, bias=False)
        self.head = nn.Linear(32 * 4, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.deep(self.wide(x.view(-1, 1, 6, 6)).tanh()).tanh()
        return self.head(self.grouped(self.narrow(z).tanh()).tanh().flatten(1))


class Signals(nn.Module):
    """Convolutions along one axis, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep = nn.Conv1d(2, 16, 5, stride=2), nn.Conv1d(16, 32, 3, padding=1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.enter(x.view(-1, 2, 18)).tanh()).tanh().mean(-1))


class Volumes(nn.Module):
    """A convolution along three axes, and nothing else: all rows are images."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, 6 * CLASSES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x.view(-1, 1, 3, 3, 4)).tanh().unflatten(1, (CLASSES, 6)).flatten(2).sum(2)


class Ours(nn.Module):
    """Of glocal's own convolutions: what remains of an image is one position."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep = Conv2d(1, 8, 3, stride=2), Conv2d(8, 16, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.enter(x.view(-1, 1, 6, 6)).tanh()).tanh().flatten(1))


class Normed(nn.Module):
    """BatchNorm and a scale of one number between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Linear(PIXELS, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * self.norm(self.enter(x)).relu())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(PIXELS, 4), nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.encode(x).tanh() @ self.encode.weight).tanh())


class Frozen(nn.Module):
    """The first layer's weight is not learnt, its bias is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(PIXELS, 4), nn.Linear(4, CLASSES)
        self.enter.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enter(x).tanh())


def parametrised() -> nn.Module:
    """The first layer's weight is a function of a parameter."""
    network = MLP(PIXELS, CLASSES, (8,))
    register_parametrization(next(m for m in network.modules() if isinstance(m, nn.Linear)), "weight", nn.Tanh())
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(PIXELS, CLASSES, (7, 5)),
    "one layer": lambda: nn.Linear(PIXELS, CLASSES),
    "convolutions": Convolutions,
    "signals": Signals,
    "volumes": Volumes,
    "ours": Ours,
    "normed": Normed,
    "tied": Tied,
    "frozen": Frozen,
    "parametrised": parametrised,
}
INPUTS = 4
FACTORS = torch.tensor([1.0, -3.0], dtype=torch.float64)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


class Case:
    """A network in evaluation mode, some inputs, vectors in output space, and the dense Jacobian by plain autograd."""

    def __init__(self, name: str, directions: int, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = NETWORKS[name]().double()
            self.x = torch.rand(INPUTS, PIXELS, dtype=torch.float64)
            self.u = torch.randn(INPUTS, directions, CLASSES, dtype=torch.float64)
            for k, b in self.module.named_buffers():
                if k.endswith("running_mean"):
                    b.uniform_(-0.5, 0.5)
            self.params = {k: p.detach() for k, p in self.module.named_parameters() if p.requires_grad}
            self.vector = {k: torch.randn_like(p) for k, p in self.params.items()}
            self.c = torch.randn(INPUTS, directions, dtype=torch.float64)
        self.module.eval()
        frozen = {k: p.detach() for k, p in self.module.named_parameters() if not p.requires_grad}
        self.buffers = {**dict(self.module.named_buffers()), **frozen}

    def rows(self) -> FactoredJacobian:
        return factored(self.module, vars(self))

    def jacobian(self) -> Tensor:
        leaves = {k: p.clone().requires_grad_() for k, p in self.params.items()}
        rows = []
        for x, us in zip(self.x, self.u, strict=True):
            for u in us:
                value = functional_call(self.module, {**leaves, **self.buffers}, (x[None],))[0] @ u
                slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
                rows.append(flat(dict(zip(leaves, slopes, strict=True))))
        return torch.stack(rows)


def factored(module: nn.Module, case: dict[str, Any]) -> FactoredJacobian:
    """The rows for cotangents `u`, whatever the outputs and labels are."""
    y = torch.zeros(INPUTS, dtype=torch.long)
    risk = Risk(module, case["params"], case["buffers"], case["x"], y, losses.get("cross-entropy"))
    return jacobian(risk, lambda *_: case["u"])


def flat(params: Params) -> Tensor:
    return torch.cat([params[k].reshape(-1) for k in sorted(params)])


@pytest.fixture(params=[(name, c) for name in NETWORKS for c in (1, 3)], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_there_and_back_is_the_jacobian_and_its_transpose(case: Case) -> None:
    j = case.jacobian()
    there, back = jvp_and_vjp(case.module, case.rows(), case.vector)
    torch.testing.assert_close(there.flatten(), j @ flat(case.vector), rtol=1e-10, atol=1e-12)
    found = back(case.c)
    assert {k: v.shape for k, v in found.items()} == {k: p.shape for k, p in case.params.items()}
    torch.testing.assert_close(flat(found), j.mT @ case.c.flatten(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_so_they_are_in_single_precision_for_many_runs(case: Case, device: str) -> None:
    """On a GPU by kernels of our own."""
    module = copy.deepcopy(case.module).to(device, torch.float32)
    runs = [
        {"rows": case.rows(), "vector": map_tree(factor.mul, case.vector), "c": factor * case.c} for factor in FACTORS
    ]

    def there_and_back(own: dict[str, Any]) -> Params:
        there, back = jvp_and_vjp(module, own["rows"], own["vector"])
        return {"there": there, "back": flat(back(own["c"]))}

    with matmul_precision("fp32"):
        mapped = vmap(there_and_back)(map_tree(lambda t: t.to(device, torch.float32), stack(runs)))
    found = map_tree(lambda t: t.double().cpu(), mapped)
    j = case.jacobian()
    for run, factor in enumerate(FACTORS):
        expected = {
            "there": (factor * (j @ flat(case.vector))).view_as(case.c),
            "back": factor * (j.mT @ case.c.flatten()),
        }
        torch.testing.assert_close(select(found, run), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_bytes", [1 << 28, 1000])
def test_the_gram_matrix_is_that_of_the_jacobian(case: Case, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    j = case.jacobian()
    monkeypatch.setattr(sys.modules[gram.__module__], "MAX_CHUNK_BYTES", chunk_bytes)
    torch.testing.assert_close(gram(case.module, case.rows()), j @ j.mT, rtol=1e-10, atol=1e-12)


def test_normalised_rows_have_length_one(case: Case) -> None:
    j = case.jacobian()
    rows, lengths = normalize(case.module, case.rows())
    torch.testing.assert_close(lengths.flatten(), j.norm(dim=1), rtol=1e-12, atol=0)
    there, _ = jvp_and_vjp(case.module, rows, case.vector)
    torch.testing.assert_close(there.flatten(), j @ flat(case.vector) / j.norm(dim=1), rtol=1e-10, atol=1e-12)


def test_rows_join_one_below_the_other(case: Case) -> None:
    rows, other = case.rows(), Case.rows(case)
    together = concatenate(concatenate(empty_like(rows), rows), other)
    there, _ = jvp_and_vjp(case.module, together, case.vector)
    expected = (case.jacobian() @ flat(case.vector)).view(INPUTS, -1).repeat(2, 1)
    torch.testing.assert_close(there, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_runs_can_be_mapped(name: str) -> None:
    cases = [Case(name, 2, seed) for seed in range(3)]
    module = cases[0].module

    def there_and_back(own: dict[str, Any]) -> Params:
        rows = factored(module, own)
        there, back = jvp_and_vjp(module, rows, own["vector"])
        return {"there": there, "gram": gram(module, rows), **back(own["c"])}

    names = ("params", "buffers", "x", "u", "vector", "c")
    given = [{name: getattr(case, name) for name in names} for case in cases]
    mapped = vmap(there_and_back)(stack(given))
    for run, own in enumerate(given):
        torch.testing.assert_close(select(mapped, run), there_and_back(own), rtol=1e-10, atol=1e-12)


def test_convolutions_are_factors_where_these_are_far_fewer_numbers() -> None:
    """Of the first one the gradient has 80 numbers and its factors 36 + 288, of the second 2,336 and 288 + 288, of the
    third 1,024 and 288 + 288, which is less than thrice as long, of the last 2,048 and 288 + 128."""
    rows = Case("convolutions", 1).rows()
    assert set(rows["inputs"]) == {"head"} and set(rows[CONV]["inputs"]) == {"deep", "grouped"}
    assert rows["dense"].shape == (INPUTS, 1, 8 * 9 + 8 + 32 * 32)
    assert set(Case("volumes", 1).rows()) == {CONV}
    numbers = sum(leaf[0].numel() for leaf in flatten(rows).values())
    assert numbers < 0.4 * sum(p.numel() for p in Convolutions().parameters())


def test_an_input_is_stored_once_for_all_its_gradients() -> None:
    rows = Case("mlp", 3).rows()
    assert {k: tuple(a.shape) for k, a in rows["inputs"].items()} == {
        "layers.0": (INPUTS, PIXELS),
        "layers.1": (INPUTS, 7),
        "layers.2": (INPUTS, 5),
    }
    assert rows["deltas"].shape == (7 + 5 + CLASSES, 3, INPUTS) and "dense" not in rows


@pytest.mark.parametrize("sizes", [(1, 3, 4), (2, 2, 2), (5, 7, 6), (30, 20, 10), (1, 90, 80)])
def test_products_are_the_same_bits_alone_and_mapped(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, rows, inner, generator=draw), torch.randn(6, inner, columns, generator=draw)
    mapped = vmap(batch_invariant_matmul)(a, b)
    torch.testing.assert_close(mapped, a @ b)
    assert all(torch.equal(mapped[i], batch_invariant_matmul(a[i], b[i])) for i in range(6))
