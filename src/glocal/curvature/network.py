"""Make a `Risk` from a user's network, loss and data, and check that they fit each other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss as TorchLoss

from glocal import losses
from glocal.errors import GlocalError, first_line, require
from glocal.inputs import check_finite, evenly_spaced_indices, read_examples
from glocal.losses import (
    LOSSES,
    MAX_CHECKED_OUTPUTS,
    AutogradLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    SquaredError,
)
from glocal.networks.layer_calls import set_eval_mode
from glocal.precision import full_precision
from glocal.risk import MAX_CHUNK_SIZE, Risk, outputs_in_chunks

AnyLoss: TypeAlias = "str | Loss | Callable[[Tensor, Tensor], Tensor]"
R = TypeVar("R")
HALF = (torch.bfloat16, torch.float16)
MAX_CLASSES = 64
"""Classes of which an `AutogradLoss` is shown an example."""
NOT_A_MEAN = "the loss must be the unweighted mean over samples; this one sums or weighs them."


def network_risk(model: nn.Module, loss: AnyLoss, data: Any, chunk_size: int | None = None) -> Risk:
    """Return the risk of a network at its present parameters, in evaluation mode, on all of the data.

    Args:
        model: Any network. It is copied: later training does not change the risk. Derivatives are taken in the
            parameters with requires_grad=True, in the order of `model.named_parameters()`.
        loss: A loss of torch with `reduction` 'mean' or 'sum', taken over all of the data at once, with its `weight`,
            `label_smoothing` and `ignore_index`; a function (outputs, y) that returns the mean over samples;
            'cross-entropy' or 'squared-error'.
        data: A DataLoader, a Dataset or a pair (x, y). It is read once, and moved to the model's device.
        chunk_size: How many samples are differentiated at once; by default as many as fit into memory.
    """
    module, resolved = set_eval_mode(trainable_copy(model)), resolve_loss(loss)
    params = {k: p.detach() for k, p in module.named_parameters() if p.requires_grad}
    constants = {k: t.detach() for k, t in (*module.named_parameters(), *module.named_buffers()) if k not in params}
    x, y = (as_float(part).to(next(iter(params.values())).device) for part in read_examples(data))
    risk = Risk(module, params, constants, x, y, resolved, chunk_size)
    check_finite(x, "x of the data")
    if isinstance(loss, TorchLoss):
        risk = replace(risk, loss=_as_mean(loss, risk))
    outputs, sample_losses = check_losses(risk, "the data")
    if isinstance(risk.loss, AutogradLoss):
        rows = diverse_examples(sample_losses, y)
        risk.loss.examples.append((outputs[rows], y[rows]))
    check_deterministic(risk)
    return risk


def takes_network(function: Callable[..., R]) -> Callable[..., R]:
    """Let a function of a `Risk` take the arguments (model, loss, data) of `network_risk` in its place."""
    signature = inspect.signature(function)
    first, *rest = signature.parameters.values()
    three = [inspect.Parameter(name, first.POSITIONAL_OR_KEYWORD) for name in ("model", "loss", "data")]
    network_signature = signature.replace(parameters=[*three, *(p.replace(annotation=p.empty) for p in rest)])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        if hasattr(first := args[0] if args else kwargs.get("model"), "__matmul__") or isinstance(first, Risk):
            return function(*args, **kwargs)
        arguments = network_signature.bind(*args, **kwargs).arguments
        with full_precision(), explain_missing_derivatives():
            return function(network_risk(*(arguments.pop(p.name) for p in three)), **arguments)

    call.__signature__ = network_signature  # type: ignore[attr-defined]
    return call


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


def trainable_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a network that can be differentiated twice, in float32 if it is in half precision."""
    require(isinstance(model, nn.Module), f"the network must be an nn.Module; a {type(model).__name__} was given.")
    module = copy.deepcopy(model)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.sparse = False  # sparse gradients have no second derivatives
    trained = any(p.requires_grad for p in module.parameters())
    require(trained, f"the network {type(module).__name__} has no parameters with requires_grad=True.")
    return module.float() if any(p.dtype in HALF for p in module.parameters()) else module


