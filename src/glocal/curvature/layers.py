r"""Per-sample gradients of linear layers and convolutions, held as two small factors: the layer's input a and δ.

In a linear layer z = W a + b, the gradient of an output fᵏ(x) in W is δ aᵀ with δ = ∂fᵏ/∂z; in a convolution it is the
sum of δ_p a_pᵀ over positions p, with a_p the patch at p. `chunk_size` is the number of samples that fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from glocal.networks.layer_calls import Layer, hooked, named_layers
from glocal.risk import Risk, unfused_ops
from glocal.tree import Params

Cotangents: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From outputs (n, K) and labels (n, ...) to C vectors in output space for each sample, (n, C, K)."""

MAX_ACTIVATION_BYTES = 1 << 30
"""Memory for the layers' inputs and outputs on a CPU. A Hessian product keeps about three times as much."""
GPU_MEMORY_DIVISOR = 12
"""On a GPU, the layers' inputs and outputs may take one twelfth of its memory."""


class AffineLayer(NamedTuple):
    """A layer that is called once, on a batch, with parameters that are used nowhere else; shapes of one sample."""

    layer: Layer
    input_shape: torch.Size
    output_shape: torch.Size

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return z for inputs a (n, ...) and any weight and bias."""
        if isinstance(self.layer, nn.Linear):
            return nn.functional.linear(a, weight, bias)
        return self.layer._conv_forward(a, weight, bias)

    def patches(self, a: Tensor) -> Tensor:
        """Return what the rows of the weight are multiplied with, one row for each sample and position.

        A convolution cuts its own patches, whatever its padding, stride and dilation, if its kernel is the identity;
        here channel by channel.
        """
        if isinstance(self.layer, nn.Linear):
            return a
        n, channels = a.shape[:2]
        kernel = self.layer.kernel_size
        size = torch.Size(kernel).numel()
        identity = torch.eye(size, dtype=a.dtype, device=a.device).view(size, 1, *kernel)
        patches = self.apply(a.reshape(n * channels, 1, *a.shape[2:]), identity)
        return patches.reshape(n, channels * size, -1).transpose(1, 2).flatten(end_dim=1)


def layer_factors(risk: Risk, layers: Mapping[str, AffineLayer], cotangents: Cotangents) -> tuple[Params, Params]:
    """Return every layer's input a, (n, ...), and δ, the gradients of ⟨u, f⟩ in its output z, (n, C, ...).

    The network should be in evaluation mode: with batch statistics a sample's gradient depends on the other samples.
    """
    if not layers:
        return {}, {}

    def outputs(offsets: Params) -> tuple[Tensor, Params]:
        """Return f(x) as a function of an offset added to every layer's output; its derivative in the offset is δ."""
        inputs: Params = {}

        def add_offset(name: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs[name] = args[0]
            return output + offsets[name]

        with hooked(affine.layer.register_forward_hook(partial(add_offset, name)) for name, affine in layers.items()):
            return risk.outputs(), inputs

    dtype = next(iter(risk.params.values())).dtype  # the network may compute in a wider type than its inputs have
    offsets = {name: risk.x.new_zeros(len(risk), *layer.output_shape, dtype=dtype) for name, layer in layers.items()}
    with unfused_ops(risk.module):
        f, pull, inputs = vjp(outputs, offsets, has_aux=True)  # type: ignore[misc]
        return inputs, vmap(pull, in_dims=1, out_dims=1)(cotangents(f, risk.y))[0]


def params_outside(layers: Iterable[str], params: Mapping[str, Tensor]) -> Params:
    """Return the parameters that are not a weight or a bias of these layers."""
    covered = {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    return {k: p for k, p in params.items() if k not in covered}


def affine_layers(risk: Risk) -> dict[str, AffineLayer]:
    """Return the layers of the network whose weights are parameters of their own and have gradients of two factors.

    They depend only on the network's structure and the shape of its inputs, so one pass with the module's own tensors
    and an input of zeros finds them.
    """
    layers = _AFFINE_LAYERS.setdefault(risk.module, {})
    shape = risk.x.shape[1:]
    if shape not in layers:
        leaf = next(iter(risk.params.values())) if risk.x.is_floating_point() else risk.x
        layers[shape] = _find_affine_layers(risk.module, torch.zeros(1, *shape, dtype=leaf.dtype, device=leaf.device))
    return {k: affine for k, affine in layers[shape].items() if f"{k}.weight" in risk.params}


_AFFINE_LAYERS: WeakKeyDictionary[nn.Module, dict[torch.Size, dict[str, AffineLayer]]] = WeakKeyDictionary()


def _find_affine_layers(module: nn.Module, zeros: Tensor) -> dict[str, AffineLayer]:
    calls: dict[str, list[AffineLayer | None]] = {}  # None: the layer's input is not a batch
    offsets: dict[str, Tensor] = {}

    def detach_layer(name: str, layer: Layer, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Detach the layer's parameters: an output that still depends on them uses them elsewhere."""
        if not args:  # called by keyword
            calls.setdefault(name, []).append(None)
            return output
        affine = AffineLayer(layer, args[0].shape[1:], output.shape[1:])
        batched = args[0].dim() == layer.weight.dim() and args[0].shape[0] == 1
        calls.setdefault(name, []).append(affine if batched else None)
        offsets[name] = torch.zeros_like(output, requires_grad=True)
        bias = None if layer.bias is None else layer.bias.detach()
        return affine.apply(args[0], layer.weight.detach(), bias) + offsets[name]

    # A network that is a single layer has no name for it, and its parameters could not be found by name.
    layers = {name: layer for name, layer in named_layers(module).items() if name and _is_affine(layer)}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    hooks = (layer.register_forward_hook(partial(detach_layer, name)) for name, layer in layers.items())
    with hooked(hooks), torch.enable_grad():
        outputs = module(zeros).sum()
    used: set[str] = set()  # parameters that are used outside of their layers, and layers that reach the outputs
    if outputs.requires_grad:
        sources = {k: p for k, p in parameters.items() if p.requires_grad} | offsets
        grads = torch.autograd.grad(outputs, list(sources.values()), allow_unused=True)
        used = {k for k, grad in zip(sources, grads, strict=True) if grad is not None}

    def owns_parameters(name: str) -> bool:
        keys = [f"{name}.{kind}" for kind, _ in layers[name].named_parameters()]
        untied = all(sum(parameters[k] is p for p in parameters.values()) == 1 for k in keys)
        return untied and not used & set(keys)

    single_calls = {name: calls[name][0] for name in layers if len(calls.get(name, ())) == 1 and name in used}
    return {name: affine for name, affine in single_calls.items() if affine is not None and owns_parameters(name)}


def _is_affine(layer: Layer) -> bool:
    """Whether the layer computes W a + b: it has no forward hooks, and no forward method of a user's."""
    methods = [getattr(layer, name) for name in ("forward", "_conv_forward") if hasattr(layer, name)]
    own = any((method.__module__ or "").partition(".")[0] not in ("torch", "glocal") for method in methods)
    return not own and not layer._forward_hooks


def chunk_size(risk: Risk, cotangents: Cotangents | None, limit: int) -> int:
    """Return the largest number of samples, up to `limit`, whose activations fit into the `memory_budget`.

    Counted are the layers' inputs and, once or for each cotangent, their outputs, on the first sample. If the network
    fails on one sample alone, the result is `limit`, and the pass itself will report the error.
    """
    input_bytes = output_bytes = 0

    def count(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal input_bytes, output_bytes
        input_bytes += _num_bytes(args)
        output_bytes += _num_bytes(output if isinstance(output, tuple) else (output,))

    try:
        layers = named_layers(risk.module).values()
        with hooked(layer.register_forward_hook(count) for layer in layers), torch.no_grad():
            first = next(risk.chunks(1))
            outputs = first.outputs()
            vectors = 1 if cotangents is None else cotangents(outputs, first.y).shape[1]
    except Exception:
        return limit
    return max(1, min(limit, memory_budget(risk.params) // max(1, input_bytes + vectors * output_bytes)))


def memory_budget(params: Mapping[str, Tensor]) -> int:
    """Return the bytes that activations may take, for each of the runs that `vmap` computes together."""
    p = next(iter(params.values()))
    budget = MAX_ACTIVATION_BYTES
    if p.device.type == "cuda":
        budget = torch.cuda.get_device_properties(p.device).total_memory // GPU_MEMORY_DIVISOR
    return budget // batch_count(p)


def batch_count(tensor: Tensor) -> int:
    """Return how many tensors this one stands for under (nested) `vmap`."""
    storage = tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(storage):
        storage = torch._C._functorch.get_unwrapped(storage)
    return storage.numel() // max(1, tensor.numel())


def _num_bytes(tensors: tuple[Any, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
