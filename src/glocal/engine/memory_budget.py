"""How many runs are trained together: as many as fit into a share of the free memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Sequential
from glocal.engine.loader import Loader
from glocal.errors import GlocalError

FREE_MEMORY_FRACTION = 0.6
"""Fraction of the free memory to plan for; the rest is left to evaluation, the allocator and other processes."""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def bytes_per_run(cohort: Cohort) -> int:
    """Measure on one step what a run needs: parameters, gradients, update, autograd's tensors, M and optimiser state.

    A memory that grows is counted at its final size, assuming that every task adds as much as the first. Frozen
    parameters are counted if they differ between the first and the last run; those that all runs share are not.
    """
    one = cohort.only(cohort.members[:1])
    loader = Loader(one)
    loader.load_task(0)
    loader.load_epoch(0)
    state = one.initial_state(loader.example())
    executor = Sequential(one)
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    shared = {p.untyped_storage().data_ptr() for p in executor.program.model.frozen.values()}
    # Of two runs: twice the size of one, as a step holds them before and after.
    _, own = cohort.only([cohort.members[0], cohort.members[-1]]).initial()
    before = tree.nbytes(state.memory)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        executor.step(state.select(0), tree.select(executor.hyper, 0), next(loader.batches_of(0)))
    executor.consolidate(state, loader)
    grown = max(0, tree.nbytes(state.memory) - before)
    held = before + grown * one.challenge.tasks + tree.nbytes(state.optimizer)
    return 4 * tree.nbytes(state.params) + tree.nbytes(own) + 2 * sum(kept.values()) + 2 * held


def largest_cohort(cohort: Cohort, budget: int | None = None) -> int:
    """Return how many runs of the cohort fit into `budget` bytes; by default a share of the free memory."""
    available = int(FREE_MEMORY_FRACTION * free_bytes(cohort.device)) if budget is None else budget
    # The runs of a group share data: the current task, and the evaluation data of all tasks.
    task = cohort.challenge.task(0, cohort.members[0].seed)
    measured = min(cohort.train_eval, len(task.train.y)) + len(task.test.y)
    example_bytes = task.train.x[:1].nbytes + task.train.y[:1].nbytes
    data_bytes = example_bytes * (len(task.train.y) + cohort.challenge.tasks * measured)
    available -= tree.nbytes(cohort.model(vectorised=False).frozen)
    each = bytes_per_run(cohort) + data_bytes * len(cohort.groups) // len(cohort)
    if each > available:
        raise GlocalError(
            f"one run of {cohort.algorithm.name} on {cohort.challenge.name} needs about {each / 1e6:,.0f} MB, and "
            f"{available / 1e6:,.0f} MB may be used. Free some memory, or choose a smaller batch, buffer or network."
        )
    return available // each
