"""Whether a user's network, loss and data fit each other, and are what the instruments take them for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.errors import GlocalError, require
from glocal.inputs import check_finite, evenly_spaced_indices
from glocal.lens.task_inputs import AT_ONCE
from glocal.losses import MAX_CHECKED_OUTPUTS, AutogradLoss, CrossEntropy, Loss, SquaredError
from glocal.precision import full_precision

if TYPE_CHECKING:
    from glocal.lens.trace import TrainingTrace

OF_CLASSES = (functional.cross_entropy, functional.nll_loss)
CLASSES = 64
"""Classes at most of which an example is shown to a loss of one's own."""
WEIGHED = "the loss is no mean over samples: one that adds them up, or weighs them, was given."


def check(trace: TrainingTrace) -> None:
    """Whether the network and the loss take every task's data, few samples as well as many, and a function of one's own
    is a mean over samples: at θ_0, at the task's solution and at the last point. Such a function is shown some outputs
    and labels to know itself by."""
    last = len(trace.checkpoints) - 1
    for o, (x, y) in enumerate(trace.tasks):
        check_finite(x, f"x of task {o}")
        require(y.is_floating_point() or not _weighs_classes(trace.loss), WEIGHED)
        for t in sorted({0, min(o + 1, last), last}) if isinstance(trace.loss, AutogradLoss) else (0,):
            try:
                with torch.no_grad():
                    outputs = torch.cat([trace.outputs(trace.checkpoints[t], part) for part in x.split(AT_ONCE)])
                _check_labels(o, trace.loss, outputs, y)
                with torch.no_grad():
                    each = trace.loss.per_sample(outputs, y)
                    means = _means(trace.loss, outputs, y)
            except GlocalError:
                raise
            except Exception as error:
                reason = (str(error) or type(error).__name__).strip().splitlines()[0]
                raise GlocalError(f"the network and the loss cannot take the data of task {o}: {reason}") from error
            if outputs.isfinite().all():  # a network beyond numbers says nothing of the data
                _known(o, each, y)
                require(all(_is_mean(mean, each[part]) for part, mean in means), WEIGHED)
            if t == 0 and isinstance(trace.loss, AutogradLoss):
                some = _telling(each, y)
                trace.loss.examples.append((outputs[some], y[some]))
        _one_function(trace, x[:AT_ONCE])


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Tell in one sentence what torch says of layers whose second derivatives it does not have."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if isinstance(error, NotImplementedError) or "derivative" in reason or "autograd" in reason:
            raise GlocalError(f"curvature asks for layers that can be differentiated twice: {reason}") from error
        raise


def _weighs_classes(loss: Loss) -> bool:
    """Whether torch's own loss divides by the sum of its classes' weights: of a single sample they cancel."""
    weight = getattr(loss.mean, "weight", None) if isinstance(loss, AutogradLoss) and _counts_classes(loss) else None
    return isinstance(weight, Tensor) and bool((weight != weight.flatten()[0]).any())


def _known(task: int, each: Tensor, y: Tensor) -> None:
    unknown = each.isnan()
    if unknown.any():
        first = int(unknown.int().argmax())
        raise GlocalError(
            f"the loss of {int(unknown.sum())} examples of task {task} is not a number, first of example {first}, "
            f"whose y is {y[first].tolist()!r:.60}: leave them out."
        )


@full_precision()
@torch.no_grad()
def _one_function(trace: TrainingTrace, x: Tensor) -> None:
    """Whether the last point's outputs are a function of θ and of their own sample: the same again, and in other
    company, where the network takes it."""
    point, half = trace.checkpoints[-1], (len(x) + 1) // 2
    outputs, again = (trace.outputs(point, x) for _ in range(2))
    close = partial(torch.allclose, rtol=1e-2, atol=1e-2 * float(outputs.abs().max()), equal_nan=True)
    require(
        close(again, outputs),
        "the network's outputs change from one pass to the next: it draws numbers in evaluation mode too, as "
        "functional.dropout does without training=self.training. There is no one loss to look at.",
    )
    try:
        fewer = trace.outputs(point, x[:half])
    except Exception:  # it takes batches of some sizes alone, in whichever way it says so
        return
    require(
        fewer.shape != outputs[:half].shape or close(fewer, outputs[:half]),
        "an example's outputs depend on the other examples of its batch, as with BatchNorm that has "
        "track_running_stats=False: the loss would depend on how many are passed at once.",
    )


def _is_mean(mean: Tensor, each: Tensor) -> bool:
    return mean.numel() == 1 and torch.allclose(mean.flatten(), each.mean().flatten(), rtol=1e-3)


def _means(loss: Loss, outputs: Tensor, y: Tensor) -> list[tuple[slice, Tensor]]:
    """What a function of one's own makes of all samples and of either half, which weights could not all hide in."""
    half = len(y) // 2
    parts = [slice(None), slice(half), slice(half, None)] if half else [slice(None)]
    return [(part, loss.mean(outputs[part], y[part])) for part in parts] if isinstance(loss, AutogradLoss) else []


def _telling(each: Tensor, y: Tensor) -> Tensor:
    """Examples with labels as different as there are: of all losses from the least to the largest, and every class."""
    some = evenly_spaced_indices(len(each), MAX_CHECKED_OUTPUTS).to(each.device)
    chosen = each.argsort()[some]
    if y.dim() == 1 and not y.is_floating_point():
        classes = y.unique()
        classes = classes[evenly_spaced_indices(len(classes), CLASSES).to(y.device)]
        first = (y == classes.unsqueeze(1)).int().argmax(1)
        chosen = torch.cat([chosen, first])
    return chosen


def _check_labels(task: int, loss: Loss, outputs: Tensor, y: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and y {tuple(y.shape)}"
    if isinstance(loss, CrossEntropy | SquaredError):
        each = outputs.shape if isinstance(loss, SquaredError) else outputs.shape[:1]
        allowed = "(n, K) and (n, K)" if isinstance(loss, SquaredError) else "(n, K) and (n,)"
        fits = outputs.dim() == 2 and y.shape == each
        require(fits, f"{loss.name} takes outputs and y of the shapes {allowed}; task {task} has {shapes}.")
    elif y.is_floating_point() and y.numel() == outputs.numel():
        # Many a function would broadcast (n, 1) and (n,) to (n, n).
        require(y.shape == outputs.shape, f"task {task} has {shapes}: give both one shape.")
    if isinstance(loss, CrossEntropy):
        integers = y.dtype == torch.int64
        require(integers, f"cross-entropy takes classes of torch.int64; those of task {task} are {y.dtype}.")
    if _counts_classes(loss) and y.dtype == torch.int64 and outputs.dim() > 1:
        low, high, classes = int(y.min()), int(y.max()), outputs.shape[1]
        inside = low >= 0 and high < classes
        require(
            inside, f"task {task} has labels {low} to {high}; the network's {classes} outputs allow 0 to {classes - 1}."
        )


def _counts_classes(loss: Loss) -> bool:
    if not isinstance(loss, AutogradLoss):
        return isinstance(loss, CrossEntropy)
    return loss.mean in OF_CLASSES or isinstance(loss.mean, nn.CrossEntropyLoss | nn.NLLLoss)
