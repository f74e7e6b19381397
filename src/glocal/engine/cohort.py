"""A cohort: runs that differ only in seed, learning rate and scalar options, trained as one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from glocal import losses, tree
from glocal.algorithms.algorithm import Algorithm, Batch
from glocal.challenges.challenge import Challenge
from glocal.engine.state import State, check_memory
from glocal.engine.step import Hyper
from glocal.errors import require
from glocal.hyperparameters import scalars
from glocal.inputs import evenly_spaced_indices
from glocal.networks.model import MakeNetwork, Model, frozen_parameters, share_parameters
from glocal.networks.preprocess import InputTransform
from glocal.networks.randomness import draws_random_numbers
from glocal.networks.replace_layers import replace_layers
from glocal.optimizers import PLAIN_SGD, Optimizer, is_built_in, step_scalars
from glocal.precision import Precision
from glocal.rng import generator, global_generator
from glocal.tree import Params, Tree

CPU = torch.device("cpu")


def seeded_network(make: MakeNetwork, challenge: Challenge, seed: int) -> nn.Module:
    """Create the network for a challenge, initialised from the seed's own random stream."""
    with global_generator(generator(seed, "init")):
        network = make(challenge.input_shape, challenge.outputs)
        if isinstance(network, nn.Module) and any(map(is_lazy, network.parameters())):
            with torch.no_grad():  # lazy layers take their sizes from their first inputs
                network.eval()(torch.zeros(1, *challenge.input_shape, dtype=challenge.input_dtype))
            network.train()
        return network


@dataclass(frozen=True)
class Member:
    """One run of a cohort."""

    seed: int
    lr: float
    algorithm: Algorithm
    optimizer: Optimizer = PLAIN_SGD


