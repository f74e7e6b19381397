"""Record a training: θ and the memory between tasks, after epochs and after steps; or open a run of a store.

runs = record(cohort)                                        # train a cohort and keep what it passed
trace = open_run("runs/runs/0123456789abcdef").trace()       # a stored run with its parameters
retraced = open_run("runs/runs/0123456789abcdef").retrace()  # train a stored run again and record it
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glocal import challenges, tree
from glocal.algorithms import ALGORITHMS
from glocal.algorithms.algorithm import Algorithm, Memory
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Challenge, Data
from glocal.challenges.registry import is_named
from glocal.engine import loop
from glocal.engine.choose import Execution
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loader import Loader, evenly_spaced
from glocal.engine.loop import Progress
from glocal.engine.state import State
from glocal.errors import GlocalError, first_line, require
from glocal.files import user_path
from glocal.lens.training_trace import MAX_EXAMPLES, Checkpoint, TrainingTrace, distance, require_positive
from glocal.networks import NETWORKS
from glocal.networks.model import MakeNetwork, Model, frozen_parameters, share_parameters
from glocal.networks.pretrained import Pretrained
from glocal.optimizers import OPTIMIZERS, PLAIN_SGD, Optimizer
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps import resolve, user_code

MAX_SNAPSHOT_BYTES = 4 << 30
"""Limit on θ and memory of all snapshots of a retraced run."""
LABELS = {"fingerprint": "data", "made": "initial network", "init": "checkpoint"}
"""What errors call settings of a challenge, network or algorithm."""


class Snapshot(NamedTuple):
    """One run at one moment: the number of finished tasks, the step (−1: unknown), θ and the memory."""

    finished: int
    step: int
    checkpoint: Checkpoint
    memory: Memory = {}  # noqa: RUF012 - never written to


@dataclass(frozen=True)
class RecordedRun:
    """A trained run. The end of a task is two snapshots with the same θ: the memory as it was in training, and, with
    one more finished task, as it was after consolidation."""

    trace: TrainingTrace
    algorithm: Algorithm
    model: Model
    snapshots: Sequence[Snapshot]


def snapshots_of(trace: TrainingTrace) -> list[Snapshot]:
    """Return θ_0, θ_1, … of a trace as snapshots."""
    return [Snapshot(t, -1, checkpoint) for t, checkpoint in enumerate(trace.checkpoints)]


def record(
    cohort: Cohort,
    every_epochs: int = 1,
    every_steps: int | None = None,
    *,
    keep_memory: bool = True,
    examples: int = MAX_EXAMPLES,
    progress: Progress | None = None,
) -> list[RecordedRun]:
    """Train a cohort and record every run.

    L_o is computed on at most `examples` training examples of a task. An algorithm's memory is built from all of them,
    so ξ_o includes the difference between the two samples unless `examples` covers the task.

    Args:
        cohort: the runs to train.
        every_epochs: take a snapshot after every so many epochs and after a task's last one; 0: between tasks only.
        every_steps: also take one after every so many steps of an epoch (CPU only; several runs must be vectorizable).
        keep_memory: whether snapshots hold the algorithm's memory, which may be many times larger than θ.
        examples: the largest number of examples per task in the trace.
        progress: receives every task and step, for a progress bar.
    """
    require(every_epochs >= 0, f"every_epochs = {every_epochs} was given; it must be 0 (between tasks only) or more.")
    require_positive(every_steps=every_steps, examples=examples)
    execution: Execution = "auto"
    if every_steps is not None:
        require(cohort.device.type == "cpu", "steps are recorded on a CPU only: choose device 'cpu', or record epochs.")
        execution = "sequential" if len(cohort) == 1 else "vectorised"
    snapshots: list[list[Snapshot]] = [[] for _ in cohort.members]
    checkpoints: list[list[Checkpoint]] = [[] for _ in cohort.members]
    finished = 0

    def keep(state: State, steps_since: int = 0) -> None:
        for run, history in enumerate(snapshots):
            memory = tree.map_tree(torch.clone, tree.select(state.memory, run)) if keep_memory else {}
            snapshot = Snapshot(finished, state.clock + steps_since, copy_checkpoint(state, run), memory)
            if history and history[-1][:2] == snapshot[:2]:
                history.pop()  # the step that ended an epoch
            history.append(snapshot)

    def after_epoch(task: int, epoch: int, state: State, _: Loader) -> None:
        if every_epochs and ((epoch + 1) % every_epochs == 0 or epoch + 1 == cohort.epochs):
            keep(state)

    def after_step(state: State, step: int) -> None:
        if every_steps is not None and step % every_steps == 0:
            keep(state, step)

    on_step = None if every_steps is None else after_step
    try:
        for boundary in loop.train(cohort, None, execution, progress, after_epoch, on_step):
            finished = boundary.finished
            keep(boundary.state)
            for solutions, history in zip(checkpoints, snapshots, strict=True):
                solutions.append(history[-1].checkpoint)
    except Exception as error:
        if isinstance(error, GlocalError) or execution != "vectorised" or checkpoints[0]:
            raise
        reason = first_line(error)
        raise GlocalError(f"these runs cannot be vectorised; record steps one run at a time: {reason}") from error
    model = cohort.model(vectorised=False)
    return [
        RecordedRun(_trace_member(cohort, run, checkpoints[run], examples), member.algorithm, model, snapshots[run])
        for run, member in enumerate(cohort.members)
    ]


def copy_checkpoint(state: State, run: int) -> Checkpoint:
    """Copy θ and the buffers of one run of a cohort."""
    return Checkpoint(*(tree.map_tree(torch.clone, tree.select(part, run)) for part in (state.params, state.buffers)))


def _trace_member(cohort: Cohort, run: int, checkpoints: Sequence[Checkpoint], examples: int) -> TrainingTrace:
    """Return the trace of one run with at most `examples` evenly spaced examples per task."""
    challenge, member = cohort.challenge, cohort.members[run]

    def subset(data: Data) -> Data:
        x, y = evenly_spaced(data, examples)
        return Data(cohort.transform.normalize(x.to(cohort.device)), y.to(cohort.device))

    tasks = [challenge.task(t, member.seed) for t in range(challenge.tasks)]
    train, test = [subset(task.train) for task in tasks], [subset(task.test) for task in tasks]
    module = share_parameters(cohort.shared_network)
    return TrainingTrace(module, cohort.loss, train, checkpoints, test)


class Retraced(NamedTuple):
    """A stored run, trained again.

    `deviation` is the largest relative difference between ‖θ_t − θ_0‖ of the two trainings. It is 0 on the machine of
    the stored run; other machines, thread counts and cohort sizes round differently, and large learning rates amplify
    this. `task_sizes` are the numbers of training examples, of which the trace may hold fewer.
    """

    run: RecordedRun
    deviation: float
    task_sizes: list[int]


@dataclass(frozen=True)
class StoredRun:
    """A run of a store and the cohort of one that trains it.

    `missing` asks for the run's algorithm, if it is not built in and was not given; `trace` does without.
    """

    run: Run
    cohort: Cohort
    missing: str = ""

    def trace(self, examples: int = MAX_EXAMPLES) -> TrainingTrace:
        """Return the trace of a run that was trained with `keep_parameters`."""
        require_positive(examples=examples)
        cohort, run = self.cohort, self.run
        message = f"{run.algorithm} predicts with a task's number and its memory, which a stored run does not keep."
        require(not isinstance(cohort.algorithm, Partition), message)
        network = cohort.shared_network
        learned = {k for k, p in network.named_parameters() if p.requires_grad}
        frozen = {k: t.to(cohort.device) for k, t in run.state(0).items() if k in frozen_parameters(network)}
        checkpoints = []
        for task in range(run.tasks + 1):
            state = {k: t.to(cohort.device) for k, t in run.state(task).items() if k not in frozen}
            require(learned <= state.keys(), f"the run '{run.path}' lacks parameters of its network: train it again.")
            params = {k: t for k, t in state.items() if k in learned}
            checkpoints.append(Checkpoint(params, {k: t for k, t in state.items() if k not in learned} | frozen))
        return _trace_member(cohort, 0, checkpoints, examples)

    def retrace(
        self,
        every_steps: int | None = None,
        examples: int = MAX_EXAMPLES,
        progress: Callable[[str, int, int], Progress] | None = None,
    ) -> Retraced:
        """Train the run again; it need not have kept its parameters.

        Args:
            every_steps: also take snapshots after every so many steps of an epoch (CPU only), not only after epochs.
            examples: the largest number of examples per task in the trace.
            progress: called with the algorithm's name, the number of tasks and of all steps; returns the progress bar.
        """
        require_positive(examples=examples, every_steps=every_steps)
        require(not self.missing, self.missing)
        cohort, challenge = self.cohort, self.cohort.challenge
        has_init = isinstance(cohort.make_network, Pretrained) or "init" not in self.run.config["network"]
        require(has_init, "the run started from a checkpoint: give its file as init (--init FILE) to train it again.")
        require(cohort.patience is None, "the run stopped early: its epochs include some that it did not keep.")
        require(challenge.tasks > 1, "the run has learned a single task: there is no forgetting to measure.")
        sizes = [challenge.task(t, self.run.seed).train.y.shape[0] for t in range(challenge.tasks)]
        epoch_steps = [math.ceil(size / cohort.batch_size) for size in sizes]
        count = 1 + challenge.tasks * (cohort.epochs + 1)  # every epoch, and every task once more
        if every_steps is not None:
            count += cohort.epochs * sum(n // every_steps for n in epoch_steps)
        size = sum(tree.nbytes(part) for part in cohort.initial()) + self.run.info["cost"]["memory_bytes"]
        require(
            count * size <= MAX_SNAPSHOT_BYTES,
            f"{count:,} snapshots of θ and memory take {count * size / 1e9:.2g} GB; at most "
            f"{MAX_SNAPSHOT_BYTES / 1e9:.2g} GB are allowed. Record fewer steps, or epochs only.",
        )
        bar = progress and progress(self.run.algorithm, challenge.tasks, cohort.epochs * sum(epoch_steps))
        (recorded,) = record(cohort, every_steps=every_steps, examples=examples, progress=bar)
        start, *solutions = recorded.trace.checkpoints
        current = torch.stack([distance(checkpoint, start) for checkpoint in solutions]).cpu()
        stored = torch.as_tensor(self.run.arrays["distance_from_init"]).double()
        relative = ((current - stored).abs() / stored.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf)
        both_diverged = ~current.isfinite() & ~stored.isfinite()
        return Retraced(recorded, float(relative.masked_fill(both_diverged, 0.0).max()), sizes)


def open_run(
    path: str | Path,
    *,
    data: str | Path | None = None,
    challenge: str | Challenge | None = None,
    network: str | MakeNetwork | None = None,
    algorithm: str | Algorithm | type[Algorithm] | None = None,
    optimizer: str | Optimizer | type[Optimizer] | None = None,
    init: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> StoredRun:
    """Open the run in the folder STORE/runs/HASH.

    Args:
        path: the folder of the run.
        data: a folder with data sets.
        challenge: the run's challenge, if it is not built in: path.py:function or the `Challenge` that was trained.
        network: the same for its network: path.py:function or the function.
        algorithm: the same for its algorithm: path.py:Name, the class or an instance. `trace` needs it only if it
            changes the network.
        optimizer: the same for its optimiser, to train the run again.
        init: the file that the run started from, to train it again.
        device: where to compute.
    """
    path = user_path(path)
    in_store = path.resolve().parent.name == "runs" and (path / "config.json").exists()
    require(in_store, f"'{path}' is not a run of a store: give STORE/runs/HASH.")
    run = Store(path.resolve().parent.parent).run(path.resolve().name)
    config = run.config
    parts = {"challenge": challenge, "network": network, "algorithm": algorithm, "optimizer": optimizer}
    missing = [kind for kind, part in parts.items() if part is None and not is_built_in(kind, config)]
    for_training = {"optimizer", "algorithm"} if run.info.get("plain_network") is True else {"optimizer"}
    optional = for_training & {*missing}
    request = _request(missing, optional, config) if missing else ""
    require({*missing} == optional, request)
    share = config["challenge"].get("validation")
    measured: Any = {
        "validation": None if share == "own" else share,
        "evaluate": config["challenge"].get("evaluate", "all"),
    }
    if challenge is None:
        name, options = _part("challenge", None, config), config["challenge"]["options"]
        resolved = resolve.challenge(challenges.make(name, run.tasks, data, **options), **measured)
    else:
        resolved = resolve.challenge(challenge, run.tasks, data, run.setting, **measured)
    make = resolve.network(_part("network", network, config), resolved.value, init)
    # The parameters that a run has kept include its initialisation: its file is needed only to train again.
    expected = {**config, "network": {k: v for k, v in config["network"].items() if k != "init" or init is not None}}
    options = asdict(algorithm) if isinstance(algorithm, Algorithm) else config["algorithm"]["options"]
    trained = resolve.Resolved(Algorithm(), config["algorithm"])
    stepped = resolve.Resolved(PLAIN_SGD, config.get("optimizer", {}))
    if "algorithm" not in missing:
        trained = resolve.algorithm(_part("algorithm", algorithm, config), options)
    plain = "the run was trained with plain SGD: leave the optimizer out."
    require(optimizer is None or "optimizer" in config, plain)
    if "optimizer" in config and "optimizer" not in missing:
        settings = asdict(optimizer) if isinstance(optimizer, Optimizer) else config["optimizer"]["options"]
        stepped = resolve.optimizer(_part("optimizer", optimizer, config), settings)
    for kind, part in (("challenge", resolved), ("network", make), ("algorithm", trained), ("optimizer", stepped)):
        _require_same(kind, part.config, expected.get(kind, {}))
    member = Member(run.seed, run.lr, trained.value, stepped.value)
    shared: Any = {
        name: config.get(name) for name in ("epochs", "batch_size", "train_eval", "precision", "horizon", "patience")
    }
    cohort = Cohort(resolved.value, make.value, (member,), device=torch.device(device), **shared)
    return StoredRun(run, cohort, request)


def _part(kind: str, value: Any, config: Mapping[str, dict[str, str]]) -> Any:
    """Return what to resolve as a part of a stored run: what is given, or a built-in name.

    A file must have the hash of the run's. An object whose file has this hash is taken from the file.

    A store may be a stranger's: no code is loaded from a file because a configuration names it.
    """
    if value is not None and not isinstance(value, str):
        spec = _file_spec(type(value) if isinstance(value, Algorithm | Optimizer) else value)
        return spec if spec and user_code.file_hash(spec, kind) == config[kind].get("source") else value
    if value is not None:
        if user_code.is_file_spec(value):
            _require_same(kind, {**config[kind], "source": user_code.file_hash(value, kind)}, config[kind])
        return value
    return str(config[kind]["name"])


def is_built_in(what: str, config: Mapping[str, dict[str, Any]]) -> bool:
    """Return whether the challenge, network, algorithm or optimiser of a run is one of glocal's."""
    if what == "challenge":
        return is_named(config[what])
    if what not in config:  # plain SGD
        return True
    built_in: dict[str, Collection[str]] = {"network": NETWORKS, "algorithm": ALGORITHMS, "optimizer": OPTIMIZERS}
    return "source" not in config[what] and str(config[what]["name"]) in built_in[what]


