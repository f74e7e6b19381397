"""Torch's switches, which a training sets, and torch itself on processors without bf16, are back where they were."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from glocal.engine.precision import multiplying
from glocal.networks.model import Precision


@given(precision=st.sampled_from(["fp32", "tf32", "bf16"]), raised=st.booleans())
def test_switches_are_as_before(precision: Precision, raised: bool) -> None:
    cudnn, cublas, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn

    def switches() -> tuple[bool, ...]:
        return cudnn.benchmark, cudnn.enabled, cublas.allow_tf32, bool(mkldnn.enabled)

    before = switches()
    try:
        with multiplying(precision):
            # As torch does at the first product of bf16 numbers that mkldnn does not take.
            setattr(mkldnn, "enabled", not mkldnn.enabled)  # noqa: B010
            if raised:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raised
    assert switches() == before
