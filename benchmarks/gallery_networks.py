"""Networks as users bring them: the gallery that `benchmarks.gallery` times and `tests/engine/test_gallery.py` trains.

None of them uses a layer of glocal, and nothing in glocal knows their names. They are listed by importance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torchvision_import import without_compiled_operators
from glocal.networks.model import MakeNetwork

VOCABULARY = 100
"""Number of different tokens."""


def conv_net(shape: Sequence[int], outputs: int, norm: Callable[[int], nn.Module], width: int = 32) -> nn.Module:
    """Return three blocks of convolution, normalisation, ReLU and maximum pooling, and a linear layer."""
    widths = shape[0], width, 2 * width, 4 * width
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(widths)
    ]
    features = widths[-1] * (shape[1] // 8) * (shape[2] // 8)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(features, outputs))


def pooling_net(shape: Sequence[int], outputs: int, width: int = 32) -> nn.Module:
    """Return a network with biases and with average, adaptive and global pooling, without normalisation."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], width, 5, padding=2), nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3), nn.LeakyReLU(), nn.AdaptiveMaxPool2d(4)),
        *(nn.Conv2d(2 * width, 2 * width, 3, groups=2), nn.ELU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(2 * width, outputs)),
    )


def dropout_net(shape: Sequence[int], outputs: int, width: int = 32) -> nn.Module:
    """Return a network with strided convolutions, BatchNorm and both kinds of dropout."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Dropout2d(0.1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.5), nn.Linear(2 * width * (shape[1] // 4) * (shape[2] // 4), outputs)),
    )


class ViT(nn.Module):
    """Vision transformer: embedded patches and a class token through `nn.TransformerEncoder`, without dropout."""

    def __init__(
        self, shape: Sequence[int], outputs: int, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (shape[1] // patch) * (shape[2] // patch), width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.head(self.encoder(tokens)[:, 0])


class MixerBlock(nn.Module):
    """Two residual MLPs: over patches, then over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.over_patches = nn.Sequential(nn.Linear(patches, patches), nn.GELU(), nn.Linear(patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, shape: Sequence[int], outputs: int, width: int = 128, depth: int = 4, patch: int = 4) -> None:
        super().__init__()
        patches = (shape[1] // patch) * (shape[2] // patch)
        self.embed = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(depth)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


def wide_mlp(shape: Sequence[int], outputs: int, width: int = 2048) -> nn.Module:
    inputs = shape[0] * shape[1] * shape[2]
    layers = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
    return nn.Sequential(nn.Flatten(), *layers)


class RowLSTM(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self, shape: Sequence[int], outputs: int, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(shape[0] * shape[2], width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(1, 2).flatten(2))[0][:, -1])


class TokenLSTM(nn.Module):
    """Embedded integer tokens, a bidirectional LSTM of two layers, and the mean over the sequence."""

    def __init__(self, shape: Sequence[int], outputs: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0].mean(1))


class TokenTransformer(nn.Module):
    """Embedded integer tokens through `nn.TransformerEncoder` with its default dropout, and the mean over them."""

    def __init__(
        self, shape: Sequence[int], outputs: int, width: int = 128, depth: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(shape[0], width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


def frozen_backbone(shape: Sequence[int], outputs: int, width: int = 32) -> nn.Module:
    """Return a convolutional network whose parameters are frozen, with a trained head of two layers."""
    backbone = conv_net(shape, 4 * width, nn.BatchNorm2d, width).requires_grad_(False)
    return nn.Sequential(backbone, nn.ReLU(), nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, outputs))


def torchvision_network(shape: Sequence[int], outputs: int, name: str) -> nn.Module:
    """Return one of torchvision's networks without trained parameters."""
    with without_compiled_operators():
        from torchvision import models
    return getattr(models, name)(num_classes=outputs)


def narrow_torchvision_network(shape: Sequence[int], outputs: int, name: str) -> nn.Module:
    """Return one of torchvision's networks with all of its layers, but few channels."""
    with without_compiled_operators():
        from torchvision import models
        from torchvision.models.convnext import CNBlockConfig
        from torchvision.models.resnet import BasicBlock

    class NarrowResNet(models.ResNet):
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
            return super()._make_layer(block, planes // 8, *args, **kwargs)

    if name == "resnet18":
        network = NarrowResNet(BasicBlock, [2, 2, 2, 2])
        network.fc = nn.Linear(64, outputs)
        return network
    if name == "convnext_tiny":
        widths = ((8, 16, 3), (16, 32, 3), (32, 64, 9), (64, None, 3))
        return models.ConvNeXt([CNBlockConfig(*w) for w in widths], stochastic_depth_prob=0.1, num_classes=outputs)
    return getattr(models, name)(width_mult=0.25, num_classes=outputs)


@dataclass(frozen=True)
class GalleryNetwork:
    """A network in the size of the benchmark and in that of the tests."""

    make: MakeNetwork
    make_small: MakeNetwork
    shape: tuple[int, ...] = (3, 32, 32)
    small_shape: tuple[int, ...] = (3, 8, 8)
    tokens: bool = False
    """Whether its inputs are integer tokens rather than images."""
    draws: bool = False
    """Whether its forward pass in training draws random numbers."""
    needs: str | None = None
    """A package that it needs."""

    @property
    def available(self) -> bool:
        return self.needs is None or find_spec(self.needs) is not None


def _sized(make: Callable[..., nn.Module], small: dict[str, int], **options: Any) -> GalleryNetwork:
    return GalleryNetwork(make, partial(make, **small), **options)


def _torchvision(name: str, draws: bool = False) -> GalleryNetwork:
    make, make_small = (partial(make, name=name) for make in (torchvision_network, narrow_torchvision_network))
    return GalleryNetwork(make, make_small, small_shape=(3, 32, 32), draws=draws, needs="torchvision")


TOKENS: dict[str, Any] = {"shape": (64,), "small_shape": (6,), "tokens": True}

GALLERY: dict[str, GalleryNetwork] = {
    "cnn-batchnorm": _sized(partial(conv_net, norm=nn.BatchNorm2d), {"width": 4}),
    "cnn-groupnorm": _sized(partial(conv_net, norm=partial(nn.GroupNorm, 4)), {"width": 4}),
    "torchvision-resnet18": _torchvision("resnet18"),
    "vit": _sized(ViT, {"width": 12, "depth": 2}),
    "lstm-rows": _sized(RowLSTM, {"width": 8}),
    "lstm-tokens": _sized(TokenLSTM, {"width": 8}, **TOKENS),
    "transformer-tokens": _sized(TokenTransformer, {"width": 8}, draws=True, **TOKENS),
    "cnn-pooling": _sized(pooling_net, {"width": 4}, small_shape=(3, 12, 12)),
    "cnn-dropout": _sized(dropout_net, {"width": 4}, draws=True),
    "mixer": _sized(Mixer, {"width": 8, "depth": 2}),
    "wide-mlp": _sized(wide_mlp, {"width": 64}),
    "frozen-backbone": _sized(frozen_backbone, {"width": 4}),
    "torchvision-mobilenet_v3_small": _torchvision("mobilenet_v3_small", draws=True),
    "torchvision-convnext_tiny": _torchvision("convnext_tiny", draws=True),
}
