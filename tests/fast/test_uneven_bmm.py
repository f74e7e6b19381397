"""Products in parts are those of whole matrices, however many threads there are and however matrices lie in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glocal.fast import uneven_bmm


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("matrices", [1, 2, 5, 7])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_products(monkeypatch: pytest.MonkeyPatch, threads: int, matrices: int, turned: bool) -> None:
    monkeypatch.setattr(uneven_bmm, "WORK", 1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(matrices, 12, 5, generator=draw), torch.randn(matrices, 5, 4, generator=draw)
    if turned:
        x, y = (t.mT.contiguous().mT for t in (x, y))
    exact = torch.einsum("bij,bjk->bik", x.double(), y.double())
    torch.testing.assert_close(uneven_bmm.bmm(x, y).double(), exact, rtol=1e-5, atol=1e-5)
    a = torch.randn(matrices, 12, 4, generator=draw)
    own = a.clone()
    for start, out in ((a, None), (a, torch.empty_like(a)), (own, own)):
        found = uneven_bmm.baddbmm(start, x, y, out=out)
        torch.testing.assert_close(found.double(), a + exact, rtol=1e-5, atol=1e-5)
        assert out is None or found is out


def test_when_threads_would_wait(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(uneven_bmm, "WORK", 12 * 5 * 4)
    x, y = torch.zeros(7, 12, 5), torch.zeros(7, 5, 4)
    asked = {n: uneven_bmm.lopsided(x[:n], y[:n]) for n in range(1, 8)}
    assert asked == {1: True, 2: False, 3: True, 4: False, 5: True, 6: False, 7: True}
    assert not uneven_bmm.lopsided(torch.zeros(25, 12, 5), torch.zeros(25, 5, 4)), "one of 26 turns is no loss"
    assert not uneven_bmm.lopsided(x[:5, :11], y[:5]), "eleven rows have no halves"
    assert not uneven_bmm.lopsided(x[:5, :, :4], y[:5, :4]), "too little to do"
