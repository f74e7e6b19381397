"""How many samples are differentiated at once: counted by hand, and of no effect on what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from glocal import losses
from glocal.curvature import kronecker, layers
from glocal.curvature.diagonal import diagonal
from glocal.curvature.jacobian import every_output, mean_output
from glocal.curvature.layers import Cotangents, batch_count, chunk_size, memory_budget
from glocal.curvature.operators import functional_operator, ggn_operator, hessian_operator
from glocal.risk import Risk


def risk_of(module: nn.Module, x: Tensor, chunk: int | None = None) -> Risk:
    params = {k: p.detach() for k, p in module.named_parameters()}
    y = torch.arange(len(x)) % 3
    return Risk(module, params, dict(module.named_buffers()), x, y, losses.get("cross-entropy"), chunk)


def network() -> nn.Module:
    """A convolution that takes 1 · 6 · 6 numbers and gives 2 · 4 · 4, a linear layer from 32 to 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double().eval()


@pytest.mark.parametrize(
    ("cotangents", "numbers"), [(mean_output, 36 + 32 + 1 * (32 + 3)), (every_output, 36 + 32 + 3 * (32 + 3))]
)
def test_as_many_as_there_is_room_for(cotangents: Cotangents, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    risk = risk_of(module, torch.randn(5, 1, 6, 6, dtype=torch.float64))
    for within, expected in ((0, 1), (8 * numbers, 1), (16 * numbers - 1, 1), (16 * numbers, 2), (8 * numbers * 90, 9)):
        monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", within)
        assert chunk_size(risk, cotangents, limit=9) == expected
    assert not module[0]._forward_hooks  # type: ignore[index]


def test_a_call_by_keyword_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    module = Named()
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", 80)
    assert chunk_size(risk_of(module, torch.ones(3, 4)), mean_output, limit=100) == 80 // (4 * 2)


class Squeezed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze()


class Talkative(nn.Linear):
    def forward(self, x: Tensor, times: float = 2.0) -> Any:
        return times * super().forward(x), None


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Talkative(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, 3.0)[0]


class Bound(nn.Module):
    """To batches of six."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("start", torch.arange(18.0, dtype=torch.float64).view(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.start).view(6, 3)


@pytest.mark.parametrize("make", [Told, Bound])
def test_networks_of_any_kind_have_products(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make().double().eval()
    x = torch.randn(6, 4, dtype=torch.float64)
    v = {k: torch.randn_like(p) for k, p in module.named_parameters()}
    torch.testing.assert_close(
        hessian_operator(risk_of(module, x)) @ v, hessian_operator(risk_of(module, x, chunk=6)) @ v
    )


def test_so_have_those_that_drop_an_axis_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Squeezed(nn.Linear(4, 1).double()).eval()
    risk = risk_of(module, torch.ones(3, 4).double())
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", 8 * 5 * 4)
    assert chunk_size(risk, None, 9) == 4
    assert chunk_size(risk, every_output, 9) == 9


def test_room_is_shared() -> None:
    found: list[int] = []

    def one(p: Tensor) -> Tensor:
        found.append(memory_budget({"p": p}))
        return p

    one(torch.ones(8, 3))
    vmap(one)(torch.ones(8, 3))
    assert found == [1 << 30, 1 << 27]


def test_products_and_factors_are_the_same_in_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    risk = risk_of(module, torch.randn(7, 1, 6, 6, dtype=torch.float64))
    v = {k: torch.randn_like(p) for k, p in risk.params.items()}

    def everything() -> list[dict]:
        return [
            hessian_operator(risk) @ v,
            functional_operator(risk) @ v,
            ggn_operator(risk) @ v,
            kronecker.kronecker_factors(risk)["kronecker"],
            diagonal(risk),
        ]

    together = everything()
    batches: list[int] = []
    module.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    one_vector, one_per_class = 36 + 32 + (32 + 3), 36 + 32 + 3 * (32 + 3)
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", 3 * 8 * one_vector)
    apart = everything()
    assert max(batches) == 3 and 3 * one_vector // one_per_class in batches
    torch.testing.assert_close(apart, together, rtol=1e-10, atol=1e-12)


def test_runs_share_the_room_for_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much room for every run, a cohort of EWC filled 127 GB of a GPU."""
    module, runs = network(), 3
    risk = risk_of(module, torch.randn(7, 1, 6, 6, dtype=torch.float64))
    stacked = {k: torch.stack([p * (1 + run) for run in range(runs)]) for k, p in risk.params.items()}
    expected = [diagonal(replace(risk, params={k: p[run] for k, p in stacked.items()})) for run in range(runs)]
    batches: list[int] = []
    module.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    one_per_class = 36 + 32 + 3 * (32 + 3)
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", runs * 2 * 8 * one_per_class)
    apart = vmap(lambda params: diagonal(replace(risk, params=params)))(stacked)
    assert max(batches) == 2
    torch.testing.assert_close(apart, {k: torch.stack([e[k] for e in expected]) for k in apart}, rtol=1e-10, atol=0)


def test_runs_that_are_batched_are_counted() -> None:
    seen: list[int] = []

    def one(x: Tensor) -> Tensor:
        seen.append(batch_count(x))
        return x

    x = torch.ones(5, 4, 3)
    one(x)
    vmap(one)(x)
    vmap(one, in_dims=2)(x)
    vmap(lambda row: vmap(one)(row))(x)
    vmap(lambda row: grad(lambda a: one(a).sum())(row))(x)
    vmap(lambda _: one(torch.ones(2)))(x)
    assert seen == [1, 5, 3, 20, 5, 1]
