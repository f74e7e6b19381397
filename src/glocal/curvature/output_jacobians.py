r"""Gradients of a network's outputs, sample by sample: g_{ic} = J_iᵀ u_{ic},   J_i = ∂f_θ(x_i)/∂θ,

for vectors u_{ic} in output space: every logit, one logit a sample, their mean, or the columns of a loss's Hessian.
`directions` turns the outputs (n, K) into the vectors u, shape (n, C, K). Two forms:

    dense       every parameter with two leading axes, (n, C, ...);
    factored    for a plain layer its input a_i and δ_{ic} = ∂⟨u_{ic}, f⟩/∂z, of which g is made (`layers`); dense for
                the other parameters. A linear layer from 784 to 100 needs 884 numbers instead of 78,500.

`jacobian` multiplies with the factored form as it is.
`module` should be in evaluation mode: a sample's gradient through batch statistics is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from glocal.curvature.differentiable import differentiable
from glocal.curvature.layers import AffineLayer, Params, run

Cotangents: TypeAlias = Callable[[Tensor], Tensor]


def every_output(outputs: Tensor) -> Tensor:
    """u_{ic} = e_c: the K gradients of a sample's logits."""
    n, k = outputs.shape
    return torch.eye(k, dtype=outputs.dtype, device=outputs.device).expand(n, k, k)


def one_output(which: Tensor) -> Cotangents:
    """u_i = e_{which_i}: one logit a sample, such as the true class's."""

    def directions(outputs: Tensor) -> Tensor:
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        return (which.unsqueeze(-1) == classes).to(outputs.dtype).unsqueeze(1)

    return directions


def mean_output(outputs: Tensor) -> Tensor:
    """u_i = (1/K) Σ_k e_k: the mean of a sample's logits."""
    return torch.full_like(outputs, 1 / outputs.shape[-1]).unsqueeze(1)


def dense(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    wanted: Mapping[str, Tensor] | None = None,
    chunk_bytes: int = 1 << 28,
) -> Params:
    """g with respect to the `wanted` parameters (all of them if not said), each (n, C, ...)."""
    parts = list(dense_in_chunks(module, params, buffers, x, directions, wanted, chunk_bytes))
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def dense_in_chunks(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    wanted: Mapping[str, Tensor] | None = None,
    chunk_bytes: int = 1 << 28,
) -> Iterator[Params]:
    """The same a few samples at a time, in order, as many as make gradients of `chunk_bytes`. Samples of networks that
    cannot be mapped, such as recurrent ones, go one by one."""
    wanted = dict(params if wanted is None else wanted)
    u = directions(functional_call(module, {**params, **buffers}, (x,)))
    mapped = True

    def one(x: Tensor, u: Tensor) -> Params:
        def outputs(wanted: Params) -> Tensor:
            return functional_call(module, {**params, **buffers, **wanted}, (x[None],))[0]

        _, pull = vjp(outputs, wanted)  # type: ignore[misc]
        return vmap(pull)(u)[0]

    bytes_a_sample = u.shape[1] * sum(p.numel() * p.element_size() for p in wanted.values())
    chunk = max(1, chunk_bytes // max(1, bytes_a_sample))
    for a, b in zip(x.split(chunk), u.split(chunk), strict=True):
        made: Params | None = None
        with differentiable(module):
            if mapped:
                try:
                    made = vmap(one)(a, b)
                except RuntimeError:
                    mapped = False
            if made is None:
                each = [one(*sample) for sample in zip(a, b, strict=True)]
                made = {k: torch.stack([part[k] for part in each]) for k in wanted}
        yield made


class Gradients(NamedTuple):
    """Output gradients of n samples, C each: factors where a layer is plain, tensors elsewhere."""

    inputs: Params  # plain layer -> a (n, ...)
    deltas: Params  # plain layer -> δ (n, C, ...)
    dense: Params  # other parameter -> g (n, C, ...)


def factored(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    plain: Mapping[str, AffineLayer],
) -> Gradients:
    """g with factors for the given plain layers (`affine_layers`, or some of them)."""
    learnt = {name: p for name, p in plain.items() if f"{name}.weight" in params}
    covered = {f"{name}.{kind}" for name in learnt for kind in ("weight", "bias")}
    rest = {k: p for k, p in params.items() if k not in covered}
    inputs: Params = {}
    deltas: Params = {}
    if learnt:
        done = run(module, params, buffers, x, learnt)
        inputs, deltas = done.inputs, done.pull_each(directions(done.outputs))
    return Gradients(inputs, deltas, dense(module, params, buffers, x, directions, rest) if rest else {})
