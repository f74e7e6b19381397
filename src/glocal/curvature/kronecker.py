r"""Kronecker factors of a Gauss–Newton matrix. For a layer z = [W b] a, a ending in 1, a sample's gradient is δ aᵀ, and

    (1/n) Σ_i Σ_c (δ_{ic} δ_{ic}ᵀ) ⊗ (a_i a_iᵀ) ≈ G ⊗ A,   A = (1/n) Σ_i a_i a_iᵀ,   G = (1/n) Σ_i Σ_c δ_{ic} δ_{ic}ᵀ,

the rows of [W b] one after the other; exact where one factor is the same for all samples. For a convolution a_{ip} is
the patch under the output position p, and positions count as samples do (KFAC-expand of Eschenhagen et al., 2023):

    A = 1/(n·positions) Σ_i Σ_p a_{ip} a_{ip}ᵀ,   G = (1/n) Σ_i Σ_p Σ_c δ_{ipc} δ_{ipc}ᵀ.

Parameters that no such layer holds (normalisation, tied weights, grouped convolutions) keep their diagonal. Curvature
is a tree of tensors,

    {"kronecker": {layer: {"A": (in, in), "G": (out, out)}}, "diagonal": {parameter: F}},

where A has one more row and column, the last, if the layer's bias is learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from glocal.curvature.chunk_size import chunk_size, memory_budget
from glocal.curvature.diagonal import diagonal
from glocal.curvature.layers import AffineLayer, Params, affine_layers, inputs_like, run
from glocal.curvature.output_jacobians import Cotangents

Curvature: TypeAlias = dict[str, dict[str, Any]]
MOST = 500
"""Samples that are differentiated at once."""


def factors(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Cotangents,
) -> Curvature:
    """The curvature on the batch `x`. `directions` turns the outputs (n, K) into vectors u (n, C, K), as in `diagonal`.

    `module` should be in evaluation mode: a sample's gradient through batch statistics is not its own.
    """
    plain = affine_layers(module, x.shape[1:], inputs_like(x, params))
    plain = {name: p for name, p in plain.items() if f"{name}.weight" in params and not _grouped(p)}
    covered = {f"{name}.{kind}" for name in plain for kind in ("weight", "bias")}
    rest = {k: p for k, p in params.items() if k not in covered}
    blocks: dict[str, dict[str, Tensor]] = {}
    if plain:
        done = run(module, params, buffers, x, plain)
        deltas = done.pull_each(directions(done.outputs))
        for name, p in plain.items():
            a = _patches(p, done.inputs[name])
            if f"{name}.bias" in params:
                a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
            delta = deltas[name].movedim(2, 0).flatten(1)  # (out, n · C · positions)
            blocks[name] = {"A": a.mT @ a / a.shape[0], "G": delta @ delta.mT / x.shape[0]}
    return {
        "kronecker": blocks,
        "diagonal": diagonal(module, params, buffers, x, directions, rest) if rest else {},
    }


def mean_factors(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[..., Tensor],
    *given: Tensor,
    chunk: int | None = None,
) -> Curvature:
    """The same over a data set, `chunk` samples at a time; `directions` also gets the chunk's part of `given`, such as
    labels."""
    if chunk is None:
        of_first = _with(directions, tuple(t[:1] for t in given))
        chunk = chunk_size(module, params, buffers, x, of_first, MOST, memory_budget(params))
    total: Curvature | None = None
    for part in zip(*(t.split(chunk) for t in (x, *given)), strict=True):
        share = part[0].shape[0] / x.shape[0]
        new = _map(lambda t, s=share: t * s, factors(module, params, buffers, part[0], _with(directions, part[1:])))
        total = new if total is None else _map(torch.add, total, new)
    assert total is not None
    return total


def multiply(curvature: Mapping[str, Mapping[str, Any]], v: Mapping[str, Tensor]) -> Params:
    """The block-diagonal matrix times a parameter vector: G V A for a layer's V = [W b]."""
    result = {k: f * v[k] for k, f in curvature["diagonal"].items()}
    for name, block in curvature["kronecker"].items():
        weight = v[f"{name}.weight"]
        columns = weight.flatten(1)
        biased = block["A"].shape[-1] > columns.shape[-1]
        joint = torch.cat([columns, v[f"{name}.bias"].unsqueeze(-1)], -1) if biased else columns
        product = block["G"] @ joint @ block["A"]
        result[f"{name}.weight"] = product[:, : columns.shape[-1]].reshape(weight.shape)
        if biased:
            result[f"{name}.bias"] = product[:, -1]
    return {k: result[k] for k in v}


def _grouped(plain: AffineLayer) -> bool:
    return not isinstance(plain.layer, nn.Linear) and plain.layer.groups > 1


def _patches(plain: AffineLayer, a: Tensor) -> Tensor:
    """What the rows of the weight are multiplied with, one row a sample and position.

    A convolution cuts its own patches, whatever its padding, stride and dilation: with the identity for a kernel,
    channel by channel.
    """
    if isinstance(plain.layer, nn.Linear):
        return a
    n, channels = a.shape[:2]
    kernel = plain.layer.kernel_size
    places = torch.Size(kernel).numel()
    identity = torch.eye(places, dtype=a.dtype, device=a.device).view(places, 1, *kernel)
    cut = plain.apply(a.reshape(n * channels, 1, *a.shape[2:]), identity)
    return cut.reshape(n, channels * places, -1).transpose(1, 2).flatten(end_dim=1)


def _with(directions: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Cotangents:
    return lambda outputs: directions(outputs, *given)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    return {k: _map(function, *(tree[k] for tree in trees)) for k in first}
