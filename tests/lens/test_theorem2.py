"""Theorem 5.1's quadratics against dense matrices; the entry of ∇²_f ℓ at the true label against closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import anywhere, dense_hessian, diverged, network, theta_of
from torch import Tensor

from glocal.curvature.hessian import functional_hessian, ggn
from glocal.errors import GlocalError
from glocal.lens.theorems import GroundTruth, equal_split, ground_truth, ground_truth_of, theorem2
from glocal.lens.training_trace import Checkpoint, TrainingTrace
from glocal.losses import LOSSES, AutogradLoss, get
from glocal.tree import from_vector


@pytest.mark.parametrize("loss", LOSSES)
def test_every_pair_is_that_of_the_dense_matrices(loss: str) -> None:
    trace = network(loss=loss)
    found = theorem2(trace)
    for o in range(3):
        outer, functional = ggn(trace.risk(o)), functional_hessian(trace.risk(o))
        top = torch.linalg.eigvalsh(dense_hessian(trace, o)).abs().max()
        torch.testing.assert_close(found.norms[o], top, rtol=1e-6, atol=0)
        for t in range(3):
            if t <= o:
                assert found.outer[t, o].isnan()
                assert found.relative[t, o].isnan()
                continue
            delta = theta_of(trace, t) - theta_of(trace, t - 1)
            one, other = delta @ outer @ delta, delta @ functional @ delta
            along = delta @ dense_hessian(trace, o) @ delta
            expected = [one, other, along, other.abs() / (one + other.abs()), along / (delta @ delta)]
            parts = [found.outer, found.functional, found.hessian, found.functional_share, found.rayleigh]
            torch.testing.assert_close(
                torch.stack([part[t, o] for part in parts]), torch.stack(expected), rtol=1e-8, atol=1e-12
            )
            torch.testing.assert_close(found.relative[t, o], along / (delta @ delta) / top, rtol=1e-6, atol=1e-12)


def focal(outputs: Tensor, y: Tensor) -> Tensor:
    """(1 − p)² (−log p), p that of the label."""
    logs = outputs.log_softmax(-1).gather(-1, y[:, None])
    return -((1 - logs.exp()).square() * logs).mean()


def test_a_loss_that_bends_differently_for_every_label() -> None:
    """Against Σ_i J_iᵀ [∇²_f ℓ_i] J_i written out, and the rest of the Hessian."""
    plain = network(seed=2)
    trace = TrainingTrace(plain.module, AutogradLoss(focal), plain.tasks, plain.checkpoints)
    found = theorem2(trace)
    point, (x, y) = trace.checkpoints[1], trace.tasks[0]
    delta, at = theta_of(trace, 1) - theta_of(trace, 0), theta_of(trace, 0)

    def outputs(theta: Tensor) -> Tensor:
        return trace.outputs(Checkpoint(from_vector(theta, point.params), {}), x)

    change = torch.autograd.functional.jvp(outputs, at, delta)[1]

    def bends(labels: Tensor) -> Tensor:
        pairs = zip(outputs(at), labels, strict=True)
        each = [torch.autograd.functional.hessian(lambda f, b=b: focal(f[None], b[None]), f) for f, b in pairs]
        return torch.stack(each)

    assert (bends(y) - bends((y + 1) % 3)).abs().amax() > 0.1
    outer = torch.einsum("nk,nkl,nl->", change, bends(y), change) / len(y)
    torch.testing.assert_close(found.outer[1, 0], outer, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found.hessian[1, 0], delta @ dense_hessian(trace, 0) @ delta, rtol=1e-8, atol=1e-12)


def test_updates_orthogonal_to_old_outputs_meet_the_constraint_up_to_the_functional_part() -> None:
    """The first half of the proof, on a network that is at no minimum."""
    trace = network(seed=4)
    point = trace.checkpoints[1]
    jacobian = torch.autograd.functional.jacobian(
        lambda theta: trace.outputs(Checkpoint(from_vector(theta, point.params), {}), trace.tasks[0].x[:5]).flatten(),
        theta_of(trace, 0),
    )
    few = [trace.tasks[0]._replace(x=trace.tasks[0].x[:5], y=trace.tasks[0].y[:5]), *trace.tasks[1:]]
    step = theta_of(trace, 1) - theta_of(trace, 0)
    free = step - torch.linalg.lstsq(jacobian.T, step[:, None]).solution.T[0] @ jacobian
    assert free.norm() > 0.1
    points = [*trace.checkpoints[:2], Checkpoint(from_vector(theta_of(trace, 0) + free, point.params), {})]
    found = theorem2(TrainingTrace(trace.module, trace.loss, few, points))
    assert abs(found.outer[1, 0]) < 1e-14
    assert abs(found.functional[1, 0]) > 1e-4
    assert found.functional_share[1, 0] > 0.999


def test_linear_networks_have_no_functional_part() -> None:
    found = theorem2(anywhere(0).trace)
    below = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    assert found.functional[below].abs().max() == 0
    assert (found.relative[below] > 0).all()
    assert (found.relative[below] <= 1 + 1e-12).all()


def test_a_run_that_diverged_has_no_numbers() -> None:
    found = theorem2(diverged(network(), 2))
    for part in (found.outer, found.functional, found.rayleigh, found.relative):
        assert part.isnan().all()
    assert found.norms.isnan().tolist() == [False, True, False]


def by_definition(loss: str, outputs: Tensor, y: Tensor) -> list[Tensor]:
    """Entry, trace, Frobenius norm and the largest other entry of ∇²_f ℓ by automatic differentiation."""
    rows = []
    for f, label in zip(outputs, y, strict=True):
        matrix = torch.autograd.functional.hessian(lambda f, a=label: get(loss).per_sample(f[None], a[None]).sum(), f)
        place = int(label.argmax()) if label.dim() else int(label)
        entry = matrix[place, place].clone()
        frobenius = matrix.norm()
        trace = matrix.trace()
        matrix[place, place] = 0
        rows.append(torch.stack([entry, trace, frobenius, matrix.abs().max()]))
    return list(torch.stack(rows, 1))


def fields(found: GroundTruth) -> list[Tensor]:
    return [found.entry, found.trace, found.frobenius, found.largest_other]


@settings(max_examples=40, deadline=None)
@given(classes=st.integers(2, 12), seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 1.0, 3.0]))
def test_the_entry_at_the_true_label_is_at_most_half_of_the_trace(classes: int, seed: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(6, classes, dtype=torch.float64, generator=draw)
    y = torch.randint(classes, (6,), generator=draw)
    found = ground_truth(get("cross-entropy"), outputs, y)
    for part, expected in zip(fields(found), by_definition("cross-entropy", outputs, y), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-8, atol=1e-12)
    p = outputs.softmax(1)
    mine = p.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(found.confidence, mine)
    torch.testing.assert_close(found.of_trace, mine * (1 - mine) / (1 - p.square().sum(1)), rtol=1e-6, atol=0)
    assert (found.of_trace <= 0.5 + 1e-12).all()
    absolute = (p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)).abs()
    row = absolute[torch.arange(6), y].sum(1) / absolute.sum((1, 2))
    torch.testing.assert_close(found.of_trace, row, rtol=1e-6, atol=0)


@settings(max_examples=40, deadline=None)
@given(classes=st.integers(2, 200), confidence=st.floats(0.01, 0.9999))
def test_equal_split_is_what_is_measured_on_such_outputs(classes: int, confidence: float) -> None:
    p = torch.full((1, classes), (1 - confidence) / (classes - 1), dtype=torch.float64)
    p[0, 1] = confidence
    measured = ground_truth(get("cross-entropy"), p.log(), torch.tensor([1]))
    closed = equal_split(torch.tensor([confidence], dtype=torch.float64), classes)
    for part, expected in zip(fields(measured), fields(closed), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-13)
    share = confidence / (confidence + 1 - (1 - confidence) / (classes - 1))
    torch.testing.assert_close(float(closed.of_trace), share, rtol=1e-9, atol=0)


def test_with_two_classes_all_entries_are_equal() -> None:
    found = equal_split(torch.tensor([0.3, 0.6, 0.99]), 2)
    torch.testing.assert_close(found.dominance, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found.of_trace, torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(found.of_squares, torch.full((3,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("classes", [3, 10, 100])
def test_confident_outputs_dominate_by_their_classes_but_not_the_trace(classes: int) -> None:
    found = equal_split(torch.tensor([1 - 1e-9], dtype=torch.float64), classes)
    torch.testing.assert_close(float(found.dominance), float(classes - 1), rtol=1e-6, atol=0)
    torch.testing.assert_close(float(found.of_trace), 0.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(float(found.of_squares), (classes - 1) / (classes + 2), rtol=1e-6, atol=0)


def test_outputs_so_sure_that_probabilities_round_to_one() -> None:
    outputs = torch.zeros(1, 10)
    outputs[0, 3] = 60.0
    found = ground_truth(get("cross-entropy"), outputs, torch.tensor([3]))
    torch.testing.assert_close(float(found.dominance), 9.0)
    torch.testing.assert_close(float(found.of_trace), 0.5)


def test_squared_error_favours_no_label() -> None:
    targets = torch.eye(5, dtype=torch.float64)
    found = ground_truth(get("squared-error"), torch.randn(5, 5, dtype=torch.float64), targets)
    for part, expected in zip(fields(found), by_definition("squared-error", targets * 0.3, targets), strict=True):
        torch.testing.assert_close(part, expected)
    torch.testing.assert_close(found.of_trace, torch.full((5,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(found.dominance, torch.ones(5, dtype=torch.float64))


def test_of_a_subject_at_the_tasks_solution_in_several_parts() -> None:
    trace = network()
    found = ground_truth_of(trace, 1)
    outputs = trace.outputs(trace.checkpoints[2], trace.tasks[1].x)
    for part, expected in zip(fields(found), by_definition("cross-entropy", outputs, trace.tasks[1].y), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-8, atol=1e-12)
    assert found.medians()["of_total_trace"] == pytest.approx(float(found.entry.sum() / found.trace.sum()))
    wide = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0))  # one matrix of these fills a part
    labels = torch.arange(5)
    whole = ground_truth(get("cross-entropy"), wide, labels)
    last = ground_truth(get("cross-entropy"), wide[4:], labels[4:])
    torch.testing.assert_close(whole.entry[4:], last.entry)
    assert len(whole.entry) == 5


def test_mistakes_are_told() -> None:
    with pytest.raises(GlocalError, match=r"shape \(4, 1\); they must be \(n, K\) with n ≥ 1 and K ≥ 2"):
        ground_truth(get("cross-entropy"), torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    with pytest.raises(GlocalError, match=r"shape \(0, 3\); they must be \(n, K\) with n ≥ 1 and K ≥ 2"):
        ground_truth(get("cross-entropy"), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(GlocalError, match="classes = 1 was given; it must be at least 2"):
        equal_split(torch.tensor([0.5]), 1)
    with pytest.raises(GlocalError, match="steps = 0 was given"):
        theorem2(network(), steps=0)
