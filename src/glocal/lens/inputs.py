"""Check that a user's network, loss and data fit each other and are what the instruments assume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.errors import GlocalError, require
from glocal.inputs import check_finite, describe, evenly_spaced_indices, is_tensor_pair, read_examples
from glocal.losses import LOSSES, MAX_CHECKED_OUTPUTS, AutogradLoss, CrossEntropy, Loss, SquaredError
from glocal.precision import full_precision

if TYPE_CHECKING:
    from glocal.lens.trace import TrainingTrace

TaskData: TypeAlias = "Data | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[tuple[Tensor, Tensor]]"
AnyLoss: TypeAlias = "str | Loss | Callable[[Tensor, Tensor], Tensor]"
CHUNK_SIZE = 500
"""Examples that pass through the network at once."""
MAX_CLASSES = 64
"""Classes of which an `AutogradLoss` is shown an example."""
NOT_A_MEAN = "the loss must be the unweighted mean over samples; this one sums or weighs them."


def as_list(what: str, given: Any) -> list[Any]:
    """Return tasks or checkpoints as a list, and refuse a single one."""
    single = isinstance(given, str | Mapping | Tensor | Dataset | DataLoader | nn.Module) or is_tensor_pair(given)
    require(
        isinstance(given, Iterable) and not single,
        f"{what} must be a list with one item per {what.removesuffix('s')}; {describe(given)} was given.",
    )
    return list(given)


def read_task(
    task: TaskData, examples: int | None = None, device: torch.device | str = "cpu", name: str = "the task"
) -> Data:
    """Return at most `examples` examples of a task (all by default) as tensors on a device; see `read_examples`."""
    x, y = read_examples(task, name, examples)
    return Data(x.to(device), y.to(device))


def resolve_loss(given: AnyLoss) -> Loss:
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


def check(trace: TrainingTrace) -> None:
    """Check that network and loss accept every task's data, and that a user's loss is a mean over samples.

    Checked at θ_0, at the task's solution and at the last checkpoint. A user's loss is shown some outputs and labels,
    from which it derives whether its curvature depends on the label.
    """
    last = len(trace.checkpoints) - 1
    for o, (x, y) in enumerate(trace.tasks):
        check_finite(x, f"x of task {o}")
        require(y.is_floating_point() or not _weighs_classes(trace.loss), NOT_A_MEAN)
        for t in sorted({0, min(o + 1, last), last}) if isinstance(trace.loss, AutogradLoss) else (0,):
            try:
                with torch.no_grad():
                    outputs = torch.cat([trace.outputs(trace.checkpoints[t], part) for part in x.split(CHUNK_SIZE)])
                _check_labels(o, trace.loss, outputs, y)
                with torch.no_grad():
                    sample_losses = trace.loss.per_sample(outputs, y)
                    means = _means(trace.loss, outputs, y)
            except GlocalError:
                raise
            except Exception as error:
                reason = (str(error) or type(error).__name__).strip().splitlines()[0]
                raise GlocalError(f"the network or the loss fails on the data of task {o}: {reason}") from error
            if outputs.isfinite().all():  # outputs that are not finite say nothing about the data
                _check_not_nan(o, sample_losses, y)
                require(all(_is_mean(mean, sample_losses[part]) for part, mean in means), NOT_A_MEAN)
            if t == 0 and isinstance(trace.loss, AutogradLoss):
                rows = _diverse_examples(sample_losses, y)
                trace.loss.examples.append((outputs[rows], y[rows]))
        _check_deterministic(trace, x[:CHUNK_SIZE])


@contextmanager
def explain_missing_derivatives() -> Iterator[None]:
    """Turn torch's error about layers without second derivatives into one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if isinstance(error, NotImplementedError) or "derivative" in reason or "autograd" in reason:
            raise GlocalError(f"curvature needs layers that can be differentiated twice: {reason}") from error
        raise


def _weighs_classes(loss: Loss) -> bool:
    """Whether a loss of torch divides by the sum of class weights, which cancel for a single sample."""
    weight = getattr(loss.mean, "weight", None) if isinstance(loss, AutogradLoss) and _takes_classes(loss) else None
    return isinstance(weight, Tensor) and bool((weight != weight.flatten()[0]).any())


def _check_not_nan(task: int, sample_losses: Tensor, y: Tensor) -> None:
    nan = sample_losses.isnan()
    if nan.any():
        first = int(nan.int().argmax())
        raise GlocalError(
            f"the loss of {int(nan.sum())} examples of task {task} is NaN, first of example {first}, whose y is "
            f"{y[first].tolist()!r:.60}: remove them."
        )


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


def _is_mean(mean: Tensor, sample_losses: Tensor) -> bool:
    return mean.numel() == 1 and torch.allclose(mean.flatten(), sample_losses.mean().flatten(), rtol=1e-3)


def _means(loss: Loss, outputs: Tensor, y: Tensor) -> list[tuple[slice, Tensor]]:
    """Return a user's loss of all samples and of either half, which together reveal weights."""
    half = len(y) // 2
    parts = [slice(None), slice(half), slice(half, None)] if half else [slice(None)]
    return [(part, loss.mean(outputs[part], y[part])) for part in parts] if isinstance(loss, AutogradLoss) else []


def _diverse_examples(sample_losses: Tensor, y: Tensor) -> Tensor:
    """Return indices of examples with losses from the smallest to the largest, and of every class."""
    rows = evenly_spaced_indices(len(sample_losses), MAX_CHECKED_OUTPUTS).to(sample_losses.device)
    rows = sample_losses.argsort()[rows]
    if y.dim() == 1 and not y.is_floating_point():
        classes = y.unique()
        classes = classes[evenly_spaced_indices(len(classes), MAX_CLASSES).to(y.device)]
        rows = torch.cat([rows, (y == classes.unsqueeze(1)).int().argmax(1)])
    return rows


def _check_labels(task: int, loss: Loss, outputs: Tensor, y: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and y {tuple(y.shape)}"
    if isinstance(loss, CrossEntropy | SquaredError):
        expected = outputs.shape if isinstance(loss, SquaredError) else outputs.shape[:1]
        allowed = "(n, K) and (n, K)" if isinstance(loss, SquaredError) else "(n, K) and (n,)"
        fits = outputs.dim() == 2 and y.shape == expected
        require(fits, f"{loss.name} takes outputs and y of the shapes {allowed}; task {task} has {shapes}.")
    elif y.is_floating_point() and y.numel() == outputs.numel():
        # Many functions would broadcast (n, 1) and (n,) to (n, n).
        require(y.shape == outputs.shape, f"task {task} has {shapes}: give both the same shape.")
    if isinstance(loss, CrossEntropy):
        integers = y.dtype == torch.int64
        require(integers, f"cross-entropy takes classes of torch.int64; those of task {task} are {y.dtype}.")
    if _takes_classes(loss) and y.dtype == torch.int64 and outputs.dim() > 1:
        low, high, classes = int(y.min()), int(y.max()), outputs.shape[1]
        require(
            low >= 0 and high < classes,
            f"task {task} has labels {low} to {high}; the network's {classes} outputs allow 0 to {classes - 1}.",
        )


def _takes_classes(loss: Loss) -> bool:
    if not isinstance(loss, AutogradLoss):
        return isinstance(loss, CrossEntropy)
    functions = (functional.cross_entropy, functional.nll_loss)
    return loss.mean in functions or isinstance(loss.mean, nn.CrossEntropyLoss | nn.NLLLoss)
