"""How many runs are trained together: as many as fit into a share of the free memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from glocal import tree
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Sequential
from glocal.engine.loader import Loader
from glocal.errors import GlocalError
from glocal.networks.layer_calls import unfused_encoders

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FREE_MEMORY_FRACTION = 0.6
"""Fraction of the free memory to plan for; the rest is left to evaluation, the allocator and other processes."""


SMALLER = "Free some memory, or choose a smaller batch, buffer or network."


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free: of the GPU, or of the machine, but no more than the process's cgroup allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *cgroup_free_bytes(CGROUPS, OWN_CGROUPS)])


def cgroup_free_bytes(mount: Path, own: Path) -> list[int]:
    """Return what the limits of the process's cgroup and of those above it leave: Slurm and containers set them.

    Args:
        mount: where cgroups are mounted.
        own: the file that names the cgroups of the process: '0::PATH' in version 2, 'N:memory:PATH' in version 1.
    """
    with suppress(OSError, ValueError):
        entries = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())
        if "memory" in entries:
            mount, names, path = mount / "memory", ("limit_in_bytes", "usage_in_bytes"), entries["memory"]
        else:
            names, path = ("max", "current"), entries.get("", "/")
        folder = mount / path.lstrip("/")
        folders = [f for f in (folder, *folder.parents) if f.is_relative_to(mount)]
        return [free for f in folders if (free := _free_in_cgroup(f, *names)) is not None]
    return []


def _free_in_cgroup(folder: Path, limit: str, usage: str) -> int | None:
    """Return the limit of one cgroup less its usage; files that were read, and are not in use, can be dropped."""
    with suppress(OSError, ValueError, KeyError):  # no limit is the word 'max'
        allowed, used = (int((folder / f"memory.{name}").read_text()) for name in (limit, usage))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, allowed - used + int(counts.get("total_inactive_file", counts["inactive_file"])))
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that memory could not be allocated."""
    if error is None or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return error is not None
    texts = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")
    failed = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return failed or is_out_of_memory(error.__cause__)


class EveryResult(TorchDispatchMode):
    """Call a function with every tensor that is computed."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.function, result)
        return result


@unfused_encoders()
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
    saved_bytes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in shared:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return saved

    shared = {p.untyped_storage().data_ptr() for p in executor.program.model.frozen.values()}
    # Two runs, because a step holds the buffers before and after it.
    _, buffers = cohort.only([cohort.members[0], cohort.members[-1]]).initial()
    before = tree.nbytes(state.memory)

    def step() -> None:
        executor.step(state.select(0), tree.select(executor.hyper, 0), next(loader.batches_of(0)))

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            step()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        saved_bytes.clear()
        with EveryResult(pack):  # torch.func.grad allows no such hooks
            step()
    executor.consolidate(state, loader)
    grown = max(0, tree.nbytes(state.memory) - before)
    state_bytes = before + grown * one.challenge.tasks + tree.nbytes(state.optimizer)
    return 4 * tree.nbytes(state.params) + tree.nbytes(buffers) + 2 * sum(saved_bytes.values()) + 2 * state_bytes


def largest_cohort(cohort: Cohort, budget: int | None = None) -> int:
    """Return how many runs of the cohort fit into `budget` bytes; by default a share of the free memory."""
    available = int(FREE_MEMORY_FRACTION * free_bytes(cohort.device)) if budget is None else budget
    # The runs of a group share data: the current task, and the evaluation data of all tasks.
    task = cohort.challenge.task(0, cohort.members[0].seed)
    eval_examples = min(cohort.train_eval, len(task.train.y))
    eval_examples += sum(len(data.y) for name, data in task.splits.items() if name != "train")
    example_bytes = task.train.x[:1].nbytes + task.train.y[:1].nbytes
    data_bytes = example_bytes * (len(task.train.y) + cohort.challenge.tasks * eval_examples)
    available -= tree.nbytes(cohort.model(vectorised=False).frozen)
    run_bytes = bytes_per_run(cohort) + data_bytes * len(cohort.groups) // len(cohort)
    if run_bytes > available:
        raise GlocalError(
            f"one run of {cohort.algorithm.name} on {cohort.challenge.name} needs about {run_bytes / 1e6:,.0f} MB, and "
            f"{available / 1e6:,.0f} MB may be used. {SMALLER}"
        )
    return available // run_bytes
