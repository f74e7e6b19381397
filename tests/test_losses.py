"""The losses against torch's own, and their derivatives in the outputs against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn import functional

from glocal import losses
from glocal.errors import GlocalError
from glocal.losses import AutogradLoss, Loss

QUICK = settings(deadline=None, max_examples=30, derandomize=True)
CROSS_ENTROPY = losses.get("cross-entropy")
SQUARED_ERROR = losses.get("squared-error")
BINARY = losses.get("binary-cross-entropy")


@st.composite
def rows_of_outputs(draw: st.DrawFn) -> Tensor:
    n, classes = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    number = st.floats(-15, 15, allow_nan=False)
    rows = st.lists(st.lists(number, min_size=classes, max_size=classes), min_size=n, max_size=n)
    return torch.tensor(draw(rows), dtype=torch.float64)


def some_labels(outputs: Tensor, loss: Loss) -> Tensor:
    if loss is CROSS_ENTROPY:
        return torch.arange(outputs.shape[0]) % outputs.shape[1]
    return torch.linspace(-2, 3, outputs.numel(), dtype=outputs.dtype).view_as(outputs)


@QUICK
@given(rows_of_outputs())
def test_cross_entropy_is_torchs(outputs: Tensor) -> None:
    y = some_labels(outputs, CROSS_ENTROPY)
    expected = functional.cross_entropy(outputs, y, reduction="none")
    torch.testing.assert_close(CROSS_ENTROPY.per_sample(outputs, y), expected, atol=1e-13, rtol=1e-12)


@QUICK
@given(rows_of_outputs())
def test_squared_error_is_half_of_torchs_sum(outputs: Tensor) -> None:
    y = some_labels(outputs, SQUARED_ERROR)
    expected = functional.mse_loss(outputs, y, reduction="none").sum(1) / 2
    torch.testing.assert_close(SQUARED_ERROR.per_sample(outputs, y), expected)


@QUICK
@given(rows_of_outputs())
def test_binary_cross_entropy_is_that_of_the_sigmoids(outputs: Tensor) -> None:
    y = torch.linspace(0, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    right, wrong = (torch.from_numpy(np.logaddexp(0, sign * outputs.numpy())) for sign in (-1, 1))
    expected = (y * right + (1 - y) * wrong).sum(1)
    torch.testing.assert_close(BINARY.per_sample(outputs, y), expected, atol=1e-12, rtol=1e-12)


def test_binary_cross_entropy_of_confident_outputs_is_exact_in_single_precision() -> None:
    outputs = torch.tensor([[5.0], [10.0], [15.0], [50.0]])
    expected = np.log1p(np.exp(-outputs.double().numpy()))[:, 0]
    np.testing.assert_allclose(BINARY.per_sample(outputs, torch.ones(4, 1)), expected, rtol=1e-6)
    np.testing.assert_allclose(BINARY.per_sample(-outputs, torch.zeros(4, 1)), expected, rtol=1e-6)


@pytest.mark.parametrize("loss", losses.LOSSES.values(), ids=losses.LOSSES)
@QUICK
@given(outputs=rows_of_outputs())
def test_score_is_the_gradient_in_the_outputs(loss: Loss, outputs: Tensor) -> None:
    y = some_labels(outputs, loss)
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.per_sample(leaf, y).sum(), leaf)
    torch.testing.assert_close(loss.output_gradient(outputs, y), gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("loss", losses.LOSSES.values(), ids=losses.LOSSES)
@QUICK
@given(outputs=rows_of_outputs())
def test_hessian_root_times_itself_is_the_dense_hessian(loss: Loss, outputs: Tensor) -> None:
    y = some_labels(outputs, loss)
    roots = loss.output_hessian_sqrt(outputs)
    for row, label, root in zip(outputs, y, roots, strict=True):
        dense = torch.autograd.functional.hessian(lambda f, y=label: loss.per_sample(f[None], y[None]).sum(), row)
        torch.testing.assert_close(torch.einsum("ck,cl->kl", root, root), dense, atol=1e-12, rtol=1e-9)


@QUICK
@given(outputs=rows_of_outputs())
def test_output_hvp_is_a_product_with_the_dense_hessian(outputs: Tensor) -> None:
    loss = AutogradLoss(functional.cross_entropy)
    y = some_labels(outputs, CROSS_ENTROPY)
    t = torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    for row, label, one, found in zip(outputs, y, t, loss.output_hvp(outputs, y)(t), strict=True):
        dense = torch.autograd.functional.hessian(lambda f, y=label: loss.per_sample(f[None], y[None]).sum(), row)
        torch.testing.assert_close(found, dense @ one, atol=1e-12, rtol=1e-9)


@QUICK
@given(rows_of_outputs())
def test_likelihood_of_a_class_is_its_softmax(outputs: Tensor) -> None:
    for label in range(outputs.shape[1]):
        y = torch.full((outputs.shape[0],), label)
        weights = np.exp(outputs.numpy())
        expected = torch.from_numpy(weights[:, label] / weights.sum(1))
        torch.testing.assert_close(CROSS_ENTROPY.likelihood(outputs, y), expected, rtol=1e-9, atol=0)


def test_likelihood_of_squared_error_is_the_unit_gaussians_density() -> None:
    outputs = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    y = torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64)
    density = stats.multivariate_normal(mean=outputs[0].numpy(), cov=np.eye(3)).pdf(y[0].numpy())
    torch.testing.assert_close(SQUARED_ERROR.likelihood(outputs, y), torch.tensor([density], dtype=torch.float64))


def test_sampled_labels_are_as_frequent_as_the_softmax_says() -> None:
    logits = torch.tensor([0.0, 1.5, -1.0, 0.7, -2.5])
    draws = 40_000
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(3))
    labels = CROSS_ENTROPY.sample_labels(logits.expand(draws, -1), uniform)
    probability = np.exp(logits.double().numpy())
    probability /= probability.sum()
    assert stats.chisquare(np.bincount(labels, minlength=5), draws * probability).pvalue > 1e-3


@QUICK
@given(rows_of_outputs(), st.sampled_from([torch.float32, torch.float64]))
def test_the_extreme_uniforms_draw_labels_that_exist(outputs: Tensor, dtype: torch.dtype) -> None:
    outputs = outputs.to(dtype)
    for uniform in (0.0, 1 - torch.finfo(dtype).eps / 2):
        labels = CROSS_ENTROPY.sample_labels(outputs, torch.full((outputs.shape[0],), uniform, dtype=dtype))
        assert int(labels.min()) >= 0
        assert int(labels.max()) < outputs.shape[1]


@QUICK
@given(rows_of_outputs(), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_distribution_function(outputs: Tensor, uniform: float) -> None:
    labels = CROSS_ENTROPY.sample_labels(outputs, torch.full((outputs.shape[0],), uniform, dtype=torch.float64))
    for row, label in zip(outputs.tolist(), labels.tolist(), strict=True):
        mass = [math.exp(v) for v in row]
        below, upto = sum(mass[:label]) / sum(mass), sum(mass[: label + 1]) / sum(mass)
        assert below - 1e-12 <= uniform <= upto + 1e-12


def test_a_class_without_probability_is_never_drawn() -> None:
    impossible_first = torch.tensor([[-200.0, 0.0, 0.0]])
    assert float(impossible_first.softmax(-1)[0, 0]) == 0
    assert CROSS_ENTROPY.sample_labels(impossible_first, torch.zeros(1)).tolist() == [1]


def test_squared_error_has_no_labels_to_sample() -> None:
    with pytest.raises(GlocalError, match="exact"):
        SQUARED_ERROR.sample_labels(torch.zeros(1, 2), torch.zeros(1))


def test_an_unknown_loss_is_told_the_nearest_name() -> None:
    with pytest.raises(GlocalError, match="Did you mean 'cross-entropy'"):
        losses.get("crossentropy")


def test_squared_errors_of_other_shapes_are_refused() -> None:
    with pytest.raises(GlocalError, match=r"outputs \(4, 1\) and targets \(4,\)"):
        SQUARED_ERROR.per_sample(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(GlocalError, match="same shape"):
        SQUARED_ERROR.output_gradient(torch.zeros(4, 2), torch.zeros(4, 1))
    outputs, y = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    mapped = torch.func.vmap(SQUARED_ERROR.per_sample)(outputs, y)
    torch.testing.assert_close(mapped, (outputs - y).square().sum(-1) / 2)
    with pytest.raises(GlocalError, match=r"\(4, 2\) and targets \(2,\)"):
        torch.func.vmap(SQUARED_ERROR.per_sample)(outputs, y[:, 0])


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, y)


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": functional.cross_entropy,
    "squared-error": functional.mse_loss,
    "logistic": logistic,
}


def own(mean: str) -> tuple[AutogradLoss, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 3, dtype=torch.float64, generator=draw)
    y: Tensor = torch.rand(6, 3, dtype=torch.float64, generator=draw)
    y = y.argmax(1) if mean == "cross-entropy" else y.round() if mean == "logistic" else y
    loss = AutogradLoss(MEANS[mean])
    loss.examples = [(outputs, y)]
    return loss, outputs, y


@pytest.mark.parametrize("mean", MEANS)
def test_derivatives_of_a_custom_loss(mean: str) -> None:
    loss, outputs, y = own(mean)
    assert float(loss.per_sample(outputs, y).mean()) == pytest.approx(float(MEANS[mean](outputs, y)))
    if mean == "cross-entropy":
        p = outputs.softmax(-1)
        gradient, hessian = p - functional.one_hot(y, 3), p.diag_embed() - p[:, :, None] * p[:, None]
    elif mean == "squared-error":  # a mean over the outputs too
        gradient, hessian = 2 / 3 * (outputs - y), torch.full_like(y, 2 / 3).diag_embed()
    else:
        p = outputs.sigmoid()
        gradient, hessian = (p - y) / 3, (p * (1 - p) / 3).diag_embed()
    torch.testing.assert_close(loss.output_gradient(outputs, y), gradient)
    root = loss.output_hessian_sqrt(outputs)
    torch.testing.assert_close(root.mT @ root, hessian)
    torch.testing.assert_close(loss.likelihood(outputs, y), (-loss.per_sample(outputs, y)).exp())
    with pytest.raises(GlocalError, match="labels can be sampled for classes only"):
        loss.sample_labels(outputs, y)


def test_a_loss_whose_curvature_depends_on_labels_has_no_root() -> None:
    def quartic(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).pow(4).mean()

    def concave(outputs: Tensor, y: Tensor) -> Tensor:
        return -functional.mse_loss(outputs, y)

    _, outputs, y = own("squared-error")
    for mean in (quartic, concave):
        for examples in ([], [(outputs, y)]):
            loss = AutogradLoss(mean)
            loss.examples += examples
            with pytest.raises(GlocalError, match="does not depend on the labels"):
                loss.output_hessian_sqrt(outputs)
        assert loss.output_gradient(outputs, y).shape == outputs.shape
