"""Bring your own network: a function of the input shape and the number of outputs that returns an nn.Module.

Train it on split digits with experience replay (a few seconds on a CPU):

    glocal run split-digits er --lr 0.05 --network examples/convolutional.py:make_network --epochs 1
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def make_network(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a small convolutional network for images of 28 × 28 pixels."""
    channels = input_shape[0]
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, outputs),
    )
