r"""The diagonal of a Gauss–Newton matrix, sample by sample:

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for given vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix;
with one u = ∇_f ℓ at the data's label it is the empirical one.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}². For a convolution it is the product of
two matrices, Σ_p δ_p a_pᵀ over positions p, a_p the patch that p sees.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from glocal.curvature.layers import AffineLayer, Params, affine_layers, inputs_like, run
from glocal.curvature.output_jacobians import Cotangents, dense_in_chunks


def diagonal(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    wanted: Mapping[str, Tensor] | None = None,
) -> Params:
    """F on the batch `x`. `directions` turns the outputs (n, K) into the vectors u, shape (n, C, K).

    `wanted` are the parameters whose F is asked for, all of them if not said. `module` should be in evaluation mode: a
    sample's gradient through batch statistics is not its own.
    """
    wanted = params if wanted is None else wanted
    plain = affine_layers(module, x.shape[1:], inputs_like(x, params))
    known = {
        name: p
        for name, p in plain.items()
        if (isinstance(p.layer, nn.Linear) or _by_patches(p.layer)) and {f"{name}.weight", f"{name}.bias"} & set(wanted)
    }
    covered = {f"{name}.{kind}" for name in known for kind in ("weight", "bias")}
    rest = {k: p for k, p in wanted.items() if k not in covered}
    result = _by_layers(module, params, buffers, x, directions, known) if known else {}
    result |= _per_sample(module, params, buffers, x, directions, rest) if rest else {}
    return {k: result[k] for k in wanted}


def _by_layers(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    plain: Mapping[str, AffineLayer],
) -> Params:
    done = run(module, params, buffers, x, plain)
    deltas = done.pull_each(directions(done.outputs))  # each (n, C, ...)
    n = x.shape[0]
    result: Params = {}
    for name, p in plain.items():
        a, delta = done.inputs[name], deltas[name]
        if isinstance(p.layer, nn.Linear):
            squares = delta.square().sum(1)
            weight, bias = squares.mT @ a.square(), squares.sum(0)
        else:
            assert isinstance(p.layer, nn.Conv2d)
            weight, bias = _convolution(p.layer, a, delta)
        result |= {f"{name}.weight": weight / n, f"{name}.bias": bias / n}
    return result


def _by_patches(layer: nn.Module) -> bool:
    """Whether a convolution sees the patches that `unfold` makes."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _convolution(layer: nn.Conv2d, a: Tensor, delta: Tensor, chunk_bytes: int = 1 << 28) -> tuple[Tensor, Tensor]:
    """Σ_i Σ_c (Σ_p δ_{icp} a_{ip}ᵀ)² for inputs a (n, ...) and δ (n, C, width, ...), and the same for the bias."""
    delta = delta.flatten(3)
    how = layer.kernel_size, layer.dilation, layer.padding, layer.stride
    bytes_a_sample = delta.shape[1] * layer.weight.numel() * a.element_size()
    chunk = max(1, chunk_bytes // max(1, bytes_a_sample))
    weight: Tensor | float = 0.0
    for some, slopes in zip(a.split(chunk), delta.split(chunk), strict=True):
        patches = nn.functional.unfold(some, *how).unsqueeze(1)  # type: ignore[arg-type]
        weight = weight + _squares(slopes @ patches.mT)
    assert isinstance(weight, Tensor)
    return weight.view(layer.weight.shape), _squares(delta.sum(-1))


def _per_sample(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
    wanted: Params,
) -> Params:
    """The same sum by explicit per-sample gradients of the `wanted` parameters, a bounded number of samples at once."""
    total = {k: torch.zeros_like(p) for k, p in wanted.items()}
    for gradients in dense_in_chunks(module, params, buffers, x, directions, wanted):
        total = {k: total[k] + _squares(g) for k, g in gradients.items()}
    return {k: s / x.shape[0] for k, s in total.items()}


def _squares(gradients: Tensor) -> Tensor:
    """Σ_i Σ_c g_{ic}², over both in one pass."""
    return gradients.flatten(0, 1).square().sum(0)
