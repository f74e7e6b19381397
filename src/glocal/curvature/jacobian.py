r"""Gradients of a network's outputs, g_{ic} = J_iᵀ u_{ic} with J_i = ∂f_θ(x_i)/∂θ, dense or by their factors.

`cotangents(outputs, y)` returns C vectors u in output space for each of n samples, (n, C, K): all logits, the label's
logit, their mean, or the root of a loss's Hessian.

`dense_jacobian` returns tensors (n, C, ...). `jacobian` stores gradients in a layer z = W ∗ a + b by their two factors,
a and δ = ∂⟨u, f⟩/∂z (`layers`), which takes far less memory: 884 numbers instead of 78,500 for a linear layer from 784
to 100. With the gradients as rows of J,

    J v = Σ_layers ⟨δ, v_W ∗ a + v_b⟩,    Jᵀ c = the layers' gradients with c δ in place of δ.

A `FactoredJacobian` is a dict of tensors, so that it can be batched, stored and stacked:

    inputs      linear layer -> a, (n, p)
    deltas      δ of all linear layers, concatenated, (D, C, n)
    convolved   inputs: convolution -> a, (n, ...); deltas: convolution -> δ, (n, C, ...)
    dense       the gradients in all other parameters, concatenated, (n, C, R)

Other parameters are those of BatchNorm, of tied weights, and of convolutions whose gradient is little longer than its
factors: a product with the factors takes a multiplication for every position. Layers and parameters are in the order of
their names. Samples are the last axis of linear layers' δ because v_W a is a row of numbers for each of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from glocal.curvature.layers import AffineLayer, Cotangents, affine_layers, layer_factors, params_outside
from glocal.curvature.network import takes_network
from glocal.losses import Loss
from glocal.risk import Risk, unfused_ops
from glocal.tree import Params, from_vector, map_tree, stack, to_vector

FactoredJacobian: TypeAlias = dict[str, Any]
VJP: TypeAlias = Callable[[Tensor], Params]

CONV = "convolved"
"""The key of convolutions' factors; `engine.state` recognizes image tensors by it."""
MIN_CONV_SAVING = 3
"""A convolution's gradient is stored by its factors if it is at least this many times as long."""
MAX_CHUNK_BYTES = 1 << 28
"""Memory for the dense gradients that are computed at once."""
SMALL_MATMUL = 400
"""Multiplications below which torch computes batches of matrix products differently from single ones."""


def every_output(outputs: Tensor, y: Tensor) -> Tensor:
    """Return u_{ic} = e_c: all K logits of a sample."""
    n, k = outputs.shape
    return torch.eye(k, dtype=outputs.dtype, device=outputs.device).expand(n, k, k)


def label_output(outputs: Tensor, y: Tensor) -> Tensor:
    """Return u_i = e_{y_i}: the logit of a sample's label."""
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return (y.unsqueeze(-1) == classes).to(outputs.dtype).unsqueeze(1)


def mean_output(outputs: Tensor, y: Tensor) -> Tensor:
    """Return u_i = (1/K) Σ_k e_k: the mean of a sample's logits."""
    return torch.full_like(outputs, 1 / outputs.shape[-1]).unsqueeze(1)


def output_hessian_sqrt(loss: Loss) -> Cotangents:
    """Return the cotangents with Σ_c u_c u_cᵀ = ∇²_f ℓ, whose gradients are those of the Gauss–Newton matrix."""
    return lambda outputs, y: loss.output_hessian_sqrt(outputs)


