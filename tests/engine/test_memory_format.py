"""What a GPU's order of numbers changes: where they lie, and nothing else."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms import OGDGTL
from glocal.challenges import from_tasks
from glocal.curvature.jacobian import CONV
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Vectorised
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.fast.channels_last import arrange, arranged
from glocal.networks.convolution import merge_batch_dim
from glocal.networks.resnet import resnet18

RUNS, INPUTS, CHANNELS, SIDE = 3, 5, 4, 6
CPU = torch.device("cpu")


def test_images_of_all_runs_are_one_image_of_many_channels_without_being_copied() -> None:
    inputs, deltas = torch.rand(RUNS, INPUTS, CHANNELS, SIDE, SIDE), torch.rand(RUNS, INPUTS, 2, CHANNELS, SIDE, SIDE)
    rows = {CONV: {"inputs": {"layer": inputs}, "deltas": {"layer": deltas}}}
    found = arranged({"span": {"rows": rows}})["span"]["rows"][CONV]
    assert found["inputs"]["layer"].equal(inputs) and found["deltas"]["layer"].equal(deltas)
    for image in (found["inputs"]["layer"], found["deltas"]["layer"][:, :, 1]):
        merged = merge_batch_dim(image, 0, 1)
        assert merged.shape == (INPUTS, RUNS * CHANNELS, SIDE, SIDE)
        assert merged.data_ptr() == image.data_ptr() and merged.stride(1) == 1
    assert merge_batch_dim(found["inputs"]["layer"], 0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("positions", [(7,), (3, 4, 5)])
def test_so_are_signals_and_volumes(positions: tuple[int, ...]) -> None:
    images = {"inputs": torch.rand(RUNS, INPUTS, CHANNELS, *positions)}
    images |= {"deltas": torch.rand(RUNS, INPUTS, 2, CHANNELS, *positions)}
    found = arranged({CONV: {half: {"layer": t} for half, t in images.items()}})[CONV]
    for half, axis in (("inputs", 2), ("deltas", 3)):
        image = found[half]["layer"]
        assert image.equal(images[half]) and (image.stride(axis), image.stride(0)) == (1, CHANNELS)


def test_weights_lie_run_by_run_with_their_channels_side_by_side() -> None:
    weight = torch.rand(RUNS, 8, CHANNELS, 3, 3)
    found = arranged({"fisher": {"layer.weight": weight}, "number": torch.zeros(RUNS)})["fisher"]["layer.weight"]
    assert found.equal(weight) and merge_batch_dim(found, 0, 0).is_contiguous(memory_format=torch.channels_last)


def test_a_memory_of_images_grows_and_projects_as_in_the_usual_order() -> None:
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        return torch.rand(n, 3, 8, 8, generator=draw), torch.arange(n) % 4

    tasks = from_tasks("noise", [(part(16), part(4)) for _ in range(3)], setting="domain")
    members = tuple(Member(seed, 0.01, OGDGTL(slots=12)) for seed in range(RUNS))
    of = Cohort(tasks, partial(resnet18, width=4), members, 1, 8, 8, CPU)

    loader, executor = Loader(of), Vectorised(of)
    loader.load_task(0)
    begin = of.initial_state(loader.example())
    for task in range(2):
        loader.load_task(task, begin.memory)
        with torch.no_grad():
            executor.consolidate(begin, loader)

    def next_task(channels_last: bool) -> State:
        state = State.from_tree(tree.map_tree(torch.clone, begin.as_tree()), begin.clock)
        if channels_last:
            arrange(state)
        laid = tree.flatten(state.memory["span"]["rows"][CONV]["inputs"]).values()
        assert all((t.stride(2) == 1) is channels_last for t in laid if t.shape[-1] > 1)
        loader.load_task(2, state.memory)
        loader.load_epoch(0)
        executor.before_epoch(state, 0)
        executor.step(state, executor.hyper, loader.batch(0))
        with torch.no_grad():
            executor.consolidate(state, loader)
        return state

    usual, other = next_task(False), next_task(True)
    images = tree.flatten(other.memory["span"]["rows"][CONV])
    assert images and all(t.shape[:2] == (RUNS, 12) for t in images.values())
    for name, expected in tree.flatten({"params": usual.params, "memory": usual.memory}).items():
        found = tree.flatten({"params": other.params, "memory": other.memory})[name]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
