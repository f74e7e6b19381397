"""Runs of a store: one that kept its parameters is a subject, and any of them can be trained again and watched."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from glocal import challenges
from glocal.algorithms.partition import Partition
from glocal.engine.cohort import Cohort, Member, seeded_network
from glocal.errors import GlocalError, require
from glocal.lens.subject import CHUNK, Point, Subject, of_run, some_examples
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps import resolve


def of_stored_run(
    path: str | Path,
    *,
    data: str | Path | None = None,
    challenge: str | None = None,
    network: str | None = None,
    algorithm: str | None = None,
    examples: int = CHUNK,
    device: torch.device | str = "cpu",
) -> Subject:
    """The run in the folder STORE/runs/HASH, at its solutions. A challenge, network or algorithm of one's own is known
    by its file alone: path.py:Name. It must be the one that was trained."""
    some_examples(examples)
    run, cohort = trained(path, data, challenge, network, algorithm, device)
    if isinstance(cohort.algorithm, Partition):
        raise GlocalError(f"{run.algorithm} answers by a task's number and its memory, which a run does not keep.")
    return of_run(cohort, 0, _points(run, cohort), examples)


def trained(
    path: str | Path,
    data: str | Path | None = None,
    challenge: str | None = None,
    network: str | None = None,
    algorithm: str | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Run, Cohort]:
    """The run, and the cohort of one that it is trained as."""
    path = Path(path)
    require((path / "config.json").exists(), f"'{path}' is no run of a store: give STORE/runs/HASH.")
    run = Store(path.resolve().parent.parent).run(path.resolve().name)
    kept = run.config
    named = kept["challenge"]["name"]
    if challenge is None:
        made = challenges.make(_named("challenge", named, kept), run.tasks, data, **kept["challenge"]["options"])
        met = resolve.challenge(made)
    else:
        met = resolve.challenge(challenge, run.tasks, data, run.setting)
    used = resolve.network(network or _named("network", kept["network"]["name"], kept), met.value)
    label = algorithm or _named("algorithm", kept["algorithm"]["name"], kept)
    learnt = resolve.algorithm(label, kept["algorithm"]["options"])
    for what, found in (("challenge", met), ("network", used), ("algorithm", learnt)):
        same = found.config == kept[what]
        require(same, f"this {what} is another one than that of the run '{path}': its data, options or code differ.")
    member = Member(run.seed, run.lr, learnt.value)
    how = kept["epochs"], kept["batch_size"], kept["train_eval"], torch.device(device), kept["precision"]
    return run, Cohort(met.value, used.value, (member,), *how)


def _named(what: str, name: str, config: object) -> str:
    """A name that is built in; what users bring has a source."""
    assert isinstance(config, dict)
    own = "source" in config[what] or (what == "challenge" and name not in {c.name for c in challenges.catalogue()})
    if own:
        raise GlocalError(f"the run's {what} '{name}' is one of your own: give --{what} path.py:Name.")
    return name


def _points(run: Run, cohort: Cohort) -> list[Point]:
    make = cohort.algorithm.network(cohort.make_network, cohort.challenge.tasks)
    names = _learnt(seeded_network(make, cohort.challenge, run.seed))
    points = []
    for task in range(run.tasks + 1):
        state = {k: t.to(cohort.device) for k, t in run.state(task).items()}
        require(names <= state.keys(), f"the run '{run.path}' has not kept the whole network: train it again.")
        rest = {k: t for k, t in state.items() if k not in names}
        points.append(Point({k: state[k] for k in state if k in names}, rest))
    return points


def _learnt(network: nn.Module) -> set[str]:
    return {k for k, p in network.named_parameters() if p.requires_grad}
