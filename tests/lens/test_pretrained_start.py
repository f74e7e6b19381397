"""The lens on a pretrained network: θ_0 = θ_1, checkpoints in half precision, and checkpoints of adapters alone."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from glocal import GlocalError
from glocal.lens import examine
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.instruments import INSTRUMENTS, measure
from glocal.lens.locality_assumption import resolve_epsilon


class Adapted(nn.Module):
    """A frozen backbone with BatchNorm, an adapter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()).requires_grad_(False)
        self.adapter, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) + self.adapter(x))


def make_training() -> tuple[Adapted, list[tuple[Tensor, Tensor]], list[dict[str, Tensor]]]:
    """Return a network, three tasks, and θ_0, θ_1, θ_2, θ_3 by plain SGD."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Adapted()
        network.backbone(torch.randn(50, 6))  # statistics that are not the initial ones
        tasks = [(torch.randn(40, 6), torch.randint(3, (40,))) for _ in range(3)]
    network.eval()
    states = [copy.deepcopy(network.state_dict())]
    for x, y in tasks:
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.3)
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
        states.append(copy.deepcopy(network.state_dict()))
    return network, tasks, states


def adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t for k, t in state.items() if not k.startswith("backbone")}


def test_checkpoints_of_adapters_are_completed_by_the_network(tmp_path: Path) -> None:
    network, tasks, states = make_training()
    paths = [tmp_path / f"{t}.safetensors" for t in range(4)]
    for state, path in zip(states, paths, strict=True):
        save_file(adapters(state), path)
    expected = trace_checkpoints(network, "cross-entropy", tasks, states)
    choices: list[list[Any]] = [paths, [states[0], *paths[1:]]]
    for given in choices:
        found = trace_checkpoints(network, "cross-entropy", tasks, given, complete=True)
        for t in range(4):
            assert torch.equal(found.theta(t - 1), expected.theta(t - 1))
            for o in range(3):
                assert found.value(o, found.checkpoints[t]) == expected.value(o, expected.checkpoints[t])


@pytest.mark.parametrize("leave_out", ["head.bias", "adapter.weight", "norm.running_mean"])
def test_a_checkpoint_must_hold_what_was_trained(leave_out: str) -> None:
    network, tasks, states = make_training()
    network.norm = nn.BatchNorm1d(3)
    states = [{**state, **{f"norm.{k}": t for k, t in network.norm.state_dict().items()}} for state in states]
    partly = [{k: t for k, t in state.items() if k != leave_out} for state in states]
    with pytest.raises(GlocalError, match=f"it has no '{leave_out}'"):
        trace_checkpoints(network, "cross-entropy", tasks, partly)


def test_what_does_not_fit_is_named() -> None:
    network, tasks, states = make_training()
    for wrong, match in (
        ({**states[0], "neck.weight": torch.zeros(1)}, r"it has 'neck\.weight', and the network has 'backbone"),
        ({**states[0], "head.weight": torch.zeros(5, 8)}, r"head\.weight.*5, 8"),
        ({}, "holds no tensors"),
    ):
        with pytest.raises(GlocalError, match=match):
            trace_checkpoints(network, "cross-entropy", tasks, [wrong, *states[1:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_is(dtype: torch.dtype) -> None:
    """Checkpoints, and a network and inputs too, give what the rounded values give in float32."""
    network, tasks, states = make_training()
    rounded = [{k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()} for state in states]
    coarse = [(x.to(dtype), y) for x, y in tasks]
    for module, data in ((network, tasks), (copy.deepcopy(network).to(dtype), coarse)):
        trace = trace_checkpoints(module, nn.CrossEntropyLoss(), data, rounded, complete=True)
        exact = copy.deepcopy(network)
        for t, state in enumerate(rounded):
            exact.load_state_dict(state)
            x, y = data[0]
            loss = nn.functional.cross_entropy(exact(x.float()), y).detach()
            assert float(trace.value(0, trace.checkpoints[t])) == pytest.approx(float(loss), rel=1e-5)
        assert trace.theta(0).dtype == torch.float32


def test_a_pretrained_start_is_the_solution_of_the_first_task(tmp_path: Path) -> None:
    network, tasks, states = make_training()
    pretrained = [states[1], *states[1:]]
    found, other = (
        examine(network, "cross-entropy", tasks, given, 0.1, eigenvalues=2) for given in (pretrained, states)
    )
    assert found.updates[0] == 0
    for name in ("distance", "radius", "losses", "eigenvector_radius", "trace"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name), equal_nan=True, rtol=0, atol=0)
    assert str(found) == str(other)
    assert found.plot(tmp_path / "figure.png").exists()

    def loss(o: int, t: int) -> float:
        network.load_state_dict(pretrained[t])
        return float(nn.functional.cross_entropy(network(tasks[o][0]), tasks[o][1]).detach())

    trace = trace_checkpoints(network, "cross-entropy", tasks, pretrained, complete=True)
    assert resolve_epsilon(None, trace) == pytest.approx(
        0.1 * sum(loss(o, 0) - loss(o, o + 1) for o in (1, 2)) / 2, rel=1e-5
    )
    with pytest.raises(GlocalError, match=r"checkpoints 0 and 1 are equal"):
        examine(network, "cross-entropy", tasks[:1], pretrained[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUMENTS)
def test_instruments_measure_a_pretrained_start(name: str) -> None:
    """A number that is finite for another start is finite for this one."""
    network, tasks, states = make_training()
    given = [states[1], *states[1:]], states
    rows = [measure(trace_checkpoints(network, "cross-entropy", tasks, points), name).rows for points in given]
    assert len(rows[0]) == len(rows[1]) > 0
    for found, other in zip(*rows, strict=True):
        lost = [k for k, value in other.items() if isinstance(value, float) and math.isfinite(value - found[k])]
        assert lost == [k for k, value in other.items() if isinstance(value, float) and math.isfinite(value)]
