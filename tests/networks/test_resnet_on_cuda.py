"""A cohort of residual networks on a GPU makes the steps that single runs make on a CPU. On a GPU alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from glocal.algorithms import AGEM, ER, SGD, Algorithm
from glocal.challenges import from_tasks
from glocal.challenges.challenge import Augment, Normalise
from glocal.engine.cohort import Cohort, Member
from glocal.engine.execute import RunByRun, Vectorised
from glocal.engine.feed import Feed
from glocal.engine.layout import arrange
from glocal.engine.plan import initial_state
from glocal.engine.precision import multiplying
from glocal.networks.model import Precision
from glocal.networks.resnet import resnet18
from glocal.tree import Params

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def cohort(device: str, algorithm: Algorithm, precision: Precision) -> Cohort:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (32, 3, 16, 16), dtype=torch.uint8, generator=draw)
    made = from_tasks("noise", [((x, torch.arange(32) % 4), (x, torch.arange(32) % 4))], setting="domain")
    made = replace(made, normalise=Normalise((0.5,) * 3, (0.25,) * 3), augment=Augment(4, True))
    members = tuple(Member(seed, lr, algorithm) for seed, lr in [(0, 0.01), (0, 0.05), (1, 0.01)])
    network = partial(resnet18, width=48)  # up to 384 channels: both ways to convolve
    return Cohort(made, network, members, 1, 32, 32, torch.device(device), precision)


def after_a_step(of: Cohort, vectorised: bool) -> tuple[Params, Params]:
    """How far the parameters have moved, and BatchNorm's statistics."""
    feed = Feed(of)
    feed.load_task(0)
    feed.load_epoch(0)
    state = initial_state(of, feed)
    arrange(state, of.device)
    before = {k: p.clone() for k, p in state.params.items()}
    executor = Vectorised(of) if vectorised else RunByRun(of)
    with multiplying(of.precision):
        executor.epoch(state, feed, 0, lambda steps: None)
    moved = {k: (state.params[k] - p).double().cpu() for k, p in before.items()}
    return moved, {k: b.double().cpu() for k, b in state.buffers.items()}


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=16, replay=8), AGEM(slots=16, replay=8)], ids=lambda a: a.name)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.02), ("bf16", 0.6)])
def test_steps_are_those_of_single_runs_on_a_cpu(algorithm: Algorithm, precision: Precision, tolerance: float) -> None:
    # On noise, rounding to bf16 alone turns the gradient by a third, as torch's own autocast does.
    expected, statistics = after_a_step(cohort("cpu", algorithm, "fp32"), vectorised=False)
    found, kept = after_a_step(cohort("cuda", algorithm, precision), vectorised=True)
    for ours, theirs in ((found, expected), (kept, statistics)):
        for run in range(3):
            assert apart(ours, theirs, run) <= tolerance


def apart(a: Params, b: Params, run: int) -> float:
    """‖a − b‖ / ‖b‖ over all of a run's tensors."""
    squares = [torch.stack([(a[k][run] - b[k][run]).square().sum(), b[k][run].square().sum()]) for k in b]
    difference, whole = torch.stack(squares).sum(0).sqrt().tolist()
    return difference / whole
