r"""Kronecker factors of a Gauss–Newton matrix. For a layer z = [W b] a, a ending in 1, a sample's gradient is δ aᵀ:

    (1/n) Σ_i Σ_c (δ_{ic} δ_{ic}ᵀ) ⊗ (a_i a_iᵀ) ≈ G ⊗ A,   A = (1/n) Σ_i a_i a_iᵀ,   G = (1/n) Σ_i Σ_c δ_{ic} δ_{ic}ᵀ,

for the rows of [W b] one after the other; exact if one factor is the same for all samples. For a convolution a_{ip} is
the patch under the output position p, and positions count as samples do (KFAC-expand of Eschenhagen et al., 2023):

    A = 1/(n·positions) Σ_i Σ_p a_{ip} a_{ip}ᵀ,   G = (1/n) Σ_i Σ_p Σ_c δ_{ipc} δ_{ipc}ᵀ.

Other parameters (normalization, tied weights, grouped convolutions) keep their diagonal. The result is a tree,

    {"kronecker": {layer: {"A": (in, in), "G": (out, out)}}, "diagonal": {parameter: F}},

where A has one more row and column, the last, if the layer's bias is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from glocal.curvature.diagonal import diagonal
from glocal.curvature.jacobian import output_hessian_sqrt
from glocal.curvature.lanczos import eigh_or_nan
from glocal.curvature.layers import Cotangents, affine_layers, chunk_size, layer_factors, params_outside
from glocal.curvature.network import takes_network
from glocal.risk import Risk
from glocal.tree import Params

KroneckerFactors: TypeAlias = dict[str, dict[str, Any]]
MAX_CHUNK_SIZE = 500
"""Samples that are differentiated at once, unless the risk has a chunk size."""


@takes_network
def kronecker_factors(risk: Risk, cotangents: Cotangents | None = None) -> KroneckerFactors:
    """Return the Kronecker factors, and the diagonal for all other parameters, averaged over chunks of the data.

    Args:
        model, loss, data: As in `network_risk`; or one `Risk`, whose network should be in evaluation mode.
        cotangents: From outputs (n, K) and labels to the vectors u, (n, C, K); by default the root of ∇²_f ℓ.
    """
    cotangents = cotangents or output_hessian_sqrt(risk.loss)
    size = risk.chunk_size or chunk_size(risk, cotangents, MAX_CHUNK_SIZE)
    return risk.mean_over_chunks(size, lambda part: _chunk_factors(part, cotangents))


def _chunk_factors(risk: Risk, cotangents: Cotangents) -> KroneckerFactors:
    layers = {k: affine for k, affine in affine_layers(risk).items() if getattr(affine.layer, "groups", 1) == 1}
    rest = params_outside(layers, risk.params)
    inputs, deltas = layer_factors(risk, layers, cotangents)
    blocks: dict[str, dict[str, Tensor]] = {}
    for name, affine in layers.items():
        a = affine.patches(inputs[name])
        if f"{name}.bias" in risk.params:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        delta = deltas[name].movedim(2, 0).flatten(1)  # (out, n · C · positions)
        blocks[name] = {"A": a.mT @ a / a.shape[0], "G": delta @ delta.mT / len(risk)}
    one_chunk = replace(risk, chunk_size=len(risk))
    return {"kronecker": blocks, "diagonal": diagonal(one_chunk, cotangents, rest) if rest else {}}


def kronecker_product(factors: Mapping[str, Mapping[str, Any]], v: Mapping[str, Tensor]) -> Params:
    """Return the block-diagonal matrix times a parameter vector: G V A for a layer's V = [W b]."""
    result = {k: f * v[k] for k, f in factors.get("diagonal", {}).items()}
    for name, block in factors.get("kronecker", {}).items():
        weight = v[f"{name}.weight"]
        columns = weight.flatten(1)
        has_bias = block["A"].shape[-1] > columns.shape[-1]
        joint = torch.cat([columns, v[f"{name}.bias"].unsqueeze(-1)], -1) if has_bias else columns
        product = block["G"] @ joint @ block["A"]
        result[f"{name}.weight"] = product[:, : columns.shape[-1]].reshape(weight.shape)
        if has_bias:
            result[f"{name}.bias"] = product[:, -1]
    return {k: result[k] for k in v}


def nearest_kronecker(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the (A, G) that minimize ‖G₁⊗A₁ + G₂⊗A₂ − G⊗A‖_F, for (A₁, G₁) and (A₂, G₂).

    Rearranged so that every Kronecker product becomes the outer product vec(A) vec(G)ᵀ (Van Loan & Pitsianis, 1993),
    the sum has rank two and the nearest product is its first singular pair: a problem in 2 × 2 matrices of inner
    products. If the factors are positive semi-definite, so are the nearest ones; if the sum is a Kronecker product, it
    is found exactly.
    """
    lefts, rights = (torch.stack(pair).double() for pair in zip(first, second, strict=True))
    inner_left, inner_right = (torch.einsum("iab,jab->ij", f, f) for f in (lefts, rights))
    root, inverse = _sqrt_and_inverse(inner_left)
    # Σ vec(A_i) vec(G_i)ᵀ = U Vᵀ has the singular pairs of S VᵀV S, S = (UᵀU)^½: left ones U S⁻¹ w, right ones V S w.
    top = eigh_or_nan(root @ inner_right @ root)[1][..., -1]
    top = torch.where((root @ top).sum(-1, keepdim=True) < 0, -top, top)
    left = torch.einsum("i,iab->ab", inverse @ top, lefts)
    right = torch.einsum("i,iab->ab", root @ top, rights)
    norm = torch.where(left.norm() > 0, left.norm(), 1)
    balance = (torch.where(right.norm() > 0, right.norm(), 1) / norm).sqrt()  # neither factor over- nor underflows
    return (left * balance).to(first[0].dtype), (right / balance).to(first[1].dtype)


def _sqrt_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a positive semi-definite matrix, and its pseudo-inverse."""
    values, vectors = eigh_or_nan(matrix)
    positive = values > values[..., -1:] * 1e-13
    root = torch.where(positive, values, 0).sqrt()
    inverse = torch.where(positive, 1 / torch.where(positive, root, 1), 0)
    return vectors * root @ vectors.mT, vectors * inverse @ vectors.mT
