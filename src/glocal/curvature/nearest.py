r"""The Kronecker product nearest to a sum of two: min ‖ G₁⊗A₁ + G₂⊗A₂ − G⊗A ‖_F.

Rearranged so that every Kronecker product becomes the outer product vec(A) vec(G)ᵀ (Van Loan & Pitsianis, 1993), the
sum has rank two and the nearest product is its first singular pair: a problem in 2 × 2 matrices of inner products. If
the factors are positive semi-definite, so are the nearest ones; if the sum is a Kronecker product, it is found exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glocal.curvature.symmetric import eigh


def nearest_kronecker(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(A, G) for the factors (A₁, G₁) and (A₂, G₂)."""
    lefts, rights = (torch.stack(pair).double() for pair in zip(a, b, strict=True))
    inner_left, inner_right = (torch.einsum("iab,jab->ij", f, f) for f in (lefts, rights))
    root, inverse = _roots(inner_left)
    # Σ vec(A_i) vec(G_i)ᵀ = U Vᵀ has the singular pairs of S VᵀV S, S = (UᵀU)^½: left ones U S⁻¹ w, right ones V S w.
    top = eigh(root @ inner_right @ root)[1][..., -1]
    top = torch.where((root @ top).sum(-1, keepdim=True) < 0, -top, top)
    left = torch.einsum("i,iab->ab", inverse @ top, lefts)
    right = torch.einsum("i,iab->ab", root @ top, rights)
    size = torch.where(left.norm() > 0, left.norm(), 1)
    balance = (torch.where(right.norm() > 0, right.norm(), 1) / size).sqrt()  # neither factor over- nor underflows
    return (left * balance).to(a[0].dtype), (right / balance).to(a[1].dtype)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a positive semi-definite matrix, and its pseudo-inverse."""
    values, vectors = eigh(matrix)
    solid = values > values[..., -1:] * 1e-13
    root = torch.where(solid, values, 0).sqrt()
    inverse = torch.where(solid, 1 / torch.where(solid, root, 1), 0)
    return vectors * root @ vectors.mT, vectors * inverse @ vectors.mT
