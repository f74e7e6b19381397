"""Curvature of networks whose layers torch fuses, attention and recurrent ones, against dense matrices by autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import dense_gauss_newton, dense_hessian, joined, some_vector, unflatten
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from glocal import losses
from glocal.curvature.hessian import functional_hessian, ggn, hessian
from glocal.curvature.operators import Operator, functional_operator, ggn_operator, hessian_operator
from glocal.risk import Risk, unfused_ops
from glocal.tree import select, stack


class Attentive(nn.Module):
    """Five tokens of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(-1, 5, 4)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layers = kind(4, 3, 2, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.view(-1, 5, 4))[0][:, -1])


NETWORKS = {"attention": Attentive, "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU)}
ON_BOTH = pytest.mark.parametrize("network", ["attention", "lstm"])


def make(network: str, dtype: torch.dtype = torch.float64) -> Risk:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = NETWORKS[network]().eval().double()
    x = torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    params = {k: p.detach().to(dtype) for k, p in module.named_parameters()}
    return Risk(module.to(dtype), params, {}, x.to(dtype), torch.arange(6) % 3, losses.get("cross-entropy"))


def operators(risk: Risk) -> dict[str, Operator]:
    return {
        "hessian": hessian_operator(risk),
        "functional": functional_operator(risk),
        "gauss-newton": ggn_operator(risk),
    }


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_are_those_of_dense_matrices(network: str, dtype: torch.dtype) -> None:
    exact = make(network)
    with sdpa_kernel(SDPBackend.MATH):
        whole, outer = dense_hessian(exact), dense_gauss_newton(exact)
    dense = {"hessian": whole, "functional": whole - outer, "gauss-newton": outer}
    close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    vectors = [some_vector(exact.params, seed) for seed in range(2)]
    block = {k: t.to(dtype) for k, t in stack(vectors).items()}
    for chunk in (2000, 4):
        for kind, operator in operators(replace(make(network, dtype), chunk_size=chunk)).items():
            found = vmap(lambda v, operator=operator: operator @ v)(block)
            for j, v in enumerate(vectors):
                expected = {k: t.to(dtype) for k, t in unflatten(dense[kind] @ joined(v), v).items()}
                torch.testing.assert_close(select(found, j), expected, **close)
                torch.testing.assert_close(operator @ select(block, j), expected, **close)


@ON_BOTH
def test_dense_hessian_and_its_parts(network: str) -> None:
    case = make(network)
    with sdpa_kernel(SDPBackend.MATH):
        whole, outer = dense_hessian(case), dense_gauss_newton(case)
    torch.testing.assert_close(hessian(case), whole, rtol=1e-8, atol=1e-11)
    parts = ggn(case), functional_hessian(replace(case, chunk_size=4))
    torch.testing.assert_close(parts[0], outer, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(parts[1], whole - outer, rtol=1e-8, atol=1e-11)


class Noting(nn.Module):
    """Notes how torch is set while it runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(settings())
        return self.inner(x)


def settings() -> tuple[bool, ...]:
    backends = torch.backends
    attention = (backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled())
    return bool(backends.mkldnn.enabled), bool(backends.cudnn.enabled), *attention


def test_torch_is_set_otherwise_only_where_and_as_long_as_needed() -> None:
    before = settings()
    for inner, kernels in ((nn.Linear(20, 3), before[:2]), (Recurrent(nn.LSTM), (False, False))):
        module = Noting(inner).eval()
        params = {k: p.detach() for k, p in module.named_parameters()}
        risk = Risk(module, params, {}, torch.ones(2, 20), torch.arange(2), losses.get("cross-entropy"))
        _ = hessian_operator(risk) @ params
        assert module.seen and set(module.seen) == {(*kernels, False, False)}
        with pytest.raises(ZeroDivisionError), unfused_ops(module):
            _ = 1 / 0
        assert settings() == before


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("hooked", [False, True], ids=["parametrised", "by a hook"])
def test_normalised_weights_against_finite_differences(hooked: bool) -> None:
    """Torch's own second derivatives of them are wrong."""
    torch.manual_seed(0)
    normalised: Any = nn.utils.weight_norm if hooked else nn.utils.parametrizations.weight_norm
    module = nn.Sequential(normalised(nn.Linear(4, 5)), nn.Tanh(), normalised(nn.Linear(5, 3), dim=None)).double()
    params = {k: p.detach() for k, p in module.named_parameters()}
    x, y, loss = torch.randn(7, 4).double(), torch.arange(7) % 3, losses.get("cross-entropy")
    v = {k: torch.randn_like(p) for k, p in params.items()}

    def slope(at: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {k: p.clone().requires_grad_() for k, p in at.items()}
        value = loss.per_sample(functional_call(module, leaves, (x,)), y).mean()
        return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))

    up, down = (slope({k: p + h * v[k] for k, p in params.items()}) for h in (1e-5, -1e-5))
    risk = Risk(module, params, {}, x, y, loss)
    found = hessian_operator(risk) @ v
    for k in params:
        torch.testing.assert_close(found[k], (up[k] - down[k]) / 2e-5, rtol=1e-6, atol=1e-8)
    whole = hessian(risk)
    torch.testing.assert_close(whole, whole.mT)
    torch.testing.assert_close(whole @ joined(v), joined(found))


def test_training_mode_is_refused() -> None:
    x, y, loss = torch.ones(4, 20), torch.arange(4) % 3, losses.get("cross-entropy")
    inner: list[tuple[nn.Module, str]] = [
        (nn.Sequential(nn.Linear(20, 3), nn.Dropout(0.5)), "Dropout 'inner.1'"),
        (nn.Sequential(nn.Linear(20, 3), nn.BatchNorm1d(3)), "BatchNorm1d 'inner.1'"),
        (Attentive(), "MultiheadAttention 'inner.encoder.self_attn'"),
    ]
    for part, layer in inner:
        module = Noting(part).train()
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        risk = Risk(module, params, buffers, x, y, loss)
        functions: list[Any] = [hessian_operator, functional_operator, ggn_operator, hessian, functional_hessian, ggn]
        for function in functions:
            with pytest.raises(ValueError, match=rf"{layer} is training.*module\.eval\(\)"):
                function(risk)
        assert not module.seen
    module = Noting(nn.Sequential(nn.Linear(20, 3), nn.Dropout(0.0))).train()  # nothing left to chance
    hessian(Risk(module, dict(module.named_parameters()), {}, x, y, loss))
