"""Make a trace of a user's training, and check that network, loss, data and checkpoints fit each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.engine.cohort import constants
from glocal.errors import GlocalError, first_line, require
from glocal.files import read_tensors, report_damage
from glocal.inputs import check_finite, describe, evenly_spaced_indices, is_tensor_pair, read_examples
from glocal.lens.training_trace import MAX_EXAMPLES, Checkpoint, TrainingTrace
from glocal.losses import LOSSES, MAX_CHECKED_OUTPUTS, AutogradLoss, CrossEntropy, Loss, SquaredError
from glocal.precision import full_precision

TaskData: TypeAlias = "Data | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[tuple[Tensor, Tensor]]"
AnyLoss: TypeAlias = "str | Loss | Callable[[Tensor, Tensor], Tensor]"
MAX_CLASSES = 64
"""Classes of which an `AutogradLoss` is shown an example."""
NOT_A_MEAN = "the loss must be the unweighted mean over samples; this one sums or weighs them."


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
    require(isinstance(module, nn.Module), f"the network must be an nn.Module; a {type(module).__name__} was given.")
    states, task_list = _as_list("checkpoints", checkpoints), _as_list("tasks", tasks)
    require(
        not complete or len(states) == len(task_list) + 1,
        f"tasks: {len(task_list)}, checkpoints: {len(states)}; give θ_0, the initialization, and one checkpoint after "
        "every task. If training is still running, give the finished tasks only.",
    )
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.sparse = False  # sparse gradients have no second derivatives
    learned = [p for p in module.parameters() if p.requires_grad]
    name = type(module).__name__
    require(bool(learned), f"the network {name} has no parameters with requires_grad=True.")
    half = next((p.dtype for p in learned if p.dtype in (torch.bfloat16, torch.float16)), None)
    require(half is None, f"the network {name} has {half} parameters, too coarse for curvature: give module.float().")
    pairs = [read_examples(task, f"task {o}", examples) for o, task in enumerate(task_list, 1)]
    data = [Data(*(part.to(learned[0].device) for part in pair)) for pair in pairs]
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
    trace = TrainingTrace(module, _resolve_loss(loss), data, points)
    for o in range(len(data)):
        _check_task(trace, o)
    for t, (before, after) in enumerate(pairwise(points) if complete else ()):
        require(
            not all(torch.equal(p, part[k]) for part, now in zip(before, after, strict=True) for k, p in now.items()),
            f"checkpoints {t} and {t + 1} are equal, but training must have changed them. state_dict() returns "
            "references to the live tensors: keep copy.deepcopy(module.state_dict()) after every task.",
        )
    return trace


@contextmanager
def explain_missing_derivatives() -> Iterator[None]:
    """Turn torch's error about layers without second derivatives into one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error)
        if isinstance(error, NotImplementedError) or "derivative" in reason or "autograd" in reason:
            raise GlocalError(f"curvature needs layers that can be differentiated twice: {reason}") from error
        raise


