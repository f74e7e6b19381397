"""Trees of tensors: stacking, selecting, joining and flattening lose nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glocal import tree

QUICK = settings(deadline=None, max_examples=30, derandomize=True)
NAMES = st.text("abc.012", min_size=1, max_size=4)
LEAVES = st.lists(st.integers(-9, 9), min_size=1, max_size=4).map(torch.tensor)
NODES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=6)
TREES = st.dictionaries(NAMES, NODES, max_size=3)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b)


def plus(a: dict[str, Any], offset: int) -> dict[str, Any]:
    return {k: plus(v, offset) if isinstance(v, dict) else v + offset for k, v in a.items()}


@QUICK
@given(TREES)
def test_unflatten_inverts_flatten(nested: dict[str, Any]) -> None:
    assert same(tree.unflatten(tree.flatten(nested)), nested)


def test_flat_names_are_paths() -> None:
    flat = tree.flatten({"fisher": {"0.weight": torch.zeros(1)}, "seen": torch.ones(())})
    assert list(flat) == ["fisher/0.weight", "seen"]


@QUICK
@given(TREES, st.integers(1, 4))
def test_a_stacked_run_is_the_run(nested: dict[str, Any], runs: int) -> None:
    stacked = tree.stack([plus(nested, run) for run in range(runs)])
    for run in range(runs):
        assert same(tree.select(stacked, run), plus(nested, run))


@QUICK
@given(TREES, st.integers(1, 4), st.integers(1, 4))
def test_cohorts_joined_are_the_cohort_of_all(nested: dict[str, Any], left: int, right: int) -> None:
    runs = [plus(nested, run) for run in range(left + right)]
    whole = tree.stack(runs)
    assert same(tree.concatenate([tree.stack(runs[:left]), tree.stack(runs[left:])]), whole)
    assert same(tree.select(whole, slice(left, None)), tree.stack(runs[left:]))
    assert same(tree.select(whole, list(range(left))), tree.stack(runs[:left]))
    assert same(tree.concatenate([whole]), whole)


def test_map_tree_goes_leaf_by_leaf_through_several_trees() -> None:
    a = {"x": torch.tensor([1, 2]), "m": {"y": torch.tensor(3)}}
    b = {"x": torch.tensor([10, 20]), "m": {"y": torch.tensor(30)}}
    assert same(tree.map_tree(torch.add, a, b), {"x": torch.tensor([11, 22]), "m": {"y": torch.tensor(33)}})


def test_nbytes_counts_every_leaf_in_its_own_type() -> None:
    inner = {"b": torch.zeros(5, dtype=torch.uint8), "c": torch.zeros((), dtype=torch.long)}
    nested = {"a": torch.zeros(3, 2), "m": inner}
    assert tree.nbytes(nested) == 3 * 2 * 4 + 5 + 8
    assert tree.nbytes({}) == 0


@QUICK
@given(st.lists(st.lists(st.floats(-3, 3), min_size=6, max_size=6), min_size=2, max_size=2))
def test_inner_is_the_dot_product_of_the_flat_vectors(values: list[list[float]]) -> None:
    def as_params(flat: list[float]) -> tree.Params:
        v = torch.tensor(flat, dtype=torch.float64)
        return {"w": v[:4].view(2, 2), "b": v[4:5], "scalar": v[5]}

    expected = math.fsum(p * q for p, q in zip(*values, strict=True))
    assert math.isclose(float(tree.inner(*map(as_params, values))), expected, abs_tol=1e-12)


def test_total_is_the_same_number_alone_and_in_a_cohort() -> None:
    values = torch.randn(7, 33, 57, generator=torch.Generator().manual_seed(0))
    together = torch.func.vmap(tree.total)(values)
    for alone, mapped in zip(values, together, strict=True):
        assert torch.equal(tree.total([alone]), mapped)
        assert math.isclose(float(mapped), math.fsum(alone.flatten().tolist()), abs_tol=1e-3)
