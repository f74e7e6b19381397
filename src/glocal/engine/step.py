"""The training step, written once: objective → gradient → direction → optimiser → observe.

Every executor maps `step` over runs: `vmap` for a cohort, nothing for a single run. Tracing and CUDA graphs compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.engine.state import State, check_memory
from glocal.errors import GlocalError, require
from glocal.networks.model import Model
from glocal.optimizers import PLAIN_SGD, Optimizer, apply_update, is_built_in
from glocal.tree import Params, Tree

Hyper: TypeAlias = Tree  # lr, and the scalars of "algorithm" and "optimizer"; tensors with one value per run
Map: TypeAlias = Callable[..., Callable[..., Any]]  # `vmap`, or `unmapped`
BATCH_DIMS = Batch(0, 0, None, 0, None, 0, 0)  # type: ignore[arg-type]
STEP_DIMS = Step(BATCH_DIMS, 0, 0, 0, 0, 0, 0)  # type: ignore[arg-type]
UNCHANGED = ()  # what a mapped method returns if the algorithm returned its very argument


def step(program: Program, state: State, hyper: Hyper, batch: Batch, map: Map) -> Tensor:
    """Advance one run, or stacked runs, by one step in place; return the objective before the step.

    Runs are independent: the gradient of the sum of their objectives holds every run's own gradient, so one ordinary
    backward pass serves a single run and a cohort alike.

    Args:
        program: the algorithm's methods, bound to the network and the optimiser.
        state: θ, buffers, memory and optimiser state; with a leading axis for the runs where `map` is `vmap`.
        hyper: the learning rate, and the scalars of the algorithm and of the optimiser.
        batch: the mini-batch of every run, as the loader makes it.
        map: `torch.func.vmap` for stacked runs, `unmapped` for a single one.
    """
    params, memory = state.params, state.memory
    batch = batch.with_inputs(map(program.prepare)(batch.x, batch.key))._replace(lr=hyper["lr"])
    leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
    with torch.enable_grad():
        objective = map(program.objective, in_dims=(0, 0, 0, 0, BATCH_DIMS))
        losses: Tensor
        losses, buffers, aux = objective(leaves, state.buffers, memory, hyper, batch)
        gradients = gradients_of(losses, list(leaves.values()), program.algorithm)
    with torch.no_grad():
        # As in torch.optim, parameters without a gradient are not updated unless `direction` says otherwise.
        used = {k: g for k, g in zip(params, gradients, strict=True) if g is not None}
        grads = {k: used[k] if k in used else p.new_zeros(()).expand_as(p) for k, p in params.items()}
        projection = map(program.direction, in_dims=(0, 0, 0, 0, 0, BATCH_DIMS))
        direction, buffers = projection(grads, params, buffers, memory, hyper, batch)
        unchanged = direction == UNCHANGED
        own = not is_built_in(program.optimizer)
        update = map(program.optimizer.update) if own else program.optimizer.update
        followed = used if unchanged else direction
        descent, state.optimizer = update(followed, state.optimizer, params, hyper["optimizer"])
        if own:  # it may keep θ or the gradients themselves
            state.optimizer = unshare(state.optimizer, [*params.values(), *followed.values()])
        apply_update(params, descent, hyper["lr"])
        aux = tree.map_tree(torch.detach, aux)
        result = Step(batch, grads, grads if unchanged else direction, params, aux, descent, hyper["lr"])
        memory = map(program.observe, in_dims=(0, 0, STEP_DIMS))(memory, hyper, result)
        if memory != UNCHANGED:
            state.memory = unshare(memory, [*params.values(), *tree.flatten(state.optimizer).values(), *batch])
        state.buffers = {k: b.detach() for k, b in buffers.items()}
    return losses.detach()


def gradients_of(losses: Tensor, leaves: Sequence[Tensor], algorithm: Algorithm) -> Sequence[Tensor | None]:
    """Return the gradients of the losses, None where they do not depend on a parameter."""
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if losses.requires_grad:
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    replaced = type(algorithm).direction is not Algorithm.direction
    require(
        replaced or any(g is not None for g in gradients),
        f"{algorithm.name}.objective does not depend on `params`, so that nothing would be learnt: compute it by "
        "model.outputs(params, x) or model.loss(params, x, y).",
    )
    return gradients


def unmapped(function: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
    """The counterpart of `vmap` for a single run: the function as it is."""
    return function


@dataclass(frozen=True)
class Program:
    """An algorithm's methods as functions of one run's tensors: parameters, buffers, memory, hyperparameters, data."""

    algorithm: Algorithm
    model: Model
    optimizer: Optimizer = PLAIN_SGD
    checked: bool = False
    """Whether methods that are called in every step are checked too."""

    def before_epoch(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, epoch: int, epochs: int
    ) -> tuple[Any, Any]:
        model = self.model.bind(buffers)
        with self._algorithm_of(hyper, "before_epoch", params=params, memory=memory) as algorithm:
            result = algorithm.before_epoch(model, params, memory, epoch, epochs)
        method = f"{algorithm.name}.before_epoch"
        pair = isinstance(result, tuple) and len(result) == 2
        require(pair, f"{method} must return (params, memory); it returned {_describe(result)}.")
        check_params(method, result[0], params)
        self._check_memory("before_epoch", result[1], memory)
        check_shapes(method, result[1], memory)
        return result

    def prepare(self, x: Tensor, key: Tensor) -> Tensor:
        return self.model.bind({}, key=key).prepare(x)

    def objective(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, batch: Batch
    ) -> tuple[Tensor, Params, Memory]:
        model = self.model.bind(buffers, key=batch.key, purpose="objective", statistics="first pass", memory=memory)
        with self._algorithm_of(hyper, "objective", params=params, memory=memory) as algorithm:
            value = algorithm.objective(model, params, memory, batch)
        loss, *aux = value if isinstance(value, tuple) else (value,)
        method = f"{self.algorithm.name}.objective"
        number = isinstance(loss, Tensor) and loss.dim() == 0
        require(number, f"{method} must return one number as a tensor; it returned {_describe(loss)}.")
        named = len(aux) < 2 and all(isinstance(part, Mapping) for part in aux)
        require(named, f"{method} may return (loss, aux) with aux a dict of tensors, such as {{'logits': logits}}.")
        return loss, model.buffers, aux[0] if aux else {}

    def direction(
        self, grads: Params, params: Params, buffers: Params, memory: Memory, hyper: Hyper, batch: Batch
    ) -> tuple[Any, Params]:
        model = self.model.bind(buffers, key=batch.key, purpose="direction", statistics="kept")
        with self._algorithm_of(hyper, "direction", grads=grads, params=params, memory=memory) as algorithm:
            new = algorithm.direction(model, grads, params, memory, batch)
        if new is not grads:
            check_params(f"{self.algorithm.name}.direction", new, grads)
        return changed(new, grads), model.buffers

    def observe(self, memory: Memory, hyper: Hyper, step: Step) -> Any:
        with self._algorithm_of(hyper, "observe", memory=memory) as algorithm:
            new = algorithm.observe(memory, step)
        self._check_memory("observe", new, memory)
        check_shapes(f"{self.algorithm.name}.observe", new, memory)
        return changed(new, memory)

    def consolidate(
        self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, random: Params, data: Batch
    ) -> tuple[Any, Params]:
        model = self.model.bind(buffers, key=random["key"], statistics="kept")
        data = data._replace(**random).with_inputs(model.transform.normalize(data.x))
        with self._algorithm_of(hyper, "consolidate", params=params, memory=memory) as algorithm:
            new = algorithm.consolidate(model, params, memory, data)
        self._check_memory("consolidate", new, memory)
        return new, model.buffers

    def predict(self, params: Params, buffers: Params, memory: Memory, hyper: Hyper, x: Tensor, task: int) -> Tensor:
        model = self.model.bind(buffers, training=False)
        with self._algorithm_of(hyper, "predict", params=params, memory=memory) as algorithm:
            return algorithm.predict(model, params, memory, model.prepare(x), task)

    def _check_memory(self, method: str, new: Any, old: Memory) -> None:
        if new is not old:
            check_memory(new, f"{self.algorithm.name}.{method}")

    @contextmanager
    def _algorithm_of(self, hyper: Hyper, method: str, **given: Tree) -> Iterator[Algorithm]:
        """Yield the algorithm with this run's hyperparameters, now tensors, in its float fields, to call a method.

        Raise an error if the method keeps something on the object, which would be lost, or replaces entries of a dict
        that it is given, which would be kept or lost depending on the executor. Methods of a step are checked in the
        rehearsal only, for that takes up to a tenth of a step.
        """
        bound = self.algorithm
        if hyper["algorithm"]:
            bound = object.__new__(type(bound))  # `copy` would write into the class, whose content names its runs
            bound.__dict__.update(self.algorithm.__dict__ | hyper["algorithm"])
        if method in ("objective", "direction", "observe") and not self.checked:
            yield bound
            return
        attributes, entries = dict(vars(bound)), {name: tree.flatten(part) for name, part in given.items()}
        name = f"{bound.name}.{method}"
        try:
            yield bound
        except RuntimeError as error:
            if "does not require grad" not in str(error) or torch.is_grad_enabled():
                raise
            remedy = "use model.grad(params, x, y) or torch.func.grad, or compute within torch.enable_grad()"
            raise ImpureError(f"{name} is called without autograd: {remedy}.") from error
        cached = {k for k in vars(bound) if isinstance(getattr(type(bound), k, None), cached_property)}
        written = [k for k, v in vars(bound).items() if k not in cached and v is not attributes.get(k, bound)]
        if written:
            raise ImpureError(f"{name} sets self.{', self.'.join(written)}, which is lost: keep it in the memory.")
        for part, before in entries.items():
            now = tree.flatten(given[part])
            replaced = [k for k in now | before if now.get(k) is not before.get(k)]
            if replaced:
                copied = f"return a new dict, such as {{**{part}, '{replaced[0]}': ...}}"
                remedy = copied if method in RETURNS.get(part, ()) else "return aux from objective, and use observe"
                raise ImpureError(f"{name} writes {', '.join(replaced)} into the {part} that it was given: {remedy}.")


class ImpureError(GlocalError):
    """A method of an algorithm that keeps something elsewhere than in what it returns."""


RETURNS = {
    "memory": ("before_epoch", "observe", "consolidate"),
    "params": ("before_epoch",),
    "grads": ("direction",),
}
"""The methods that return each of these."""


def check_params(what: str, new: Any, old: Params) -> None:
    """Raise an error unless an algorithm returned one tensor for every parameter, in its shape."""
    require(isinstance(new, Mapping), f"{what} must return a dict of all parameters; it returned {_describe(new)}.")
    missing, unknown = ", ".join(old.keys() - new.keys()), ", ".join(new.keys() - old.keys())
    require(not missing, f"{what} must return a tensor for every parameter; missing: {missing}.")
    require(not unknown, f"{what} must return tensors for the parameters only; it also returned {unknown}.")
    for name, p in old.items():
        same = isinstance(new[name], Tensor) and new[name].shape == p.shape
        shape = f"a tensor of shape {tuple(p.shape)} for {name}"
        require(same, f"{what} must return {shape}; it returned {_describe(new[name])}.")


def check_shapes(method: str, new: Memory, old: Memory) -> None:
    """Raise an error if a method other than `consolidate` changes the shapes of the memory."""
    if new is old:
        return
    sizes, before = ({k: tuple(v.shape) for k, v in tree.flatten(m).items()} for m in (new, old))
    other = [f"'{k}' from {before.get(k)} to {sizes.get(k)}" for k in before | sizes if before.get(k) != sizes.get(k)]
    changes = f"{method} changes the shapes of the memory: {', '.join(other)}"
    require(not other, f"{changes}. Only consolidate may; give it its final shape in init.")


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def changed(new: Any, old: Any) -> Any:
    """Return `new`, or `UNCHANGED` if it is the very object `old`: updated in place or not at all."""
    return UNCHANGED if new is old else new


def unshare(memory: Tree, reused: Iterable[Tensor | None]) -> Tree:
    """Clone leaves that do not own their memory.

    Such are parts of `reused`, which later steps overwrite, and constants, which `vmap` expands over the runs.
    """
    storages = {t.untyped_storage().data_ptr() for t in reused if t is not None}

    def unshare_leaf(leaf: Tensor) -> Tensor:
        expanded = leaf.dim() > 0 and leaf.shape[0] > 1 and leaf.stride(0) == 0
        return leaf.clone() if expanded or leaf.untyped_storage().data_ptr() in storages else leaf

    return tree.map_tree(unshare_leaf, memory)
