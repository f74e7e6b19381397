"""The paper's network for images: ResNet-18 as it is made for CIFAR (He et al. 2016), 11,173,962 parameters for 10
classes. The first convolution is 3×3 and there is no max-pooling, so that images of 32×32 pixels keep their size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from glocal.errors import require
from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.convolution import Conv2d
from glocal.networks.mlp import Linear

BLOCKS = 2
"""In every one of the four stages."""


class Block(nn.Module):
    """relu(B(C(relu(B(C(x))))) + x): C 3×3 convolutions, B BatchNorm. Where the shape changes, x goes through a 1×1
    convolution and BatchNorm of its own."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = Conv2d(channels, width, 3, stride, 1, bias=False), BatchNorm2d(width)
        self.conv2, self.norm2 = Conv2d(width, width, 3, 1, 1, bias=False), BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(Conv2d(channels, width, 1, stride, bias=False), BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x), relu=True)
        return self.norm2(self.conv2(inner), residual=self.shortcut(x), relu=True)


class ResNet18(nn.Module):
    """Four stages of two blocks, the channels doubled and the sides halved between them, and the mean over positions.

    Initialised as PyTorch does by default.
    """

    def __init__(self, channels: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.conv, self.norm = Conv2d(channels, width, 3, 1, 1, bias=False), BatchNorm2d(width)
        blocks, channels = [], width
        for stage in range(4):
            for block in range(BLOCKS):
                blocks.append(Block(channels, width << stage, stride=2 if stage and not block else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x), relu=True)
        return self.head(self.blocks(x).mean((-2, -1)))


def resnet18(input_shape: Sequence[int], outputs: int, width: int = 64) -> ResNet18:
    images = len(input_shape) == 3
    require(
        images, f"resnet18 takes images, (channels, height, width); inputs of shape {tuple(input_shape)} were given."
    )
    return ResNet18(input_shape[0], outputs, width)
