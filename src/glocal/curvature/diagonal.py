r"""The diagonal of a Gauss–Newton matrix, sample by sample:

    F = (1/n) Σ_i Σ_c (J_iᵀ u_{ic})²,   J_i = ∂f_θ(x_i)/∂θ,

for given vectors u_{ic} in output space. With Σ_c u_c u_cᵀ = ∇²_f ℓ it is the diagonal of the (exact) Fisher matrix; with
one u = ∇_f ℓ at the data's label it is the empirical one.

For a linear layer z = W a + b the gradient of one sample is the outer product δ aᵀ, so its squares need no per-sample
gradients: F_W = (1/n) Σ_i (Σ_c δ_{ic}²) (a_i²)ᵀ and F_b = (1/n) Σ_i Σ_c δ_{ic}².
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    linear = _plain_linear_layers(module, params, buffers, x)
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
    f, pull, inputs = vjp(outputs, nudges, has_aux=True)
    (deltas,) = vmap(pull)(directions(f).transpose(0, 1))  # over c; each (C, n, out)
    n = x.shape[0]
    result: Params = {}
    for name, layer in layers.items():
        squares = deltas[name].square().sum(0)
        result[f"{name}.weight"] = squares.mT @ inputs[name].square() / n
        if layer.bias is not None:
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

        _, pull = vjp(outputs, wanted)
        (gradients,) = vmap(pull)(u)
        return {k: g.square().sum(0) for k, g in gradients.items()}

    bytes_a_sample = u.shape[1] * sum(p.numel() * p.element_size() for p in wanted.values())
    chunk = max(1, chunk_bytes // max(1, bytes_a_sample))
    total = {k: torch.zeros_like(p) for k, p in wanted.items()}
    for a, b in zip(x.split(chunk), u.split(chunk), strict=True):
        total = {k: total[k] + s.sum(0) for k, s in vmap(one)(a, b).items()}
    return {k: s / x.shape[0] for k, s in total.items()}


def _plain_linear_layers(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor
) -> dict[str, nn.Linear]:
    """The linear layers the closed form holds for: applied once, to (n, in), with parameters of their own."""
    calls: dict[str, int] = {}
    plain: dict[str, bool] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def count(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1
            plain[name] = args[0].dim() == 2

        return count

    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    owned = {k: sum(p is q for _, q in module.named_parameters(remove_duplicate=False)) for k, p in module.named_parameters()}
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        functional_call(module, {**params, **buffers}, (x[:1],))
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: layer
        for name, layer in layers.items()
        if calls.get(name) == 1
        and plain[name]
        and f"{name}.weight" in params
        and all(owned[f"{name}.{kind}"] == 1 for kind, _ in layer.named_parameters())
    }
