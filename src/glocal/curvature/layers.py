r"""Layers a network is linear in, z = W ∗ a + b: there a sample's gradient is made of two factors.

The gradient of an output fᵏ(x) in W is the product of the layer's input a and of δ = ∂fᵏ/∂z: δ aᵀ for a linear layer,
the sum of δ_p a_pᵀ over positions p for a convolution. Two small tensors stand for a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

Params: TypeAlias = dict[str, Tensor]
Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Pull: TypeAlias = Callable[[Tensor], Params]


class AffineLayer(NamedTuple):
    """A layer that is applied once, to a batch, with parameters used nowhere else; and the shapes of one sample."""

    layer: Layer
    input_shape: torch.Size
    output_shape: torch.Size

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """z for inputs a (n, ...) and any weight and bias: linear in both of them."""
        if isinstance(self.layer, nn.Linear):
            return nn.functional.linear(a, weight, bias)
        return self.layer._conv_forward(a, weight, bias)


class Pass(NamedTuple):
    """A forward pass that can be pulled back: outputs, the plain layers' inputs, and δ for vectors in output space."""

    outputs: Tensor  # (n, K)
    inputs: Params  # layer -> (n, ...)
    pull: Pull  # u (n, K) -> layer -> δ (n, ...): the derivative of Σ_k u_k fᵏ in z, sample by sample

    def pull_each(self, u: Tensor) -> Params:
        """δ for several vectors a sample: u (n, C, K) -> layer -> δ (n, C, ...)."""
        return vmap(self.pull, in_dims=1, out_dims=1)(u)


def run(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    plain: Mapping[str, AffineLayer],
) -> Pass:
    """f_θ(x) with the inputs of the plain layers and their δ.

    `module` should be in evaluation mode: a sample's gradient through batch statistics is not its own.
    """
    inputs: Params = {}

    def outputs(nudges: Params) -> tuple[Tensor, Params]:
        """f(x) as a function of a nudge added to every layer's output: its derivative in the nudge is δ."""

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
            def add_nudge(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                inputs[name] = args[0]
                return output + nudges[name]

            return add_nudge

        handles = [p.layer.register_forward_hook(hook(name)) for name, p in plain.items()]
        try:
            return functional_call(module, {**params, **buffers}, (x,)), dict(inputs)
        finally:
            for handle in handles:
                handle.remove()

    kind = next(iter(params.values())).dtype  # a network may compute more precisely than its inputs are
    nudges = {name: x.new_zeros(x.shape[0], *p.output_shape, dtype=kind) for name, p in plain.items()}
    f, pull, inputs = vjp(outputs, nudges, has_aux=True)  # type: ignore[misc]
    return Pass(f, inputs, lambda u: pull(u)[0])


def affine_layers(module: nn.Module, shape: torch.Size, like: Tensor) -> dict[str, AffineLayer]:
    """The layers of `module` whose gradients have this form, for inputs of this shape.

    It is a matter of the network's structure, so one pass with its own tensors and an input of zeros tells.
    """
    known = _PLAIN.setdefault(module, {})
    if shape not in known:
        known[shape] = _find(module, torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
    return known[shape]


def inputs_like(x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the type that a network's inputs have: whole numbers are what they are, floats as it computes."""
    return next(iter(params.values())) if x.is_floating_point() else x


_PLAIN: WeakKeyDictionary[nn.Module, dict[torch.Size, dict[str, AffineLayer]]] = WeakKeyDictionary()


def _find(module: nn.Module, zeros: Tensor) -> dict[str, AffineLayer]:
    calls: dict[str, list[tuple[torch.Size, torch.Size]]] = {}

    def cut_off(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        """The layer's output as a constant in its parameters: what still depends on them uses them elsewhere."""

        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls.setdefault(name, []).append((args[0].shape, output.shape))
            assert isinstance(layer, KINDS)
            bias = None if layer.bias is None else layer.bias.detach()
            return AffineLayer(layer, args[0].shape, output.shape).apply(args[0], layer.weight.detach(), bias)

        return hook

    # A network that is one layer has no name for it, and none for its parameters to be found by.
    layers = {name: layer for name, layer in module.named_modules() if name and isinstance(layer, KINDS)}
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

    found = {}
    for name, layer in layers.items():
        dims = 2 if isinstance(layer, nn.Linear) else layer.weight.dim()
        seen = calls.get(name, [])
        if len(seen) == 1 and len(seen[0][0]) == dims and seen[0][0][0] == 1 and own(name):
            found[name] = AffineLayer(layer, seen[0][0][1:], seen[0][1][1:])
    return found
