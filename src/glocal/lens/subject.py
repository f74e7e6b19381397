r"""What the instruments look at: the true losses L_1 … L_T of a sequence of tasks, and the points θ_0 … θ_T that
training passed on its way through them. Tasks are counted from 0: θ_o, the solution of task o, is `solutions[o + 1]`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal import losses, tree
from glocal.challenges.challenge import Data
from glocal.curvature.differentiable import differentiable
from glocal.curvature.products import Product, gauss_newton_product, hessian_product
from glocal.engine.cohort import Cohort, constants, seeded_network
from glocal.engine.loader import evenly_spaced
from glocal.engine.loop import Execution, Progress, train
from glocal.errors import GlocalError, require
from glocal.lens import task_inputs
from glocal.lens.input_checks import check
from glocal.lens.task_inputs import AnyLoss, TaskData
from glocal.losses import Loss
from glocal.tree import Params

CHUNK = 2_000


class Point(NamedTuple):
    """The parameters θ, and the network's other tensors (BatchNorm's statistics) as they were beside them."""

    params: Params
    buffers: Params


@dataclass(frozen=True)
class Subject:
    """A network, its loss, the tasks' data as the network takes them, and θ_0, θ_1, …; the network is in eval mode."""

    module: nn.Module
    loss: Loss
    tasks: Sequence[Data]
    solutions: Sequence[Point]
    tests: Sequence[Data] = ()
    """Every task's test data, where they are known."""

    def __post_init__(self) -> None:
        self.module.eval()
        found, allowed = len(self.solutions), len(self.tasks) + 1
        require(
            1 <= found <= allowed,
            f"{len(self.tasks)} tasks have 1 to {allowed} points θ_0, θ_1, …; {found} were given.",
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self.solutions[0].params.values())).device

    def outputs(self, point: Point, x: Tensor) -> Tensor:
        """f_θ(x)."""
        with differentiable(self.module):
            return functional_call(self.module, {**point.params, **point.buffers}, (x,))

    def value(self, task: int, point: Point) -> Tensor:
        """L_o(θ), the mean over the task's data, a bounded number of examples at a time."""
        data = self.tasks[task]
        parts = zip(data.x.split(CHUNK), data.y.split(CHUNK), strict=True)
        return torch.stack([self.loss.per_sample(self.outputs(point, x), y).sum() for x, y in parts]).sum() / len(
            data.y
        )

    def gradient(self, task: int, point: Point) -> Params:
        """∇L_o(θ)."""
        leaves = {k: p.detach().requires_grad_() for k, p in point.params.items()}
        data, total = self.tasks[task], {k: torch.zeros_like(p) for k, p in point.params.items()}
        with torch.enable_grad(), differentiable(self.module):
            for x, y in zip(data.x.split(CHUNK), data.y.split(CHUNK), strict=True):
                share = self.loss.per_sample(self.outputs(Point(leaves, point.buffers), x), y).sum() / len(data.y)
                slopes = torch.autograd.grad(share, list(leaves.values()), allow_unused=True, materialize_grads=True)
                for k, slope in zip(leaves, slopes, strict=True):
                    total[k] += slope
        return total

    def hessian_product(self, task: int, point: Point) -> Product:
        """v ↦ H_o(θ) v, H_o = ∇²L_o."""
        return hessian_product(self.module, point.params, point.buffers, *self.tasks[task], self.loss)

    def outer_product(self, task: int, point: Point) -> Product:
        """v ↦ G_o(θ) v, the outer-product part of the Hessian (Eq. Hessian-decomp)."""
        x, y = self.tasks[task]
        return gauss_newton_product(self.module, point.params, point.buffers, x, self.loss, y=y)

    def on(self, device: torch.device | str) -> Subject:
        """The same subject on another device."""
        move = partial(tree.map_tree, lambda leaf: leaf.to(device))
        tasks, tests = ([Data(d.x.to(device), d.y.to(device)) for d in part] for part in (self.tasks, self.tests))
        points = [Point(move(p.params), move(p.buffers)) for p in self.solutions]
        return Subject(self.module.to(device), self.loss, tasks, points, tests)

    def double(self) -> Subject:
        """A copy in double precision, for what rounding would hide. Whole numbers stay what they are."""
        more = partial(tree.map_tree, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)
        tasks, tests = ([Data(**more(d._asdict())) for d in part] for part in (self.tasks, self.tests))
        points = [Point(more(p.params), more(p.buffers)) for p in self.solutions]
        return Subject(copy.deepcopy(self.module).double(), self.loss, tasks, points, tests)


def of_module(
    module: nn.Module,
    loss: AnyLoss,
    tasks: Sequence[TaskData],
    checkpoints: Sequence[Mapping[str, Any]],
    examples: int | None = None,
) -> Subject:
    """A subject from what a user has: a network, which is copied; a loss by name or as a function that is a mean over
    samples; for every task (x, y), a DataLoader or a Dataset, of which at most so many examples are taken (all if not
    said); and state dicts θ_0, θ_1, … of the network."""
    require(isinstance(module, nn.Module), f"a network is an nn.Module; a {type(module).__name__} was given.")
    own = copy.deepcopy(module)
    for part in own.modules():
        if isinstance(part, nn.Embedding):
            part.sparse = False  # sparse gradients have no second derivatives
    learnt = [p for p in own.parameters() if p.requires_grad]
    require(bool(learnt), f"the network {type(module).__name__} has no parameters that are learnt: nothing moves.")
    halves = {p.dtype for p in learnt} & {torch.bfloat16, torch.float16}
    require(
        not halves,
        f"the network {type(module).__name__} computes in {', '.join(map(str, halves))}, in which no "
        "curvature is found: give module.float().",
    )
    chosen = task_inputs.chosen(loss)
    device = learnt[0].device
    data = [
        task_inputs.gathered(task, examples, device, f"task {o}")
        for o, task in enumerate(task_inputs.listed("tasks", tasks))
    ]
    points = [_point(own, state) for state in task_inputs.listed("checkpoints", checkpoints)]
    _sound(own, points)
    subject = Subject(own, chosen, data, points)
    check(subject)
    return subject


