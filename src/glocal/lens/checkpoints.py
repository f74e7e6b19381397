"""Make a trace of a user's training, and check that network, loss, data and checkpoints fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from glocal.challenges.challenge import Data
from glocal.curvature.network import (
    AnyLoss,
    check_deterministic,
    check_losses,
    diverse_examples,
    resolve_loss,
    trainable_copy,
)
from glocal.engine.cohort import constants
from glocal.errors import GlocalError, require
from glocal.files import read_tensors, report_damage
from glocal.inputs import check_finite, describe, is_tensor_pair, read_examples
from glocal.lens.training_trace import Checkpoint, TrainingTrace
from glocal.losses import AutogradLoss

TaskData: TypeAlias = "Data | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[tuple[Tensor, Tensor]]"


def trace_checkpoints(
    module: nn.Module,
    loss: AnyLoss,
    tasks: Sequence[TaskData],
    checkpoints: Sequence[Mapping[str, Any] | str | Path],
    examples: int | None = None,
    complete: bool = False,
) -> TrainingTrace:
    """Make a trace of your own training from the arguments of `examine`; all examples are used if `examples` is None.

    `complete` requires θ_0 and one checkpoint per task, and that every task changed something.
    """
    module = trainable_copy(module)
    states, task_list = _as_list("checkpoints", checkpoints), _as_list("tasks", tasks)
    require(
        not complete or len(states) == len(task_list) + 1,
        f"tasks: {len(task_list)}, checkpoints: {len(states)}; give θ_0, the initialization, and one checkpoint after "
        "every task. If training is still running, give the finished tasks only.",
    )
    pairs = [read_examples(task, f"task {o}", examples) for o, task in enumerate(task_list, 1)]
    device = next(p.device for p in module.parameters() if p.requires_grad)
    data = [Data(*(part.to(device) for part in pair)) for pair in pairs]
    points = [_read_state_dict(module, state) for state in states]
    frozen = [k for k, p in module.named_parameters() if not p.requires_grad]
    for t, (params, constant) in enumerate(points):
        diverged = [k for k, p in params.items() if not bool(p.isfinite().all())]
        advice = "training diverged. Give the checkpoints before it." if t else "give the initialization."
        if diverged:
            raise GlocalError(f"checkpoint {t} has values that are not finite, first in '{diverged[0]}': {advice}")
        changed = [k for k in frozen if not torch.equal(points[0].buffers[k], constant[k])]
        if changed:
            raise GlocalError(
                f"'{changed[0]}' has requires_grad=False in the given network but differs between checkpoints 0 and "
                f"{t}: give the network as it was trained."
            )
    trace = TrainingTrace(module, resolve_loss(loss), data, points)
    for o in range(len(data)):
        _check_task(trace, o)
    for t, (before, after) in enumerate(pairwise(points) if complete else ()):
        require(
            not all(torch.equal(p, part[k]) for part, now in zip(before, after, strict=True) for k, p in now.items()),
            f"checkpoints {t} and {t + 1} are equal, but training must have changed them. state_dict() returns "
            "references to the live tensors: keep copy.deepcopy(module.state_dict()) after every task.",
        )
    return trace


def _as_list(what: str, given: Any) -> list[Any]:
    """Return tasks or checkpoints as a list, and refuse a single one."""
    single = isinstance(given, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or is_tensor_pair(given)
    message = f"{what} must be a list with one item per {what.removesuffix('s')}; {describe(given)} was given."
    require(isinstance(given, Iterable) and not single, message)
    return list(given)


def _read_state_dict(module: nn.Module, state: Any) -> Checkpoint:
    problem = f"a checkpoint must be a state dict; a {type(state).__name__} was given"
    require(not isinstance(state, nn.Module), f"{problem}: give a copy of its state_dict().")
    if isinstance(state, str | Path):
        require(Path(state).suffix == ".safetensors", f"{problem}: give torch.load('{state}').")
        with report_damage(Path(state), "Give a safetensors file or a state dict."):
            state, _ = read_tensors(Path(state))
    require(isinstance(state, Mapping), f"{problem}.")
    names, keys = set(module.state_dict()), [str(key) for key in state]
    if not names & set(keys):
        nested = [k for k, part in state.items() if isinstance(part, Mapping)]
        require(not nested, f"{problem} that holds one: give its {nested[:1]}.")
        # As torch.compile, DataParallel and Lightning write them.
        starts = [key[: i + 1] for key in keys[:1] for i, letter in enumerate(key) if letter == "."]
        prefix = next((start for start in starts if {start + name for name in names} == set(keys)), None)
        require(
            prefix is None,
            f"the names in a checkpoint begin with '{prefix}': give "
            f"{{k.removeprefix('{prefix}'): t for k, t in state.items()}}.",
        )
    try:
        module.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:  # AttributeError: values that are not tensors
        reason = str(error).strip().splitlines()[-1].strip()
        raise GlocalError(f"a checkpoint does not fit the network: {reason}") from error
    params = {k: p.detach().clone() for k, p in module.named_parameters() if p.requires_grad}
    return Checkpoint(params, {k: b.clone() for k, b in constants(module).items()})


def _check_task(trace: TrainingTrace, task: int) -> None:
    """Check that network and loss accept a task's data, and that a user's loss is a mean over samples.

    A user's loss is checked at θ_0, at the task's solution and at the last checkpoint, since weights may cancel at one
    of them. It is shown some outputs and labels, from which it derives whether its curvature depends on the label.
    """
    (x, y), last = trace.tasks[task], len(trace.checkpoints) - 1
    check_finite(x, f"x of task {task + 1}")
    for t in sorted({0, min(task + 1, last), last}) if isinstance(trace.loss, AutogradLoss) else (0,):
        outputs, sample_losses = check_losses(trace.risk(task, trace.checkpoints[t]), f"task {task + 1}")
        if isinstance(trace.loss, AutogradLoss) and t == 0:
            rows = diverse_examples(sample_losses, y)
            trace.loss.examples.append((outputs[rows], y[rows]))
    check_deterministic(trace.risk(task, trace.checkpoints[-1]))
