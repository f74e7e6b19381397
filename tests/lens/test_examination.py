"""How local a training was: quadratics, quartics and a small network, where all of it is known otherwise."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from quadratics import anywhere, apart, dense_hessian, diverged, network, theta_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import glocal
from glocal.errors import GlocalError
from glocal.lens import examine
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.examination import examine_trace
from glocal.lens.record import open_run
from glocal.report.lens_figures import draw_examination

matplotlib.use("Agg")
QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500}


def test_a_quadratic_is_its_expansion_everywhere() -> None:
    known = anywhere(seed=0)
    found = examine_trace(known.trace, epsilon=1e-3, eigenvalues=8)
    later = torch.ones(4, 4).tril(-1) > 0
    assert torch.equal(found.inside, later)
    assert (
        found.radius[later].isinf().all()
        and found.eigenvector_radius.isinf().all()
        and found.random_radius.isinf().all()
    )
    for o in range(4):
        values = np.linalg.eigvalsh(known.hessian(o))
        assert found.eigenvalues[o].numpy() == pytest.approx(np.sort(values)[::-1])
        assert float(found.trace[o]) == pytest.approx(values.sum())
        for t in range(o + 1, 4):
            assert float(found.distance[t, o]) == pytest.approx(np.linalg.norm(known.solution(t) - known.solution(o)))
            forgot = known.loss(o, known.solution(t)) - known.loss(o, known.solution(o))
            assert float(found.forgetting.measured[t, o]) == pytest.approx(forgot)
            assert float(found.forgetting.predicted[t, o]) == pytest.approx(forgot)
    assert found.updates.numpy() == pytest.approx([np.linalg.norm(known.update(t)) for t in range(4)])


def test_epsilon_is_a_tenth_of_what_is_learnt() -> None:
    known = apart(seed=1)
    gains = [known.loss(o, known.thetas[0]) - known.loss(o, known.solution(o)) for o in range(3)]
    assert examine_trace(known.trace).epsilon == pytest.approx(0.1 * np.mean(gains))
    with pytest.raises(GlocalError, match="give epsilon"):
        examine_trace(
            trace_checkpoints(nn.Linear(1, 1), "squared-error", [(torch.ones(2, 1), torch.ones(2, 1))], [ONE, ONE])
        )


ONE = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}


class Squared(nn.Module):
    """f_θ(x) = θ² x: with x = 1 and y = 0 the loss is ½ θ⁴."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.square() * x


