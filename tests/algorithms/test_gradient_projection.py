"""The triangular S with S G Sᵀ = I, for Gram matrices of every rank."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from glocal.algorithms.gradient_projection import whiten

QUICK = settings(deadline=None, max_examples=40, derandomize=True)


def vectors(rows: int, rank: int, seed: int) -> Tensor:
    """Unit vectors in 60 dimensions that span `rank` of them."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, rank, dtype=torch.float64, generator=draw)
    return torch.nn.functional.normalize(
        mixed @ torch.randn(rank, 60, dtype=torch.float64, generator=draw) / rank**0.5, dim=1
    )


@QUICK
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1, 5, 32, 100]))
def test_what_it_makes_of_the_rows_is_an_orthonormal_basis_of_their_span(
    rows: int, rank: int, seed: int, block: int
) -> None:
    rank = min(rank, rows)
    j = vectors(rows, rank, seed)
    s = whiten(j @ j.mT, 1e-6, block)
    assert torch.equal(s, s.tril())
    basis = s @ j
    kept = s.diagonal() > 0
    assert int(kept.sum()) == rank
    assert not bool(s[~kept].any())
    torch.testing.assert_close(basis @ basis.mT, torch.diag(kept.double()), rtol=0, atol=1e-6)
    torch.testing.assert_close(j - j @ basis.mT @ basis, torch.zeros_like(j), rtol=0, atol=1e-6)


def test_the_first_of_equal_rows_is_kept() -> None:
    j = vectors(3, 3, 0)[[0, 1, 0, 2, 1, 2]]
    assert (whiten(j @ j.mT, 1e-6, 2).diagonal() > 0).tolist() == [True, True, False, True, False, False]


def test_a_row_is_left_out_if_what_is_new_in_it_is_shorter_than_the_tolerance() -> None:
    basis = torch.eye(2, dtype=torch.float64)
    for angle, kept in ((1e-3, True), (2e-4, True), (5e-5, False), (0.0, False)):
        j = torch.stack([basis[0], basis[0] + angle * basis[1]])
        assert bool(whiten(j @ j.mT, 1e-4)[1].any()) == kept


def test_what_a_row_left_out_would_have_explained_is_still_kept() -> None:
    """The second row's new part is too short to count; the third lies along it and is new all the same."""
    basis = torch.eye(2, dtype=torch.float64)
    j = torch.stack([basis[0], basis[0] + 1e-5 * basis[1], basis[1]])
    s = whiten(j @ j.mT, 1e-4)
    torch.testing.assert_close(s, torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)))


def test_rows_of_zeros_and_none_at_all() -> None:
    assert not bool(whiten(torch.zeros(3, 3, dtype=torch.float64), 1e-6).any())
    assert whiten(torch.zeros(0, 0, dtype=torch.float64), 1e-6).shape == (0, 0)


def test_what_is_not_a_number_stays_in_its_run() -> None:
    j = vectors(5, 5, 0)
    broken = torch.stack([j @ j.mT, torch.full((5, 5), torch.nan, dtype=torch.float64)])
    mapped = vmap(lambda g: whiten(g, 1e-6, 2))(broken)
    assert torch.equal(mapped[0], whiten(j @ j.mT, 1e-6, 2))
