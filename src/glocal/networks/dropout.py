"""Dropout around any network, with masks from given random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from glocal.networks.layer_calls import layer_calls, named_layers


class DropoutNetwork(nn.Module):
    """Drop inputs of every linear layer, except where it is the network's first layer: pixels are never dropped.

    A layer that is called several times has its own masks at every call.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        calls = layer_calls(network, shape)
        self.skipped = int(bool(calls) and isinstance(calls[0].layer, nn.Linear))
        self.widths = [math.prod(call.input_shape) for call in calls[1:] if isinstance(call.layer, nn.Linear)]

    def forward(self, x: Tensor, random: Tensor | None = None, rate: Tensor | float = 0.0) -> Tensor:
        """Call the network.

        Args:
            x: The inputs.
            random: One uniform number in [0, 1) per droppable input, flat. Without them nothing is dropped.
            rate: The probability that an input is dropped.
        """
        if random is None or not self.widths:
            return self.network(x)
        masks = self._masks(x.shape[0], random, rate)

        def drop(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mask = next(masks)
            return args if mask is None else (args[0] * mask.to(args[0].dtype).view_as(args[0]), *args[1:])

        with ExitStack() as hooks:
            for layer in named_layers(self.network).values():
                if isinstance(layer, nn.Linear):
                    hooks.enter_context(layer.register_forward_pre_hook(drop))
            return self.network(x)

    def _masks(self, samples: int, random: Tensor, rate: Tensor | float) -> Iterator[Tensor | None]:
        """Yield the mask of every call: 0 for dropped inputs and 1/(1 − rate) for others, so that the mean is 1."""
        width = sum(self.widths)
        masks = (random[: samples * width].view(samples, width) >= rate) / (1 - rate)
        return iter([*[None] * self.skipped, *masks.split(self.widths, 1)])
