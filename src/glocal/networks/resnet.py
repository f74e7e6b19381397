"""The paper's network for images: ResNet-18 for CIFAR (He et al. 2016), 11,173,962 parameters for 10 classes.

The first convolution is 3 × 3 and there is no max-pooling, so that images of 32 × 32 pixels keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from glocal.errors import require
from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.convolution import Conv2d
from glocal.networks.mlp import Linear

STAGES, BLOCKS_PER_STAGE = 4, 2


class Block(nn.Module):
    """relu(B(C(relu(B(C(x))))) + x), with 3 × 3 convolutions C and BatchNorm B.

    Where the shape changes, the shortcut x is a 1 × 1 convolution of x with its own BatchNorm.
    """

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
    """Four stages of two blocks, with twice the channels and half the side in each, and a mean over positions.

    Initialized by PyTorch's defaults.
    """

    def __init__(self, channels: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.conv, self.norm = Conv2d(channels, width, 3, 1, 1, bias=False), BatchNorm2d(width)
        blocks, channels = [], width
        for stage in range(STAGES):
            for block in range(BLOCKS_PER_STAGE):
                blocks.append(Block(channels, width << stage, stride=2 if stage and not block else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x), relu=True)
        return self.head(self.blocks(x).mean((-2, -1)))

    def unit_groups(self) -> dict[str, tuple[str | None, str | None]]:
        """Declare which units each layer reads and writes (see `glocal.networks.hat`): the blocks of a stage add to
        one group, and the inside of every block is another one."""
        stream = "stage0"
        groups: dict[str, tuple[str | None, str | None]] = {"conv": (None, stream), "norm": (stream, stream)}
        for i, block in enumerate(self.blocks):
            name, inner, after = f"blocks.{i}", f"block{i}", f"stage{i // BLOCKS_PER_STAGE}"
            groups |= {f"{name}.conv1": (stream, inner), f"{name}.norm1": (inner, inner)}
            groups |= {f"{name}.conv2": (inner, after), f"{name}.norm2": (after, after)}
            if len(block.shortcut):  # type: ignore[arg-type]
                groups |= {f"{name}.shortcut.0": (stream, after), f"{name}.shortcut.1": (after, after)}
            stream = after
        return groups | {"head": (stream, None)}


def resnet18(input_shape: Sequence[int], outputs: int, width: int = 64) -> ResNet18:
    """Make a ResNet-18 for images of this shape, (channels, height, width)."""
    images = len(input_shape) == 3
    require(images, f"resnet18 takes images (channels, height, width), but the inputs have shape {tuple(input_shape)}.")
    return ResNet18(input_shape[0], outputs, width)
