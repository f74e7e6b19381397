"""A challenge of twelve small tasks, for workers to train."""

import torch

from glocal import Challenge
from glocal.challenges.from_tasks import from_tasks


def make() -> Challenge:
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for _ in range(12):
        x = torch.randn(400, 8, generator=generator)
        y = (x @ torch.randn(8, generator=generator) > 0).long()
        tasks.append(((x, y), (x, y)))
    return from_tasks("small", tasks, setting="domain")
