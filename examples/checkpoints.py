"""Bring your own training: three tasks of rotated digits in plain PyTorch, with a checkpoint after every task.

Measure how local the training was:

    glocal lens examples/checkpoints.py:make_training -o lens.png

Or save the checkpoints theta-0.pt, ..., theta-3.pt, which docs/locality.md reads:

    python examples/checkpoints.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from glocal import challenges

NUM_TASKS = 3


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


def make_loaders(examples: int = 800) -> list[DataLoader]:
    """Return one DataLoader per task."""
    challenge = challenges.make("rotated-digits", tasks=NUM_TASKS)
    loaders = []
    for task in range(NUM_TASKS):
        x, y = challenge.task(task, seed=1).train
        dataset = TensorDataset(x[:examples].float() / 255, y[:examples])
        loaders.append(DataLoader(dataset, batch_size=50, shuffle=True))
    return loaders


def train(lr: float, epochs: int = 3) -> list[dict]:
    """Train on one task after the other; return the state dicts θ_0 (the initialisation), θ_1, θ_2, θ_3."""
    network = make_network()
    checkpoints = [copy.deepcopy(network.state_dict())]
    for loader in make_loaders():
        optimizer = torch.optim.SGD(network.parameters(), lr)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                optimizer.step()
        checkpoints.append(copy.deepcopy(network.state_dict()))
    return checkpoints


def make_training(lr: float = 0.1) -> tuple[nn.Module, nn.Module, list[DataLoader], list[dict]]:
    """Return what `glocal lens` needs: the network, the loss, the data of every task, and the checkpoints."""
    return make_network(), nn.CrossEntropyLoss(), make_loaders(), train(lr)


if __name__ == "__main__":
    for t, checkpoint in enumerate(train(lr=0.1)):
        torch.save(checkpoint, f"theta-{t}.pt")
