"""The networks that have a name: functions of the inputs' shape and the number of outputs."""

from collections.abc import Callable

from torch import nn

from glocal.networks.mlp import MLP, mlp
from glocal.networks.model import Model
from glocal.networks.resnet import ResNet18, resnet18

NETWORKS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "mlp": (mlp, "784-100-100-10 on digits, ReLU, Xavier weights: the paper's, 89,610 parameters"),
    "resnet18": (resnet18, "ResNet-18 for small images, 3×3 stem, no max-pool: the paper's, 11,173,962 parameters"),
}

__all__ = ["MLP", "NETWORKS", "Model", "ResNet18", "mlp", "resnet18"]
