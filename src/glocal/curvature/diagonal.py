r"""The diagonal of a Gauss–Newton matrix, sample by sample:

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for given vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix;
with one u = ∇_f ℓ at the data's label it is the empirical one.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}².
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

Params = dict[str, Tensor]


def diagonal(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
) -> Params:
    """F on the batch `x`. `directions` turns the outputs (n, K) into the vectors u, shape (n, C, K).

    `module` should be in evaluation mode: a sample's gradient through batch statistics is not its own.
    """
    linear = _plain_linear_layers(module, x.shape[1:], next(iter(params.values())))
    covered = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    rest = {k: p for k, p in params.items() if k not in covered}
    result = _linear(module, params, buffers, x, directions, linear) if linear else {}
    result |= _per_sample(module, params, buffers, x, directions, rest) if rest else {}
    return {k: result[k] for k in params}


def _linear(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
    layers: Mapping[str, nn.Linear],
) -> Params:
    inputs: dict[str, Tensor] = {}

    def outputs(nudges: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x) as a function of a nudge added to every linear layer's output: its derivative in the nudge is δ."""

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
            def add_nudge(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                inputs[name] = args[0]
                return output + nudges[name]

            return add_nudge

        handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
        try:
            return functional_call(module, {**params, **buffers}, (x,)), dict(inputs)
        finally:
            for handle in handles:
                handle.remove()

    nudges = {name: x.new_zeros(x.shape[0], layer.out_features) for name, layer in layers.items()}
    f, pull, inputs = vjp(outputs, nudges, has_aux=True)  # type: ignore[misc]
    (deltas,) = vmap(pull)(directions(f).transpose(0, 1))  # over c; each (C, n, out)
    n = x.shape[0]
    result: Params = {}
    for name in layers:
        squares = deltas[name].square().sum(0)
        result[f"{name}.weight"] = squares.mT @ inputs[name].square() / n
        result[f"{name}.bias"] = squares.sum(0) / n
    return result


def _per_sample(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    directions: Callable[[Tensor], Tensor],
    wanted: Params,
    chunk_bytes: int = 1 << 28,
) -> Params:
    """The same sum by explicit per-sample gradients of the `wanted` parameters, a bounded number of samples at once."""
    u = directions(functional_call(module, {**params, **buffers}, (x,)))

    def one(x: Tensor, u: Tensor) -> Params:
        def outputs(wanted: Params) -> Tensor:
            return functional_call(module, {**params, **buffers, **wanted}, (x[None],))[0]

        _, pull = vjp(outputs, wanted)  # type: ignore[misc]
        (gradients,) = vmap(pull)(u)
        return {k: g.square().sum(0) for k, g in gradients.items()}

    bytes_a_sample = u.shape[1] * sum(p.numel() * p.element_size() for p in wanted.values())
    chunk = max(1, chunk_bytes // max(1, bytes_a_sample))
    total = {k: torch.zeros_like(p) for k, p in wanted.items()}
    for a, b in zip(x.split(chunk), u.split(chunk), strict=True):
        total = {k: total[k] + s.sum(0) for k, s in vmap(one)(a, b).items()}
    return {k: s / x.shape[0] for k, s in total.items()}


def _plain_linear_layers(module: nn.Module, shape: torch.Size, like: Tensor) -> dict[str, nn.Linear]:
    """The linear layers the closed form holds for: applied once, to (n, in), with parameters used nowhere else.

    It is a matter of the network's structure, so one pass with its own tensors and an input of zeros tells.
    """
    known = _PLAIN.setdefault(module, {})
    if shape not in known:
        zeros = torch.zeros(1, *shape, dtype=like.dtype, device=like.device)
        known[shape] = _find_plain_linear_layers(module, zeros)
    return known[shape]


_PLAIN: WeakKeyDictionary[nn.Module, dict[torch.Size, dict[str, nn.Linear]]] = WeakKeyDictionary()


def _find_plain_linear_layers(module: nn.Module, zeros: Tensor) -> dict[str, nn.Linear]:
    calls: dict[str, list[torch.Size]] = {}

    def cut_off(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        """The layer's output as a constant in its parameters: what still depends on them uses them elsewhere."""

        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls.setdefault(name, []).append(args[0].shape)
            assert isinstance(layer, nn.Linear)
            bias = None if layer.bias is None else layer.bias.detach()
            return nn.functional.linear(args[0], layer.weight.detach(), bias)

        return hook

    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    everything = dict(module.named_parameters(remove_duplicate=False))
    handles = [layer.register_forward_hook(cut_off(name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            outputs = module(zeros).sum()
    finally:
        for handle in handles:
            handle.remove()
    learnt = {k: p for k, p in everything.items() if p.requires_grad}
    slopes: list[Tensor | None] = [None] * len(learnt)
    if outputs.requires_grad:
        slopes = list(torch.autograd.grad(outputs, list(learnt.values()), allow_unused=True))
    elsewhere = {k for k, slope in zip(learnt, slopes, strict=True) if slope is not None}

    def own(name: str) -> bool:
        keys = [f"{name}.{kind}" for kind, _ in layers[name].named_parameters()]
        alone = all(sum(everything[k] is p for p in everything.values()) == 1 for k in keys)
        return alone and not elsewhere & set(keys)

    once = [torch.Size((1, layer.in_features)) for layer in layers.values()]
    return {
        name: layer
        for (name, layer), size in zip(layers.items(), once, strict=True)
        if calls.get(name) == [size] and own(name)
    }
