r"""The diagonal of a Gauss–Newton matrix, sample by sample:

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for given vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix;
with one u = ∇_f ℓ at the data's label it is the empirical one.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}².
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from glocal.curvature.layers import Params, Plain, plain_layers, run
from glocal.curvature.outputs import Directions, dense_in_chunks


def diagonal(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Directions,
    wanted: Mapping[str, Tensor] | None = None,
) -> Params:
    """F on the batch `x`. `directions` turns the outputs (n, K) into the vectors u, shape (n, C, K).

    `wanted` are the parameters whose F is asked for, all of them if not said. `module` should be in evaluation mode: a
    sample's gradient through batch statistics is not its own.
    """
    wanted = params if wanted is None else wanted
    plain = plain_layers(module, x.shape[1:], next(iter(params.values())))
    linear = {
        name: p
        for name, p in plain.items()
        if isinstance(p.layer, nn.Linear) and {f"{name}.weight", f"{name}.bias"} & set(wanted)
    }
    covered = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    rest = {k: p for k, p in wanted.items() if k not in covered}
    result = _linear(module, params, buffers, x, directions, linear) if linear else {}
    result |= _per_sample(module, params, buffers, x, directions, rest) if rest else {}
    return {k: result[k] for k in wanted}


def _linear(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Directions,
    plain: Mapping[str, Plain],
) -> Params:
    done = run(module, params, buffers, x, plain)
    deltas = done.pull_each(directions(done.outputs))  # each (n, C, out)
    n = x.shape[0]
    result: Params = {}
    for name in plain:
        squares = deltas[name].square().sum(1)
        result[f"{name}.weight"] = squares.mT @ done.inputs[name].square() / n
        result[f"{name}.bias"] = squares.sum(0) / n
    return result


def _per_sample(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Directions,
    wanted: Params,
) -> Params:
    """The same sum by explicit per-sample gradients of the `wanted` parameters, a bounded number of samples at once."""
    total = {k: torch.zeros_like(p) for k, p in wanted.items()}
    for gradients in dense_in_chunks(module, params, buffers, x, directions, wanted):
        total = {k: total[k] + g.square().sum(1).sum(0) for k, g in gradients.items()}
    return {k: s / x.shape[0] for k, s in total.items()}
