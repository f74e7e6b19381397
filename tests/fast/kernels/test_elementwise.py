"""The elementwise kernels against torch."""

from __future__ import annotations

import pytest
import torch

from glocal.fast import elementwise


def test_cast_from_bf16_keeps_values_and_strides(device: str) -> None:
    x = torch.randn(3, 5, 7, 11, device=device).bfloat16()
    for t in (x, x.contiguous(memory_format=torch.channels_last), x.movedim(0, 2), x[:, ::2]):
        y = elementwise.from_bf16(t, torch.float32)
        assert y.dtype == torch.float32 and torch.equal(y, t.float())
    assert elementwise.from_bf16(x, torch.float64) is NotImplemented


@pytest.mark.parametrize("runs", [1, 3])
def test_the_update_is_sgd(runs: int, device: str) -> None:
    torch.manual_seed(0)
    theta, direction = (torch.randn(runs, 300, 301, device=device) for _ in range(2))
    lr = torch.rand(runs, 1, 1, device=device)
    expected = theta - lr * direction
    assert elementwise.sgd_update(theta, direction, lr) is None
    torch.testing.assert_close(theta, expected)


def test_updates_that_are_small_or_not_dense_are_left_to_torch(device: str) -> None:
    lr = torch.ones(2, 1, 1, device=device)
    small, wide = torch.zeros(2, 8, 8, device=device), torch.zeros(2, 300, 400, device=device)
    transposed = torch.zeros(300, 400, 2, device=device).movedim(-1, 0)
    cases = [(small, small), (wide[..., ::2], wide[..., ::2]), (wide, wide.double()), (transposed, transposed)]
    cases.append((wide, wide.mT.contiguous().mT))
    for theta, direction in cases:
        assert elementwise.sgd_update(theta, direction, lr) is NotImplemented
