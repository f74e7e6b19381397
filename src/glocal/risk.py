r"""The risk L(θ) = (1/n) Σ_i ℓ(f_θ(x_i), y_i): a network, its parameters, a data set and a loss in one object.

`glocal.curvature` computes with a `Risk`: Hessian and Gauss–Newton operators, Jacobians, Kronecker factors, spectra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from glocal.errors import GlocalError, require
from glocal.losses import Loss
from glocal.networks.layer_calls import unfused_encoders
from glocal.networks.model import Model
from glocal.tree import Params, Tree, map_tree

NO_STORAGE = "doesn't have storage"
"""What torch says where an operation reads the memory of a tensor that torch.func follows."""
MAX_CHUNK_SIZE = 2_000
"""Samples that pass through the network at once, unless `Risk.chunk_size` says otherwise."""


@dataclass(frozen=True, eq=False)
class Risk:
    r"""L(θ) = (1/n) Σ_i ℓ(f_θ(x_i), y_i) at one θ.

    All of its tensors may carry a batch dimension of `torch.func.vmap`, so that one function serves many runs.

    Args:
        module: The network f. Its own tensors are used where `params` and `buffers` have none, as those of frozen
            parameters. It should be in evaluation mode: with dropout or batch statistics L is not a sum over samples.
        params: θ, the parameters that derivatives are taken in.
        buffers: The network's other tensors.
        x: The inputs, (n, ...).
        y: The labels or targets, (n, ...).
        loss: ℓ.
        chunk_size: How many samples are differentiated at once; by default as many as fit into memory.

    Example:
        >>> import torch
        >>> from glocal.losses import SquaredError
        >>> module = torch.nn.Linear(2, 1, bias=False)
        >>> params = {"weight": torch.tensor([[1.0, 2.0]])}
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> risk = Risk(module, params, {}, x, y, SquaredError())
        >>> risk.value()  # (1² + 2²) / 2 / 2
        tensor(1.2500)
        >>> risk.gradient()
        {'weight': tensor([[0.5000, 1.0000]])}
    """

    module: nn.Module
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    x: Tensor
    y: Tensor
    loss: Loss
    chunk_size: int | None = None

    @classmethod
    def from_model(cls, model: Model, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Risk:
        """Return the risk of a model in evaluation mode, on inputs as the challenge stores them."""
        evaluated = model.eval_mode()
        return cls(evaluated.module, params, evaluated.buffers, evaluated.prepare(x), y, model.criterion)

    def __len__(self) -> int:
        """n, the number of samples."""
        return self.x.shape[0]

    @property
    def num_params(self) -> int:
        """P, the number of entries of θ."""
        return sum(p.numel() for p in self.params.values())

    def chunks(self, size: int) -> Iterator[Risk]:
        """Yield the risks of consecutive samples, `size` of them at a time; each is a mean over its own samples."""
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield replace(self, x=x, y=y)

    def mean_over_chunks(self, size: int, function: Callable[[Risk], Tree]) -> Tree:
        """Return a mean over the samples, from a function that returns the tree of means over a chunk of `size`."""

        def weighted(part: Risk) -> Tree:
            return map_tree(lambda t: t * (len(part) / len(self)), function(part))

        return reduce(partial(map_tree, torch.add), map(weighted, self.chunks(size)))

    def outputs(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return f_θ(x), (n, K)."""
        return functional_call(self.module, {**(self.params if params is None else params), **self.buffers}, (self.x,))

    def losses(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return ℓ(f_θ(x_i), y_i), (n,)."""
        return self.loss.per_sample(self.outputs(params), self.y)

    def value(self) -> Tensor:
        """Return L(θ)."""
        with unfused_ops(self.module):
            sums = [part.losses().sum() for part in self.chunks(self.chunk_size or MAX_CHUNK_SIZE)]
        return torch.stack(sums).sum() / len(self)

    def gradient(self) -> Params:
        """Return ∇L(θ)."""

        def chunk_gradient(part: Risk) -> Params:
            return grad(lambda params: part.losses(params).mean())(dict(part.params))

        with torch.no_grad(), unfused_ops(self.module):
            return self.mean_over_chunks(self.chunk_size or MAX_CHUNK_SIZE, chunk_gradient)


def outputs_in_chunks(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return f_θ(x) for a network's parameters and buffers, computed in chunks."""
    with unfused_ops(module):
        parts = [functional_call(module, dict(tensors), (part,)) for part in x.split(MAX_CHUNK_SIZE)]
    kind = type(parts[0]).__name__
    require(isinstance(parts[0], Tensor), f"the network returns a {kind}; give a module that returns one tensor.")
    return torch.cat(parts)


def is_recurrent(module: nn.Module) -> bool:
    """Whether the network has recurrent layers of torch's, which `vmap` cannot batch."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


@contextmanager
def unfused_ops(module: nn.Module) -> Iterator[None]:
    """Run the network with operations that can be differentiated twice and batched by `vmap`.

    Torch's fused attention and recurrent layers have first derivatives only, the second derivatives of its fused
    weight normalization are wrong, and so is its PReLU under two nested `vmap`s of equal size. Convolutions lose their
    fast kernels only if the network has recurrent layers.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(unfused_encoders())
        stack.enter_context(_Elementary())
        if is_recurrent(module):
            for backend in (torch.backends.mkldnn, torch.backends.cudnn):
                # `backend.flags` would also set precision and determinism.
                stack.callback(setattr, backend, "enabled", backend.enabled)
                setattr(backend, "enabled", False)  # noqa: B010
        try:
            yield
        except RuntimeError as error:
            if NO_STORAGE not in str(error):
                raise
            raise GlocalError(
                f"torch.func cannot differentiate {type(module).__name__}, which this algorithm or measurement needs: "
                "it computes with packed sequences or other data that it reads by address. Pass padded sequences."
            ) from error


class _Elementary(TorchFunctionMode):
    """Replace functions of torch by elementary operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ELEMENTARY.get(func, func)(*args, **kwargs or {})


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    slopes = weight.reshape(-1, *[1] * (x.dim() - 2)) if weight.numel() > 1 else weight
    return torch.where(x > 0, x, slopes * x)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / ‖v‖ with one norm for each index along `dim`, or one norm in total if `dim` is −1."""
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


ELEMENTARY: dict[Any, Any] = {torch._weight_norm: _weight_norm, torch.prelu: _prelu}
