"""The products J v and Jᵀ w with factored output gradients, layer by layer as their definition says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import vjp

from glocal.curvature.layers import AffineLayer, Params
from glocal.curvature.output_jacobians import Gradients


def along(gradients: Gradients, plain: Mapping[str, AffineLayer], v: Mapping[str, Tensor]) -> Tensor:
    """⟨g_{ic}, v⟩ for a parameter vector v: how the outputs change along it, shape (n, C)."""
    parts = [g.reshape(*g.shape[:2], -1) @ v[k].reshape(-1) for k, g in gradients.dense.items()]
    for name, a in gradients.inputs.items():
        change = plain[name].apply(a, v[f"{name}.weight"], v.get(f"{name}.bias"))
        parts.append((gradients.deltas[name] * change.unsqueeze(1)).flatten(2).sum(-1))
    return torch.stack(parts).sum(0)


def combine(gradients: Gradients, plain: Mapping[str, AffineLayer], w: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Σ_{ic} w_{ic} g_{ic} for weights w (n, C): a parameter vector with the names and shapes of `like`."""
    result = {k: torch.tensordot(w, g, 2) for k, g in gradients.dense.items()}
    for name, a in gradients.inputs.items():
        layer, delta = plain[name], gradients.deltas[name]
        own = {kind: like[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in like}
        _, pull = vjp(lambda own, layer=layer, a=a: layer.apply(a, **own), own)  # type: ignore[misc]
        (sums,) = pull((w.reshape(*w.shape, *(1,) * (delta.dim() - 2)) * delta).sum(1))
        result |= {f"{name}.{kind}": g for kind, g in sums.items()}
    return {k: result[k] for k in like}
