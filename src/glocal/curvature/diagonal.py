r"""The diagonal of a Gauss–Newton matrix,

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix; with one
u = ∇_f ℓ at the data's label it is that of the empirical Fisher matrix.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}². For a convolution it is the product of
two matrices, Σ_p δ_p a_pᵀ over positions p, where a_p is the patch under p.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce

import torch
from torch import Tensor, nn

from glocal.curvature.jacobian import MAX_CHUNK_BYTES, dense_jacobian_chunks, output_hessian_sqrt
from glocal.curvature.layers import Cotangents, affine_layers, chunk_size, layer_factors, params_outside
from glocal.curvature.network import takes_network
from glocal.risk import Risk
from glocal.tree import Params, map_tree


@takes_network
def diagonal(risk: Risk, cotangents: Cotangents | None = None, wrt: Mapping[str, Tensor] | None = None) -> Params:
    """Return F, the diagonal of the Gauss–Newton matrix or of a Fisher matrix, as a dict shaped as θ.

    Args:
        model, loss, data: As in `network_risk`; or one `Risk`, whose network should be in evaluation mode.
        cotangents: From outputs (n, K) and labels to the vectors u, (n, C, K); by default the root of ∇²_f ℓ.
        wrt: The parameters whose F is computed, by default all.
    """
    cotangents = cotangents or output_hessian_sqrt(risk.loss)
    wrt = risk.params if wrt is None else wrt
    size = risk.chunk_size or chunk_size(risk, cotangents, max_chunk_size(risk.y.device))
    return risk.mean_over_chunks(size, lambda part: _chunk_diagonal(part, cotangents, wrt))


def max_chunk_size(device: torch.device) -> int:
    """Return how many samples are differentiated at once: few on a CPU, whose cache is small."""
    return 500 if device.type == "cpu" else 5_000


def _chunk_diagonal(risk: Risk, cotangents: Cotangents, wrt: Mapping[str, Tensor]) -> Params:
    layers = {name: affine for name, affine in affine_layers(risk).items() if _has_closed_form(affine.layer)}
    layers = {name: affine for name, affine in layers.items() if {f"{name}.weight", f"{name}.bias"} & wrt.keys()}
    inputs, deltas = layer_factors(risk, layers, cotangents)
    sums: Params = {}
    for name, affine in layers.items():
        if isinstance(affine.layer, nn.Linear):
            squares = deltas[name].square().sum(1)
            weight, bias = squares.mT @ inputs[name].square(), squares.sum(0)
        else:
            assert isinstance(affine.layer, nn.Conv2d)
            weight, bias = _convolution(affine.layer, inputs[name], deltas[name])
        sums |= {f"{name}.weight": weight, f"{name}.bias": bias}
    if rest := params_outside(layers, wrt):  # from explicit gradients, of a bounded number of samples at a time
        parts = (map_tree(_sum_of_squares, part) for part in dense_jacobian_chunks(risk, cotangents, rest))
        sums |= reduce(partial(map_tree, torch.add), parts)
    return {k: sums[k] / len(risk) for k in wrt}


def _has_closed_form(layer: nn.Module) -> bool:
    """Whether the layer is linear, or a convolution whose patches `unfold` returns."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)


def _convolution(layer: nn.Conv2d, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_i Σ_c (Σ_p δ_{icp} a_{ip}ᵀ)² for inputs a (n, ...) and δ (n, C, width, ...), and the bias's."""
    delta = delta.flatten(3)
    geometry = layer.kernel_size, layer.dilation, layer.padding, layer.stride
    sample_bytes = delta.shape[1] * layer.weight.numel() * a.element_size()
    size = max(1, MAX_CHUNK_BYTES // max(1, sample_bytes))
    weight = torch.zeros_like(layer.weight).flatten(1)
    for inputs, deltas in zip(a.split(size), delta.split(size), strict=True):
        patches = nn.functional.unfold(inputs, *geometry).unsqueeze(1)  # type: ignore[arg-type]
        weight = weight + _sum_of_squares(deltas @ patches.mT)
    return weight.view(layer.weight.shape), _sum_of_squares(delta.sum(-1))


def _sum_of_squares(gradients: Tensor) -> Tensor:
    """Return Σ_i Σ_c g_{ic}²."""
    return gradients.flatten(0, 1).square().sum(0)
