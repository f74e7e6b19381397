r"""Herding (iCaRL's): examples whose mean feature stays as close as possible to that of their whole class.

Of the examples of a class with features φ_1, ..., φ_n and mean μ, without replacement and best first,

    p_k = argmin_i ‖ μ − (1/k) ( φ_i + Σ_{j<k} φ_{p_j} ) ‖ = argmin_i ‖ ( k μ − Σ_{j<k} φ_{p_j} ) − φ_i ‖,

the first of equals. Any first few of them are what herding would have chosen had fewer been asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def herd(features: Tensor, members: Tensor, count: int) -> Tensor:
    """The rows of `count` examples of every class, (K, count), from features (n, F) and who is in a class, (K, n).

    A class that has fewer has them all in its first places; what follows there means nothing.
    """
    # Candidates are often nearer to each other than float32 can tell, and products may be rounded otherwise in a cohort
    # than alone. In double precision, with equals known up to its rounding, both choose the same example.
    features = features.double()
    sizes = members.sum(1, keepdim=True).clamp(min=1)
    means = members.to(features.dtype) @ features / sizes
    lengths = features.square().sum(-1)
    rounding = 1e-10 * lengths.max()
    rows = torch.arange(features.shape[0], device=features.device)
    missing, available, chosen = means, members, []
    for _ in range(count):
        distances = lengths - 2 * (missing @ features.mT)  # squared, less ‖missing‖², which is the same for all
        distances = torch.where(available, distances, torch.inf)
        nearest = (distances <= distances.amin(-1, keepdim=True) + rounding).byte().argmax(-1)
        chosen.append(nearest)
        available = available & (rows != nearest.unsqueeze(-1))
        missing = missing + means - features[nearest]
    return torch.stack(chosen, -1)


def draw(random: Tensor, members: Tensor, count: int) -> Tensor:
    """The same uniformly, by chance: in the order of the examples' random numbers (n,)."""
    return torch.where(members, random, 2.0).sort(dim=-1, stable=True).indices[..., :count]


def repeat(chosen: Tensor, held: Tensor) -> Tensor:
    """Classes that have fewer examples than places, `held` of them, fill these with the same ones over and over."""
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    return chosen.gather(-1, places % held.clamp(min=1).unsqueeze(-1))
