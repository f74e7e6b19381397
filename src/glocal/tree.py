"""Trees: nested dicts of tensors, such as a run's parameters. A cohort's tensors have a first axis for its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    Params: TypeAlias = dict[str, Tensor]
else:  # configurations are trees too, and are read without torch
    Params = dict[str, Any]
Tree: TypeAlias = dict[str, Any]  # str -> Tensor | Tree


def map_tree(function: Callable[..., Tensor], *trees: Mapping[str, Any]) -> Tree:
    """Apply `function` leaf by leaf to trees of one structure."""
    first = trees[0]
    return {
        key: map_tree(function, *(tree[key] for tree in trees))
        if isinstance(leaf, Mapping)
        else function(*(tree[key] for tree in trees))
        for key, leaf in first.items()
    }


def stack(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """Stack the leaves of runs' trees, which have one structure, along a new first axis."""
    import torch

    return map_tree(lambda *leaves: torch.stack(leaves), *trees)


def concatenate(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """Concatenate the leaves of cohorts' trees, which have one structure, along their first axis."""
    import torch

    return dict(trees[0]) if len(trees) == 1 else map_tree(lambda *leaves: torch.cat(leaves), *trees)


def select(tree: Mapping[str, Any], index: int | slice | Sequence[int]) -> Tree:
    """Select one run, or some runs, of a cohort's tree."""
    return map_tree(lambda leaf: leaf[index], tree)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tree, or a configuration, as one flat dict with names like 'fisher/0.weight'."""
    flat: dict[str, Any] = {}
    for key, leaf in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(leaf, f"{name}/") if isinstance(leaf, Mapping) else {name: leaf})
    return flat


def unflatten(flat: Mapping[str, Tensor]) -> Tree:
    """Invert `flatten`."""
    tree: Tree = {}
    for name, leaf in flat.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def to_vector(params: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the tensors of θ, in the order of the dict, into one vector (P,)."""
    import torch

    return torch.cat([p.reshape(-1) for p in params.values()])


def from_vector(vector: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Invert `to_vector`: split a vector into tensors with the names and shapes of `like`."""
    parts = vector.split([p.numel() for p in like.values()])
    return {k: part.reshape(p.shape) for (k, p), part in zip(like.items(), parts, strict=True)}


def nbytes(tree: Mapping[str, Any]) -> int:
    """Return the bytes that the leaves take."""
    return sum(leaf.numel() * leaf.element_size() for leaf in flatten(tree).values())


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the inner product of two parameter vectors."""
    return total(a[k] * b[k] for k in a)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all entries of all tensors: rows first, then their sums.

    In this order the rounding is the same alone and in a cohort; on a CPU one `sum()` is split among threads by size.
    """
    import torch

    return torch.cat([_row_sums(t) for t in tensors]).sum(-1)


def norm(tensors: Params) -> Tensor:
    """Return the Euclidean norm of all entries of all tensors."""
    return total(t.square() for t in tensors.values()).sqrt()


def _row_sums(t: Tensor) -> Tensor:
    if t.is_cuda:
        return t.sum().unsqueeze(0)
    return t.contiguous().flatten(end_dim=-2).sum(-1) if t.dim() > 1 else t.reshape(-1).sum(-1, keepdim=True)
