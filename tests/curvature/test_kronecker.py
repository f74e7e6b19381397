"""Kronecker factors: exact where theory says so, their moments for every kind of convolution, the rest by diagonals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CLASSES, NETWORKS, dense_gauss_newton, jacobian, joined, make, output_hessians, some_vector
from torch import Tensor, nn
from torch.func import vmap

from glocal import losses
from glocal.curvature.hessian import to_dense
from glocal.curvature.kronecker import kronecker_factors, kronecker_product
from glocal.curvature.layers import affine_layers
from glocal.curvature.operators import Operator
from glocal.risk import Risk
from glocal.tree import Params, flatten, select, stack

SQUARED_ERROR = losses.get("squared-error")


def test_one_linear_layer_with_squared_error_is_exact() -> None:
    case = make("linear", "squared-error")
    curvature = kronecker_factors(case)
    block = curvature["kronecker"]["layers.0"]
    torch.testing.assert_close(block["G"], torch.eye(CLASSES, dtype=torch.float64))
    ones = torch.cat([case.x, torch.ones(len(case.x), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(block["A"], ones.T @ ones / len(case.x))
    matrix = to_dense(Operator(lambda v: kronecker_product(curvature, v), case.params))
    torch.testing.assert_close(matrix, dense_gauss_newton(case), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("network", NETWORKS)
def test_with_one_sample_every_linear_layer_is_exact(network: str) -> None:
    case = make(network, n=1)
    curvature = kronecker_factors(case)
    exact = dense_gauss_newton(case)
    place = dict(
        zip(case.params, torch.arange(len(exact)).split([p.numel() for p in case.params.values()]), strict=True)
    )
    linear = [name for name in curvature["kronecker"] if isinstance(case.module.get_submodule(name), nn.Linear)]
    assert linear
    approximate = to_dense(Operator(lambda v: kronecker_product(curvature, v), case.params))
    for name in linear:
        own = torch.cat([place[k] for k in (f"{name}.weight", f"{name}.bias") if k in place])
        torch.testing.assert_close(approximate[own][:, own], exact[own][:, own], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_parameter_is_in_a_block_or_has_its_diagonal(network: str) -> None:
    case = make(network)
    curvature = kronecker_factors(case)
    blocks, diagonal = curvature["kronecker"], curvature["diagonal"]
    held = {f"{name}.{kind}" for name in blocks for kind, _ in case.module.get_submodule(name).named_parameters()}
    assert held | set(diagonal) == set(case.params)
    assert not held & set(diagonal)
    exact = dict(
        zip(case.params, dense_gauss_newton(case).diag().split([p.numel() for p in case.params.values()]), strict=True)
    )
    for k, f in diagonal.items():
        torch.testing.assert_close(f, exact[k].view_as(f), rtol=1e-9, atol=1e-13)
    left = {
        "conv with BatchNorm": {"norm.weight", "norm.bias"},
        "grouped conv": {"second.weight"},
        "tied weights": {"first.weight", "first.bias", "second.bias", "scale"},
    }
    assert set(diagonal) == left.get(network, set())


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 3), (6,)),
    "1-d": (nn.Conv1d(2, 3, 3, stride=2), (2, 9)),
    "2-d": (nn.Conv2d(2, 3, 2), (2, 4, 5)),
    "2-d without bias": (nn.Conv2d(2, 3, (1, 3), bias=False), (2, 4, 5)),
    "padded": (nn.Conv2d(2, 3, 3, padding=(1, 2), stride=(2, 1)), (2, 4, 5)),
    "same": (nn.Conv2d(2, 3, 3, padding="same"), (2, 4, 5)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 5)),
    "reflected": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect", dilation=2), (2, 9)),
    "dilated": (nn.Conv2d(2, 3, 2, dilation=(2, 1)), (2, 4, 5)),
    "3-d": (nn.Conv3d(2, 3, 2), (2, 3, 3, 2)),
}


class Responses(nn.Module):
    """A layer whose responses are the outputs, one after the other."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(1)


