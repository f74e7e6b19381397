"""Random numbers inside a network, such as dropout's, drawn from a key instead of torch's global generator.

A pass of a run then draws the same numbers alone, in a cohort under `vmap`, and in a captured CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from glocal.rng import generator, global_generator, uniform

MAX_AHEAD = 1 << 22
"""Random numbers that are computed before they are needed: 16 MB."""


class KeyedRandomness(TorchFunctionMode):
    """Inside this context dropout, `rand`, `randn` and `bernoulli` take the next numbers of the key's sequence.

    Other functions, such as `torch.multinomial` or an LSTM's own dropout, still use torch's global generator.

    Args:
        key: the key of the pass.
        expected: how many numbers will probably be drawn. They are computed at once, since a draw takes 20 operations.
    """

    def __init__(self, key: Tensor, expected: int = 0) -> None:
        super().__init__()
        self._key, self.drawn = key, 0
        self._num_ahead = min(expected, MAX_AHEAD)
        self._ahead = uniform(key, self._num_ahead)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return DRAWS[func](self, *args, **kwargs)
        if func in COMPOSITE:
            with self:
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def uniform(self, shape: Any) -> Tensor:
        """Return the next uniform random numbers in [0, 1), float32."""
        n, start = math.prod(shape), self.drawn
        self.drawn += n
        ahead = self.drawn <= self._num_ahead
        numbers = self._ahead[start : self.drawn] if ahead else uniform(self._key, n, start)
        return numbers.view(tuple(shape))

    def normal(self, shape: Any) -> Tensor:
        middle = self.uniform(shape) + 2.0**-25  # the middle of its interval, so that neither 0 nor 1 occurs
        return torch.erfinv(middle.double() * 2 - 1).float() * math.sqrt(2)

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, axes: int | None = None
    ) -> Tensor:
        """Drop entries; with `axes`, whole slices along the axes after these."""
        if not training or p == 0:
            return input
        shape = input.shape if axes is None else [*input.shape[:axes], *[1] * (input.dim() - axes)]
        factors = ((self.uniform(shape) >= p) / (1 - p if p < 1 else 1)).to(input.dtype)
        return input.mul_(factors) if inplace else input * factors

    def channel_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, dim: int
    ) -> Tensor:
        """Drop channels of (n, channels, ...) or (channels, ...), with `dim` axes behind the channels."""
        return self.dropout(input, p, training, inplace, axes=input.dim() - dim)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        """`scaled_dot_product_attention`, written out where it drops weights."""
        if dropout_p == 0 or options.get("enable_gqa"):
            arguments = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
            return functional.scaled_dot_product_attention(query, key, value, **arguments)
        scores = query @ key.mT * (options.get("scale") or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        empty = scores.isneginf().all(-1, keepdim=True)  # where all keys are masked, torch's output is 0
        weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        return self.dropout(weights, dropout_p) @ value

    def bernoulli(self, input: Tensor, p: float | None = None, **options: Any) -> Tensor:
        return (self.uniform(input.shape) < (input if p is None else p)).to(input.dtype)

    def bernoulli_(self, input: Tensor, p: float | Tensor = 0.5, **options: Any) -> Tensor:
        return input.copy_(self.uniform(input.shape) < p)


def _draw_like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(mode: KeyedRandomness, tensor: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return draw(mode, tensor.shape).to(dtype or tensor.dtype)

    return drawn


def _draw_size(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(mode: KeyedRandomness, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        shape = options.get("size") or (size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        device = options.get("device") or torch.get_default_device()
        return draw(mode, shape).to(device, dtype or torch.get_default_dtype())

    return drawn


DRAWS: dict[Any, Callable[..., Tensor]] = {
    functional.dropout: KeyedRandomness.dropout,
    **{
        function: lambda mode, *args, dim=dim, **options: mode.channel_dropout(*args, **options, dim=dim)
        for dim, function in enumerate((functional.dropout1d, functional.dropout2d, functional.dropout3d), 1)
    },
    functional.scaled_dot_product_attention: KeyedRandomness.attention,
    torch.bernoulli: KeyedRandomness.bernoulli,
    Tensor.bernoulli: KeyedRandomness.bernoulli,
    Tensor.bernoulli_: KeyedRandomness.bernoulli_,
    torch.rand_like: _draw_like(KeyedRandomness.uniform),
    torch.randn_like: _draw_like(KeyedRandomness.normal),
    torch.rand: _draw_size(KeyedRandomness.uniform),
    torch.randn: _draw_size(KeyedRandomness.normal),
}
COMPOSITE = {functional.multi_head_attention_forward}
"""Functions written in Python whose bodies draw."""


@cache
def _body(function: FunctionType) -> FunctionType:
    """Return the function without its own dispatch to modes, so that a mode sees what its body calls."""
    off: dict[str, Any] = {name: lambda *_: False for name in dir(functional) if name.startswith("has_torch_function")}
    return FunctionType(function.__code__, function.__globals__ | off, None, function.__defaults__)


def draws_random_numbers(module: nn.Module, x: Tensor) -> bool:
    """Return whether a pass in training mode draws from torch's global generator; x is a batch on the CPU."""
    with global_generator(generator(0)), torch.no_grad():
        before = torch.get_rng_state()
        try:
            module.train()(x)
        except Exception:  # it takes more arguments, say
            return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules())
        return not before.equal(torch.get_rng_state())
