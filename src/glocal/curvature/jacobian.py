r"""A Jacobian J of output gradients, many rows of it, never written down.

A row is the gradient of u·f_θ(x) for an input x and a vector u in output space, several u for every input (`outputs`).
In a layer z = W ∗ a + b it is made of two factors, a and δ (`layers`), so that

    J v = Σ_layers ⟨δ, v_W ∗ a + v_b⟩,    Jᵀ c = the layers' gradients with c δ in δ's place:

every layer applied to its stored inputs, there and back. A convolution is kept in whichever form takes fewer numbers,
factors or gradient; parameters outside plain layers (those of BatchNorm, tied weights) as they are.

Rows are a dict of tensors, n inputs with C rows each:

    inputs   layer -> a, (n, ...)
    deltas   δ of all these layers, one below the other, (D, C, n)
    dense    the gradients in the remaining parameters side by side, (n, C, R)

Layers and parameters come in the order of their names. Inputs are δ's last axis, because v_W a is a row of numbers for
every output of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from glocal.curvature.layers import KINDS, Params, Plain, plain_layers
from glocal.curvature.outputs import Directions, factored
from glocal.curvature.pairing import Answer, paired, weighted

Rows: TypeAlias = dict[str, Any]
Back: TypeAlias = Callable[[Tensor], Params]


def jacobian(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor, directions: Directions
) -> Rows:
    """The rows for inputs x (n, ...) at θ = `params`; `directions` turns the outputs (n, K) into u, (n, C, K)."""
    plain = plain_layers(module, x.shape[1:], next(iter(params.values())))
    outputs = functional_call(module, {**params, **buffers}, (x,))
    smaller = {name: p for name, p in plain.items() if _smaller(name, p, params, directions(outputs).shape[1])}
    found = factored(module, params, buffers, x, directions, smaller)
    rows: Rows = {}
    if found.inputs:
        rows["inputs"] = found.inputs
        rows["deltas"] = torch.cat([found.deltas[name].flatten(2).permute(2, 1, 0) for name in sorted(found.deltas)])
    if found.dense:
        dense = [found.dense[k] for k in sorted(found.dense)]
        rows["dense"] = torch.cat([g.reshape(*g.shape[:2], -1) for g in dense], 2)
    return rows


def act(
    module: nn.Module, rows: Rows, vector: Mapping[str, Tensor], answers: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Back]:
    """J v, shape (n, C), and the way back: c ↦ Jᵀ c, by name.

    `answers` has v_W a + v_b, (outputs, n), of those linear layers where it is known already; the way back gives, in
    place of the weight's and bias's gradients that c δ makes there, c δ itself under the weight's name.
    """
    answers = answers or {}
    names = sorted(rows.get("inputs", {}))
    others = [name for name in names if name not in answers]
    layers = {name: _layer(module.get_submodule(name), name, rows["inputs"][name], vector) for name in others}
    given = [(answers[name], None) if name in answers else layers[name][0] for name in names]
    widths = [z.shape[0] for z, _ in given]
    parts = []
    if names:
        deltas = rows["deltas"]
        parts.append(paired(deltas, given))
    rest: list[str] = []
    if "dense" in rows:
        factored = {key for name in names for key in _keys(name)}
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
                found[weight] = part if name in answers else layers[name][1](part)
                if bias in vector and name not in answers:
                    total = part.sum(1) if total is None else total
                    positions = total.shape[0] // vector[bias].shape[0]
                    found[bias] = total if positions == 1 else total.view(-1, positions).sum(1)
        if rest:
            dense = times_vector(rows["dense"].flatten(0, 1).mT, c.reshape(-1))
            pieces = dense.split([vector[k].numel() for k in rest])
            found |= {k: piece.view(vector[k].shape) for k, piece in zip(rest, pieces, strict=True)}
        return found

    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, back


def gram(module: nn.Module, rows: Rows, chunk_bytes: int = 1 << 28) -> Tensor:
    """J Jᵀ in float64, (nC, nC). For linear layers the product over rows is a product of products: (a·a' + 1) δ·δ'."""
    total: Tensor | float = 0.0
    begin = 0
    for name, a in _inputs(rows):
        layer = module.get_submodule(name)
        a = a.double()
        width = _width(layer, a)
        delta = rows["deltas"][begin : begin + width].permute(2, 1, 0).double()
        begin += width
        if isinstance(layer, nn.Linear):
            inner = product(a, a.mT) + (layer.bias is not None)
            flat = delta.flatten(0, 1)
            total = total + product(flat, flat.mT) * _repeated(inner, delta.shape[1])
        else:
            for j in _written_down(layer, a, delta, chunk_bytes):
                total = total + product(j, j.mT)
    if "dense" in rows:
        dense = rows["dense"].flatten(0, 1)
        for part in dense.split(max(1, chunk_bytes // (8 * max(1, dense.shape[0]))), 1):
            total = total + product(part.double(), part.double().mT)
    assert isinstance(total, Tensor)
    return total


def shape(rows: Rows) -> tuple[int, int]:
    """n and C: how many inputs, and how many gradients of each."""
    held = _held(rows)
    return held.shape[0], held.shape[1]


def normalised(module: nn.Module, rows: Rows) -> tuple[Rows, Tensor]:
    """The gradients scaled to length 1, and their lengths, (n, C). A gradient of length 0 stays what it is."""
    lengths = gram(module, rows).diagonal().sqrt().view(shape(rows)).to(_held(rows).dtype)
    scale = torch.where(lengths > 0, lengths, 1)
    scales = {"deltas": scale.mT, "dense": scale.unsqueeze(-1)}
    return {k: v / scales[k] if k in scales else v for k, v in rows.items()}, lengths


def none_of(rows: Rows) -> Rows:
    """No gradients, of the form that the given ones have."""
    return {k: none_of(dict(v)) if isinstance(v, Mapping) else v.narrow(_axis(k), 0, 0) for k, v in rows.items()}


def joined(old: Rows, new: Rows) -> Rows:
    """Rows of one network, one below the other."""
    return {
        k: joined(old[k], new[k]) if isinstance(old[k], Mapping) else torch.cat([old[k], new[k]], _axis(k))
        for k in sorted(old)
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


def _smaller(name: str, plain: Plain, params: Mapping[str, Tensor], each: int) -> bool:
    """Whether the factors of an input's gradients are no more numbers than the gradients."""
    own = [f"{name}.{kind}" for kind, _ in plain.layer.named_parameters()]
    factors = plain.input_shape.numel() + each * plain.output_shape.numel()
    return all(k in params for k in own) and factors <= each * sum(params[k].numel() for k in own)


def _axis(key: str) -> int:
    """Where a tensor of rows grows with the inputs."""
    return -1 if key == "deltas" else 0


def _held(rows: Rows) -> Tensor:
    """δ, or where there is none the dense gradients, as (n, C, ...)."""
    held: Tensor = rows["deltas"].movedim(-1, 0).mT if "deltas" in rows else rows["dense"]
    return held


def _keys(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def _inputs(rows: Rows) -> Iterator[tuple[str, Tensor]]:
    held = rows.get("inputs", {})
    return ((name, held[name]) for name in sorted(held))


def _layer(
    layer: nn.Module, name: str, a: Tensor, vector: Mapping[str, Tensor]
) -> tuple[Answer, Callable[[Tensor], Tensor]]:
    """v_W ∗ a of a layer, flat for every input, (outputs, n), v_b if it is still to be added, (outputs), and what the
    first part's transpose makes of a tensor of z's shape."""
    weight, bias = (vector.get(key) for key in _keys(name))
    assert weight is not None
    if isinstance(layer, nn.Linear):
        return (product(weight, a.mT), bias), lambda t: product(t, a)
    assert isinstance(layer, KINDS)
    plain = Plain(layer, a.shape[1:], torch.Size())
    z, pull = vjp(lambda weight: plain.respond(a, weight), weight)  # type: ignore[misc]
    answer = z if bias is None else z + bias.view(-1, *[1] * (z.dim() - 2))
    return (answer.flatten(1).mT, None), lambda t: pull(t.mT.reshape(z.shape))[0]


def _width(layer: nn.Module, a: Tensor) -> int:
    """How many numbers a layer answers to one input."""
    assert isinstance(layer, KINDS)
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return Plain(layer, a.shape[1:], torch.Size()).respond(a[:1], layer.weight.detach().to(a.dtype))[0].numel()


def _written_down(layer: nn.Module, a: Tensor, delta: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    """A convolution's gradients themselves, (nC, ...), some output channels at a time."""
    assert isinstance(layer, KINDS)
    plain = Plain(layer, a.shape[1:], torch.Size())
    channels = layer.weight.shape[0]
    delta = delta.unflatten(2, (channels, -1))
    if layer.bias is not None:
        yield delta.sum(-1).flatten(0, 1)
    shape = plain.respond(a[:1], layer.weight.detach().to(a.dtype)).shape[2:]
    bytes_a_channel = 8 * delta.shape[0] * delta.shape[1] * layer.weight[0].numel()
    # Channels of one group see the same inputs; those of several are taken together.
    some = channels if getattr(layer, "groups", 1) > 1 else max(1, chunk_bytes // max(1, bytes_a_channel))
    for part in delta.split(some, 2):
        zeros = a.new_zeros(part.shape[2], *layer.weight.shape[1:])

        def one(a: Tensor, delta: Tensor, zeros: Tensor = zeros) -> Tensor:
            _, pull = vjp(lambda weight: plain.respond(a[None], weight)[0], zeros)  # type: ignore[misc]
            return vmap(lambda d: pull(d)[0].flatten())(delta)

        yield vmap(one)(a, part.unflatten(-1, shape)).flatten(0, 1)


def _repeated(inner: Tensor, times: int) -> Tensor:
    """Every entry of a matrix as a block of its own, for inputs with several rows each."""
    return inner if times == 1 else inner.repeat_interleave(times, 0).repeat_interleave(times, 1)
