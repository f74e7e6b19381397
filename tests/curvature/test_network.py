"""Curvature of a user's network, torch loss and loader, against the dense Hessian of the same loss by torch.func."""

from __future__ import annotations

import copy
import pydoc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from glocal import curvature
from glocal.curvature import (
    dense_jacobian,
    density,
    diagonal,
    eigenpairs,
    every_output,
    ggn,
    ggn_operator,
    hessian,
    hessian_operator,
    kronecker_factors,
    network_risk,
    trace,
)
from glocal.errors import GlocalError

N, CLASSES = 23, 3


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4), nn.Linear(4, CLASSES)
        )
        model.double()(torch.randn(50, 4, dtype=torch.float64))  # moves the running statistics
    model[4].requires_grad_(False)
    return model


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, LABELS, TARGETS = draw(N, 4), torch.arange(N) * 2 % CLASSES, draw(N, CLASSES, seed=2)
WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), LABELS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), LABELS),
    "summed weights": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), LABELS),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), LABELS),
    "weights and label smoothing": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), LABELS),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=1), LABELS),
    "ignored labels": (nn.CrossEntropyLoss(), LABELS.masked_fill(torch.arange(N) % 4 == 0, -100)),
    "soft labels": (nn.CrossEntropyLoss(), TARGETS.softmax(1)),
    "MSE": (nn.MSELoss(), TARGETS),
    "summed MSE": (nn.MSELoss(reduction="sum"), TARGETS),
    "multi-label": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), (TARGETS > 0).double()),
    "Poisson": (nn.PoissonNLLLoss(), TARGETS.exp().round()),
    "function": (functional.cross_entropy, LABELS),
    "own": (lambda f, y: (f - y).pow(4).sum(1).mean(), TARGETS),
}
ON_ALL = pytest.mark.parametrize("name", LOSSES)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def dense_hessian(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of loss(model(x), y), computed on all data at once as torch defines the loss."""
    model = copy.deepcopy(model).eval()
    names = {k: p for k, p in model.named_parameters() if p.requires_grad}

    def value(theta: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in names.values()])
        params = {k: part.view_as(p) for (k, p), part in zip(names.items(), parts, strict=True)}
        return loss(functional_call(model, params, (x,)), y)

    return jacrev(grad(value))(flat(model))


@ON_ALL
def test_hessian_and_its_value_are_those_of_the_torch_loss(name: str) -> None:
    loss, y = LOSSES[name]
    model, loader = make_model(), DataLoader(TensorDataset(X, y), batch_size=5, shuffle=True)
    expected = dense_hessian(model, loss, X, y)
    torch.testing.assert_close(hessian(model, loss, loader), expected)
    torch.testing.assert_close(network_risk(model, loss, (X, y)).value(), loss(copy.deepcopy(model).eval()(X), y))
    v = draw(len(expected))
    torch.testing.assert_close(hessian_operator(model, loss, loader) @ v, expected @ v)
    assert model.training and model[3].training, "the given network is left as it was"


def test_eigenpairs_trace_and_density() -> None:
    loss, y = LOSSES["weights and label smoothing"]
    model = make_model()
    expected = dense_hessian(model, loss, X, y)
    values, vectors = torch.linalg.eigh(expected)
    order = values.abs().argsort(descending=True)[:10]
    top = eigenpairs(model, loss, DataLoader(TensorDataset(X, y), batch_size=7), k=10)
    torch.testing.assert_close(top.values, values[order])
    torch.testing.assert_close((top.vectors @ vectors[:, order]).abs(), torch.eye(10).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(eigenpairs(expected, k=10).values, top.values)
    torch.testing.assert_close(trace(model, loss, (X, y), probes=40).value, values.sum())
    estimate = trace(model, loss, (X, y))
    assert estimate.error > 0 and abs(estimate.value - values.sum()) < 5 * estimate.error
    spectrum = density(model, loss, (X, y), probes=3)
    torch.testing.assert_close(spectrum.sum(torch.square).value, values.square().sum(), rtol=0.5, atol=0)
    torch.testing.assert_close(spectrum.radius, values.abs().max())


@pytest.mark.parametrize("name", ["cross-entropy", "label smoothing", "MSE", "summed MSE"])
def test_gauss_newton_matrices(name: str) -> None:
    """J, by autograd, with the Hessian of the loss in the outputs."""
    loss, y = LOSSES[name]
    model, params = make_model(), [p for p in make_model().parameters() if p.requires_grad]
    model.eval()
    rows = []
    for output in model(X).flatten():
        grads = torch.autograd.grad(output, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    jacobian = torch.stack(rows)
    outputs = model(X).detach()
    inner = jacrev(grad(lambda f: loss(f.view(N, CLASSES), y)))(outputs.flatten())  # type: ignore[misc]
    expected = jacobian.T @ inner @ jacobian
    torch.testing.assert_close(ggn(model, loss, (X, y)), expected)
    v = draw(len(expected))
    torch.testing.assert_close(ggn_operator(model, loss, (X, y)) @ v, expected @ v)
    found = torch.cat([part.flatten() for part in diagonal(model, loss, (X, y)).values()])
    torch.testing.assert_close(found, expected.diag())
    assert kronecker_factors(model, loss, (X, y))["kronecker"]["0"]["G"].shape == (5, 5)
    dense = dense_jacobian(model, loss, (X, y), every_output)
    torch.testing.assert_close(torch.cat([p.flatten(2) for p in dense.values()], 2).flatten(0, 1), jacobian)
    assert len(params) == len(dense)


@pytest.mark.parametrize("slopes", [1, 6])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_prelu_with_as_many_samples_as_outputs(n: int, slopes: int) -> None:
    """Torch's own rule for it is wrong there under two nested vmaps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(slopes), nn.Linear(6, 3)).double()
    x, y = torch.randn(n, 4).double(), torch.arange(n) % 3
    names = dict(model.named_parameters())
    jacobian = jacrev(lambda p: functional_call(model, p, (x,)))(names)
    for name, rows in dense_jacobian(model, "cross-entropy", (x, y), every_output).items():
        torch.testing.assert_close(rows, jacobian[name])


class Backbone(nn.Module):
    """Its first layer does not reach the outputs by a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = torch.tanh(self.first(x))
        return self.last(features)


@pytest.mark.parametrize("n", [2, 5, 7])
def test_layers_that_no_gradient_reaches(n: int) -> None:
    model, x, y = Backbone(), torch.randn(n, 3), torch.arange(n) % 2
    found = diagonal(model, nn.CrossEntropyLoss(), (x, y))
    assert not found["first.weight"].any() and found["last.weight"].all()
    dense = ggn(model, nn.CrossEntropyLoss(), (x, y)).diag()
    torch.testing.assert_close(torch.cat([f.flatten() for f in found.values()]), dense)


def test_binary_cross_entropy_takes_outputs_and_targets_in_rows() -> None:
    flat, x = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), torch.randn(5, 3)
    with pytest.raises(GlocalError, match=r"\(n, K\) and \(n, K\)"):
        network_risk(flat, "binary-cross-entropy", (x, torch.ones(5)))
    with pytest.raises(GlocalError, match="from 0 to 1"):
        network_risk(nn.Linear(3, 1), "binary-cross-entropy", (x, torch.full((5, 1), 5.0)))


def test_perfect_fit_keeps_its_scale() -> None:
    """Both the mean and the sum of squares are 0 there, but their second derivatives are not."""
    model = nn.Linear(4, CLASSES).double()
    y = model(X).detach()
    torch.testing.assert_close(hessian(model, nn.MSELoss(), (X, y)), dense_hessian(model, nn.MSELoss(), X, y))


def test_later_training_does_not_change_a_risk() -> None:
    model = make_model()
    risk = network_risk(model, nn.CrossEntropyLoss(), (X, LABELS))
    before = risk.value()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert risk.value() == before


def test_arguments_by_name() -> None:
    model = make_model()
    by_name = eigenpairs(model=model, loss=nn.CrossEntropyLoss(), data=(X, LABELS), k=2)
    torch.testing.assert_close(by_name.values, eigenpairs(model, nn.CrossEntropyLoss(), (X, LABELS), 2).values)


@pytest.mark.parametrize(
    ("loss", "y", "told"),
    [
        (nn.CrossEntropyLoss(reduction="none"), LABELS, "reduction='none'"),
        (nn.CrossEntropyLoss, LABELS, "give an instance"),
        (partial(functional.cross_entropy, reduction="sum"), LABELS, "unweighted mean"),
        (partial(functional.cross_entropy, weight=WEIGHT), LABELS, "unweighted mean"),
        (nn.CrossEntropyLoss(), LABELS + 1, "labels 1 to 3"),
        (nn.MSELoss(), TARGETS[:, 0], "fails on the data"),
        ("hinge", LABELS, "unknown loss"),
    ],
)
def test_losses_that_are_refused(loss: Any, y: Tensor, told: str) -> None:
    with pytest.raises(GlocalError, match=told):
        eigenpairs(make_model(), loss, (X, y), k=1)


def test_a_class_in_place_of_a_network_is_refused() -> None:
    with pytest.raises(GlocalError, match=r"must be an nn\.Module; a type was given"):
        eigenpairs(nn.Linear, nn.CrossEntropyLoss(), (X, LABELS), k=1)


def test_a_gauss_newton_diagonal_of_a_weighted_loss_is_refused() -> None:
    with pytest.raises(GlocalError, match="not depend on the labels"):
        diagonal(make_model(), LOSSES["weights"][0], (X, LABELS))


def test_help_lists_the_public_functions() -> None:
    page = pydoc.plain(pydoc.render_doc(curvature))
    assert all(f"{name}(" in page for name in ("eigenpairs", "trace", "density", "diagonal", "hessian_operator"))
    assert "eigenpairs(model, loss, data, k" in page
