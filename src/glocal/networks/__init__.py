"""Networks, by name: functions of the inputs' shape and the number of outputs.

>>> make, description = NETWORKS["mlp"]
>>> network = make((1, 28, 28), 10)
>>> sum(p.numel() for p in network.parameters())
89610

Any `nn.Module` can be trained: pass a function (input_shape, outputs) -> nn.Module.
"""

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
