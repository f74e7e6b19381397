"""Instruments compute in full precision on a GPU, whatever torch's switches say, and leave them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glocal import losses
from glocal.curvature.eigenpairs import eigenpairs
from glocal.fast.tf32 import CUDNN, convolved_exactly, full_precision, tf32
from glocal.lens.examination import examine
from glocal.lens.instruments import look
from glocal.lens.subject import of_module
from glocal.paper.study import Piece, Place, Row, conduct

SWITCHES: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    before = [switch.allow_tf32 for switch in SWITCHES]
    for switch in SWITCHES:
        switch.allow_tf32 = True
    yield
    for switch, was in zip(SWITCHES, before, strict=True):
        switch.allow_tf32 = was


def on() -> tuple[bool, ...]:
    return tuple(switch.allow_tf32 for switch in SWITCHES)


class Watching(nn.Linear):
    """A network that notes what it multiplies with."""

    seen: list[tuple[bool, ...]]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(on())
        return super().forward(x)


def problem() -> tuple[Watching, Tensor, Tensor, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    network = Watching(3, 2)
    Watching.seen = []
    states = [{k: p.detach() + i * torch.randn_like(p) for k, p in network.named_parameters()} for i in range(3)]
    return network, torch.randn(12, 3), torch.arange(12) % 2, states


def pairs(network: Watching, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    eigenpairs(network, states[1], {}, x, y, losses.get("cross-entropy"), 2)


def one_look(network: Watching, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    subject = of_module(network, "cross-entropy", [(x, y), (x.flip(0), y)], states)  # which tries the network
    Watching.seen = []
    look(subject, "flatness")


def examination(network: Watching, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    examine(network, "cross-entropy", [(x, y), (x.flip(0), y)], states, epsilon=0.1)


@pytest.mark.parametrize("instrument", [pairs, one_look, examination])
def test_instruments_multiply_exactly(instrument: Callable[..., None]) -> None:
    instrument(*problem())
    assert Watching.seen and set(Watching.seen) == {(False, False)}
    assert on() == (True, True)


def test_a_study_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Looking:
        name, columns = "looking", "matmul cudnn"

        def pieces(self, demo: bool) -> list[Piece]:
            return [{"a": 1}]

        def cost(self, demo: bool) -> str:
            return ""

        def measure(self, piece: Piece, place: Place) -> list[Row]:
            return [dict(zip(("matmul", "cudnn"), on(), strict=True))]

        def draw(self, rows: object, figure: object) -> None: ...

        def conclude(self, rows: object) -> list[str]:
            return []

    place = Place(torch.device("cpu"), None, tmp_path_factory.mktemp("store"))
    assert conduct(Looking(), place) == [{"matmul": False, "cudnn": False}] and on() == (True, True)


def test_errors_leave_the_switches_too() -> None:
    with pytest.raises(ZeroDivisionError), full_precision():
        assert on() == (False, False)
        raise ZeroDivisionError
    assert on() == (True, True)


def test_convolutions_know_what_they_are_to_be() -> None:
    assert not convolved_exactly()
    with full_precision():
        assert convolved_exactly()
        with tf32(True):
            assert not convolved_exactly()
    assert not convolved_exactly()


@pytest.mark.parametrize("generic", ["tf32", "ieee"])
def test_one_switch_for_everything_is_followed_and_left(generic: str) -> None:
    everything: Any = torch.backends
    before = everything.fp32_precision
    for switch in SWITCHES:
        switch.allow_tf32 = False
    newer = torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn
    try:
        everything.fp32_precision = generic
        was = [switch.fp32_precision for switch in newer]
        with full_precision():
            assert convolved_exactly() and [switch.fp32_precision for switch in newer] == ["ieee"] * 3
        with tf32(True):
            assert not convolved_exactly()
        assert [switch.fp32_precision for switch in newer] == was
    finally:
        everything.fp32_precision = before
        for switch, own in zip(newer, ("none", "none", "none"), strict=True):
            switch.fp32_precision = own


def test_switches_of_the_newer_generation_are_left_as_they_were() -> None:
    """Torch refuses to read the older ones then."""
    newer = torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn
    before = [switch.fp32_precision for switch in newer]
    try:
        torch.backends.cuda.matmul.fp32_precision, CUDNN.conv.fp32_precision = "ieee", "ieee"
        with pytest.raises(RuntimeError):
            on()
        with tf32(True):
            assert on() == (True, True) and not convolved_exactly()
        assert [switch.fp32_precision for switch in newer] == ["ieee", "ieee", before[2]] and convolved_exactly()
        CUDNN.conv.fp32_precision = "tf32"
        with full_precision():
            assert on() == (False, False) and convolved_exactly()
        assert not convolved_exactly()
    finally:
        for switch in SWITCHES:
            switch.allow_tf32 = True
        for switch, precision in zip(newer, before, strict=True):
            switch.fp32_precision = precision
