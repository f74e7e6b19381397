"""Output gradients, dense and factored, against one backward pass for every sample and direction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CLASSES, NETWORKS, Case, jacobian, joined, make, some_vector
from factors import along, combine
from torch import Tensor
from torch.func import functional_call, vmap

from glocal.curvature.layers import affine_layers
from glocal.curvature.output_jacobians import (
    Cotangents,
    Gradients,
    dense,
    dense_in_chunks,
    every_output,
    factored,
    mean_output,
    one_output,
)
from glocal.curvature.vector import flatten
from glocal.tree import Params, select, stack

WAYS: dict[str, tuple[Callable[[Case], Cotangents], Callable[[Tensor, Case], Tensor]]] = {
    "every": (lambda case: every_output, lambda j, case: j),
    "one": (lambda case: one_output(case.y), lambda j, case: j[torch.arange(len(j)), case.y].unsqueeze(1)),
    "mean": (lambda case: mean_output, lambda j, case: j.mean(1, keepdim=True)),
    "score": (
        lambda case: lambda f: case.loss.output_gradient(f, case.y).unsqueeze(1),
        lambda j, case: torch.einsum(
            "ikp,ik->ip", j, case.loss.output_gradient(case.outputs(case.params), case.y)
        ).unsqueeze(1),
    ),
}


def loop(case: Case) -> Tensor:
    """∂fᵏ(x_i)/∂θ by an ordinary backward pass each, shape (n, K, P)."""
    rows = []
    for one in case.x:
        leaves = {k: p.clone().requires_grad_() for k, p in case.params.items()}
        f = case.outputs(leaves, one[None])[0]
        for k in range(CLASSES):
            slopes = torch.autograd.grad(
                f[k], list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in slopes]))
    return torch.stack(rows).view(len(case.x), CLASSES, -1)


@pytest.mark.parametrize("network", NETWORKS)
def test_dense_gradients_of_every_logit_are_those_of_single_backward_passes(network: str) -> None:
    case = make(network)
    actual = dense(case.module, case.params, case.buffers, case.x, every_output)
    assert {k: g.shape for k, g in actual.items()} == {k: (7, CLASSES, *p.shape) for k, p in case.params.items()}
    torch.testing.assert_close(vmap(vmap(flatten))(actual), loop(case), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", NETWORKS)
def test_both_forms_hold_the_gradients_along_the_given_directions(network: str, way: str) -> None:
    case = make(network)
    directions = WAYS[way][0](case)
    expected = WAYS[way][1](jacobian(case), case)  # (n, C, P)
    whole = dense(case.module, case.params, case.buffers, case.x, directions)
    torch.testing.assert_close(vmap(vmap(flatten))(whole), expected, rtol=1e-9, atol=1e-13)

    plain = affine_layers(case.module, case.x.shape[1:], case.x)
    parts = factored(case.module, case.params, case.buffers, case.x, directions, plain)
    assert not {f"{name}.weight" for name in parts.inputs} & set(parts.dense)
    v = some_vector(case.params)
    w = torch.randn(expected.shape[:2], dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for form in (parts, Gradients({}, {}, whole)):
        torch.testing.assert_close(along(form, plain, v), expected @ joined(v), rtol=1e-9, atol=1e-13)
        sums = combine(form, plain, w, case.params)
        assert list(sums) == list(case.params)
        torch.testing.assert_close(joined(sums), torch.einsum("ic,icp->p", w, expected), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("network", "left"), [("relu", 0), ("conv", 0), ("grouped conv", 0), ("conv with BatchNorm", 2)]
)
def test_only_what_no_plain_layer_holds_is_kept_dense(network: str, left: int) -> None:
    case = make(network)
    plain = affine_layers(case.module, case.x.shape[1:], case.x)
    parts = factored(case.module, case.params, case.buffers, case.x, every_output, plain)
    assert len(parts.dense) == left


def test_chunks_hold_as_many_samples_as_their_bytes_allow() -> None:
    case = make("tanh")
    bytes_a_sample = 8 * CLASSES * joined(case.params).numel()
    arguments = (case.module, case.params, case.buffers, case.x, every_output)
    sizes = [len(part["0.weight"]) for part in dense_in_chunks(*arguments, chunk_bytes=3 * bytes_a_sample + 1)]
    assert sizes == [3, 3, 1]
    assert len(list(dense_in_chunks(*arguments, chunk_bytes=1))) == 7
    torch.testing.assert_close(dense(*arguments, chunk_bytes=1), dense(*arguments), rtol=1e-10, atol=1e-14)


def test_frozen_parameters_have_no_gradients() -> None:
    case = make("relu")
    frozen = {k: case.params[k] for k in ("layers.0.weight", "layers.1.bias")}
    learnt = {k: p for k, p in case.params.items() if k not in frozen}
    plain = affine_layers(case.module, case.x.shape[1:], case.x)
    parts = factored(case.module, learnt, frozen, case.x, every_output, plain)
    whole = dense(case.module, learnt, frozen, case.x, every_output)
    w = torch.randn(7, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    sums = combine(parts, plain, w, learnt)
    assert list(sums) == list(learnt)
    torch.testing.assert_close(sums, {k: torch.tensordot(w, g, 2) for k, g in whole.items()}, rtol=1e-9, atol=1e-13)
    v = some_vector(learnt)
    expected = torch.stack([(g * v[k]).flatten(2).sum(-1) for k, g in whole.items()]).sum(0)
    torch.testing.assert_close(along(parts, plain, v), expected, rtol=1e-9, atol=1e-13)


def test_along_a_small_step_the_outputs_change_as_told() -> None:
    case = make("conv")
    plain = affine_layers(case.module, case.x.shape[1:], case.x)
    parts = factored(case.module, case.params, case.buffers, case.x, every_output, plain)
    v, step = some_vector(case.params), 1e-5
    after, before = (
        functional_call(case.module, {k: p + sign * step * v[k] for k, p in case.params.items()}, (case.x,))
        for sign in (1, -1)
    )
    torch.testing.assert_close(along(parts, plain, v), (after - before) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm", "tied weights"])
def test_mapped_over_runs_it_is_the_loop(network: str) -> None:
    runs = [make(network, seed=seed) for seed in range(3)]
    module, x = runs[0].module, runs[0].x
    plain = affine_layers(module, x.shape[1:], x)
    w = torch.randn(7, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    v = some_vector(runs[0].params)

    def one(params: Params, buffers: Params) -> tuple[Params, Gradients, Tensor, Params]:
        parts = factored(module, params, buffers, x, every_output, plain)
        whole = dense(module, params, buffers, x, every_output)
        return whole, parts, along(parts, plain, v), combine(parts, plain, w, params)

    together = vmap(one)(stack([c.params for c in runs]), stack([c.buffers for c in runs]))
    for run, case in enumerate(runs):
        alone = one(case.params, case.buffers)
        torch.testing.assert_close(select(together[0], run), alone[0], rtol=1e-9, atol=1e-13)
        for mapped, own in zip(together[1], alone[1], strict=True):
            torch.testing.assert_close(select(mapped, run), own, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(together[2][run], alone[2], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(select(together[3], run), alone[3], rtol=1e-9, atol=1e-13)