@takes_network
def dense_jacobian(risk: Risk, cotangents: Cotangents, wrt: Mapping[str, Tensor] | None = None) -> Params:
    """Return the per-sample gradients of outputs in the parameters `wrt`, by default all, each (n, C, ...).

    Args:
        model, loss, data: As in `network_risk`, or one `Risk`. The loss is not used.
        cotangents: Which outputs: `every_output`, `label_output`, `mean_output`, or a function from outputs (n, K) and
            labels to vectors in output space, (n, C, K).
        wrt: The parameters, a dict of some of θ.
    """
    parts = list(dense_jacobian_chunks(risk, cotangents, wrt))
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def dense_jacobian_chunks(
    risk: Risk, cotangents: Cotangents, wrt: Mapping[str, Tensor] | None = None
) -> Iterator[Params]:
    """Yield the gradients of consecutive samples, at most MAX_CHUNK_BYTES (but at least one sample) at a time.

    If `vmap` cannot batch the network, as with recurrent layers, samples are computed one by one.
    """
    wrt = dict(risk.params if wrt is None else wrt)
    with unfused_ops(risk.module):
        u = cotangents(risk.outputs(), risk.y)

    def sample_gradients(x: Tensor, u: Tensor) -> Params:
        sample = replace(risk, x=x[None])
        _, pull = vjp(lambda wrt: sample.outputs({**risk.params, **wrt})[0], wrt)  # type: ignore[misc]
        return vmap(pull)(u)[0]

    sample_bytes = u.shape[1] * sum(p.numel() * p.element_size() for p in wrt.values())
    size = max(1, MAX_CHUNK_BYTES // max(1, sample_bytes))
    for x, vectors in zip(risk.x.split(size), u.split(size), strict=True):
        with unfused_ops(risk.module):
            try:
                gradients = vmap(sample_gradients)(x, vectors)
            except RuntimeError:
                gradients = stack([sample_gradients(*sample) for sample in zip(x, vectors, strict=True)])
        yield gradients


def jacobian(risk: Risk, cotangents: Cotangents) -> FactoredJacobian:
    """Return the gradients with respect to all parameters, by their factors where these are shorter."""
    layers = affine_layers(risk)
    vectors = cotangents(risk.outputs(), risk.y).shape[1]
    layers = {k: layers[k] for k in sorted(layers) if _saves_memory(k, layers[k], risk.params, vectors)}
    inputs, deltas = layer_factors(risk, layers, cotangents)
    linear = [name for name, affine in layers.items() if isinstance(affine.layer, nn.Linear)]
    conv = [name for name in layers if name not in linear]
    rows: FactoredJacobian = {}
    if linear:
        rows["inputs"] = {name: inputs[name] for name in linear}
        rows["deltas"] = torch.cat([deltas[name].permute(2, 1, 0) for name in linear])
    if conv:
        rows[CONV] = {"inputs": {name: inputs[name] for name in conv}, "deltas": {name: deltas[name] for name in conv}}
    if rest := params_outside(layers, risk.params):
        dense = dense_jacobian(risk, cotangents, rest)
        rows["dense"] = torch.cat([dense[k].reshape(*dense[k].shape[:2], -1) for k in sorted(dense)], 2)
    return rows


def jvp_and_vjp(module: nn.Module, rows: FactoredJacobian, vector: Mapping[str, Tensor]) -> tuple[Tensor, VJP]:
    """Return J v, (n, C), and the function c ↦ Jᵀ c."""
    names = sorted(rows.get("inputs", {}))
    widths = [vector[f"{name}.weight"].shape[0] for name in names]
    deltas = rows["deltas"].detach() if names else torch.empty(0)
    parts: list[Tensor] = []
    conv_vjp: VJP | None = None
    for name, delta in zip(names, deltas.split(widths), strict=True):
        weight, bias = f"{name}.weight", f"{name}.bias"
        z = batch_invariant_matmul(vector[weight], rows["inputs"][name].mT)
        z = z + vector[bias].unsqueeze(1) if bias in vector else z
        parts.append((delta * z.unsqueeze(1)).sum(0).mT)
    if CONV in rows:
        part, conv_vjp = _conv_jvp_and_vjp(module, rows[CONV], vector)
        parts.append(part)
    if "dense" in rows:
        outside = params_outside((*names, *rows.get(CONV, {}).get("inputs", {})), vector)
        rest = dict(sorted(outside.items()))
        parts.append(batch_invariant_matvec(rows["dense"].flatten(0, 1), to_vector(rest)).view(rows["dense"].shape[:2]))

    def vjp(c: Tensor) -> Params:
        result: Params = {}
        if names:
            products = deltas * c.mT
            products = products.squeeze(1) if products.shape[1] == 1 else products.sum(1)
            for name, part in zip(names, products.split(widths), strict=True):
                weight, bias = f"{name}.weight", f"{name}.bias"
                result[weight] = batch_invariant_matmul(part, rows["inputs"][name])
                if bias in vector:
                    result[bias] = part.sum(1)
        if conv_vjp is not None:
            result |= conv_vjp(c)
        if "dense" in rows:
            result |= from_vector(batch_invariant_matvec(rows["dense"].flatten(0, 1).mT, c.reshape(-1)), rest)
        return result

    return reduce(torch.add, parts), vjp


def gram(module: nn.Module, rows: FactoredJacobian) -> Tensor:
    """Return J Jᵀ in float64, (nC, nC). For linear layers it is a product of small products, (a·a' + 1) δ·δ'."""
    total: Tensor | float = 0.0
    begin = 0
    for name, a in sorted(rows.get("inputs", {}).items()):
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        delta = rows["deltas"][begin : begin + layer.out_features].permute(2, 1, 0).double()
        begin += layer.out_features
        inner = batch_invariant_matmul(a.double(), a.double().mT) + (layer.bias is not None)
        if delta.shape[1] > 1:  # every input has several rows
            inner = inner.repeat_interleave(delta.shape[1], 0).repeat_interleave(delta.shape[1], 1)
        flat = delta.flatten(0, 1)
        total = total + batch_invariant_matmul(flat, flat.mT) * inner
    if CONV in rows:
        for block in _conv_dense_blocks(module, rows[CONV]):
            total = total + batch_invariant_matmul(block, block.mT)
    if "dense" in rows:
        dense = rows["dense"].flatten(0, 1)
        for part in dense.split(max(1, MAX_CHUNK_BYTES // (8 * max(1, dense.shape[0]))), 1):
            total = total + batch_invariant_matmul(part.double(), part.double().mT)
    assert isinstance(total, Tensor)
    return total


def normalize(module: nn.Module, rows: FactoredJacobian) -> tuple[FactoredJacobian, Tensor]:
    """Scale the gradients to length 1, except those of length 0. Return them and their lengths, (n, C)."""
    if "deltas" in rows:
        leading = rows["deltas"].permute(2, 1, 0)
    else:
        leading = next(iter(rows[CONV]["deltas"].values())) if CONV in rows else rows["dense"]
    lengths = gram(module, rows).diagonal().sqrt().view(leading.shape[:2]).to(leading.dtype)
    scale = torch.where(lengths > 0, lengths, 1)
    scales = {"deltas": scale.mT, "dense": scale.unsqueeze(-1)}
    result = {k: v / scales[k] if k in scales else v for k, v in rows.items()}
    if CONV in rows:
        deltas = rows[CONV]["deltas"]
        result[CONV] = rows[CONV] | {"deltas": {k: d / _unsqueeze(scale, d.dim() - 2) for k, d in deltas.items()}}
    return result, lengths


def empty_like(rows: FactoredJacobian) -> FactoredJacobian:
    """Return a Jacobian of the same structure without rows."""
    return _map_samples(lambda axis, t: t.narrow(axis, 0, 0), rows)


def concatenate(first: FactoredJacobian, second: FactoredJacobian) -> FactoredJacobian:
    """Append the rows of a second Jacobian of the same network."""
    return _map_samples(lambda axis, *tensors: torch.cat(tensors, axis), first, second)


def _map_samples(function: Callable[..., Tensor], *jacobians: FactoredJacobian) -> FactoredJacobian:
    """Apply `function(axis, *tensors)` tensor by tensor; `axis` is that of the samples."""
    return {
        key: map_tree(partial(function, -1 if key == "deltas" else 0), *({key: rows[key]} for rows in jacobians))[key]
        for key in sorted(jacobians[0])
    }


def batch_invariant_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a b with the same rounding for one run and for a batch of runs.

    Torch multiplies batches of tiny matrices by its own loop and single ones by a library; here both are summed.
    """
    rows, inner = a.shape
    small = rows * inner * b.shape[1] < SMALL_MATMUL
    return (a.unsqueeze(-1) * b).sum(1) if small or rows == 1 else a @ b


def batch_invariant_matvec(a: Tensor, v: Tensor) -> Tensor:
    """Return a v with the same rounding for one run and for a batch of runs.

    On a CPU a product with two equal columns is used, because matrix–vector products round differently.
    """
    return torch.mv(a, v) if a.is_cuda else batch_invariant_matmul(v.repeat(2, 1), a.mT)[0]


def _saves_memory(name: str, affine: AffineLayer, params: Mapping[str, Tensor], vectors: int) -> bool:
    """Whether the factors of an input's gradients are shorter than the gradients; for a convolution, much shorter."""
    keys = [f"{name}.{kind}" for kind, _ in affine.layer.named_parameters()]
    factors = affine.input_shape.numel() + vectors * affine.output_shape.numel()
    saving = 1 if isinstance(affine.layer, nn.Linear) else MIN_CONV_SAVING
    return all(k in params for k in keys) and saving * factors <= vectors * sum(params[k].numel() for k in keys)


def _conv_jvp_and_vjp(module: nn.Module, factors: Any, vector: Mapping[str, Tensor]) -> tuple[Tensor, VJP]:
    """Return the convolutions' part of J v and of c ↦ Jᵀ c."""
    parts, weight_vjps = [], {}
    for name, layer, a, delta in _conv_factors(module, factors):
        bias = vector.get(f"{name}.bias")
        forward = partial(layer._conv_forward, a, bias=None)
        z, weight_vjps[name] = vjp(forward, vector[f"{name}.weight"])  # type: ignore[misc]
        z = z if bias is None else z + _unsqueeze(bias, z.dim() - 2)
        parts.append((delta * z.unsqueeze(1)).sum(tuple(range(2, delta.dim()))))

    def conv_vjp(c: Tensor) -> Params:
        result: Params = {}
        for name, _, _, delta in _conv_factors(module, factors):
            gradient = delta * _unsqueeze(c, delta.dim() - 2)
            gradient = gradient.squeeze(1) if gradient.shape[1] == 1 else gradient.sum(1)
            (result[f"{name}.weight"],) = weight_vjps[name](gradient)
            if f"{name}.bias" in vector:
                result[f"{name}.bias"] = gradient.flatten(2).sum(2).sum(0)
        return result

    return torch.stack(parts).sum(0), conv_vjp


def _conv_dense_blocks(module: nn.Module, factors: Any) -> Iterator[Tensor]:
    """Yield the convolutions' dense gradients in float64, (nC, ...), some columns at a time."""
    for _, layer, inputs, deltas in _conv_factors(module, factors):
        a, delta, weight = inputs.double(), deltas.double(), layer.weight
        if layer.bias is not None:
            yield delta.flatten(3).sum(3).flatten(0, 1)
        channel_bytes = 8 * delta.shape[0] * delta.shape[1] * weight[0].numel()
        # Output channels of different groups have different inputs and are computed together.
        channels = weight.shape[0] if layer.groups > 1 else max(1, MAX_CHUNK_BYTES // max(1, channel_bytes))
        for part in delta.split(channels, 2):
            zeros = a.new_zeros(part.shape[2], *weight.shape[1:])
            yield vmap(partial(_conv_gradients, layer, zeros))(a, part).flatten(0, 1)


def _conv_gradients(layer: Any, zeros: Tensor, a: Tensor, delta: Tensor) -> Tensor:
    """Return one sample's gradients in the weight, (C, ...), for δ (C, ...)."""
    _, pull = vjp(lambda weight: layer._conv_forward(a[None], weight, None)[0], zeros)  # type: ignore[misc]
    return vmap(lambda d: pull(d)[0].flatten())(delta)


def _conv_factors(module: nn.Module, factors: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Yield the name of each convolution, the layer, its inputs and its δ."""
    for name, a in sorted(factors["inputs"].items()):
        yield name, module.get_submodule(name), a, factors["deltas"][name]


def _unsqueeze(t: Tensor, dims: int) -> Tensor:
    """Append axes of length 1."""
    return t.view(*t.shape, *[1] * dims)
