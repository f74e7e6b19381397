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
    as_float,
    check_deterministic,
    check_losses,
    diverse_examples,
    resolve_loss,
    trainable_copy,
)
from glocal.errors import GlocalError, require
from glocal.files import read_tensors, report_damage
from glocal.inputs import check_finite, describe, is_tensor_pair, read_examples
from glocal.lens.training_trace import Checkpoint, TrainingTrace
from glocal.losses import AutogradLoss
from glocal.networks.model import frozen_parameters
from glocal.networks.pretrained import list_names, load_state
from glocal.tree import Params

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
    data = [Data(*(as_float(part).to(device) for part in pair)) for pair in pairs]
    points: list[Checkpoint] = []
    frozen: Params = {}
    for t, state in enumerate(states):
        points.append(_read_state_dict(module, state))
        frozen = frozen or {k: p.clone() for k, p in frozen_parameters(module).items()}
        params = points[t].params
        diverged = [k for k, p in params.items() if not bool(p.isfinite().all())]
        advice = "training diverged. Give the checkpoints before it." if t else "give the initialization."
        if diverged:
            raise GlocalError(f"checkpoint {t} has values that are not finite, first in '{diverged[0]}': {advice}")
        changed = [k for k, p in frozen_parameters(module).items() if not torch.equal(frozen[k], p)]
        if changed:
            raise GlocalError(
                f"'{changed[0]}' has requires_grad=False in the given network but differs between checkpoints 0 and "
                f"{t}: give the network as it was trained."
            )
    trace = TrainingTrace(module, resolve_loss(loss), data, points)
    for o in range(len(data)):
        _check_task(trace, o)
    equal = [
        all(torch.equal(p, old[k]) for old, new in zip(before, after, strict=True) for k, p in new.items())
        for before, after in pairwise(points)
    ]
    if equal[:1] == [True] and not all(equal):
        equal[0] = False  # a network that was pretrained on the first task
    for t, same in enumerate(equal if complete else ()):
        require(
            not same,
            f"checkpoints {t} and {t + 1} are equal, but training must have changed them. state_dict() returns "
            "references to the live tensors: keep copy.deepcopy(module.state_dict()) after every task.",
        )
    return trace


def _as_list(name: str, values: Any) -> list[Any]:
    """Return tasks or checkpoints as a list, and refuse a single one."""
    single = isinstance(values, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or is_tensor_pair(values)
    message = f"{name} must be a list with one item per {name.removesuffix('s')}; {describe(values)} was given."
    require(isinstance(values, Iterable) and not single, message)
    return list(values)


def _read_state_dict(module: nn.Module, state: Any) -> Checkpoint:
    problem = f"a checkpoint must be a state dict; a {type(state).__name__} was given"
    require(not isinstance(state, nn.Module), f"{problem}: give a copy of its state_dict().")
    if isinstance(state, str | Path):
        require(Path(state).suffix == ".safetensors", f"{problem}: give torch.load('{state}').")
        with report_damage(Path(state), "Give a safetensors file or a state dict."):
            state, _ = read_tensors(Path(state))
    require(isinstance(state, Mapping), f"{problem}.")
    nested = [k for k, part in state.items() if isinstance(part, Mapping)]
    fits = not nested or bool(set(module.state_dict()) & set(state))
    require(fits, f"{problem} that holds one: give its {nested[:1]}.")
    learned = {k: p for k, p in module.named_parameters() if p.requires_grad}
    missing = load_state(module, state, "a checkpoint")
    # Frozen parameters, and buffers of layers without learned ones, stay as they are if a checkpoint lacks them.
    layers, buffers = {name.rpartition(".")[0] for name in learned}, dict(module.named_buffers())
    lacking = [k for k in missing if k in learned or (k in buffers and k.rpartition(".")[0] in layers)]
    require(not lacking, f"a checkpoint does not fit the network: it has no {list_names(lacking)}.")
    params = {k: p.detach().clone() for k, p in learned.items()}
    return Checkpoint(params, {k: b.clone() for k, b in buffers.items()})


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
