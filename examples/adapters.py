"""Start from a pretrained network: low-rank adapters W + B A in a frozen feature extractor, trained on split digits.

Pretrain the feature extractor on rotated digits, save it, and sweep three algorithms (half a minute on two CPU cores):

    python examples/adapters.py

The same sweep as a command, once features.safetensors is there:

    glocal sweep split-digits --network examples/adapters.py:make_network --init features.safetensors \
        --setting task --epochs 1 --algorithms sgd ewc er --lrs 0.01 0.1 --seeds 11 13 33

All runs share the frozen weights, and only adapters and head have gradients.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import glocal
from glocal import challenges

RANK, WIDTH = 4, 100


class LowRankLinear(nn.Linear):
    """(W + B A) x + b with frozen W and b. B starts at 0, so that training starts from W."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(RANK, inputs) / math.sqrt(inputs))
        self.B = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(nn.functional.linear(x, self.A), self.B)


def make_features(inputs: int, linear: type[nn.Linear]) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), linear(inputs, WIDTH), nn.ReLU(), linear(WIDTH, WIDTH), nn.ReLU())


def make_network(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return the feature extractor with adapters, and a head: the network that glocal trains."""
    features = make_features(math.prod(input_shape), LowRankLinear)
    return nn.Sequential(OrderedDict(features=features, head=nn.Linear(WIDTH, outputs)))


def pretrain(epochs: int = 3) -> dict[str, Tensor]:
    """Train on digits that are rotated by two angles, and return the parameters of the feature extractor."""
    torch.manual_seed(0)
    challenge = challenges.make("rotated-digits", tasks=2, angles=[-30.0, 30.0])
    tasks = [challenge.task(t, seed=0).train for t in range(2)]
    x, y = torch.cat([task.x for task in tasks]).float() / 255, torch.cat([task.y for task in tasks])
    features = make_features(math.prod(challenge.input_shape), nn.Linear)
    network = nn.Sequential(features, nn.Linear(WIDTH, challenge.outputs))
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return {f"features.{name}": tensor for name, tensor in features.state_dict().items()}


if __name__ == "__main__":
    save_file(pretrain(), "features.safetensors")  # a part of the network: adapters and head are not in it
    options = {"network": make_network, "init": "features.safetensors", "setting": "task", "epochs": 1}
    runs = glocal.sweep("split-digits", ["sgd", "ewc", "er"], lrs=[0.01, 0.1], seeds=[11, 13, 33], **options)
    print(runs.table().select("algorithm", "lr", "acc_mean", "acc_std", "forgetting_mean"))
    print("Note:", *runs[0].info["notes"])
