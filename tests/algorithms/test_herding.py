"""Herding against its definition, evaluated example by example in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.icarl import draw, herd, repeat

QUICK = settings(deadline=None, max_examples=40, derandomize=True)


def brute_force(features: list[list[Fraction]], count: int) -> list[int]:
    """argmin over all examples left of ‖μ − mean of the chosen and this one‖², the first of equals, exactly."""
    n, width = len(features), len(features[0])
    mean = [sum((f[j] for f in features), Fraction(0)) / n for j in range(width)]
    chosen: list[int] = []
    while len(chosen) < min(count, n):

        def away(i: int) -> Fraction:
            with_it = [*chosen, i]
            part = [sum((features[k][j] for k in with_it), Fraction(0)) / len(with_it) for j in range(width)]
            return sum(((a - b) ** 2 for a, b in zip(mean, part, strict=True)), Fraction(0))

        chosen.append(min((i for i in range(n) if i not in chosen), key=away))
    return chosen


def expected(features: Tensor, members: Tensor, count: int) -> list[list[int]]:
    """The rows that brute force finds for every class."""
    result = []
    for part in members:
        rows = part.nonzero().flatten().tolist()
        exact = [[Fraction(v) for v in features[row].tolist()] for row in rows]
        result.append([rows[i] for i in brute_force(exact, count)])
    return result


def shuffled_classes(sizes: list[int], seed: int) -> Tensor:
    """Who is in which class, (K, n), in no order, beside two examples of no class at all."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), c) for c, size in enumerate(sizes)] + [torch.full((2,), -1)])
    labels = labels[torch.randperm(len(labels), generator=draws)]
    return labels == torch.arange(len(sizes)).unsqueeze(1)


@QUICK
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 999))
def test_it_is_the_greedy_choice_of_the_definition(sizes: list[int], width: int, count: int, seed: int) -> None:
    members = shuffled_classes(sizes, seed)
    features = torch.randn(members.shape[1], width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    actual = herd(features, members, count)
    assert actual.shape == (len(sizes), count)
    for part, wanted in zip(actual.tolist(), expected(features, members, count), strict=True):
        assert part[: len(wanted)] == wanted


@QUICK
@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3), st.integers(1, 2), st.integers(0, 999))
def test_of_equals_it_takes_the_first(sizes: list[int], width: int, seed: int) -> None:
    """Small whole numbers, as many as a power of two: many ties, and no rounding anywhere."""
    members = shuffled_classes(sizes, seed)
    features = torch.randint(-1, 2, (members.shape[1], width), generator=torch.Generator().manual_seed(seed)).float()
    actual = herd(features, members, 8).tolist()
    for part, wanted in zip(actual, expected(features, members, 8), strict=True):
        assert part[: len(wanted)] == wanted


def test_a_class_with_too_few_examples_has_them_all_and_takes_none_of_anothers() -> None:
    members = torch.tensor([[0, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    small, large, _ = herd(features, members, 5).tolist()
    assert small[0] == 1
    assert sorted(large) == [0, 2, 3, 4, 5]


def test_the_first_few_are_those_that_fewer_would_have_been() -> None:
    members = shuffled_classes([20, 30], 5)
    features = torch.randn(52, 6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(herd(features, members, 4), herd(features, members, 15)[:, :4])


def test_the_chosen_stand_for_their_class_better_than_chance() -> None:
    members = torch.ones(1, 400, dtype=torch.bool)
    features = torch.randn(400, 8, generator=torch.Generator().manual_seed(2))
    rows = herd(features, members, 20)[0]
    by_chance = [
        (features[torch.randperm(400, generator=torch.Generator().manual_seed(s))[:20]].mean(0) - features.mean(0))
        for s in range(50)
    ]
    assert (features[rows].mean(0) - features.mean(0)).norm() < 0.3 * min(d.norm() for d in by_chance)


def test_mapped_over_runs_it_chooses_what_each_would_alone() -> None:
    members = shuffled_classes([40, 25], 3)
    features = torch.randn(5, 67, 12, generator=torch.Generator().manual_seed(3)).relu()
    mapped = vmap(lambda f: herd(f, members, 12))(features)
    assert torch.equal(mapped, torch.stack([herd(f, members, 12) for f in features]))


@pytest.mark.parametrize("seed", range(3))
def test_by_chance_it_is_the_members_in_the_order_of_their_random_numbers(seed: int) -> None:
    members = shuffled_classes([6, 3], seed)
    random = torch.randint(-(2**63), 2**63 - 1, (11,), generator=torch.Generator().manual_seed(seed))
    rows = draw(random, members, 5)
    for part, chosen in zip(members, rows.tolist(), strict=True):
        ranked = sorted(part.nonzero().flatten().tolist(), key=lambda row: int(random[row]))
        assert chosen[: len(ranked)] == ranked[:5]


def test_places_left_over_are_filled_with_the_same_ones_in_turn() -> None:
    rows = torch.tensor([[7, 3, 0, 0, 0], [4, 9, 2, 5, 1], [6, 0, 0, 0, 0]])
    filled = repeat(rows, torch.tensor([2, 5, 1]))
    assert filled.tolist() == [[7, 3, 7, 3, 7], [4, 9, 2, 5, 1], [6, 6, 6, 6, 6]]