def _as_list(what: str, given: Any) -> list[Any]:
    """Return tasks or checkpoints as a list, and refuse a single one."""
    single = isinstance(given, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or is_tensor_pair(given)
    message = f"{what} must be a list with one item per {what.removesuffix('s')}; {describe(given)} was given."
    require(isinstance(given, Iterable) and not single, message)
    return list(given)


def _resolve_loss(given: AnyLoss) -> Loss:
    """Return the loss of a name or of a function."""
    if isinstance(given, str):
        return losses.get(given)
    if isinstance(given, AutogradLoss):
        return AutogradLoss(given.mean)  # a fresh one: it stores examples of these tasks
    if hasattr(given, "per_sample"):
        return given  # type: ignore[return-value]
    if isinstance(given, type):
        raise GlocalError(f"the loss is the class {given.__name__}; give an instance, {given.__name__}().")
    if not callable(given):
        allowed = ", ".join(map(repr, LOSSES))
        raise GlocalError(f"the loss must be {allowed}, or a function of outputs and y; {given!r} was given.")
    return AutogradLoss(given)


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
        outputs, sample_losses = _outputs_and_losses(trace, task, t)
        if isinstance(trace.loss, AutogradLoss) and t == 0:
            rows = _diverse_examples(sample_losses, y)
            trace.loss.examples.append((outputs[rows], y[rows]))
    _check_deterministic(trace, x[:MAX_EXAMPLES])


@torch.no_grad()
def _outputs_and_losses(trace: TrainingTrace, task: int, t: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and losses of a task's examples at checkpoint t; check labels, losses and their mean."""
    (x, y), name = trace.tasks[task], f"task {task + 1}"
    half = len(y) // 2
    parts = (slice(None), slice(half), slice(half, None)) if half else (slice(None),)  # together they reveal weights
    try:
        outputs = trace.outputs(trace.checkpoints[t], x)
        _check_labels(name, trace.loss, outputs, y)
        sample_losses = trace.loss.per_sample(outputs, y)
        mean = trace.loss.mean if isinstance(trace.loss, AutogradLoss) else None
        means = [(mean(outputs[part], y[part]), sample_losses[part].mean()) for part in parts] if mean else []
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"the network or the loss fails on the data of {name}: {first_line(error)}") from error
    nan = sample_losses.isnan()
    if outputs.isfinite().all():  # outputs that are not finite say nothing about the data
        if nan.any():
            first = int(nan.int().argmax())
            raise GlocalError(
                f"the loss of {int(nan.sum())} examples of {name} is NaN, first of example {first}, whose y is "
                f"{y[first].tolist()!r:.60}: remove them."
            )
        equal = (a.numel() == 1 and torch.allclose(a.flatten(), b.flatten(), rtol=1e-3) for a, b in means)
        require(all(equal), NOT_A_MEAN)
    return outputs, sample_losses


def _check_labels(name: str, loss: Loss, outputs: Tensor, y: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and y {tuple(y.shape)}"
    if isinstance(loss, CrossEntropy | SquaredError):
        expected = outputs.shape if isinstance(loss, SquaredError) else outputs.shape[:1]
        allowed = "(n, K) and (n, K)" if isinstance(loss, SquaredError) else "(n, K) and (n,)"
        fits = outputs.dim() == 2 and y.shape == expected
        require(fits, f"{loss.name} takes outputs and y of the shapes {allowed}; {name} has {shapes}.")
    elif y.is_floating_point() and y.numel() == outputs.numel():
        # Many functions would broadcast (n, 1) and (n,) to (n, n).
        require(y.shape == outputs.shape, f"{name} has {shapes}: give both the same shape.")
    if isinstance(loss, CrossEntropy):
        integers = y.dtype == torch.int64
        require(integers, f"cross-entropy takes classes of torch.int64; those of {name} are {y.dtype}.")
    function = loss.mean if isinstance(loss, AutogradLoss) else loss
    takes_classes = isinstance(function, CrossEntropy | nn.CrossEntropyLoss | nn.NLLLoss)
    takes_classes = takes_classes or function in (functional.cross_entropy, functional.nll_loss)
    if takes_classes and y.dtype == torch.int64 and outputs.dim() > 1:
        low, high, classes = int(y.min()), int(y.max()), outputs.shape[1]
        message = f"{name} has labels {low} to {high}; the network's {classes} outputs allow 0 to {classes - 1}."
        require(low >= 0 and high < classes, message)


def _diverse_examples(sample_losses: Tensor, y: Tensor) -> Tensor:
    """Return indices of examples with losses from the smallest to the largest, and of every class."""
    rows = evenly_spaced_indices(len(sample_losses), MAX_CHECKED_OUTPUTS).to(sample_losses.device)
    rows = sample_losses.argsort()[rows]
    if y.dim() == 1 and not y.is_floating_point():
        classes = y.unique()
        classes = classes[evenly_spaced_indices(len(classes), MAX_CLASSES).to(y.device)]
        rows = torch.cat([rows, (y == classes.unsqueeze(1)).int().argmax(1)])
    return rows


@full_precision()
@torch.no_grad()
def _check_deterministic(trace: TrainingTrace, x: Tensor) -> None:
    """Check that the outputs are a function of θ and of their own sample: repeat them, alone and in another batch."""
    checkpoint, half = trace.checkpoints[-1], (len(x) + 1) // 2
    outputs, repeated = (trace.outputs(checkpoint, x) for _ in range(2))
    close = partial(torch.allclose, rtol=1e-2, atol=1e-2 * float(outputs.abs().max()), equal_nan=True)
    require(
        close(repeated, outputs),
        "the network's outputs change between two passes: it is random in eval mode too, for example "
        "functional.dropout without training=self.training.",
    )
    try:
        fewer = trace.outputs(checkpoint, x[:half])
    except Exception:  # a network for batches of some sizes only may raise anything
        return
    require(
        fewer.shape != outputs[:half].shape or close(fewer, outputs[:half]),
        "an example's outputs depend on the other examples of its batch, for example BatchNorm with "
        "track_running_stats=False: the loss would depend on the batch size.",
    )