def as_float(tensor: Tensor) -> Tensor:
    """Return half precision, which is too coarse for curvature, in float32, and other tensors as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor


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


@torch.no_grad()
def _as_mean(loss: TorchLoss, risk: Risk) -> Loss:
    """Return a torch loss of all of the data as an unweighted mean over samples.

    Its sum over samples times a constant: torch's 'mean' divides by the number of elements or by the sum of weights.
    """
    require(
        loss.reduction != "none",
        f"{loss} has reduction='none' and returns one number per sample; use reduction='mean' or 'sum'.",
    )
    ignored = risk.y == getattr(loss, "ignore_index", torch.nan)
    classes = risk.y.dtype == torch.int64 and risk.y.dim() == 1 and not bool(ignored.any())
    options = [getattr(loss, name, None) for name in ("reduction", "weight", "label_smoothing")]
    if type(loss) is nn.CrossEntropyLoss and classes and options == ["mean", None, 0.0]:
        return CrossEntropy()
    summed = copy.deepcopy(loss)
    summed.reduction = "sum"

    with _explain_failure("the data"):
        outputs, y = _outputs(risk).double(), risk.y.double() if risk.y.is_floating_point() else risk.y
        _check_labels("the data", AutogradLoss(loss), outputs, torch.where(ignored, 0, risk.y))
        exact, exact_sum = (copy.deepcopy(function).double() for function in (loss, summed))
        # The constant does not depend on the outputs. At a perfect fit both losses may be 0.
        outputs = outputs if exact_sum(outputs, y) != 0 else outputs + 1
        total = exact_sum(outputs, y)
        constant = float(exact(outputs, y) / total) * len(y) if total != 0 else 1.0
    return AutogradLoss(lambda outputs, y: summed(outputs, y) * (constant / len(y)))


@torch.no_grad()
def check_losses(risk: Risk, name: str) -> tuple[Tensor, Tensor]:
    """Return the outputs and losses of all samples; check labels, losses, and that a user's loss is their mean."""
    y, half = risk.y, len(risk) // 2
    parts = (slice(None), slice(half), slice(half, None)) if half else (slice(None),)  # together they reveal weights
    with _explain_failure(name):
        outputs = _outputs(risk)
        _check_labels(name, risk.loss, outputs, y)
        sample_losses = risk.loss.per_sample(outputs, y)
        mean = risk.loss.mean if isinstance(risk.loss, AutogradLoss) else None
        means = [(mean(outputs[part], y[part]), sample_losses[part].mean()) for part in parts] if mean else []
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


@contextmanager
def _explain_failure(name: str) -> Iterator[None]:
    try:
        yield
    except GlocalError:
        raise
    except Exception as error:
        raise GlocalError(f"the network or the loss fails on {name}: {first_line(error)}") from error


def _outputs(risk: Risk) -> Tensor:
    return outputs_in_chunks(risk.module, {**risk.params, **risk.buffers}, risk.x)


def _check_labels(name: str, loss: Loss, outputs: Tensor, y: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and y {tuple(y.shape)}"
    if isinstance(loss, CrossEntropy | SquaredError | BinaryCrossEntropy):
        takes_labels = isinstance(loss, CrossEntropy)
        expected = outputs.shape[:1] if takes_labels else outputs.shape
        allowed = "(n, K) and (n,)" if takes_labels else "(n, K) and (n, K)"
        fits = outputs.dim() == 2 and y.shape == expected
        require(fits, f"{loss.name} takes outputs and y of the shapes {allowed}; {name} has {shapes}.")
    elif y.is_floating_point() and y.numel() == outputs.numel():
        # Many functions would broadcast (n, 1) and (n,) to (n, n).
        require(y.shape == outputs.shape, f"{name} has {shapes}: give both the same shape.")
    if isinstance(loss, BinaryCrossEntropy):
        in_range = bool(((y >= 0) & (y <= 1)).all())
        require(in_range, f"binary-cross-entropy takes y from 0 to 1; those of {name} are not all.")
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


def diverse_examples(sample_losses: Tensor, y: Tensor) -> Tensor:
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
def check_deterministic(risk: Risk) -> None:
    """Check that the outputs are a function of θ and of their own sample: repeat them, alone and in another batch."""
    risk = replace(risk, x=risk.x[:MAX_CHUNK_SIZE])
    outputs, repeated, half = _outputs(risk), _outputs(risk), (len(risk) + 1) // 2
    close = partial(torch.allclose, rtol=1e-2, atol=1e-2 * float(outputs.abs().max()), equal_nan=True)
    require(
        close(repeated, outputs),
        "the network's outputs change between two passes: it is random in eval mode too, for example "
        "functional.dropout without training=self.training.",
    )
    try:
        fewer = _outputs(replace(risk, x=risk.x[:half]))
    except Exception:  # a network for batches of some sizes only may raise anything
        return
    require(
        fewer.shape != outputs[:half].shape or close(fewer, outputs[:half]),
        "an example's outputs depend on the other examples of its batch, for example BatchNorm with "
        "track_running_stats=False: the loss would depend on the batch size.",
    )
