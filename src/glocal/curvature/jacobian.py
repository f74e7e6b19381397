r"""A Jacobian J of output gradients, many rows of it, never written down.

A row is the gradient of u·f_θ(x) for an input x and a vector u in output space, several u for every input (`outputs`).
In a layer z = W ∗ a + b it is made of two factors, a and δ (`layers`), so that

    J v = Σ_layers ⟨δ, v_W ∗ a + v_b⟩,    Jᵀ c = the layers' gradients with c δ in δ's place:

every layer applied to its stored inputs, there and back. A product with a convolution's gradient as it is takes a
multiplication a number, and by its factors one for every position: where it is little longer than they are it is kept
so, and those of parameters outside plain layers (BatchNorm's, tied weights) always.

Rows are a dict of tensors, n inputs with C rows each:

    inputs      linear layer -> a, (n, p)
    deltas      δ of all these layers, one below the other, (D, C, n)
    convolved   inputs: convolution -> a, (n, ...); deltas: convolution -> δ, (n, C, ...)
    dense       the gradients in the remaining parameters side by side, (n, C, R)

Layers and parameters come in the order of their names. Inputs are the last axis of linear layers' δ, because v_W a is a
row of numbers for every output of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal.curvature import conv_jacobian
from glocal.curvature.conv_jacobian import IMAGES
from glocal.curvature.factored_contraction import Answer, paired, weighted
from glocal.curvature.layers import AffineLayer, Params, affine_layers, inputs_like
from glocal.curvature.output_jacobians import Cotangents, factored
from glocal.tree import map_tree

FactoredJacobian: TypeAlias = dict[str, Any]
Back: TypeAlias = Callable[[Tensor], Params]
LONGER = 3
"""How many times as long as its factors a convolution's gradient may be to be kept as it is."""


def jacobian(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor, directions: Cotangents
) -> FactoredJacobian:
    """The rows for inputs x (n, ...) at θ = `params`; `directions` turns the outputs (n, K) into u, (n, C, K)."""
    plain = affine_layers(module, x.shape[1:], inputs_like(x, params))
    outputs = functional_call(module, {**params, **buffers}, (x,))
    each = directions(outputs).shape[1]
    kept = {name: p for name, p in plain.items() if _as_factors(name, p, params, each)}
    found = factored(module, params, buffers, x, directions, kept)
    linear = [name for name in sorted(found.inputs) if isinstance(plain[name].layer, nn.Linear)]
    others = [name for name in sorted(found.inputs) if name not in linear]
    rows: FactoredJacobian = {}
    if linear:
        rows["inputs"] = {name: found.inputs[name] for name in linear}
        rows["deltas"] = torch.cat([found.deltas[name].permute(2, 1, 0) for name in linear])
    if others:
        inputs, deltas = ({name: held[name] for name in others} for held in (found.inputs, found.deltas))
        rows[IMAGES] = {"inputs": inputs, "deltas": deltas}
    if found.dense:
        dense = [found.dense[k] for k in sorted(found.dense)]
        rows["dense"] = torch.cat([g.reshape(*g.shape[:2], -1) for g in dense], 2)
    return rows


def jvp_and_vjp(module: nn.Module, rows: FactoredJacobian, vector: Mapping[str, Tensor]) -> tuple[Tensor, Back]:
    """J v, shape (n, C), and the way back: c ↦ Jᵀ c, by name."""
    names = sorted(rows.get("inputs", {}))
    given = [_answer(k, rows["inputs"][k], vector) for k in names]
    widths = [z.shape[0] for z, _ in given]
    parts: list[Tensor] = []
    from_images: Back | None = None
    if names:
        deltas = rows["deltas"]
        parts.append(paired(deltas, given))
    if IMAGES in rows:
        part, from_images = conv_jacobian.jvp_and_vjp(module, rows[IMAGES], vector)
        parts.append(part)
    rest: list[str] = []
    if "dense" in rows:
        convolutions = rows.get(IMAGES, {}).get("inputs", {})
        factored = {key for name in (*names, *convolutions) for key in _keys(name)}
        rest = [k for k in sorted(vector) if k not in factored]
        numbers = torch.cat([vector[k].reshape(-1) for k in rest])
        parts.append(times_vector(rows["dense"].flatten(0, 1), numbers).view(rows["dense"].shape[:2]))

    def back(c: Tensor) -> Params:
        found: Params = {}
        if names:
            products, sums = weighted(deltas, c)
            totals = [None] * len(names) if sums is None else sums.split(widths)
            for name, part, total in zip(names, products.split(widths), totals, strict=True):
                weight, bias = _keys(name)
                found[weight] = product(part, rows["inputs"][name])
                if bias in vector:
                    found[bias] = part.sum(1) if total is None else total
        if from_images is not None:
            found |= from_images(c)
        if rest:
            dense = times_vector(rows["dense"].flatten(0, 1).mT, c.reshape(-1))
            pieces = dense.split([vector[k].numel() for k in rest])
            found |= {k: piece.view(vector[k].shape) for k, piece in zip(rest, pieces, strict=True)}
        return found

    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, back


