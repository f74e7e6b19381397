"""Dense output gradients against one backward pass for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import CLASSES, NETWORKS, jacobian, joined, make
from torch import Tensor
from torch.func import functional_call, vmap

from glocal.curvature.jacobian import (
    dense_jacobian,
    dense_jacobian_chunks,
    every_output,
    label_output,
    mean_output,
    output_hessian_sqrt,
)
from glocal.risk import Risk
from glocal.tree import Params, select, stack, to_vector

EXPECTED: dict[str, tuple[Callable[[Risk], Callable[[Tensor, Tensor], Tensor]], Callable[[Tensor, Risk], Tensor]]] = {
    "every": (lambda risk: every_output, lambda j, risk: j),
    "label": (lambda risk: label_output, lambda j, risk: j[torch.arange(len(j)), risk.y].unsqueeze(1)),
    "mean": (lambda risk: mean_output, lambda j, risk: j.mean(1, keepdim=True)),
    "hessian": (
        lambda risk: output_hessian_sqrt(risk.loss),
        lambda j, risk: risk.loss.output_hessian_sqrt(risk.outputs()) @ j,
    ),
    "loss": (
        lambda risk: lambda f, y: risk.loss.output_gradient(f, y).unsqueeze(1),
        lambda j, risk: risk.loss.output_gradient(risk.outputs(), risk.y).unsqueeze(1) @ j,
    ),
}


def loop(risk: Risk) -> Tensor:
    """∂fᵏ(x_i)/∂θ by one backward pass each, (n, K, P)."""
    rows = []
    for x in risk.x:
        leaves = {k: p.clone().requires_grad_() for k, p in risk.params.items()}
        f = functional_call(risk.module, {**leaves, **risk.buffers}, (x[None],))[0]
        for k in range(CLASSES):
            grads = torch.autograd.grad(
                f[k], list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).view(len(risk.x), CLASSES, -1)


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_every_logit_are_those_of_single_backward_passes(network: str) -> None:
    risk = make(network)
    actual = dense_jacobian(risk, every_output)
    assert {k: g.shape for k, g in actual.items()} == {k: (7, CLASSES, *p.shape) for k, p in risk.params.items()}
    torch.testing.assert_close(vmap(vmap(to_vector))(actual), loop(risk), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("network", NETWORKS)
def test_cotangents_select_the_gradients(network: str, kind: str) -> None:
    risk = make(network)
    cotangents, expected = EXPECTED[kind]
    actual = vmap(vmap(to_vector))(dense_jacobian(risk, cotangents(risk)))
    torch.testing.assert_close(actual, expected(jacobian(risk), risk), rtol=1e-9, atol=1e-13)


def test_chunks_hold_as_many_samples_as_their_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    risk = make("tanh")
    at_once = dense_jacobian(risk, every_output)
    sample_bytes = 8 * CLASSES * joined(risk.params).numel()
    monkeypatch.setattr(sys.modules[dense_jacobian.__module__], "MAX_CHUNK_BYTES", 3 * sample_bytes + 1)
    assert [len(part["0.weight"]) for part in dense_jacobian_chunks(risk, every_output)] == [3, 3, 1]
    monkeypatch.setattr(sys.modules[dense_jacobian.__module__], "MAX_CHUNK_BYTES", 1)
    assert len(list(dense_jacobian_chunks(risk, every_output))) == 7
    torch.testing.assert_close(dense_jacobian(risk, every_output), at_once, rtol=1e-10, atol=1e-14)


def test_frozen_parameters_have_no_gradients() -> None:
    risk = make("relu")
    frozen = {k: risk.params[k] for k in ("layers.0.weight", "layers.1.bias")}
    trained = {k: p for k, p in risk.params.items() if k not in frozen}
    part = dense_jacobian(replace(risk, params=trained, buffers=frozen), every_output)
    assert list(part) == list(trained)
    everything = dense_jacobian(risk, every_output)
    torch.testing.assert_close(part, {k: everything[k] for k in trained}, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm", "tied weights"])
def test_batched_over_runs_it_is_the_loop(network: str) -> None:
    runs = [make(network, seed=seed) for seed in range(3)]

    def one(params: Params, buffers: Params) -> Params:
        return dense_jacobian(replace(runs[0], params=params, buffers=buffers), every_output)

    together = vmap(one)(stack([r.params for r in runs]), stack([r.buffers for r in runs]))
    for i, risk in enumerate(runs):
        torch.testing.assert_close(select(together, i), dense_jacobian(risk, every_output), rtol=1e-9, atol=1e-13)
