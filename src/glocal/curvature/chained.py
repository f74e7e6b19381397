r"""Hessian products of a chain of linear layers with rectifiers between them, written out (Pearlmutter, 1994).

Of z_l = W_l a_{l−1} + b_l, a_l = [z_l > 0] z_l, f = z_L, and the slopes g_l = ∂L/∂z_l, the derivatives along v are

    ż_l = V_l a_{l−1} + v_l + W_l ȧ_{l−1},          ȧ_l = [z_l > 0] ż_l,
    ġ_L = ∇²_f L ż_L,                               ġ_{l−1} = [z_{l−1} > 0] (W_lᵀ ġ_l + V_lᵀ g_l),
    (H v)_{W_l} = ġ_l a_{l−1}ᵀ + g_l ȧ_{l−1}ᵀ,      (H v)_{b_l} = Σ ġ_l, over the samples,

with V_l and v_l what v has in the place of W_l and b_l. Autograd makes the same products of matrices. Here two of them
that are added up are one pass. `alive` makes them smaller still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from glocal.curvature.layers import Params
from glocal.networks.mlp import MLP, Linear
from glocal.networks.vmap_utils import is_batched

if TYPE_CHECKING:
    from glocal.losses import Loss

EVERYWHERE = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
"""Hooks of all modules."""


class Link(NamedTuple):
    """What products need of a layer; features by samples."""

    weight: str
    bias: str
    w: Tensor  # W_l
    a: Tensor  # a_{l−1}
    open: Tensor  # [z_l > 0]


def links(module: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> tuple[str, ...]:
    """The layers' names in their order; none where the network may be something else, or not all of it is learnt."""
    names: list[str] = []
    if type(module) is MLP:
        names = [f"layers.{i}" for i in range(len(module.layers))]
    elif type(module) is nn.Sequential:
        names = _alternating(module, x)
    plain = all(type(module.get_submodule(name)) in (nn.Linear, Linear) for name in names)
    own = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    fits = x.numel() > 0 and own == set(params) and all(p.dtype == x.dtype for p in params.values())
    changed = any(map(_changed, module.modules())) or torch.is_autocast_enabled(x.device.type)
    return tuple(names) if plain and fits and not changed and not any(EVERYWHERE) else ()


def _changed(part: nn.Module) -> bool:
    """Whether a module does something beside what its class does."""
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return any(hooks) or "forward" in vars(part)


def _alternating(module: nn.Sequential, x: Tensor) -> list[str]:
    """The first, third, … parts of a sequence, if there are rectifiers between them and nothing else."""
    parts = [(name, part) for name, part in module._modules.items() if type(part) is not nn.Identity]
    head = parts[0][1] if parts else None
    flat = type(head) is nn.Flatten and (head.start_dim, head.end_dim) == (1, -1)
    parts = parts[1:] if flat else parts
    rectified = len(parts) % 2 == 1 and all(type(part) is nn.ReLU for _, part in parts[1::2])
    return [name for name, _ in parts[::2]] if rectified and (flat or x.dim() == 2) else []


def hessian_product(
    names: Sequence[str], params: Mapping[str, Tensor], x: Tensor, y: Tensor, loss: Loss, n: int
) -> Callable[[Params], Params]:
    """v ↦ ∇²L v for L = (1/n) Σ ℓ over these samples."""
    chain, f = _forward(names, params, x.flatten(1))
    loss.per_sample(f, y)  # which refuses labels that are none
    bend, slopes = loss.output_hvp(f, y), _slopes(chain, _by_features(loss.output_gradient(f, y) / n))

    def product(v: Params) -> Params:
        v = {k: t.to(x.dtype) for k, t in v.items()}
        dots: list[Tensor] = []
        z = _affine(v, chain[0])
        for before, link in pairwise(chain):
            dots.append(_gated(z, before.open))
            z = _add(_affine(v, link), link.w, dots[-1])
        found: Params = {}
        g = _by_features(bend(z.mT) / n)
        for i in reversed(range(len(chain))):
            link = chain[i]
            found[link.weight], found[link.bias] = g @ link.a.mT, g.sum(1)
            if i > 0:
                found[link.weight] = _add(found[link.weight], slopes[i], dots[i - 1].mT)
                g = _gated(_add(link.w.mT @ g, v[link.weight].mT, slopes[i]), chain[i - 1].open)
        return {k: found[k] for k in v}

    return product


def _by_features(rows: Tensor) -> Tensor:
    """Features by samples, in that order in memory: products with a transposed one take twice as long."""
    return rows.mT.contiguous()


def _affine(params: Mapping[str, Tensor], link: Link) -> Tensor:
    """What a layer with these weights and biases makes of its inputs."""
    return torch.addmm(params[link.bias].unsqueeze(1), params[link.weight], link.a)


def _add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, in the total's place where torch can."""
    return torch.addmm(total, a, b) if is_batched(total, a, b) else total.addmm_(a, b)


def _gated(z: Tensor, open: Tensor) -> Tensor:
    """Their product, likewise."""
    return z * open if is_batched(z, open) else z.mul_(open)


def _forward(names: Sequence[str], params: Mapping[str, Tensor], x: Tensor) -> tuple[list[Link], Tensor]:
    """The layers, and the outputs (n, K)."""
    chain: list[Link] = []
    a = z = x.mT
    for name in names:
        link = Link(f"{name}.weight", f"{name}.bias", params[f"{name}.weight"], a, a)
        z = _affine(params, link)
        chain.append(link._replace(open=(z > 0).to(z.dtype)))
        a = z * chain[-1].open
    return chain, z.mT


def _slopes(chain: Sequence[Link], last: Tensor) -> list[Tensor]:
    """g_1, …, g_L."""
    found = [last]
    for before, link in zip(chain[-2::-1], chain[:0:-1], strict=True):
        found.append((link.w.mT @ found[-1]) * before.open)
    return found[::-1]
