"""The top eigenpairs of ∇²L of a network: Lanczos's method with Hessian products, in one call.

Where a chain's inputs have features that are zero in every sample (`alive`), the search leaves the weights out that
meet them: no eigenvector of another eigenvalue than 0 has a part there, and of these enough are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from glocal.curvature.lanczos import Eigenpairs, Largest, lanczos, start_vector
from glocal.curvature.products import hessian_product, living
from glocal.curvature.vector import flatten, unflatten
from glocal.precision import full_precision

if TYPE_CHECKING:
    from glocal.losses import Loss


@full_precision()
def eigenpairs(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    k: int,
    steps: int | None = None,
    largest: Largest = "magnitude",
    tolerance: float = 0.0,
    chunk: int | None = None,
    start: Tensor | None = None,
) -> Eigenpairs:
    """The k of largest magnitude, or of largest value, found as `lanczos` finds them; from a random start, always the
    same, if none is given."""
    theta = flatten(params)
    if start is None:
        start = start_vector(theta.numel(), torch.Generator().manual_seed(0), theta.dtype).to(theta.device)
    some = living(module, params, x)
    if some is None or k > len(params[some.weight]):  # of so many eigenvalues 0 is sure to be one
        product = hessian_product(module, params, buffers, x, y, loss, chunk)
        return lanczos(lambda v: flatten(product(unflatten(v, params))), start, k, steps, largest, tolerance)
    few = some.narrowed(params)
    product = hessian_product(module, few, buffers, some.of(x.flatten(1)), y, loss, chunk)
    begin = flatten(some.narrowed(unflatten(start, params)))
    found = lanczos(lambda v: flatten(product(unflatten(v, few))), begin, k, steps, largest, tolerance)
    wide = torch.stack([flatten(some.spread(unflatten(v, few))) for v in found.vectors])
    return found._replace(vectors=wide)
