"""What a recording replays is what the function does, whatever it writes to, draws and forgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from glocal.fast import op_trace
from glocal.fast.op_trace import copy_with_strides, trace
from glocal.fast.step_trace import bitwise_equal

GIVEN = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def writes_to_an_argument(given: Sequence[Tensor]) -> list[Tensor]:
    a, b = given
    a.add_(b)
    return [a.sum(), a]


def writes_through_a_view(given: Sequence[Tensor]) -> list[Tensor]:
    a, b = given
    a.t()[0].mul_(b[:, 1])
    return [a.t().t() + b]


def reads_before_and_after_writing(given: Sequence[Tensor]) -> list[Tensor]:
    a, b = given
    before = a * 2
    a.copy_(b)
    return [before + a * 2]


def writes_to_what_it_made(given: Sequence[Tensor]) -> list[Tensor]:
    counts = torch.zeros_like(given[0])
    counts += given[1]
    return [counts]


def returns_what_is_always_the_same(given: Sequence[Tensor]) -> list[Tensor]:
    return [torch.arange(3.0), given[0] + torch.arange(3) * torch.ones(3)]


def counts_in_place(given: Sequence[Tensor]) -> list[Tensor]:
    steps = torch.ones_like(given[0])
    return [steps, given[1] * torch.full_like(given[0], 2)]


def takes_a_gradient(given: Sequence[Tensor]) -> list[Tensor]:
    return [grad(lambda a: (a * given[1]).relu().log1p().sum())(given[0])]


def maps(given: Sequence[Tensor]) -> list[Tensor]:
    values, places = vmap(lambda a, b: (a * b).topk(2))(*given)
    return [values, places.float()]


def draws(given: Sequence[Tensor]) -> list[Tensor]:
    torch.rand(3)  # nobody looks at it, but the stream has gone on
    return [torch.dropout(given[0], 0.5, train=True), given[1] + torch.rand(3)]


def says_nothing_of_an_argument(given: Sequence[Tensor]) -> list[Tensor]:
    return [given[1].detach().unsqueeze(0).squeeze(0)]


def writes_to_what_it_is_told(given: Sequence[Tensor]) -> list[Tensor]:
    """At recording nothing changes: the example's second argument is smaller everywhere."""
    torch.minimum(given[1], given[0] + 100, out=given[1])
    return [given[1] * 2]


def writes_to_a_list(given: Sequence[Tensor]) -> list[Tensor]:
    torch._foreach_mul_(list(given), 3.0)
    return [given[0] - given[1]]


def turns_into_the_complex_plane(given: Sequence[Tensor]) -> list[Tensor]:
    z = torch.complex(given[0], given[1] * 0)
    return [(z * z.conj()).real, torch.complex(*given).conj().imag.clone()]


def has_an_expanded_part(given: Sequence[Tensor]) -> list[Tensor]:
    return [(given[0][:1].expand(4, 3) + given[1][:1].expand(4, 3)) * 2]


def needs_an_argument_again(given: Sequence[Tensor]) -> list[Tensor]:
    twice = given[0] * 2
    flipped, more = twice.t(), twice + given[1]
    return [more * twice, flipped[0] + 1, more.relu() - more]


def adds_to_products(given: Sequence[Tensor]) -> list[Tensor]:
    a, b = (g.expand(2, 4, 3) * 1 for g in given)
    product = a @ b.mT
    start = product * 2
    kept = b @ a.mT
    changed = start * 3
    sums = [start + a @ a.mT, kept + start, start + kept, changed + b @ b.mT]
    given[0].add_(1)
    late = given[0].expand(2, 4, 3) + torch.bmm(a @ b.mT, b)
    chain = a * 2 + b @ (b.mT @ a) + a @ (a.mT @ b)
    return [*sums, changed.mul_(2), late, chain]


FUNCTIONS = [
    needs_an_argument_again,
    adds_to_products,
    writes_to_what_it_is_told,
    writes_to_a_list,
    turns_into_the_complex_plane,
    has_an_expanded_part,
    writes_to_an_argument,
    writes_through_a_view,
    reads_before_and_after_writing,
    writes_to_what_it_made,
    returns_what_is_always_the_same,
    counts_in_place,
    takes_a_gradient,
    maps,
    draws,
    says_nothing_of_an_argument,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_same_results_on_other_numbers_again_and_again(
    function: Callable[[Sequence[Tensor]], list[Tensor]],
) -> None:
    replay = trace(function, GIVEN)
    for n in range(3):
        given = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * n + k)) for k in range(2)]
        mine, theirs = [g.clone() for g in given], [g.clone() for g in given]
        torch.manual_seed(n)
        expected = function(theirs)
        after = torch.get_rng_state()
        torch.manual_seed(n)
        found = replay(mine)
        assert torch.equal(torch.get_rng_state(), after)
        torch.testing.assert_close([*found, *mine], [*expected, *theirs], rtol=0, atol=0)
        for result in found:
            result += 1  # whoever is given a result may write to it


