"""Challenges: ordered sequences of tasks, named ones and anybody's own, and the data they are made of."""

from glocal.challenges.challenge import Augment, Challenge, Data, LossName, Normalise, Setting, Task
from glocal.challenges.dataset import prepare
from glocal.challenges.own import from_tasks
from glocal.challenges.registry import Entry, catalogue, make
from glocal.challenges.sources import Source, SourceStatus, fetch, locate, status

__all__ = [
    "Augment",
    "Challenge",
    "Data",
    "Entry",
    "LossName",
    "Normalise",
    "Setting",
    "Source",
    "SourceStatus",
    "Task",
    "catalogue",
    "fetch",
    "from_tasks",
    "locate",
    "make",
    "prepare",
    "status",
]