def _sound(module: nn.Module, points: Sequence[Point]) -> None:
    """Refuse checkpoints with numbers that are none, and such as the network was not trained to."""
    for t, (params, _) in enumerate(points):
        lost = [k for k, p in params.items() if not bool(p.isfinite().all())]
        when = "the training diverged there. Give the checkpoints before it." if t else "give where training began."
        require(not lost, f"checkpoint {t} has numbers that are not finite, first in '{''.join(lost[:1])}': {when}")
    frozen = [k for k, p in module.named_parameters() if not p.requires_grad]
    for t, (before, after) in enumerate(pairwise({**point.params, **point.buffers} for point in points)):
        learnt = [k for k in frozen if not torch.equal(before[k], after[k])]
        require(
            not learnt,
            f"'{''.join(learnt[:1])}' is not learnt in the given network (requires_grad is False), but differs between "
            f"checkpoints {t} and {t + 1}: give the network as it was trained.",
        )


def _point(module: nn.Module, state: Any) -> Point:
    what = f"a checkpoint is a state dict; a {type(state).__name__} was given"
    require(not isinstance(state, nn.Module), f"{what}: give a copy of its state_dict().")
    require(not isinstance(state, str | Path), f"{what}: give torch.load('{state}').")
    require(isinstance(state, Mapping), f"{what}.")
    names = set(module.state_dict())
    inner = [k for k, part in state.items() if isinstance(part, Mapping) and _holds_tensors(part)]
    if inner and not set(state) & names:
        raise GlocalError(f"a checkpoint is a state dict; a dict that holds one was given: give its {inner[:1]}.")
    prefix = _prefix(state, names)
    if prefix:
        writer = WRITERS.get(prefix)
        written = f", as {writer} writes them" if writer else ""
        raise GlocalError(
            f"a checkpoint's names begin with '{prefix}'{written}: give "
            f"{{k.removeprefix('{prefix}'): t for k, t in state.items()}}."
        )
    try:
        module.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:  # the second where it holds no tensors
        reason = str(error).strip().splitlines()[-1].strip()
        raise GlocalError(f"a checkpoint does not fit the network: {reason}") from error
    params = {k: p.detach().clone() for k, p in module.named_parameters() if p.requires_grad}
    return Point(params, {k: b.clone() for k, b in constants(module).items()})


WRITERS = {"module.": "DataParallel", "_orig_mod.": "torch.compile"}


def _holds_tensors(part: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in part.values())


def _prefix(state: Mapping[str, Any], names: set[str]) -> str:
    """What all names of a checkpoint begin with, and without which they are most like the network's; '' if nothing."""
    keys = [str(k) for k in state]
    if not keys or set(keys) & names:
        return ""
    found = sorted(keys[0][: -len(name)] for name in names if keys[0].endswith(f".{name}"))
    common = [prefix for prefix in found if all(key.startswith(prefix) for key in keys)]
    return max(common, key=lambda prefix: len({key.removeprefix(prefix) for key in keys} & names), default="")


def some_examples(count: int) -> None:
    """Refuse to look at none."""
    require(count >= 1, f"a task is looked at on 1 example or more; {count} were asked for.")


def of_training(
    cohort: Cohort, examples: int = CHUNK, execution: Execution = "auto", progress: Progress | None = None
) -> list[Subject]:
    """Train a cohort to the end, and look at every one of its runs."""
    points: list[list[Point]] = [[] for _ in cohort.members]
    for snapshot in train(cohort, execution=execution, progress=progress):
        for run, seen in enumerate(points):
            own = tree.map_tree(torch.clone, snapshot.state.select(run).as_tree())
            seen.append(Point(own["params"], own.get("buffers", {})))
    return [of_run(cohort, run, seen, examples) for run, seen in enumerate(points)]


def of_run(cohort: Cohort, run: int, points: Sequence[Point], examples: int = CHUNK) -> Subject:
    """One run of a cohort at these points, with at most so many examples of every task, evenly spaced."""
    some_examples(examples)
    challenge, seed = cohort.challenge, cohort.members[run].seed
    make = cohort.algorithm.network(cohort.make_network, challenge.tasks)
    module = seeded_network(make, challenge, seed).to(cohort.device)

    def some(data: Data) -> Data:
        x, y = evenly_spaced(data, examples)
        return Data(cohort.transform.normalize(x.to(cohort.device)), y.to(cohort.device))

    both = [(some(task.train), some(task.test)) for task in (challenge.task(t, seed) for t in range(challenge.tasks))]
    return Subject(module, losses.get(challenge.loss), [a for a, _ in both], points, [b for _, b in both])
