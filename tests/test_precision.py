"""Torch's precision switches: set for training and for instruments, and restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from glocal import losses
from glocal.curvature.lanczos import eigenpairs
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.examination import examine
from glocal.lens.instruments import measure
from glocal.paper.study import Context, Row, Summary, WorkItem, run
from glocal.precision import CUDNN, Precision, allow_tf32, conv_uses_tf32, full_precision, matmul_precision
from glocal.risk import Risk

SWITCHES: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)


@pytest.fixture(autouse=True)
def tf32_allowed() -> Iterator[None]:
    before = [switch.allow_tf32 for switch in SWITCHES]
    for switch in SWITCHES:
        switch.allow_tf32 = True
    yield
    for switch, was in zip(SWITCHES, before, strict=True):
        switch.allow_tf32 = was


def current() -> tuple[bool, ...]:
    return tuple(switch.allow_tf32 for switch in SWITCHES)


class Recording(nn.Linear):
    """A layer that records the switches at every call."""

    recorded: list[tuple[bool, ...]]

    def forward(self, x: Tensor) -> Tensor:
        self.recorded.append(current())
        return super().forward(x)


def problem() -> tuple[Recording, Tensor, Tensor, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    network = Recording(3, 2)
    Recording.recorded = []
    states = [{k: p.detach() + i * torch.randn_like(p) for k, p in network.named_parameters()} for i in range(3)]
    return network, torch.randn(12, 3), torch.arange(12) % 2, states


def pairs(network: Recording, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    eigenpairs(Risk(network, states[1], {}, x, y, losses.get("cross-entropy")), 2)


def one_instrument(network: Recording, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    trace = trace_checkpoints(network, "cross-entropy", [(x, y), (x.flip(0), y)], states)  # which tries the network
    Recording.recorded = []
    measure(trace, "flatness")


def examination(network: Recording, x: Tensor, y: Tensor, states: list[dict[str, Tensor]]) -> None:
    examine(network, "cross-entropy", [(x, y), (x.flip(0), y)], states, epsilon=0.1)


@pytest.mark.parametrize("instrument", [pairs, one_instrument, examination])
def test_instruments_compute_in_full_precision(instrument: Callable[..., None]) -> None:
    instrument(*problem())
    assert Recording.recorded and set(Recording.recorded) == {(False, False)}
    assert current() == (True, True)


def test_studies_compute_in_full_precision(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Looking:
        name, columns = "looking", "matmul cudnn"

        def work_items(self, demo: bool) -> list[WorkItem]:
            return [{"a": 1}]

        def measure(self, item: WorkItem, context: Context) -> list[Row]:
            return [dict(zip(("matmul", "cudnn"), current(), strict=True))]

        def draw(self, rows: object, figure: object) -> None: ...

        def summarize(self, rows: object) -> Summary:
            return Summary([], "")

    context = Context(torch.device("cpu"), None, tmp_path_factory.mktemp("store"))
    assert run(Looking(), context)[0].to_dicts() == [{"matmul": False, "cudnn": False}] and current() == (True, True)


def test_switches_are_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), full_precision():
        assert current() == (False, False)
        raise ZeroDivisionError
    assert current() == (True, True)


def test_conv_uses_tf32_reads_the_switch() -> None:
    assert conv_uses_tf32()
    with full_precision():
        assert not conv_uses_tf32()
        with allow_tf32(True):
            assert conv_uses_tf32()
    assert conv_uses_tf32()


@pytest.mark.parametrize("generic", ["tf32", "ieee"])
def test_the_global_switch_is_overridden_and_restored(generic: str) -> None:
    everything: Any = torch.backends
    before = everything.fp32_precision
    for switch in SWITCHES:
        switch.allow_tf32 = False
    newer = torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn
    try:
        everything.fp32_precision = generic
        was = [switch.fp32_precision for switch in newer]
        with full_precision():
            assert not conv_uses_tf32() and [switch.fp32_precision for switch in newer] == ["ieee"] * 3
        with allow_tf32(True):
            assert conv_uses_tf32()
        assert [switch.fp32_precision for switch in newer] == was
    finally:
        everything.fp32_precision = before
        for switch, own in zip(newer, ("none", "none", "none"), strict=True):
            switch.fp32_precision = own


def test_newer_switches_are_restored() -> None:
    """Torch refuses to read the older switches while both generations disagree."""
    newer = torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn
    before = [switch.fp32_precision for switch in newer]
    try:
        torch.backends.cuda.matmul.fp32_precision, CUDNN.conv.fp32_precision = "ieee", "ieee"
        with pytest.raises(RuntimeError):
            current()
        with allow_tf32(True):
            assert current() == (True, True) and conv_uses_tf32()
        assert [switch.fp32_precision for switch in newer] == ["ieee", "ieee", before[2]] and not conv_uses_tf32()
        CUDNN.conv.fp32_precision = "tf32"
        with full_precision():
            assert current() == (False, False) and not conv_uses_tf32()
        assert conv_uses_tf32()
    finally:
        for switch in SWITCHES:
            switch.allow_tf32 = True
        for switch, precision in zip(newer, before, strict=True):
            switch.fp32_precision = precision


@given(precision=st.sampled_from(["fp32", "tf32", "bf16"]), raised=st.booleans())
def test_training_restores_all_switches(precision: Precision, raised: bool) -> None:
    cudnn, cublas, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn

    def switches() -> tuple[bool, ...]:
        return cudnn.benchmark, cudnn.enabled, cublas.allow_tf32, bool(mkldnn.enabled)

    before = switches()
    try:
        with matmul_precision(precision):
            # Torch does this at the first bf16 product on a CPU without bf16.
            setattr(mkldnn, "enabled", not mkldnn.enabled)  # noqa: B010
            if raised:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raised
    assert switches() == before
