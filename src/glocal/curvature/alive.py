"""Features of the inputs that are zero in every sample, such as the rim of digits, left out of a chain's products.

The weights that meet them have no slope: ∇²L has zeros in their rows and columns. One such feature is kept for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from glocal.curvature.layers import Params
from glocal.networks.vmap_utils import is_batched

MANY = 0.1
"""The part of the features that must be zero everywhere for it to pay to leave them out."""


class Alive(NamedTuple):
    """The features that are not zero in every sample, and one that is."""

    weight: str  # of the layer that is given the inputs
    which: Tensor
    places: Tensor  # of every feature among them

    def of(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.which)

    def narrowed(self, params: Mapping[str, Tensor]) -> Params:
        return {**params, self.weight: self.of(params[self.weight])}

    def spread(self, vector: Params) -> Params:
        """A vector in their places, and zero in all others."""
        own = vector[self.weight]
        return {**vector, self.weight: own.new_zeros(len(own), len(self.places)).index_copy(1, self.which, own)}

    def widened(self, product: Params) -> Params:
        """Every feature's numbers again: zero for the others, as for the one."""
        return {**product, self.weight: product[self.weight].index_select(1, self.places)}


def alive(x: Tensor, layer: str, params: Mapping[str, Tensor]) -> Alive | None:
    """Among those of x, (n, features), that a linear layer is given. None where leaving the others out does not pay (on
    a GPU), where nobody knows (of samples mapped over runs), and where zero times a weight may be no number."""
    weight = f"{layer}.weight"
    if x.device.type != "cpu" or is_batched(x, params[weight]) or not bool(params[weight].isfinite().all()):
        return None
    living = x.abs().amax(0) != 0  # sooner found than x.any(0)
    dead = (~living).nonzero().squeeze(1)
    if len(dead) - 1 <= MANY * len(living):  # what would be left out; of what is left, nothing
        return None
    living[dead[0]] = True
    places = living.cumsum(0) - 1
    places = places.index_fill(0, dead, int(places[dead[0]]))
    return Alive(weight, living.nonzero().squeeze(1), places)
