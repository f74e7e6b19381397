"""The perturbation score where it is known in closed form, where losses pass the largest number, and in any network."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.errors import GlocalError
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.perturbation import RADII, perturbation, top_eigenpairs, unit_directions
from glocal.lens.training_trace import TrainingTrace
from glocal.tree import Params

FEATURES, EXAMPLES = 6, 40


def regression(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> TrainingTrace:
    """One task of linear regression without a bias, L(θ) = mean ½ (xᵀθ − y)², and its 'solution', any θ."""
    network = nn.Linear(x.shape[1], 1, bias=False).double()
    data = Data(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    state = {"weight": torch.from_numpy(at)[None]}
    return trace_checkpoints(network, "squared-error", [data], [state, state])


def correlated(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs of very different scales, noisy targets, and the least-squares solution."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(EXAMPLES, FEATURES)) * 2.0 ** np.arange(FEATURES)
    y = x @ random.normal(size=FEATURES) + random.normal(size=EXAMPLES)
    return x, y, np.linalg.lstsq(x, y, rcond=None)[0]


@pytest.mark.parametrize("off", [0.0, 0.5], ids=["at the minimum", "on a slope"])
def test_a_quadratic_by_its_closed_form(off: float) -> None:
    x, y, best = correlated()
    theta = best + off * np.random.default_rng(1).normal(size=FEATURES)
    trace = regression(theta, x, y)
    found = perturbation(trace, 0, eigenvectors=FEATURES, directions=7)

    hessian, slope = x.T @ x / EXAMPLES, x.T @ (x @ theta - y) / EXAMPLES
    values, vectors = np.linalg.eigh(hessian)
    np.testing.assert_allclose(found.eigenvalues, values[::-1], rtol=1e-9)
    assert found.base["train"] == pytest.approx(((x @ theta - y) ** 2).mean() / 2, rel=1e-12)

    r = np.array(RADII)
    eigen = vectors.T[::-1]
    eigen = eigen * np.sign(eigen[np.arange(FEATURES), np.abs(eigen).argmax(1)])[:, None]
    random = unit_directions(trace, 0, 7, seed=0).numpy()
    np.testing.assert_allclose((random**2).sum(1), 1, rtol=1e-12)

    def change(v: np.ndarray) -> np.ndarray:
        return (v @ slope)[:, None] * r + 0.5 * ((v @ hessian) * v).sum(1)[:, None] * r**2

    # What is left of ½ r² λ after it was added to L(θ) and taken away again.
    lost = 1e-13 * found.base["train"]
    for kind, directions in (("eigen", eigen), ("random", random)):
        measured = found.losses["train"][kind].numpy() - found.base["train"]  # type: ignore[index]
        np.testing.assert_allclose(measured, change(directions), rtol=1e-7, atol=lost)
    ratios = np.abs(change(eigen)[:, None] / change(random)[None])
    np.testing.assert_allclose(found.score(), ratios.mean(1), rtol=1e-4)
    others = [np.abs(change(random)[[i]] / np.delete(change(random), i, 0)).mean(0) for i in range(7)]
    np.testing.assert_allclose(found.score(kind="random"), others, rtol=1e-4)
    assert (found.num_ratios() == 7).all() and (found.num_ratios(kind="random") == 6).all()
    if not off:  # at a minimum of a quadratic the radius cancels
        stiffness = ((random @ hessian) * random).sum(1)
        np.testing.assert_allclose(found.score()[:, -1], values[::-1] * (1 / stiffness).mean(), rtol=1e-9)


def test_where_all_directions_are_alike_every_score_is_one() -> None:
    x = 3 * np.eye(FEATURES)
    found = perturbation(regression(np.zeros(FEATURES), x, np.zeros(FEATURES)), 0, eigenvectors=3)
    one = torch.ones(3, len(RADII), dtype=torch.float64)
    torch.testing.assert_close(found.score(), one, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.score(kind="random"), one[:1].expand(10, -1), rtol=1e-9, atol=0)


def test_beyond_the_largest_number() -> None:
    x, y, best = correlated()
    found = perturbation(regression(best, x, y), 0, eigenvectors=2, radii=[1.0, 1e200])
    assert found.losses["train"]["eigen"][:, 1].tolist() == [torch.inf] * 2
    assert found.num_ratios()[:, 1].tolist() == [0, 0] and found.score()[:, 1].isnan().all()
    assert found.score()[:, 0].isfinite().all()

    # Along the eigenvector the square of 1.5e154 is beyond; along a random direction a part of it is not.
    steep = np.zeros((1, FEATURES))
    steep[0, 2] = 1.0
    edge = perturbation(regression(np.zeros(FEATURES), steep, np.zeros(1)), 0, eigenvectors=1, radii=[1.5e154])
    assert edge.losses["train"]["eigen"].item() == torch.inf
    assert edge.losses["train"]["random"].isfinite().all()
    assert edge.score().item() == torch.inf and edge.num_ratios().item() == 10


def test_no_change_beside_no_change_is_no_ratio() -> None:
    found = perturbation(regression(np.zeros(2), np.zeros((3, 2)), np.ones(3)), 0, eigenvectors=1, radii=[1.0])
    assert found.losses["train"]["eigen"].item() == found.base["train"]
    assert found.num_ratios().item() == 0 and found.score().isnan().all()


def classifier(double: bool = False) -> tuple[nn.Module, TrainingTrace]:
    """A network with batch statistics, and some classes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        x, y = torch.randn(60, 5), torch.randint(3, (60,))
        for _ in range(5):
            network(torch.randn(20, 5) + 1)
    if double:
        network, x = network.double(), x.double()
    state = {k: v.clone() for k, v in network.state_dict().items()}
    return network, trace_checkpoints(network, "cross-entropy", [Data(x, y)], [state, state])


