"""Go on with stored runs: each run on a longer sequence starts from the stored run that has learnt its first tasks.

Everything random is a function of seed, task, epoch and step, so a run that goes on computes what it would have
computed on the longer sequence from the start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glocal import files, tree
from glocal.challenges.challenge import Challenge, fingerprint
from glocal.engine.cohort import Cohort
from glocal.engine.config import RunConfig
from glocal.engine.evaluate import Record
from glocal.engine.loop import Snapshot
from glocal.engine.state import State
from glocal.errors import GlocalError, require
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.tree import Params


class Parents:
    """The runs of a store, to go on from with more tasks of a challenge."""

    def __init__(self, store: Store, challenge: Challenge, kept: frozenset[str], children: Store) -> None:
        self.store, self.challenge, self.children = store, challenge, children
        self.kept = {"state"} | (kept & {"parameters"})  # what a parent must have
        self.runs = [(_shared_config(run.config), run) for run in store.runs()]
        self._fingerprints = cache(lambda tasks, seed: task_fingerprints(challenge.first(tasks), seed))

    def find(self, config: RunConfig) -> tuple[RunConfig, Run]:
        """Return the configuration of a run that goes on, and the longest run that it can go on from.

        A child that is finished already comes first, so that it is not trained again.
        """
        shared = _shared_config(config.as_dict())
        runs = [run for other, run in self.runs if other == shared and run.tasks < config.challenge["tasks"]]
        runs = [run for run in runs if self.store.finished(run.hash, self.kept)]
        pairs = [(replace(config, parent={"run": run.hash, "after": run.tasks}), run) for run in runs]
        for child, run in sorted(pairs, key=lambda p: (not self.children.finished(p[0].hash), -p[1].tasks)):
            if self.children.finished(child.hash) or self._changed_task(run) is None:
                spans = config.optimizer is not None and config.optimizer["options"]["span"] == "sequence"
                old, new = _horizon(run.config), _horizon(config.as_dict())
                remedy = f"of {old} tasks, not {new}: train it again with horizon={new}"
                require(not spans or old == new, f"the schedule of run {run.hash} spans a sequence {remedy}.")
                return child, run
        label = f"{config.algorithm['name']} at lr {config.lr:g} and seed {config.seed}"
        raise GlocalError(f"'{self.store.path}' has no run of {label} to go on from: {self._reason(config, runs)}.")

    def _changed_task(self, run: Run) -> int | None:
        """Return the number of the first task that is not the one that the run was trained on."""
        fingerprints = self._fingerprints(run.tasks, run.seed if self.challenge.seeded else 0)
        changed = (fingerprints != _read_state(run, "task_fingerprints")["task_fingerprints"]).any(1)
        return int(changed.int().argmax()) + 1 if changed.any() else None

    def _reason(self, config: RunConfig, runs: Sequence[Run]) -> str:
        if runs:
            task, challenge = self._changed_task(runs[0]), self.challenge.name
            return f"task {task} of {challenge} has other data than when run {runs[0].hash} was trained"
        wanted, tasks = tree.flatten(json.loads(_shared_config(config.as_dict()))), config.challenge["tasks"]
        differences = []
        for shared, run in self.runs:
            flat = tree.flatten(json.loads(shared))
            differences.append((sorted(k for k in wanted.keys() | flat.keys() if wanted.get(k) != flat.get(k)), run))
        if not differences:
            return "it has no finished run"
        keys, run = min(differences, key=lambda pair: (len(pair[0]), pair[1].tasks))
        if "challenge/outputs" in keys:
            outputs = run.config["challenge"]["outputs"], config.challenge["outputs"]
            return f"run {run.hash} has {outputs[0]} outputs; train it with all {outputs[1]} from the start"
        if keys:
            return f"the most similar one, run {run.hash}, differs in {', '.join(keys)}"
        if run.tasks >= tasks:
            return f"run {run.hash} has {run.tasks} tasks already; give more tasks than that"
        lacking = [name for name in sorted(self.kept) if not self.store.finished(run.hash, {name})]
        flags = " and ".join(f"--keep-{name}" for name in lacking)
        return f"run {run.hash} has not kept its {' and '.join(lacking)}; repeat its command with {flags}"


def task_fingerprints(challenge: Challenge, seed: int) -> Tensor:
    """Return the SHA-256 of the data of every task, (tasks, 32) bytes."""
    texts = [fingerprint([challenge.task(task, seed)]).removeprefix("sha256:") for task in range(challenge.tasks)]
    return torch.tensor([list(bytes.fromhex(text)) for text in texts], dtype=torch.uint8)


def cohort_after(cohort: Cohort, parents: Sequence[Run]) -> Cohort:
    """Return a cohort that goes on from other runs.

    If these were trained for another number of tasks, its algorithm must not use that number: it is set to 0.
    """
    return cohort if all(_horizon(r.config) == cohort.planned_tasks for r in parents) else replace(cohort, horizon=0)


def begin_after(cohort: Cohort, parents: Sequence[Run]) -> Snapshot:
    """Return the snapshot at which a cohort goes on: that of the end of each run's parent."""
    states = [_read_state(run) for run in parents]
    params, buffers = cohort.initial()
    optimizer = cohort.initial_optimizer(params)
    expected = tree.flatten({"params": params, "buffers": buffers, "optimizer": optimizer})
    for run, state in zip(parents, states, strict=True):
        shapes = {k: t.shape for k, t in state.items() if k.startswith("params/")}
        fits = shapes == {k: t.shape[1:] for k, t in expected.items() if k.startswith("params/")}
        remedy = f"train it again with horizon={cohort.challenge.tasks}"
        message = f"the network of {cohort.algorithm.name} depends on the number of tasks, and run {run.hash} was"
        require(fits, f"{message} trained for {_horizon(run.config)}: {remedy}.")

    def stacked(name: str) -> Tensor:
        # A cohort's state has velocities, and frozen parameters, only if some of its runs need their own.
        tensors = [state[name] if name in state else expected[name][i].cpu() for i, state in enumerate(states)]
        return torch.stack(tensors).to(cohort.device)

    names = [*expected, *(name for name in states[0] if name.startswith("memory/")), "diverged"]
    parts = tree.unflatten({name: stacked(name) for name in names})
    arrays = {k: torch.stack([torch.as_tensor(run.arrays[k]) for run in parents]) for k in parents[0].arrays}
    costs = [run.info["cost"] for run in parents]
    seconds, peak = sum(cost["seconds"] for cost in costs), max(cost["peak_bytes"] for cost in costs)
    record = Record(arrays, seconds=seconds, peak_bytes=peak, executor=costs[0]["executor"])
    return Snapshot(parents[0].tasks, State.from_tree(parts, parents[0].info["steps"]), record)


