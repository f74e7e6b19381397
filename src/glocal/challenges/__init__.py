"""Challenges: ordered sequences of tasks, named ones and anybody's own, and the data they are made of."""

from glocal.challenges.challenge import Challenge, Data, LossName, Setting, Task
from glocal.challenges.own import from_tasks
from glocal.challenges.registry import Entry, catalogue, make
from glocal.challenges.sources import Source, SourceStatus, fetch, locate, status

__all__ = [
    "Challenge",
    "Data",
    "Entry",
    "LossName",
    "Setting",
    "Source",
    "SourceStatus",
    "Task",
    "catalogue",
    "fetch",
    "from_tasks",
    "locate",
    "make",
    "status",
]
