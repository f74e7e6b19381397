r"""The loss ℓ(f, y) of a network's outputs f, with the derivatives in f that curvature needs.

>>> import torch
>>> loss = get("cross-entropy")
>>> outputs, y = torch.zeros(1, 2), torch.tensor([0])
>>> loss.output_gradient(outputs, y)
tensor([[-0.5000,  0.5000]])
>>> s = loss.output_hessian_sqrt(outputs)[0]
>>> s.mT @ s
tensor([[ 0.2500, -0.2500],
        [-0.2500,  0.2500]])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap
from torch.nn.functional import softplus

from glocal.errors import GlocalError, first_line, require, require_known


class Loss(ABC):
    """ℓ and its derivatives in the outputs, (n, K). Every method works sample by sample."""

    name: str

    @abstractmethod
    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return ℓ(f_i, y_i), (n,)."""

    def among(self, outputs: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        """Return ℓ among some classes, a mask (K,): the outputs of the others are −∞."""
        return self.per_sample(outputs.masked_fill(~classes, -torch.inf), y)

    def has_value_among(self, classes: Tensor) -> bool:
        """Whether `among` has a value for these classes."""
        return True

    @abstractmethod
    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return ∇_f ℓ(f_i, y_i), (n, K)."""

    @abstractmethod
    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """Return rows s_c with Σ_c s_c s_cᵀ = ∇²_f ℓ, (n, C, K)."""

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function t ↦ ∇²_f ℓ(f_i, y_i) t_i, (n, K): SᵀS t, a sum of positive terms, does not cancel."""
        sqrt = self.output_hessian_sqrt(outputs)
        return lambda t: (sqrt.mT @ (sqrt @ t.unsqueeze(-1))).squeeze(-1)

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return p(y_i | x_i), (n,), if the loss is a negative log-likelihood."""
        return (-self.per_sample(outputs, y)).exp()

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        """Sample labels from the network's predictive distribution, from one uniform number each."""
        raise GlocalError(f"labels can be sampled for classes only, not for '{self.name}'; use fisher='exact'.")


class CrossEntropy(Loss):
    """ℓ = −log softmax(f)_y for a class y."""

    name = "cross-entropy"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.is_cuda:
            return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        # On a CPU the transpose takes a tenth of the time: the contiguous axis is the batch, not the few classes.
        return -outputs.mT.log_softmax(-2).gather(-2, y.unsqueeze(-2)).squeeze(-2)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        return outputs.softmax(-1) - (y.unsqueeze(-1) == classes).to(outputs.dtype)

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """diag(p) − p pᵀ = Σ_c p_c (e_c − p)(e_c − p)ᵀ."""
        p = outputs.softmax(-1)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return p.sqrt().unsqueeze(-1) * (identity - p.unsqueeze(-2))

    def sample_labels(self, outputs: Tensor, uniform: Tensor) -> Tensor:
        cumulative = outputs.softmax(-1).cumsum(-1)
        return (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)


class SquaredError(Loss):
    """ℓ = ½‖f − y‖², the negative log-likelihood of a unit Gaussian up to a constant."""

    name = "squared-error"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * self.output_gradient(outputs, y).square().sum(-1)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        _require_same_shape("squared error", outputs, y)
        return outputs - y

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        identity = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return identity.expand(*outputs.shape[:-1], -1, -1)

    def likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (-self.per_sample(outputs, y)).exp() * (2 * math.pi) ** (-outputs.shape[-1] / 2)


class BinaryCrossEntropy(Loss):
    """ℓ = Σ_c log(1 + exp f_c) − y_c f_c for targets y_c in [0, 1]: several labels may be right at once."""

    name = "binary-cross-entropy"

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        _require_same_shape(self.name, outputs, y)
        return (y * softplus(-outputs) + (1 - y) * softplus(outputs)).sum(-1)  # without cancellation

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        _require_same_shape(self.name, outputs, y)
        return outputs.sigmoid() - y

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """∇²_f ℓ is diagonal, with σ(f_c) (1 − σ(f_c)) = σ(f_c) σ(−f_c)."""
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt().diag_embed()


def _require_same_shape(name: str, outputs: Tensor, y: Tensor) -> None:
    """Refuse shapes such as (n, 1) and (n,), which would broadcast to (n, n)."""
    if outputs.shape != y.shape:
        description = f"outputs {tuple(outputs.shape)} and targets {tuple(y.shape)}"
        raise GlocalError(f"the {name} needs outputs and targets of the same shape; got {description}.")


MAX_CHECKED_OUTPUTS = 8
"""Outputs at which the second derivatives of an `AutogradLoss` are compared between labels."""


class AutogradLoss(Loss):
    r"""Any function (outputs, y) that is a mean over samples, with derivatives by autograd.

    ∇²_f ℓ has a root that needs no label if it is positive semi-definite and the same for all labels, as for every
    negative log-likelihood of an exponential family in its natural parameters f (cross-entropy, squared error,
    logistic, Poisson): log p(y | f) = ⟨f, T(y)⟩ − A(f) + h(y), and ∇²_f ℓ = ∇²A(f). This is tested on `examples`,
    outputs (m, K) and their labels, for every K that occurs; without examples the loss has no root.
    """

    name = "own"

    def __init__(self, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.mean = mean
        self.examples: list[tuple[Tensor, Tensor]] = []

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        return vmap(self._single_loss)(outputs, y)

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        return vmap(grad(self._single_loss))(outputs, y)

    def output_hessian_sqrt(self, outputs: Tensor) -> Tensor:
        """√λ_c v_c for the eigenpairs of ∇²_f ℓ."""
        label = self._labels.get(outputs.shape[-1])
        if label is None:
            raise GlocalError(
                "the outer-product Hessian needs a loss whose second derivative in the outputs is positive and does "
                "not depend on the labels, such as cross-entropy or squared error; the given loss is not of this kind. "
                "ewc can do without it: fisher='empirical'."
            )
        label = label.to(outputs.device, outputs.dtype if label.is_floating_point() else label.dtype)
        values, vectors = torch.linalg.eigh(self._hessians(outputs, label))
        return values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT

    def output_hvp(self, outputs: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        _, pull = vjp(lambda f: self.output_gradient(f, y), outputs)  # type: ignore[misc]
        return lambda t: pull(t)[0]

    @cached_property
    def _labels(self) -> dict[int, Tensor]:
        """A label for every K if ∇²_f ℓ is positive semi-definite and the same for all labels; otherwise empty."""
        for outputs, _ in self.examples:
            if outputs.dim() != 2:
                raise GlocalError(
                    "the outer-product Hessian needs outputs of shape (n, K), one row for each example; those of the "
                    f"network are {tuple(outputs.shape)}. Wrap it in a module that flattens or unsqueezes them."
                )
        checked = [(outputs[:MAX_CHECKED_OUTPUTS], y) for outputs, y in self.examples]
        first = [self._hessians(outputs, y[0]) for outputs, y in checked]
        # For a confident network all second derivatives may be rounding errors.
        tolerance = 1e-4 * max((float(hessians.abs().amax()) for hessians in first), default=0.0)
        for (outputs, y), hessians in zip(checked, first, strict=True):
            differences = (self._hessians(outputs, label) - hessians for label in y[1:])
            independent = all(bool((d.abs() <= tolerance).all()) for d in differences)  # False if one is NaN
            if not independent or bool((torch.linalg.eigvalsh(hessians) < -tolerance).any()):
                return {}
        return {outputs.shape[1]: y[0] for outputs, y in checked}

    def _single_loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.mean(f.unsqueeze(0), y.unsqueeze(0)).sum()

    def _hessians(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Return ∇²_f ℓ of all outputs with one label, (n, K, K)."""
        return vmap(jacrev(grad(self._single_loss)), (0, None))(outputs, label)


class PerSampleLoss(AutogradLoss):
    """A user's function (outputs, y) that returns one loss per example, (n,), with derivatives by autograd."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda outputs, y: function(outputs, y).mean())
        self.function = function
        self.ways: dict[tuple[bool, ...], str] = {}
        self.name = getattr(function, "__name__", type(function).__name__)

    def per_sample(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.dim() > 2:  # stacked runs
            return torch.stack([self.per_sample(*run) for run in zip(outputs, y, strict=True)])
        return self.function(outputs, y)

    def among(self, outputs: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        """Return ℓ with outputs of −∞ for the other classes, or without their outputs; NaN if it takes neither."""
        way = self._way_among(classes)
        if way == "masked":
            return super().among(outputs, y, classes)
        if way == "selected":
            return self.per_sample(outputs[..., classes], (classes.cumsum(0) - 1)[y])
        return outputs.new_full(y.shape, torch.nan)

    def has_value_among(self, classes: Tensor) -> bool:
        return self._way_among(classes) != ""

    def _way_among(self, classes: Tensor) -> str:
        """Find by examples whether the loss takes outputs of −∞, or else fewer outputs and other numbers of classes.

        Fewer outputs are accepted only if permuting the classes does not change the loss.
        """
        key = tuple(classes.tolist())
        if key in self.ways:
            return self.ways[key]
        every, mask, self.ways[key] = torch.arange(len(key)), classes.cpu(), ""
        outputs = torch.randn(len(key), len(key), generator=torch.Generator().manual_seed(0))
        with suppress(Exception):
            if self.function(outputs.masked_fill(~mask, -torch.inf)[mask], every[mask]).isfinite().all():
                self.ways[key] = "masked"
                return "masked"
        with suppress(Exception):
            alike = torch.allclose(self.function(outputs, every), self.function(outputs.roll(1, 1), every.roll(-1)))
            if alike and self.function(outputs[mask][:, mask], every[: mask.sum()]).isfinite().all():
                self.ways[key] = "selected"
        return self.ways[key]

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Raise an error unless the function returns a loss for every example that depends on this example alone."""
        try:
            values, single = self.function(outputs, y), self.function(outputs[:1], y[:1])
        except Exception as error:
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(y.shape)} of {y.dtype}"
            raise GlocalError(f"the loss '{self.name}' does not accept {shapes}: {first_line(error)}.") from error
        result = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        remedy = "use reduction='none', and sum or average over outputs"
        fits = isinstance(values, Tensor) and values.shape == y.shape[:1] and values.is_floating_point()
        require(fits, f"the loss '{self.name}' must return one value per example, ({len(y)},), not {result}; {remedy}.")
        same = torch.allclose(values[:1], single, rtol=1e-4, equal_nan=True)
        require(same, f"the loss '{self.name}' of an example depends on the other examples of its batch; {remedy}.")


LOSSES: dict[str, Loss] = {loss.name: loss for loss in (CrossEntropy(), SquaredError(), BinaryCrossEntropy())}


def get(loss: str | Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return the loss of this name, or the loss that a function (outputs, y) -> one loss per example computes."""
    if not isinstance(loss, str):
        return PerSampleLoss(loss)
    require_known("loss", loss, LOSSES)
    return LOSSES[loss]