def parameters_after(task: int, parents: Sequence[Run], like: State) -> tuple[Params, Params]:
    """Return the parameters and buffers that parents have kept of one task, stacked."""
    states = [run.state(task) for run in parents]
    stacked = {k: torch.stack([state[k] for state in states]) for k in (*like.params, *like.buffers)}
    return {k: stacked[k] for k in like.params}, {k: stacked[k] for k in like.buffers}


def parent_note(parent: Run) -> str:
    """Say in a run's notes what it goes on from."""
    after = f"goes on from run {parent.hash}, which learned {parent.tasks} task{'s' * (parent.tasks > 1)}"
    return f"{after}; networks before its last are not measured on task {parent.tasks + 1} and later ones"


def _horizon(config: Mapping[str, Any]) -> int:
    """Return the number of tasks that are planned in all."""
    return int(config.get("horizon", config["challenge"]["tasks"]))


def _shared_config(config: Mapping[str, Any]) -> str:
    """Return what a run has in common with those that can go on from it, apart from the data of its tasks."""
    challenge = {k: v for k, v in config["challenge"].items() if k not in ("tasks", "fingerprint", "options")}
    rest = {k: v for k, v in config.items() if k not in ("horizon", "parent")}
    return json.dumps(rest | {"challenge": challenge}, sort_keys=True)


def _read_state(run: Run, prefix: str = "") -> Params:
    assert run.path is not None
    path = run.path / "state.safetensors"
    with files.report_damage(path, "Delete the run's folder and repeat its command with keep_state."):
        return files.read_tensors(path, prefix)[0]
