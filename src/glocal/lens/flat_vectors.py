r"""A subject's updates and Hessians as flat vectors and maps of them, ordered as `vector.flatten` orders θ.

Tasks are counted from 0, so that after task t there are t + 1 of them: the paper's average Hessian of the tasks before
t, \bar H_{<t} = (1/t) Σ_{o<t} H_o with its t counted from 1, is (1/(t + 1)) Σ_{o<t} H_o here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from glocal.curvature.lanczos import start_vector
from glocal.curvature.products import Product
from glocal.curvature.vector import flatten, unflatten
from glocal.errors import require
from glocal.lens.subject import Point, Subject
from glocal.tree import Params

Matvec = Callable[[Tensor], Tensor]

LARGEST_SMALL = 1_000_000
"""Parameters up to which several products are made at once, and what they share is kept."""


def trained(subject: Subject) -> int:
    """How many tasks were learnt: N, with the solutions θ_1 … θ_N."""
    found = len(subject.solutions) - 1
    require(found >= 1, "a subject without a learnt task was given; allowed: θ_0 and at least one solution after it.")
    return found


def at_least(least: int, **given: int) -> None:
    """Refuse smaller numbers than the least, by name."""
    for name, number in given.items():
        require(number >= least, f"{name} = {number} was given; allowed: {least} and more.")


def solution(subject: Subject, task: int) -> Point:
    """θ_o."""
    return subject.solutions[task + 1]


def position(subject: Subject, task: int) -> Tensor:
    """θ_o as a vector."""
    return flatten(solution(subject, task).params)


def update(subject: Subject, task: int) -> Tensor:
    """Δ_t = θ_t − θ_{t−1}."""
    return position(subject, task) - position(subject, task - 1)


def size(subject: Subject) -> int:
    """P."""
    return sum(p.numel() for p in subject.solutions[0].params.values())


def slope(subject: Subject, task: int) -> Tensor:
    """∇L_o(θ_o)."""
    return flatten(subject.gradient(task, solution(subject, task)))


def hessian(subject: Subject, task: int) -> Matvec:
    """v ↦ H_o v, H_o = ∇²L_o(θ_o)."""
    point = solution(subject, task)
    return flat(subject.hessian_product(task, point), point.params)


def average_hessian(subject: Subject, task: int) -> Matvec:
    r"""v ↦ \bar H_{<t} v, over the tasks o < t; t may be N, the task that would come next."""
    # Of a large network only one task's passes fit into memory at a time.
    kept = [hessian(subject, o) for o in range(task)] if size(subject) <= LARGEST_SMALL else None

    def product(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for o in range(task):
            total = total + (hessian(subject, o) if kept is None else kept[o])(v)
        return total / (task + 1)

    return product


def flat(product: Product, like: Params) -> Matvec:
    """A map of dicts as a map of vectors."""
    return lambda v: flatten(product(unflatten(v, like)))


def at_once(subject: Subject) -> int:
    """How many products are made side by side."""
    return 8 if size(subject) <= LARGEST_SMALL else 1


def start(subject: Subject, seed: int) -> Tensor:
    """A random direction, the same on every device."""
    drawn = start_vector(size(subject), torch.Generator().manual_seed(seed), torch.float64)
    return drawn.to(position(subject, -1))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b, added up in double precision."""
    return a.double() @ b.double()