def gram(module: nn.Module, rows: FactoredJacobian, chunk_bytes: int = 1 << 28) -> Tensor:
    """J Jᵀ in float64, (nC, nC). For linear layers the product over rows is a product of products: (a·a' + 1) δ·δ'."""
    total: Tensor | float = 0.0
    begin = 0
    for name, a in sorted(rows.get("inputs", {}).items()):
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        delta = rows["deltas"][begin : begin + layer.out_features].permute(2, 1, 0).double()
        begin += layer.out_features
        inner = product(a.double(), a.double().mT) + (layer.bias is not None)
        flat = delta.flatten(0, 1)
        total = total + product(flat, flat.mT) * _repeated(inner, delta.shape[1])
    if IMAGES in rows:
        for j in conv_jacobian.written_down(module, rows[IMAGES], chunk_bytes):
            total = total + product(j, j.mT)
    if "dense" in rows:
        dense = rows["dense"].flatten(0, 1)
        for part in dense.split(max(1, chunk_bytes // (8 * max(1, dense.shape[0]))), 1):
            total = total + product(part.double(), part.double().mT)
    assert isinstance(total, Tensor)
    return total


def shape(rows: FactoredJacobian) -> tuple[int, int]:
    """n and C: how many inputs, and how many gradients of each."""
    held = _held(rows)
    return held.shape[0], held.shape[1]


def normalised(module: nn.Module, rows: FactoredJacobian) -> tuple[FactoredJacobian, Tensor]:
    """The gradients scaled to length 1, and their lengths, (n, C). A gradient of length 0 stays what it is."""
    lengths = gram(module, rows).diagonal().sqrt().view(shape(rows)).to(_held(rows).dtype)
    scale = torch.where(lengths > 0, lengths, 1)
    scales = {"deltas": scale.mT, "dense": scale.unsqueeze(-1)}
    found = {k: v / scales[k] if k in scales else v for k, v in rows.items()}
    if IMAGES in rows:
        found[IMAGES] = conv_jacobian.divided(rows[IMAGES], scale)
    return found, lengths


def none_of(rows: FactoredJacobian) -> FactoredJacobian:
    """No gradients, of the form that the given ones have."""
    return {
        k: map_tree(lambda t: t[:0], v) if isinstance(v, Mapping) else v.narrow(_axis(k), 0, 0) for k, v in rows.items()
    }


def joined(old: FactoredJacobian, new: FactoredJacobian) -> FactoredJacobian:
    """Rows of one network, one below the other."""
    both = ((k, old[k], new[k]) for k in sorted(old))
    return {
        k: map_tree(lambda s, t: torch.cat([s, t]), a, b) if isinstance(a, Mapping) else torch.cat([a, b], _axis(k))
        for k, a, b in both
    }


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, so that the result is the same alone and in a cohort.

    Torch multiplies stacks of tiny matrices by a loop of its own and single ones by a library; here both are added up.
    """
    rows, inner = a.shape
    small = rows * inner * b.shape[1] < 400
    return (a.unsqueeze(-1) * b).sum(1) if small or rows == 1 else a @ b


def times_vector(a: Tensor, v: Tensor) -> Tensor:
    """a v likewise, on a CPU: by two equal columns and not one, for what multiplies vectors rounds differently."""
    return torch.mv(a, v) if a.is_cuda else product(v.repeat(2, 1), a.mT)[0]


def _as_factors(name: str, plain: AffineLayer, params: Mapping[str, Tensor], each: int) -> bool:
    """Whether the factors of an input's gradients are fewer numbers than the gradients, for a convolution far fewer."""
    own = [f"{name}.{kind}" for kind, _ in plain.layer.named_parameters()]
    factors = plain.input_shape.numel() + each * plain.output_shape.numel()
    longer = 1 if isinstance(plain.layer, nn.Linear) else LONGER
    return all(k in params for k in own) and longer * factors <= each * sum(params[k].numel() for k in own)


def _axis(key: str) -> int:
    """Where a tensor that is no layer's alone grows with the inputs."""
    return -1 if key == "deltas" else 0


def _held(rows: FactoredJacobian) -> Tensor:
    """δ, or where there is none the dense gradients, as (n, C, ...)."""
    if "deltas" in rows:
        linear: Tensor = rows["deltas"].movedim(-1, 0).mT
        return linear
    others: Tensor = next(iter(rows[IMAGES]["deltas"].values())) if IMAGES in rows else rows["dense"]
    return others


def _keys(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def _answer(name: str, a: Tensor, vector: Mapping[str, Tensor]) -> Answer:
    """v_W a of a linear layer for every input, (outputs, n), and v_b, which is still to be added, (outputs)."""
    weight, bias = _keys(name)
    return product(vector[weight], a.mT), vector.get(bias)


def _repeated(inner: Tensor, times: int) -> Tensor:
    """Every entry of a matrix as a block of its own, for inputs with several rows each."""
    return inner if times == 1 else inner.repeat_interleave(times, 0).repeat_interleave(times, 1)