def test_the_example_and_the_random_stream_are_left_alone() -> None:
    given, stream = [g.clone() for g in GIVEN], torch.get_rng_state()
    trace(writes_to_an_argument, given)
    trace(draws, given)
    assert all(torch.equal(a, b) for a, b in zip(given, GIVEN, strict=True))
    assert torch.equal(torch.get_rng_state(), stream)


def test_what_is_always_the_same_is_made_once() -> None:
    def function(given: Sequence[Tensor]) -> list[Tensor]:
        return [given[0] + torch.arange(3).cumsum(0).flip(0)]

    trace_of_function = trace(function, GIVEN)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    with Names():
        trace_of_function(GIVEN)
    assert called == ["add"]


LOOKING: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "bool": lambda given: [given[0] if given[0].sum() > 0 else given[1]],
    "item": lambda given: [given[0] * given[0].sum().item()],
    "tolist": lambda given: [given[0] * given[0].tolist()[0][0]],
    "numpy": lambda given: [given[0] * float(given[0].numpy().sum())],
    "array": lambda given: [given[0] * float(np.asarray(given[0]).sum())],
    "dlpack": lambda given: [given[0] * float(np.from_dlpack(given[0]).sum())],
    "a mask": lambda given: [given[0][given[0] > 0].mean()],
    "masked_select": lambda given: [given[0].masked_select(given[0] > 0).mean()],
    "nonzero": lambda given: [given[0].nonzero().sum()],
}


@pytest.mark.parametrize("function", LOOKING.values(), ids=LOOKING)
def test_who_looks_at_numbers_cannot_be_recorded(function: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    with pytest.raises(RuntimeError):
        trace(function, GIVEN)


def test_places_given_by_number_can_be_looked_up() -> None:
    replay = trace(lambda given: [given[0][given[1].argsort(0)[:, 0]]], GIVEN)
    other = [GIVEN[1], GIVEN[0]]
    assert torch.equal(replay(other)[0], other[0][other[1].argsort(0)[:, 0]])


def test_an_operation_that_checks_goes_on_checking() -> None:
    replay = trace(lambda given: [torch.linalg.cholesky(given[0])], [torch.eye(3)])
    with pytest.raises(torch.linalg.LinAlgError):
        replay([-torch.eye(3)])


def test_no_more_is_held_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_trace, "MAX_TRACED_BYTES", 200)
    trace(lambda given: [given[0] + given[1]], GIVEN)
    with pytest.raises(RuntimeError, match="results"):
        trace(lambda given: [given[0] + given[1] + torch.ones(50).sum()], GIVEN)
    monkeypatch.setattr(op_trace, "MAX_TRACED_BYTES", 90)
    with pytest.raises(RuntimeError, match="arguments"):
        trace(lambda given: [given[0] + given[1]], GIVEN)


def test_copies_have_the_same_strides_and_memory_of_their_own() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (whole, whole.mT, whole[:, ::2], whole[:, :1, 1:], torch.zeros(0, 3)):
        copy = copy_with_strides(tensor)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        copy += 1
    assert torch.equal(whole, torch.arange(24.0).reshape(2, 3, 4))
    shared = torch.arange(2.0)[:, None, None].expand(2, 3, 4)
    copy = copy_with_strides(shared)
    assert copy.stride() == shared.stride() == (1, 0, 0)
    copy[0, 0, 0] = 7
    assert torch.equal(copy[0], torch.full((3, 4), 7.0))
    assert not shared[0].any()


def test_alike_sees_every_difference() -> None:
    plus = lambda given: [given[0] + given[1]]  # noqa: E731
    assert bitwise_equal(plus, lambda given: [given[1] + given[0]], GIVEN)
    assert not bitwise_equal(plus, lambda given: [given[0] + given[1] + 1e-6], GIVEN)
    assert not bitwise_equal(plus, lambda given: [given[0].add_(given[1])], GIVEN), (
        "another result is left in the argument"
    )
    assert not bitwise_equal(plus, lambda given: [(given[0] + given[1]).double()], GIVEN)
    assert bitwise_equal(draws, draws, GIVEN)
    nothing = [torch.full((2,), torch.nan)]
    assert bitwise_equal(lambda given: [given[0] * 1], lambda given: [given[0]], nothing)