def quartic(*thetas: float) -> Any:
    data = (torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    states = [{"theta": torch.tensor([theta], dtype=torch.float64)} for theta in thetas]
    return Squared(), "squared-error", [data] * (len(thetas) - 1), states


def test_rounding_leaves_no_region() -> None:
    """A quadratic is its own expansion, however large its losses are beside ε."""
    torch.manual_seed(0)
    module, tasks = nn.Linear(4, 2), [(torch.randn(30, 4), 3e3 * torch.randn(30, 2)) for _ in range(3)]
    states = [{k: p + 5 * t for k, p in module.state_dict().items()} for t in range(4)]
    found = examine(module, "squared-error", tasks, states, epsilon=0.01)
    assert float(found.forgetting.error.abs().nan_to_num().max()) > 0.01
    assert torch.equal(found.inside, found.later) and bool(found.radius[found.later].isinf().all())


def test_the_largest_eigenvalue_is_not_that_of_largest_magnitude() -> None:
    """Of those of largest magnitude it is the largest where one is positive; where none is, nobody knows."""
    trace = network(seed=3, tasks=2, step=2.0)
    found = examine_trace(trace, 0.1, eigenvalues=8)
    for o in range(2):
        every = torch.linalg.eigvalsh(dense_hessian(trace, o))
        assert float(found.largest[o]) == pytest.approx(float(every.max()), rel=1e-6)
        assert found.rows()[o]["largest_eigenvalue"] == float(found.largest[o])
    downwards = replace(found, eigenvalues=torch.tensor([[-9.0, -5.0], [-9.0, 5.0]]))
    assert math.isnan(downwards.largest[0]) and float(downwards.largest[1]) == 5
    assert replace(downwards, parameters=2).largest.tolist() == [-5, 5]


@pytest.mark.parametrize("b", [2.0, -1.5, 1.05])
def test_the_radius_on_the_way_is_a_root(b: float) -> None:
    """ξ(a + s r) = |2 a s r³ + ½ r⁴| = ε, s the sense of the way."""
    a, epsilon = 1.0, 0.4
    module, loss, tasks, states = quartic(3.0, a, b)
    found = examine(module, loss, tasks, states, epsilon)

    def root(s: float) -> float:
        every = np.concatenate([np.roots([0.5, 2 * a * s, 0, 0, c]) for c in (epsilon, -epsilon)])
        return float(min(r.real for r in every if abs(r.imag) < 1e-9 and r.real > 0))

    assert float(found.distance[1, 0]) == pytest.approx(abs(b - a))
    assert float(found.radius[1, 0]) == pytest.approx(root(math.copysign(1, b - a)), rel=1e-3)
    assert float(found.eigenvector_radius[0]) == pytest.approx(min(root(1), root(-1)), rel=1e-3)
    assert float(found.eigenvalues[0, 0]) == pytest.approx(6 * a**2)
    error = abs(2 * a * (b - a) ** 3 + 0.5 * (b - a) ** 4)
    assert bool(found.inside[1, 0]) == (error < epsilon)


def test_who_is_inside_by_a_dense_hessian() -> None:
    trace = network(seed=3, tasks=4, step=0.4)
    for epsilon in (0.003, 0.03, 0.3):
        found = examine_trace(trace, epsilon)
        for o in range(4):
            hessian, slope = dense_hessian(trace, o), trace.gradient(o)
            values = torch.linalg.eigvalsh(hessian)
            order = values.abs().argsort(descending=True)[:10]
            torch.testing.assert_close(found.eigenvalues[o], values[order], rtol=1e-6, atol=1e-9)
            assert float(found.trace[o]) == pytest.approx(float(values.sum()), abs=4 * float(found.trace_error[o]))
            for t in range(o + 1, 4):
                move = theta_of(trace, t) - theta_of(trace, o)
                expanded = trace.value(o, trace.checkpoints[o + 1]) + slope @ move + move @ hessian @ move / 2
                error = float((trace.value(o, trace.checkpoints[t + 1]) - expanded).abs())
                assert bool(found.inside[t, o]) == (error < epsilon)
                if float(found.distance[t, o]) < float(found.radius[t, o]):
                    assert error < epsilon  # the way there is inside, and so is its end


def test_data_in_any_shape_and_losses_of_ones_own() -> None:
    trace = network(seed=1, tasks=2, dtype=torch.float32)
    module, states = trace.module, [point.params for point in trace.checkpoints]
    before, module_mode = copy.deepcopy(module.state_dict()), module.train().training
    sets = [TensorDataset(*task) for task in trace.tasks]
    tensors = [(x, y) for x, y in trace.tasks]
    batches = [[(x[:10], y[:10]), (x[10:], y[10:])] for x, y in tensors]
    expected = str(examine(module, "cross-entropy", tensors, states, 0.1))
    for given in (sets, [DataLoader(s, batch_size=4) for s in sets], batches):
        assert str(examine(module, nn.CrossEntropyLoss(), given, states, 0.1)) == expected
    assert str(examine(module, nn.functional.cross_entropy, tensors, states, 0.1)) == expected
    assert module.training == module_mode and all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
    few = examine(module, "cross-entropy", batches, states, 0.1, examples=12)
    first = examine(module, "cross-entropy", [(x[:12], y[:12]) for x, y in tensors], states, 0.1)
    assert torch.equal(few.losses, first.losses) and str(few) != expected


def test_statistics_of_batchnorm_are_those_of_each_checkpoint() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    tasks, states = [], [copy.deepcopy(module.state_dict())]
    for shift in (0.0, 3.0):
        x, y = torch.randn(30, 3) + shift, torch.randint(2, (30,))
        for _ in range(20):
            module(x)  # moves the statistics alone
        tasks.append((x, y))
        states.append(copy.deepcopy(module.state_dict()))
    found = examine(module, "cross-entropy", tasks, states, 0.1)
    for o, (x, y) in enumerate(tasks):
        module.load_state_dict(states[o + 1])
        loss = nn.functional.cross_entropy(module.eval()(x), y)
        assert float(found.losses[o]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(found.distance[1, 0]) == 0 and math.isnan(found.radius[1, 0])
    measured = float(found.forgetting.measured[1, 0])
    assert abs(measured) > 0.01 and float(found.forgetting.predicted[1, 0]) == 0
    assert float(found.forgetting.statistics[1, 0]) == pytest.approx(measured, rel=1e-5)
    assert bool(found.inside[1, 0]) and abs(float(found.forgetting.error[1, 0])) < 1e-6
    draw_examination(found, Figure())
    warning = examine(module, "cross-entropy", tasks, states, abs(measured) / 2).warning
    assert warning is not None and f"{'raised' if measured > 0 else 'lowered'} old losses" in warning
    assert f"{abs(measured):.3g}" in warning
    assert examine(module, "cross-entropy", tasks, states, abs(measured) * 2).warning is None


def test_what_statistics_do_is_no_error_of_the_expansion() -> None:
    """Parameters and statistics move: ξ_o is that of the parameters, by a dense Hessian with the statistics of θ_o."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    tasks, states = [], [copy.deepcopy(module.state_dict())]
    for shift in (0.0, 2.0):
        x, y = torch.randn(20, 2, dtype=torch.float64) + shift, torch.randint(2, (20,))
        module.train()(x)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.1 * torch.randn_like(p))
        tasks.append((x, y))
        states.append(copy.deepcopy(module.state_dict()))
    found = examine(module, "cross-entropy", tasks, states, 0.1)
    (x, y), names = tasks[0], [k for k, _ in module.named_parameters()]
    moved = torch.cat([(states[2][k] - states[1][k]).flatten() for k in names])

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([states[1][k].numel() for k in names])
        own = {k: part.view_as(states[1][k]) for k, part in zip(names, parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(module.eval(), {**states[1], **own}, (x,)), y)

    origin = torch.cat([states[1][k].flatten() for k in names])
    slope, bend = torch.autograd.functional.jacobian(loss, origin), torch.autograd.functional.hessian(loss, origin)
    with torch.no_grad():
        error = loss(origin + moved) - loss(origin) - slope @ moved - moved @ bend @ moved / 2
    assert float(found.forgetting.error[1, 0]) == pytest.approx(float(error), rel=1e-6)
    module.load_state_dict(states[2])
    with torch.no_grad():
        rise = nn.functional.cross_entropy(module(x), y) - loss(origin)
    assert float(found.forgetting.measured[1, 0]) == pytest.approx(float(rise), rel=1e-6)


def test_checkpoints_that_tell_nothing_are_refused() -> None:
    module, loss, tasks, states = quartic(3.0, 1.0, 2.0)
    with pytest.raises(GlocalError, match=r"checkpoints 1 and 2 are equal.*deepcopy"):
        examine(module, loss, tasks, [states[0], states[1], states[1]], 0.1)
    lost = {"theta": torch.tensor([math.nan], dtype=torch.float64)}
    with pytest.raises(GlocalError, match="checkpoint 2 has values that are not finite, first in 'theta'"):
        examine(module, loss, tasks, [states[0], states[1], lost], 0.1)


def test_data_that_tell_nothing_are_refused() -> None:
    trace = network(seed=1, tasks=2, dtype=torch.float32)
    states = [point.params for point in trace.checkpoints]
    (x, y), other = trace.tasks
    broken = x.clone()
    broken[3, 0] = math.nan
    with pytest.raises(GlocalError, match=r"x of task 1 contains NaN or infinity in 1 of 15 examples.*index 3"):
        examine(trace.module, "cross-entropy", [(broken, y), other], states, 0.1)
    with pytest.raises(GlocalError, match=r"a dict of length 2 \('image', 'label'\); batches must be pairs"):
        examine(trace.module, "cross-entropy", [[{"image": x, "label": y}], other], states, 0.1)  # type: ignore[list-item]
    with pytest.raises(GlocalError, match="a tuple of length 3"):
        examine(trace.module, "cross-entropy", [[(x, x, y)], other], states, 0.1)  # type: ignore[list-item]


@pytest.mark.parametrize("point", [1, 2, 3])
def test_a_run_that_diverged_is_outside(point: int, tmp_path: Path) -> None:
    found = examine_trace(diverged(network(seed=2), point), 0.1)
    touched = [(t, o) for t in range(3) for o in range(t) if point in (t + 1, o + 1)]
    assert all(not bool(found.inside[pair]) and math.isnan(found.distance[pair]) for pair in touched)
    assert "diverged" in found.finding and "nan" in str(found)
    assert math.isnan(found.eigenvalues[point - 1, 0]) and found.plot(tmp_path / "f.svg").exists()
    other = (2 if point == 1 else 1) - 1
    assert found.eigenvalues[other].isfinite().all() and float(found.random_radius[other]) > 0


def test_a_figure_of_one_task() -> None:
    figure = Figure()
    draw_examination(examine(*quartic(3.0, 1.0)), figure)
    assert len(figure.axes) == 3


def test_a_figure_of_all_pairs(tmp_path: Path) -> None:
    found = examine_trace(network(seed=3, tasks=4, step=0.4), 0.03)
    figure = Figure()
    draw_examination(found, figure)
    where, forgot, bend = figure.axes
    points, dots = (
        [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]  # type: ignore[arg-type]
        for axes in (where, forgot)
    )
    assert len(points) == 6 and sorted(float(p.get_ydata()[0]) for p in points) == pytest.approx(  # type: ignore[index,arg-type]
        sorted(found.distance[found.later].tolist())
    )
    assert sum(isinstance(p.get_markerfacecolor(), str) for p in points) == 6 - int(found.inside.sum()) > 0  # white
    assert len(dots) == 6 and len([line for line in bend.lines if line.get_marker() == "_"]) == 4
    for axes in (where, bend):  # θ_1 is the solution of task 1
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3", "4"]
    bars = {round(bar.get_x() + bar.get_width() / 2, 9): bar.get_y() + bar.get_height() for bar in where.patches}  # type: ignore[attr-defined]
    assert sorted(bars.values()) == pytest.approx(sorted(found.radius[found.later].tolist()))
    for point in points:  # an open point is above the bar of its direction
        x, y = np.array(point.get_xydata())[0]
        assert y > bars[round(x, 9)] or not isinstance(point.get_markerfacecolor(), str)
    assert [row["task"] for row in found.rows()] == [1, 2, 3, 4]
    assert found.plot(tmp_path / "new" / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(GlocalError, match="suffix"):
        found.plot(tmp_path / "f.xyz")


def test_mistakes_are_told() -> None:
    trace = network(seed=1, dtype=torch.float32)
    module, states = trace.module, [point.params for point in trace.checkpoints]
    tasks: Any = [tuple(task) for task in trace.tasks]

    def summed(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction="sum")

    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((module, "cross-entropi", tasks, states), "unknown loss"),
        ((module, 3, tasks, states), "the loss must be 'cross-entropy'"),
        ((module, summed, tasks, states), "unweighted mean over samples"),
        ((module, "cross-entropy", tasks, states[:1]), "tasks: 3, checkpoints: 1; give θ_0"),
        ((module, "cross-entropy", tasks[:1], states), "tasks: 1, checkpoints: 4"),
        ((module, "cross-entropy", tasks, states[1:]), "tasks: 3, checkpoints: 3"),
        ((module, "cross-entropy", tasks[:1], [{}, {}]), "does not fit the network"),
        ((module, "cross-entropy", [3], states[:2]), "task 1 is a int"),
        ((module, "cross-entropy", [[3]], states[:2]), "batches must be pairs"),
        ((module, "cross-entropy", [[]], states[:2]), "no examples"),
        ((module, "cross-entropy", [(torch.ones(3, 9), torch.zeros(3).long())], states[:2]), "fails on task 1"),
        ((module, "cross-entropy", tasks, states, -1.0), r"epsilon = -1\.0 was given; it must be finite and above 0"),
    ]
    for arguments, told in wrong:
        with pytest.raises(GlocalError, match=told):
            examine(*arguments)
    with pytest.raises(GlocalError, match="examples is 0"):
        examine(module, "cross-entropy", tasks, states, examples=0)


def test_a_run_of_the_store_has_the_losses_that_it_measured(tmp_path: Path) -> None:
    (run,) = glocal.sweep("rotated-digits", ["er"], [0.1], [7], store=tmp_path, keep_parameters=True, **QUICK)
    assert run.path is not None
    trace = open_run(run.path).trace()
    for t, point in enumerate(trace.checkpoints):
        for o in range(2):
            assert float(trace.value(o, point)) == pytest.approx(run.arrays["train_class_loss"][t, o], rel=1e-4)
    for given, told in (
        ({"network": "resnet18"}, "network is not the one of the run: its name is resnet18, in the run mlp. Give the"),
        ({"network": f"{__file__}:x"}, "the run has the built-in 'mlp'. Leave the network out"),
    ):
        with pytest.raises(GlocalError, match=told):
            open_run(run.path, **given)
    with pytest.raises(GlocalError, match="not a run of a store"):
        open_run(tmp_path).trace()


def test_runs_of_the_store_that_need_more(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import math\nfrom torch import nn\ndef net(shape, outputs):\n"
        "    first = nn.Linear(math.prod(shape), 6)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(6), nn.Linear(6, outputs))\n"
    )
    store: dict[str, Any] = {"store": tmp_path / "s", **QUICK}
    (own,) = glocal.sweep("split-digits", ["sgd"], [0.1], [7], network=f"{mine}:net", keep_parameters=True, **store)
    assert own.path is not None
    with pytest.raises(GlocalError, match=r"--network PATH\.py:net; in Python network="):
        open_run(own.path)
    trace = open_run(own.path, network=f"{mine}:net").trace()
    assert float(trace.value(0, trace.checkpoints[1])) == pytest.approx(own.arrays["train_class_loss"][1, 0], rel=1e-4)
    (bare,) = glocal.sweep("rotated-digits", ["sgd"], [0.1], [7], **store)
    (parts,) = glocal.sweep("rotated-digits", ["packnet"], [0.1], [7], keep_parameters=True, **store)
    for run, told in ((bare, "not kept its parameters"), (parts, "predicts with a task's number")):
        assert run.path is not None
        with pytest.raises(GlocalError, match=told):
            open_run(run.path).trace()


def test_common_mistakes_with_checkpoints_and_losses_are_named() -> None:
    module, loss, tasks, states = quartic(3.0, 1.0)
    for wrapped, said in (
        ({"epoch": 3, "model": states[1]}, r"a dict was given that holds one: give its \['model'\]"),
        ({f"module.{k}": t for k, t in states[1].items()}, r"begin with 'module\.': give"),
    ):
        with pytest.raises(GlocalError, match=said):
            examine(module, loss, tasks, [states[0], wrapped], 0.1)
    with pytest.raises(GlocalError, match=r"the class MSELoss; give an instance, MSELoss\(\)"):
        examine(module, nn.MSELoss, tasks, states, 0.1)  # type: ignore[arg-type]


def test_single_numbers_are_inputs_too() -> None:
    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, None])

    module = Column()
    states = [{k: p + i for k, p in module.state_dict().items()} for i in range(2)]
    trace = trace_checkpoints(module, "squared-error", [(torch.rand(50), torch.rand(50, 1))], states)
    assert float(trace.value(0, trace.checkpoints[1])) > 0