@pytest.mark.parametrize("kind", LAYERS)
def test_factors_are_moments_of_what_the_layer_does(kind: str) -> None:
    """A: (1/(n·positions)) Σ z zᵀ = [W b] A [W b]ᵀ for any W, b. G: with u = e_c for every response, δ is 1 once."""
    layer, shape = LAYERS[kind]
    module = Responses(layer).double().eval()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, dtype=torch.float64, generator=draw)
    params = {k: p.detach() for k, p in module.named_parameters()}
    risk = Risk(module, params, {}, x, torch.zeros(4), SQUARED_ERROR)
    curvature = kronecker_factors(risk)
    assert not curvature["diagonal"]
    block = curvature["kronecker"]["layer"]
    affine = affine_layers(risk)["layer"]
    for _ in range(3):
        own = [torch.randn(p.shape, dtype=torch.float64, generator=draw) for p in params.values()]
        z = affine.apply(x, *own).transpose(0, 1).flatten(1)  # (out, n · positions)
        joint = torch.cat([p.reshape(len(p), -1) for p in own], 1)
        torch.testing.assert_close(joint @ block["A"] @ joint.T, z @ z.T / z.shape[1], rtol=1e-10, atol=1e-13)
    positions = z.shape[1] // len(x)
    torch.testing.assert_close(block["G"], positions * torch.eye(3, dtype=torch.float64), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("network", ["tanh", "conv with BatchNorm"])
def test_outer_factor_of_the_head_is_the_mean_output_hessian(network: str) -> None:
    case = make(network)
    head = "4" if network == "tanh" else "head"
    curvature = kronecker_factors(case)
    torch.testing.assert_close(curvature["kronecker"][head]["G"], output_hessians(case).mean(0), rtol=1e-9, atol=1e-13)


def test_multiply_is_the_kronecker_product_of_the_factors() -> None:
    case = make("conv")
    curvature = kronecker_factors(case)
    v = some_vector(case.params)
    result = kronecker_product(curvature, v)
    assert list(result) == list(case.params)
    for name, block in curvature["kronecker"].items():
        learnt = [t for t in (f"{name}.weight", f"{name}.bias") if t in v]
        joint, product = (torch.cat([tree[k].reshape(len(tree[k]), -1) for k in learnt], 1) for tree in (v, result))
        expected = torch.kron(block["G"], block["A"]) @ joint.flatten()
        torch.testing.assert_close(product.flatten(), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm"])
def test_chunks_average_to_the_whole(network: str) -> None:
    case = make(network)

    def output_gradient(f: Tensor, y: Tensor) -> Tensor:
        return case.loss.output_gradient(f, y).unsqueeze(1)

    whole = kronecker_factors(case, output_gradient)
    chunked = kronecker_factors(replace(case, chunk_size=3), output_gradient)
    torch.testing.assert_close(flatten(chunked), flatten(whole), rtol=1e-10, atol=1e-14)


def test_frozen_parameters_are_left_out() -> None:
    case = make("relu")
    frozen = {k: case.params[k] for k in ("layers.0.weight", "layers.1.bias")}
    learnt = {k: p for k, p in case.params.items() if k not in frozen}
    curvature = kronecker_factors(replace(case, params=learnt, buffers=frozen))
    whole = kronecker_factors(case)
    assert set(curvature["kronecker"]) == {"layers.1", "layers.2"}
    assert set(curvature["diagonal"]) == {"layers.0.bias"}
    torch.testing.assert_close(curvature["kronecker"]["layers.2"], whole["kronecker"]["layers.2"])
    torch.testing.assert_close(
        curvature["kronecker"]["layers.1"]["A"], whole["kronecker"]["layers.1"]["A"][:-1, :-1], rtol=1e-10, atol=1e-14
    )
    first_bias = jacobian(case)[:, :, case.params["layers.0.weight"].numel() :][:, :, :5]
    expected = torch.einsum("ikp,ikl,ilp->p", first_bias, output_hessians(case), first_bias) / len(case.x)
    torch.testing.assert_close(curvature["diagonal"]["layers.0.bias"], expected, rtol=1e-9, atol=1e-13)
    assert list(kronecker_product(curvature, some_vector(learnt))) == list(learnt)


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm", "grouped conv", "tied weights"])
def test_mapped_over_runs_it_is_the_loop(network: str) -> None:
    runs = [make(network, seed=seed) for seed in range(3)]
    v = some_vector(runs[0].params)

    def one(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], Params]:
        curvature = kronecker_factors(replace(runs[0], params=params, buffers=buffers, chunk_size=4))
        return curvature, kronecker_product(curvature, v)

    together = vmap(one)(stack([c.params for c in runs]), stack([c.buffers for c in runs]))
    for run, case in enumerate(runs):
        alone = one(case.params, case.buffers)
        for mapped, own in zip(together, alone, strict=True):
            torch.testing.assert_close(flatten(select(mapped, run)), flatten(own), rtol=1e-9, atol=1e-13)
    assert joined(alone[1]).abs().max() > 1e-3
