"""Challenges: ordered sequences of tasks, chosen by name (`make`) or built from your own data (`from_tasks`).

>>> from glocal import challenges
>>> challenge = challenges.make("split-digits")
>>> challenge.setting, challenge.tasks, challenge.input_shape
('class', 5, (1, 28, 28))
>>> task = challenge.task(1, seed=0)
>>> task.classes, tuple(task.train.x.shape), tuple(task.test.y.shape)
((2, 3), (800, 1, 28, 28), (200,))

`fetch`, `locate`, `prepare` and `status` handle the files of data sets. `from_tasks` makes a challenge from arrays,
tensors, data sets or loaders, one pair (train, test) per task:

>>> import numpy as np
>>> x, y = np.random.default_rng(0).random((40, 8)), np.arange(40) % 2
>>> own = challenges.from_tasks("two-tasks", [((x, y), (x, y)), ((x, y + 2), (x, y + 2))], setting="class")
>>> own.tasks, own.outputs, own.task(1, seed=0).classes
(2, 4, (2, 3))
"""

from glocal.challenges.challenge import Augment, Challenge, Data, Normalise, Setting, Task
from glocal.challenges.datasets import prepare
from glocal.challenges.download import fetch, locate, status
from glocal.challenges.from_tasks import from_tasks
from glocal.challenges.registry import ChallengeInfo, catalogue, make

__all__ = [
    "Augment",
    "Challenge",
    "ChallengeInfo",
    "Data",
    "Normalise",
    "Setting",
    "Task",
    "catalogue",
    "fetch",
    "from_tasks",
    "locate",
    "make",
    "prepare",
    "status",
]
