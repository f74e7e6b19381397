"""The training loop: for every task, epochs of steps, consolidation, and evaluation on all tasks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.engine.choose import Execution, choose
from glocal.engine.cohort import Cohort
from glocal.engine.early_stopping import EarlyStopping
from glocal.engine.evaluate import Evaluator, Record
from glocal.engine.executors import OnStep, copy_into_
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.networks.layer_calls import unfused_encoders
from glocal.precision import matmul_precision
from glocal.tree import Params

AfterEpoch = Callable[[int, int, State, Loader], None]
"""Called after an epoch with the task, the epoch, the state before consolidation, and the loader."""


class Progress:
    """Receives the progress of a cohort, for example to draw a bar; this base class ignores it."""

    def task(self, task: int) -> None: ...

    def steps(self, count: int) -> None: ...


@dataclass
class Snapshot:
    """A cohort at a task boundary: all that is needed to resume."""

    finished: int
    state: State
    record: Record


def train(
    cohort: Cohort,
    begin: Snapshot | None = None,
    execution: Execution = "auto",
    progress: Progress | None = None,
    watch: AfterEpoch | None = None,
    on_step: OnStep | None = None,
) -> Iterator[Snapshot]:
    """Train a cohort, from its initialisation or from a snapshot, and yield a snapshot at every task boundary.

    The first one, before any task, is yielded too: θ_0 is measured like every θ_t. A snapshot is the live state, valid
    until the generator goes on.

    Args:
        cohort: what to train.
        begin: the snapshot to go on from; None: the initialisation. Its record may be one of the first tasks alone.
        execution: how to execute it; auto: vectorised where possible.
        progress: receives every task and step, for a progress bar.
        watch: is called after every epoch with task, epoch, state and loader; it must not change them.
        on_step: is called after every step with the live state and the number of steps in this epoch; a GPU then
            trains without CUDA graphs, and a sequential executor gives a state of one run.
    """
    on_gpu = cohort.device.type == "cuda"
    progress = progress or Progress()
    # Streams, graphs and kernels are made on the GPU that is torch's current one.
    current_device = torch.cuda.device(cohort.device) if on_gpu else nullcontext()
    with matmul_precision(cohort.precision), unfused_encoders(), current_device:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(cohort.device)
        started = time.perf_counter()
        loader, evaluator = Loader(cohort), Evaluator(cohort)
        loader.load_task(0 if begin is None else min(begin.finished, cohort.challenge.tasks - 1))
        executor = choose(cohort, loader, execution, begin.record.executor if begin else "")
        theta_0, _ = cohort.initial()
        if begin is None:
            sizes = len(cohort), cohort.challenge.tasks, cohort.epochs
            record = Record.blank(*sizes, validation=cohort.challenge.validation is not None)
            begin = Snapshot(0, cohort.initial_state(loader.example()), record)
            evaluator.measure(executor, begin.state, record, row=0)
            record.executor, record.notes = executor.name, [executor.note] if executor.note else []
            record.seconds = time.perf_counter() - started
            yield begin
        elif begin.finished == begin.record.tasks < cohort.challenge.tasks:  # the run goes on with more tasks
            record = begin.record.extend(cohort.challenge.tasks)
            loader.load_task(0)
            for row, state in ((0, cohort.initial_state(loader.example())), (begin.finished, begin.state)):
                evaluator.measure(executor, state, record, row, first=begin.finished)
            begin = Snapshot(begin.finished, begin.state, record)
            yield begin
        executor.arrange(begin.state)
        state, record, spent = begin.state, begin.record, begin.record.seconds
        for task in range(begin.finished, cohort.challenge.tasks):
            started = time.perf_counter()
            progress.task(task)
            loader.load_task(task, state.memory)
            if cohort.optimizer.state == "reset":
                copy_into_(cohort.initial_optimizer(state.params), state.optimizer)
            previous = {k: p.clone() for k, p in state.params.items()}
            stopping, last_step = EarlyStopping(cohort, evaluator, task), state.clock + cohort.epochs * loader.steps
            for epoch in range(cohort.epochs):
                begun = time.perf_counter()
                loader.load_epoch(epoch)
                executor.before_epoch(state, epoch)
                losses = executor.epoch(state, loader, epoch, progress.steps, on_step)
                note_divergence(state, losses)
                objectives = losses.mean(1).double().cpu().masked_fill(stopping.stopped, torch.nan)
                record.arrays["epoch_loss"][:, task, epoch] = objectives
                took = time.perf_counter() - begun  # complete: copying the losses waits for the device
                if epoch or cohort.epochs == 1:  # the first epoch includes graph capture and tracing
                    record.epoch_step_seconds.append(took / losses.shape[1] / len(cohort))
                if watch is not None:
                    watch(task, epoch, state, loader)
                    if on_gpu:  # pending work must not count in the next epoch's time
                        torch.cuda.synchronize(cohort.device)
                with torch.no_grad():
                    if stopping.after_epoch(executor, state):
                        break
            stopping.restore_best(state)
            if epoch + 1 < cohort.epochs:  # the key of `consolidate` must not depend on when the others stopped
                loader.load_epoch(cohort.epochs - 1)
            state.clock = last_step  # also after fewer epochs, so that it is the same in every cohort
            with torch.no_grad():
                executor.consolidate(state, loader)
                executor.arrange(state)
                from_init = distance(state.params, theta_0)
                note_lost(state, from_init)
                record.arrays["distance_from_init"][:, task] = from_init
                record.arrays["update_norm"][:, task] = distance(state.params, previous)
                record.arrays["memory_bytes"][:, task] = tree.nbytes(state.memory) // len(cohort)
                note_lost(state, evaluator.measure(executor, state, record, row=task + 1))
            record.notes = [executor.note] if executor.note else []
            record.peak_bytes = max(record.peak_bytes, peak_bytes(cohort.device))
            spent += time.perf_counter() - started
            record.seconds = spent
            yield Snapshot(task + 1, state, record)


def distance(params: Params, origin: Params) -> Tensor:
    """Return ‖θ − θ'‖₂ over all parameters, one value per run."""
    squared = vmap(lambda a, b: tree.total((a[k] - b[k]).double().square() for k in a))
    return squared(params, origin).sqrt().cpu()


def note_divergence(state: State, losses: Tensor) -> None:
    """Record the first step whose objective was not finite, and advance the clock."""
    bad = ~losses.isfinite()
    first = state.clock + bad.long().argmax(1)
    state.diverged.copy_(torch.where((state.diverged < 0) & bad.any(1), first, state.diverged))
    state.clock += losses.shape[1]


def note_lost(state: State, measured: Tensor) -> None:
    """Mark runs whose parameters or losses are not finite as diverged, even if their last objective was finite."""
    lost = (state.diverged < 0) & ~measured.isfinite().to(state.diverged.device)
    state.diverged.masked_fill_(lost, state.clock)


def peak_bytes(device: torch.device) -> int:
    """Return peak memory: allocated bytes on a GPU, resident bytes of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
