"""A training of one's own, in plain PyTorch: three tasks of turned digits, and the state of the network between them.

Look at it:  glocal lens examples/checkpoints.py:make_subject -o lens.png
Or keep its checkpoints, as for docs/locality.md:  python examples/checkpoints.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from glocal import challenges

TASKS = 3


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


def make_loaders(examples: int = 800) -> list[DataLoader]:
    digits = challenges.make("rotated-digits", tasks=TASKS)
    parts = [digits.task(t, seed=1).train for t in range(TASKS)]
    data = [TensorDataset(x[:examples].float() / 255, y[:examples]) for x, y in parts]
    return [DataLoader(each, batch_size=50, shuffle=True) for each in data]


def train(lr: float, epochs: int = 3) -> list[dict]:
    """θ_0 … θ_3."""
    network = make_network()
    checkpoints = [copy.deepcopy(network.state_dict())]
    for loader in make_loaders():
        optimiser = torch.optim.SGD(network.parameters(), lr)
        for _ in range(epochs):
            for x, y in loader:
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                optimiser.step()
        checkpoints.append(copy.deepcopy(network.state_dict()))
    return checkpoints


def make_subject(lr: float = 0.1) -> tuple[nn.Module, nn.Module, list[DataLoader], list[dict]]:
    """The network, its loss, every task's data, and θ_0, θ_1, …"""
    return make_network(), nn.CrossEntropyLoss(), make_loaders(), train(lr)


if __name__ == "__main__":
    for t, state in enumerate(train(lr=0.1)):
        torch.save(state, f"theta-{t}.pt")