def by_hand(network: nn.Module, trace: TrainingTrace, direction: Tensor, r: float) -> float:
    """L(θ + r v) with the whole network in float64, one state dict."""
    moved, begin = {k: v.double() for k, v in network.state_dict().items()}, 0
    for name, p in network.named_parameters():
        moved[name] = p.detach().double() + r * direction[begin : begin + p.numel()].double().view_as(p)
        begin += p.numel()
    outputs = torch.func.functional_call(network.eval(), moved, (trace.tasks[0].x.double(),))
    return functional.cross_entropy(outputs, trace.tasks[0].y).item()


def test_losses_of_a_network_in_float32_are_taken_in_float64() -> None:
    network, trace = classifier()
    found = perturbation(trace, 0, eigenvectors=2, directions=3, radii=[1e-3, 1.0, 1e3])
    ways = {"eigen": top_eigenpairs(trace, 0, 2, chunk_size=500).vectors, "random": unit_directions(trace, 0, 3, 0)}
    for kind, vectors in ways.items():
        expected = [[by_hand(network, trace, v, r) for r in found.radii] for v in vectors]
        np.testing.assert_allclose(found.losses["train"][kind].numpy(), np.array(expected), rtol=1e-12)  # type: ignore[index]


def test_outputs_beyond_numbers_have_an_infinite_loss() -> None:
    _, trace = classifier()
    values = perturbation(trace, 0, eigenvectors=2, radii=[1.0, 1e306]).losses["train"]["random"]
    assert values[:, 0].isfinite().all() and not values.isnan().any()
    assert (values[:, 1] == torch.inf).any()


def test_eigenvectors_are_those_of_the_dense_hessian() -> None:
    network, trace = classifier(double=True)
    found = top_eigenpairs(trace, 0, 4, chunk_size=13)
    theta = torch.cat([p.detach().flatten() for p in network.parameters()])

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in network.parameters()])
        params = {k: part.view_as(p) for (k, p), part in zip(network.named_parameters(), parts, strict=True)}
        outputs = torch.func.functional_call(network.eval(), params, (trace.tasks[0].x,))
        return functional.cross_entropy(outputs, trace.tasks[0].y)

    values, vectors = np.linalg.eigh(torch.autograd.functional.hessian(loss, theta).numpy())
    order = np.abs(values).argsort()[::-1][:4]
    np.testing.assert_allclose(found.values, values[order], rtol=1e-6)
    np.testing.assert_allclose(np.abs((found.vectors.numpy() * vectors.T[order]).sum(1)), 1, rtol=1e-5)


def test_test_losses_are_means_over_the_test_data() -> None:
    _, trace = classifier(double=True)
    x, y = trace.tasks[0]
    found = perturbation(trace, 0, Data(torch.cat([x, x, x]), torch.cat([y, y, y])), eigenvectors=2, directions=2)
    assert found.base["test"] == pytest.approx(found.base["train"], rel=1e-12)
    for kind in ("eigen", "random"):
        torch.testing.assert_close(found.losses["test"][kind], found.losses["train"][kind])
    torch.testing.assert_close(found.score("test"), found.score("train"), rtol=1e-5, atol=0)


