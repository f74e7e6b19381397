r"""The diagonal of a Gauss–Newton matrix, sample by sample:

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for given vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix;
with one u = ∇_f ℓ at the data's label it is the empirical one.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}².
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from glocal.curvature.layers import Params, Plain, plain_layers, run


def diagonal(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
) -> Params:
    """F on the batch `x`. `directions` turns the outputs (n, K) into the vectors u, shape (n, C, K).

    `module` should be in evaluation mode: a sample's gradient through batch statistics is not its own.
    """
    plain = plain_layers(module, x.shape[1:], next(iter(params.values())))
    linear = {name: p for name, p in plain.items() if isinstance(p.layer, nn.Linear)}
    covered = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    rest = {k: p for k, p in params.items() if k not in covered}
    result = _linear(module, params, buffers, x, directions, linear) if linear else {}
    result |= _per_sample(module, params, buffers, x, directions, rest) if rest else {}
    return {k: result[k] for k in params}


def _linear(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
    plain: Mapping[str, Plain],
) -> Params:
    done = run(module, params, buffers, x, plain)
    deltas = vmap(done.pull)(directions(done.outputs).transpose(0, 1))  # over c; each (C, n, out)
    n = x.shape[0]
    result: Params = {}
    for name in plain:
        squares = deltas[name].square().sum(0)
        result[f"{name}.weight"] = squares.mT @ done.inputs[name].square() / n
        result[f"{name}.bias"] = squares.sum(0) / n
    return result


def _per_sample(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
    wanted: Params,
    chunk_bytes: int = 1 << 28,
) -> Params:
    """The same sum by explicit per-sample gradients of the `wanted` parameters, a bounded number of samples at once."""
    u = directions(functional_call(module, {**params, **buffers}, (x,)))

    def one(x: Tensor, u: Tensor) -> Params:
        def outputs(wanted: Params) -> Tensor:
            return functional_call(module, {**params, **buffers, **wanted}, (x[None],))[0]

        _, pull = vjp(outputs, wanted)  # type: ignore[misc]
        (gradients,) = vmap(pull)(u)
        return {k: g.square().sum(0) for k, g in gradients.items()}

    bytes_a_sample = u.shape[1] * sum(p.numel() * p.element_size() for p in wanted.values())
    chunk = max(1, chunk_bytes // max(1, bytes_a_sample))
    total = {k: torch.zeros_like(p) for k, p in wanted.items()}
    for a, b in zip(x.split(chunk), u.split(chunk), strict=True):
        total = {k: total[k] + s.sum(0) for k, s in vmap(one)(a, b).items()}
    return {k: s / x.shape[0] for k, s in total.items()}