def _request(missing: Sequence[str], optional: Collection[str], config: Mapping[str, dict[str, Any]]) -> str:
    """Return the sentence that asks for parts of a run that are not built in; `optional` ones to train it again."""
    names = [f"{kind} '{config[kind]['name']}'" for kind in missing]
    flags = [
        f"--{kind} PATH.py:{'FUNCTION' if kind == 'challenge' else config[kind]['name']}"
        f"{' (only to train the run again)' if kind in optional else ''}"
        for kind in missing
    ]
    return (
        f"the run's {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not built in: give {' '.join(flags)}; "
        f"in Python {', '.join(f'{kind}=' for kind in missing)} with the path or the object."
    )


def _file_spec(target: Any) -> str | None:
    """Return path.py:Name of a class or function at the top level of a file, or None."""
    name = getattr(target, "__qualname__", "")
    try:
        path = inspect.getsourcefile(target)
    except (TypeError, OSError):
        return None
    return f"{path}:{name}" if path and Path(path).is_file() and name.isidentifier() else None


def _require_same(kind: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise an error that says what differs unless the challenge, network or algorithm is the one of the run."""
    flat = [tree.flatten(part) for part in (old, new)]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if flat[0].get(name) != flat[1].get(name)]
    if not names:
        return
    advice = f"Give the {kind} that was trained, or train the run again."
    if "source" in names and "source" not in old:
        cause = f"the run has the built-in '{old['name']}'"
        advice = f"Leave the {kind} out."
    elif "source" in names and "source" in new:
        cause = f"its code has changed since the run was trained (hash {old['source']} then, {new['source']} now)"
        advice = (
            f"{advice} A file counts as a whole. If the {kind} was given as a Python object, its code may be the same: "
            "give the object again, to glocal.lens.record.open_run."
        )
    else:
        labels = [LABELS.get(name, name.removeprefix("options/")) for name in names]
        values = [[part.get(name, "absent") for part in flat] for name in names]
        cause = "; ".join(f"its {label} is {b}, in the run {a}" for label, (a, b) in zip(labels, values, strict=True))
    raise GlocalError(f"this {kind} is not the one of the run: {cause}. {advice}")
