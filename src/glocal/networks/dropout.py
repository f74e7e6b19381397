"""Dropout whose masks are made of given random numbers, around any network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from glocal.networks.layer_calls import layer_calls, named_layers


class DropoutNetwork(nn.Module):
    """Drops inputs of every linear layer, unless that is the network's first layer: pixels are never dropped.

    A layer that is called several times has masks of its own at every call.
    """

    def __init__(self, network: nn.Module, shape: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        made = layer_calls(network, shape)
        self.spared = int(bool(made) and isinstance(made[0].layer, nn.Linear))
        self.widths = [math.prod(call.input_shape) for call in made[1:] if isinstance(call.layer, nn.Linear)]

    def forward(self, x: Tensor, random: Tensor | None = None, rate: Tensor | float = 0.0) -> Tensor:
        """With one uniform number for every input that may be dropped, in a row; without them nothing is dropped."""
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

    def _masks(self, rows: int, random: Tensor, rate: Tensor | float) -> Iterator[Tensor | None]:
        """In the order of the calls: 0 where an input is dropped, 1/(1 − rate) elsewhere, so that the mean is 1."""
        width = sum(self.widths)
        masks = (random[: rows * width].view(rows, width) >= rate) / (1 - rate)
        return iter([*[None] * self.spared, *masks.split(self.widths, 1)])
