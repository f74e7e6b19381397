r"""Rows of a Jacobian in the weights and biases of convolutions z = W ∗ a + b, as images: a, and δ = ∂⟨u, f⟩/∂z.

With positions p of an output image and rows i,

    (J v)_i = Σ_p ⟨δ_{ip}, (v_W ∗ a_i + v_b)_p⟩,    Jᵀ c = the slopes in W and b of Σ_i ⟨c_i δ_i, W ∗ a_i + b⟩.

Images are {"inputs": layer -> a, (n, ...), "deltas": layer -> δ, (n, C, ...)}, C rows of every input. A convolution
takes and gives them in this order: with one row an input a step turns none of them round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from glocal.curvature.layers import KINDS, AffineLayer, Params

Images: TypeAlias = Mapping[str, Mapping[str, Tensor]]
IMAGES = "convolved"
"""The name under which rows have them; whoever keeps rows knows by it what is laid out as images (`engine.layout`)."""


def jvp_and_vjp(
    module: nn.Module, images: Images, vector: Mapping[str, Tensor]
) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """J v, shape (n, C), and the way back: c ↦ Jᵀ c, by name."""
    parts, pulls = [], {}
    for name, a, delta in _layers(images):
        bias = vector.get(f"{name}.bias")
        z, pulls[name] = vjp(partial(_plain(module, name, a).apply, a), vector[f"{name}.weight"])  # type: ignore[misc]
        z = z if bias is None else z + _at_positions(bias, z.dim() - 2)
        parts.append((delta * z.unsqueeze(1)).sum(tuple(range(2, delta.dim()))))

    def back(c: Tensor) -> Params:
        found: Params = {}
        for name, _, delta in _layers(images):
            slope = delta * _at_positions(c, delta.dim() - 2)
            slope = slope.squeeze(1) if slope.shape[1] == 1 else slope.sum(1)
            (found[f"{name}.weight"],) = pulls[name](slope)
            if f"{name}.bias" in vector:
                found[f"{name}.bias"] = slope.flatten(2).sum(2).sum(0)
        return found

    return torch.stack(parts).sum(0), back


def divided(images: Images, by: Tensor) -> dict[str, dict[str, Tensor]]:
    """Every row divided by its own number, (n, C)."""
    deltas = {name: delta / _at_positions(by, delta.dim() - 2) for name, _, delta in _layers(images)}
    return {"inputs": dict(images["inputs"]), "deltas": deltas}


def written_down(module: nn.Module, images: Images, chunk_bytes: int) -> Iterator[Tensor]:
    """The rows themselves in float64, (nC, ...), some of a layer's columns at a time."""
    for name, a, delta in _layers(images):
        yield from _written_down(_plain(module, name, a), a.double(), delta.double(), chunk_bytes)


def _written_down(plain: AffineLayer, a: Tensor, delta: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    layer = plain.layer
    if layer.bias is not None:
        yield delta.flatten(3).sum(3).flatten(0, 1)
    bytes_a_channel = 8 * delta.shape[0] * delta.shape[1] * layer.weight[0].numel()
    # Channels of one group see the same inputs; those of several are taken together.
    some = layer.weight.shape[0] if layer.groups > 1 else max(1, chunk_bytes // max(1, bytes_a_channel))  # type: ignore[operator]
    for part in delta.split(some, 2):
        zeros = a.new_zeros(part.shape[2], *layer.weight.shape[1:])

        def one(a: Tensor, delta: Tensor, zeros: Tensor = zeros) -> Tensor:
            _, pull = vjp(lambda weight: plain.apply(a[None], weight)[0], zeros)  # type: ignore[misc]
            return vmap(lambda d: pull(d)[0].flatten())(delta)

        yield vmap(one)(a, part).flatten(0, 1)


def _layers(images: Images) -> Iterator[tuple[str, Tensor, Tensor]]:
    return ((name, images["inputs"][name], images["deltas"][name]) for name in sorted(images["inputs"]))


def _plain(module: nn.Module, name: str, a: Tensor) -> AffineLayer:
    layer: Any = module.get_submodule(name)
    assert isinstance(layer, KINDS)
    return AffineLayer(layer, a.shape[1:], torch.Size())


def _at_positions(t: Tensor, positions: int) -> Tensor:
    """The same numbers at every position of images that have so many axes."""
    return t.view(*t.shape, *[1] * positions)