def test_losses_on_some_examples_and_the_hessian_of_others() -> None:
    """The losses of the first, middle and last example of each split; eigenvectors of all of them."""
    _, trace = classifier(double=True)
    x, y = trace.tasks[0]
    whole = perturbation(trace, 0, Data(x, y), eigenvectors=2, directions=2)
    few = perturbation(trace, 0, Data(x, y), eigenvectors=2, directions=2, examples=3)
    chosen = np.linspace(0, len(y) - 1, 3).round().astype(int)
    point = trace.checkpoints[1]
    with torch.no_grad():
        outputs = functional_call(trace.module, {**point.params, **point.buffers}, (x[chosen],))
    expected = trace.loss.per_sample(outputs, y[chosen]).mean().item()
    for base in few.base.values():
        assert base == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(few.eigenvalues, whole.eigenvalues)


def test_the_hessian_is_of_random_examples_and_not_of_the_first() -> None:
    """Only the second half of the data has any curvature."""
    x = np.zeros((40, 2))
    x[20:, 0] = 1.0
    trace = regression(np.zeros(2), x, np.zeros(40))
    seen = [float(perturbation(trace, 0, eigenvectors=1, samples=20, seed=s).eigenvalues) for s in range(5)]
    assert all(0 < value < 1 for value in seen) and len(set(seen)) > 1
    assert float(perturbation(trace, 0, eigenvectors=1, samples=40).eigenvalues) == pytest.approx(0.5)


class Stubborn(nn.Linear):
    """A network that looks at its own values: nothing maps over it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.weight.sum().item() < torch.inf else x


def test_neither_chunks_nor_neighbours_change_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trace = classifier()
    together = perturbation(trace, 0, eigenvectors=2).losses["train"]["random"]
    monkeypatch.setattr(sys.modules["glocal.lens.approximation_error"], "MAX_BATCHED_BYTES", 0)
    monkeypatch.setattr(sys.modules["glocal.lens.perturbation"], "CHUNK_SIZE", 9)
    torch.testing.assert_close(perturbation(trace, 0, eigenvectors=2).losses["train"]["random"], together)


def test_a_network_that_cannot_be_mapped() -> None:
    x, y, best = correlated()
    plain = regression(best, x, y)
    stubborn = Stubborn(FEATURES, 1, bias=False).double()
    trace = TrainingTrace(stubborn, losses.get("squared-error"), plain.tasks, plain.checkpoints)
    found, expected = (perturbation(s, 0, eigenvectors=2) for s in (trace, plain))  # more than go side by side
    torch.testing.assert_close(found.losses["train"]["random"], expected.losses["train"]["random"])
    torch.testing.assert_close(found.score(), expected.score(), rtol=1e-6, atol=0)


def nowhere(params: Params) -> Params:
    return {k: p * torch.nan for k, p in params.items()}


def test_what_cannot_be_measured_is_told() -> None:
    x, y, best = correlated()
    trace = regression(best, x, y)
    for wrong, told in (
        ({"task": 1}, "solutions of 1 tasks"),
        ({"task": 0, "eigenvectors": 7}, "6 parameters has 1 to 6"),
        ({"task": 0, "eigenvectors": 1, "directions": 1}, "at least 2 random directions"),
        ({"task": 0, "eigenvectors": 1, "radii": []}, r"radii = \(\) was given; they must be positive and finite"),
        ({"task": 0, "eigenvectors": 1, "radii": [-1.0]}, r"\(-1\.0,\) was given; they must be positive and finite"),
        ({"task": 0, "eigenvectors": 1, "radii": [1.0, torch.inf]}, r"\(1\.0, inf\) .* positive and finite"),
        ({"task": 0, "eigenvectors": 1, "radii": [1.0, torch.nan]}, r"\(1\.0, nan\) .* positive and finite"),
        ({"task": 0, "eigenvectors": 1, "samples": 0}, "at least 1"),
    ):
        with pytest.raises(GlocalError, match=told):
            perturbation(trace, **wrong)
    with pytest.raises(GlocalError, match="diverged"):
        perturbation(
            replace(trace, checkpoints=[p._replace(params=nowhere(p.params)) for p in trace.checkpoints]),
            0,
            eigenvectors=1,
        )
    with pytest.raises(GlocalError, match="unknown split 'test'"):
        perturbation(trace, 0, eigenvectors=1).score("test")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    _, trace = classifier(double=True)
    here = perturbation(trace, 0, trace.tasks[0], eigenvectors=3)
    there = perturbation(trace.to("cuda"), 0, trace.to("cuda").tasks[0], eigenvectors=3)
    torch.testing.assert_close(there.eigenvalues, here.eigenvalues, rtol=1e-6, atol=0)
    for split in here.losses:
        torch.testing.assert_close(there.losses[split]["random"], here.losses[split]["random"])
        torch.testing.assert_close(there.losses[split]["eigen"], here.losses[split]["eigen"], rtol=1e-4, atol=0)
