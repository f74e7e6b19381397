"""Rotation equals Pillow's bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from glocal.challenges.datasets import load_digits
from glocal.challenges.permuted import rearrange
from glocal.challenges.rotated import rotation_map

angles = st.floats(-720, 720, allow_nan=False) | st.integers(-1440, 1440).map(lambda half: half / 2)


def rotate(images: torch.Tensor, angle: float) -> torch.Tensor:
    return rearrange(images, rotation_map(*images.shape[-2:], angle))


def pillow(image: np.ndarray, angle: float) -> np.ndarray:
    return np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.NEAREST))


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), angles)
@example(28, 28, 90.0)
@example(28, 28, -90.0)
@example(27, 27, 270.0)
@example(5, 8, 90.0)
@example(8, 5, 270.0)
@example(9, 4, 180.0)
@example(28, 28, 1e-14)
@example(28, 28, -1e-20)
@example(28, 28, 180.00000000000003)
@example(28, 28, 45.0)
@example(200, 300, 33.3)
def test_rotation_equals_pillow_on_every_pixel(height: int, width: int, angle: float) -> None:
    # No pixel is 0, and neighbours differ, so that a wrong neighbour or a wrong border shows.
    image = (1 + np.arange(height * width) % 251).astype(np.uint8).reshape(height, width)
    np.testing.assert_array_equal(rotate(torch.from_numpy(image), angle).numpy(), pillow(image, angle))


@settings(max_examples=25, deadline=None)
@given(angles)
def test_rotated_digits_equal_pillow(angle: float) -> None:
    images = load_digits().test.x[:40]
    rotated = rotate(images, angle)
    assert rotated.shape == images.shape
    for image, ours in zip(images[:, 0].numpy(), rotated[:, 0].numpy(), strict=True):
        np.testing.assert_array_equal(ours, pillow(image, angle))


def test_many_angles_equal_pillow_at_28x28() -> None:
    image = (1 + np.arange(784) % 251).astype(np.uint8).reshape(28, 28)
    for angle in np.random.default_rng(0).uniform(0, 180, 2000):
        np.testing.assert_array_equal(rotate(torch.from_numpy(image), angle).numpy(), pillow(image, float(angle)))


def test_rotation_is_counter_clockwise() -> None:
    top_right = torch.tensor([[0, 1], [0, 0]])
    assert rotate(top_right, 90).tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32, torch.float64, torch.bfloat16])
def test_any_dtype_and_leading_shape(dtype: torch.dtype) -> None:
    images = torch.randint(0, 2, (2, 3, 6, 5), generator=torch.Generator().manual_seed(0))
    rotated = rotate(images.to(dtype), 30.0)
    assert rotated.dtype == dtype
    for i in range(2):
        for c in range(3):
            expected = pillow(images[i, c].numpy().astype(np.uint8), 30.0)
            np.testing.assert_array_equal(rotated[i, c].to(torch.uint8).numpy(), expected)


def test_float_images_equal_pillow() -> None:
    image = np.random.default_rng(0).random((17, 23), dtype=np.float32)
    np.testing.assert_array_equal(rotate(torch.from_numpy(image), 77.7).numpy(), pillow(image, 77.7))


def test_rotation_copies_and_accepts_any_strides() -> None:
    images = torch.arange(1, 2 * 16 + 1).reshape(2, 4, 4)
    before = images.clone()
    assert rotate(images, 0.0).data_ptr() != images.data_ptr()
    torch.testing.assert_close(rotate(images.mT, 40.0), rotate(images.mT.contiguous(), 40.0))
    assert torch.equal(images, before)