@dataclass(frozen=True)
class Cohort:
    """Runs to train together: members in the order of their seeds, with one challenge, network and structure."""

    challenge: Challenge
    make_network: MakeNetwork
    members: tuple[Member, ...]
    epochs: int
    batch_size: int
    train_eval: int = 2_000
    device: torch.device = CPU
    precision: Precision = "fp32"
    horizon: int | None = None
    """Tasks that are planned in all; None: those of the challenge; 0: runs go on that were trained for fewer."""
    patience: int | None = None
    """Epochs without a lower validation loss after which a task ends; None: all epochs are trained."""

    def __len__(self) -> int:
        return len(self.members)

    def only(self, members: Sequence[Member]) -> Cohort:
        return replace(self, members=tuple(members))

    @property
    def algorithm(self) -> Algorithm:
        """The common structure; the members' scalars travel in `hyper`."""
        return self.members[0].algorithm

    @property
    def optimizer(self) -> Optimizer:
        """The common structure of the optimisers; the members' scalars travel in `hyper`."""
        return self.members[0].optimizer

    @property
    def planned_tasks(self) -> int:
        return self.challenge.tasks if self.horizon is None else self.horizon

    def hyper(self) -> Hyper:
        """Return every scalar hyperparameter as a tensor with one value per run."""
        algorithms = [scalars(m.algorithm) for m in self.members]
        columns = {
            "lr": [m.lr for m in self.members],
            "algorithm": {k: [values[k] for values in algorithms] for k in algorithms[0]},
            "optimizer": step_scalars([m.optimizer for m in self.members]),
        }
        return tree.map_tree(partial(torch.tensor, device=self.device), columns)

    def model(self, vectorised: bool) -> Model:
        """Return the network as functions of one run's parameters, to be mapped over runs if `vectorised`."""
        module = share_parameters(self.shared_network)
        if vectorised and self.device.type == "cuda":
            module = replace_layers(module)
        sizes = self.planned_tasks, self.batch_size
        options: Any = {"vectorised": vectorised, "transform": self.transform, "precision": self.precision}
        return Model(module, self.loss, *sizes, classes=self._classes, draws=self.draws, **options)

    def _classes(self, task: int) -> tuple[int, ...]:
        valid = self.horizon is None or task < self.challenge.tasks
        require(valid, f"{self.algorithm.name} uses the classes of later tasks: it cannot be planned with a horizon.")
        seeds = {m.seed for m in self.members} if self.challenge.seeded else {self.members[0].seed}
        classes = {self.challenge.task(task, seed).classes for seed in seeds}
        message = "uses the classes of tasks, which differ between seeds here: train with cohort_size=1."
        require(len(classes) == 1, f"{self.algorithm.name} {message}")
        return classes.pop()

    @cached_property
    def loss(self) -> losses.Loss:
        """The challenge's loss. The curvature of a user's loss is checked on targets of the first task."""
        loss = losses.get(self.challenge.loss)
        if isinstance(loss, losses.PerSampleLoss):
            y = self.challenge.task(0, self.members[0].seed).train.y.cpu().unique(dim=0)
            y = y[evenly_spaced_indices(len(y), losses.MAX_CHECKED_OUTPUTS)]
            loss.examples = [(torch.randn(len(y), self.challenge.outputs, generator=generator(0, "loss")), y)]
        return loss

    @cached_property
    def draws(self) -> bool:
        """Whether the network draws random numbers in training."""
        x = torch.zeros(2, *self.challenge.input_shape, dtype=self.challenge.input_dtype)
        return draws_random_numbers(self.network(self.members[0].seed), x)

    @cached_property
    def transform(self) -> InputTransform:
        """What the challenge's inputs pass on their way into the network."""
        return InputTransform(self.challenge.normalise, self.challenge.augment, self.device)

    @cached_property
    def shared_network(self) -> nn.Module:
        """The first run's network on the device; all models use its frozen parameters."""
        return self.network(self.members[0].seed).to(self.device)

    def initial(self) -> tuple[Params, Params]:
        """Return θ_0 and the networks' buffers, stacked; they depend on the seed alone.

        Frozen parameters that differ between runs are among the buffers; those that do not are the models' own.
        """
        shared = frozen_parameters(self.shared_network)
        parts: dict[int, tuple[Params, Params, Params]] = {}
        for seed in {m.seed for m in self.members}:
            network = self.network(seed).to(self.device)
            params = {k: p.detach() for k, p in network.named_parameters() if p.requires_grad}
            frozen = {k: p for k, p in frozen_parameters(network).items() if not torch.equal(p, shared[k])}
            parts[seed] = params, dict(network.named_buffers()), frozen
        differing = [k for k in shared if any(k in frozen for _, _, frozen in parts.values())]
        runs = [parts[m.seed] for m in self.members]
        rest = [buffers | {k: frozen.get(k, shared[k]) for k in differing} for _, buffers, frozen in runs]
        return tree.stack([params for params, _, _ in runs]), tree.stack(rest)

    def initial_state(self, example: Batch, start: tuple[Params, Params] | None = None) -> State:
        """Return every run's M_1, for batches like `example`, with θ_0 and the buffers of `initial` or of `start`."""
        params, buffers = start or self.initial()
        model = self.model(vectorised=False)
        example = example.with_inputs(model.transform.normalize(example.x))
        memories = []
        for run, member in enumerate(self.members):
            run_params = tree.select(params, run)
            with global_generator(generator(member.seed, "memory"), self.device):
                memory = member.algorithm.init(model.bind(tree.select(buffers, run)), run_params, example)
            check_memory(memory, f"{member.algorithm.name}.init")
            memories.append(tree.map_tree(lambda leaf: leaf.to(self.device), memory))
        diverged = torch.full((len(self),), -1, dtype=torch.long, device=self.device)
        optimizer = self.initial_optimizer(params)
        return State(params, buffers, tree.stack(memories), diverged, optimizer=optimizer)

    def initial_optimizer(self, params: Params) -> Tree:
        """Return the state of every run's optimiser before a step from these parameters, stacked."""
        hyper = self.hyper()["optimizer"]
        if is_built_in(self.optimizer):
            return self.optimizer.init(params, hyper)
        runs = range(len(self))
        states = [self.optimizer.init(tree.select(params, i), tree.select(hyper, i)) for i in runs]
        return tree.map_tree(lambda leaf: leaf.to(self.device), tree.stack(states))

    @cached_property
    def groups(self) -> list[slice]:
        """Slices of neighbouring members that share their data."""
        if not self.challenge.seeded:
            return [slice(0, len(self))]
        seeds = [m.seed for m in self.members]
        starts = [i for i, seed in enumerate(seeds) if i == 0 or seed != seeds[i - 1]]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(self)], strict=True)]

    def network(self, seed: int) -> nn.Module:
        """Create the network of a seed, as the algorithm changes it."""
        make = self.algorithm.network(self.make_network, self.planned_tasks or self.challenge.tasks)
        return seeded_network(make, self.challenge, seed)
