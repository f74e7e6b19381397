"""The store: one directory per finished run, named by the hash of its configuration.

    STORE/runs/HASH/       config.json, info.json, arrays.safetensors and, if asked for, parameters.safetensors
                           (θ_0 … θ_T) and state.safetensors (the last snapshot, to go on with more tasks)
    STORE/cohorts/HASH/    a cohort in training: its members, and one directory per attempt to train them, with a lease
                           (`glocal.store.lease`) and the checkpoint of the last task boundary
    STORE/damaged/         damaged runs and checkpoints that were trained again; nothing reads or removes them
    STORE/plans/           sweeps for `glocal work` to train (`glocal.sweeps.plan`)
    STORE/index.safetensors  what runs/ holds, to read it faster (`glocal.store.index`)

A cohort's directory is removed when all its runs are written. One that no process holds was interrupted; the next
process that needs its runs resumes it from the last attempt's checkpoint. An attempt writes to its own directory only.
Of two processes that finish the same run, the first one's is kept.

Every file has a checksum, which is checked when it is read: tensors in the file itself (`glocal.files`), config.json
and info.json in the metadata of arrays.safetensors. Files of earlier versions have none.

torch is imported only where tensors are: finished runs are read without it.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glocal import files, tree
from glocal.engine.config import ARRAYS, RunConfig
from glocal.errors import GlocalError, GlocalWarning, require
from glocal.store import index
from glocal.store.lease import EXPIRY_SECONDS, NO_ATTEMPT, Lease, LeaseObserver, Seen, attempt_path, was_released
from glocal.store.run import Run, Runs, check_run

if TYPE_CHECKING:
    import torch

    from glocal.engine.loop import Snapshot
    from glocal.tree import Params

MARKER = "glocal-store.json"
FORMAT = 1
RECORD_SCALARS = ("seconds", "epoch_step_seconds", "peak_bytes", "executor", "notes")
"""Fields of a `Record` that are no arrays; a checkpoint stores them as JSON."""


class Store:
    """A folder of runs, which several processes and machines can use at the same time."""

    def __init__(self, path: str | Path, lease_seconds: float = EXPIRY_SECONDS) -> None:
        self.path, self.lease_seconds, self._watch = files.user_path(path), lease_seconds, LeaseObserver()
        self.runs_path = self.path / "runs"
        self.cohorts_path = self.path / "cohorts"

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open an existing store."""
        store = cls(path)
        require(store.path.exists(), f"there is no store at '{path}'. `glocal sweep ... --store {path}` creates one.")
        store._check()
        return store

    @classmethod
    def create(cls, path: str | Path) -> Store:
        """Open a store, or create it in an empty or new folder."""
        store = cls(path)
        with files.report_os_errors("read the folder", store.path):
            names = set(os.listdir(store.path)) if store.path.is_dir() else set()
        names -= {name for name in names if name.startswith(f".{MARKER}")}  # a marker being written
        marker_lost = names >= {"runs", "cohorts"} and MARKER not in names
        if store.path.is_file() or (names and not marker_lost):
            store._check()
        with files.report_os_errors("create the store", store.path):
            store.path.mkdir(parents=True, exist_ok=True)
            # The marker comes first: another process that creates the same store must not find the folders without it.
            new = not (store.path / MARKER).exists()
            if new:
                files.write_json(store.path / MARKER, {"format": FORMAT})
            for folder in (store.runs_path, store.cohorts_path):
                folder.mkdir(exist_ok=True)
            for folder in (store.path, store.runs_path, store.cohorts_path, store.path / "plans"):
                files.remove_leftovers(folder)
            for folder in (store.path, store.path.parent) if new else ():
                files.sync_folder(folder)
        return store

    def _check(self) -> None:
        if not (self.path / MARKER).exists():
            reason = "it is a file" if self.path.is_file() else f"it has no {MARKER}"
            raise GlocalError(f"'{self.path}' is not a glocal store: {reason}. Give another folder.")
        with files.report_damage(self.path / MARKER, "Give another folder."):
            version = files.read_json(self.path / MARKER)["format"]
        require(version == FORMAT, f"the store '{self.path}' has format {version}; this glocal reads format {FORMAT}.")

    def finished(self, hash: str, kept: Collection[str] = ()) -> bool:
        """Return whether the store holds a run, with the files that are to be kept: 'parameters', 'state'."""
        run = self.runs_path / hash
        return run.is_dir() and all((run / f"{name}.safetensors").exists() for name in kept)

    def missing(self, hashes: Collection[str], kept: Collection[str] = ()) -> set[str]:
        """Return those of the runs that are not `finished`."""
        stored = set(self.names())
        return {hash for hash in hashes if hash not in stored or (kept and not self.finished(hash, kept))}

    def run(self, hash: str) -> Run:
        """Read one run."""
        path = self.runs_path / hash
        with files.report_damage(path, "The run's command trains it again."):
            arrays, metadata = files.read_arrays(path / "arrays.safetensors")
            config, info = (files.read_json(path / name, metadata.get(name)) for name in ("config.json", "info.json"))
            run = Run(config, arrays, info, path)
            expected = RunConfig(**config).hash
            if missing := set(ARRAYS) - run.arrays.keys():
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            if expected != hash:
                raise ValueError(f"its configuration is that of {expected}")
            check_run(run)
        return run

    def runs(self) -> list[Run]:
        """Read all finished runs; those that cannot be read are left out, with a warning."""
        results = self.read(self.names())
        errors = [str(error) for error in results.values() if isinstance(error, GlocalError)]
        if errors:
            verify = f" `glocal verify {self.path}` lists them." if len(errors) > 1 else ""
            message = f"{len(errors)} of {len(results)} runs in '{self.path}' left out: {errors[0]}{verify}"
            warnings.warn(message, GlocalWarning, stacklevel=2)
        return [run for run in results.values() if isinstance(run, Run)]

    def read(self, names: Collection[str]) -> dict[str, Run | GlocalError]:
        """Read runs; many of them from the index, if it holds them as they are. Return why a run cannot be read."""
        indexed = index.read(self.path) if len(names) >= index.MIN_RUNS else {}
        results: dict[str, Run | GlocalError] = {}
        unindexed: dict[str, index.Entry] = {}
        for name in names:
            stamp, entry = index.stamp(f"{self.runs_path}/{name}"), indexed.get(name)
            if entry is not None and entry.stamp == stamp:
                results[name] = entry.run
                continue
            try:
                results[name] = run = files.read_twice(self.run, name)
                if stamp is not None:
                    unindexed[name] = index.Entry(stamp, run)
            except GlocalError as error:
                results[name] = error
        if len(unindexed) >= index.MIN_RUNS:
            stored = set(self.names())
            index.write(self.path, {name: entry for name, entry in (indexed | unindexed).items() if name in stored})
        return results

    def names(self) -> list[str]:
        """Return the names of all finished runs."""
        with files.report_os_errors("read the folder", self.runs_path, "Check its permissions and its disk."):
            listed = os.listdir(self.runs_path) if self.runs_path.exists() else []
        return sorted(name for name in listed if not name.startswith("."))

    def verify(self) -> Iterator[Verified]:
        """Read every file of every run and every cohort in training, and check it against its checksum."""
        for folder in [*map(self.runs_path.joinpath, self.names()), *sorted(self.cohorts_path.glob("[!.]*"))]:
            error, unchecked, tensors = None, [], sorted(folder.rglob("*.safetensors"))
            try:
                for path in tensors:
                    with files.report_damage(path, "Delete it and repeat its command."):
                        files.read_tensors(path)
                        if not files.has_checksums(path):
                            unchecked.append(path.name)
                if folder.parent == self.runs_path:
                    self.run(folder.name)
                elif (folder / "members.json").exists():
                    with files.report_damage(folder, "Repeat its command."):
                        _read_members(folder)
            except GlocalError as raised:
                error = str(raised)
            if folder.exists():  # unless a process has finished it at this moment
                yield Verified(folder, error, unchecked)

    def write(
        self, config: RunConfig, arrays: Params, info: Mapping[str, Any], kept: Mapping[str, Params | None]
    ) -> None:
        """Write a finished run, unless another process has; `kept` are its parameters and state, or None."""
        path = self.runs_path / config.hash
        tensors_by_name = {name: tensors for name, tensors in kept.items() if tensors is not None}
        if self.finished(config.hash, tensors_by_name):
            return
        existing = path.stat() if path.exists() else None
        if self._holds(config.hash, arrays):  # without all files that are to be kept
            with files.report_os_errors("write to the store", self.path):
                for name, tensors in tensors_by_name.items():
                    files.write_tensors(path / f"{name}.safetensors", tensors)
            return
        with files.report_os_errors("write to the store", self.path):
            try:
                with files.new_directory(path, existing) as part:
                    contents = {"config.json": config.as_dict(), "info.json": dict(info)}
                    checksums = {name: files.write_json(part / name, value) for name, value in contents.items()}
                    files.write_tensors(part / "arrays.safetensors", arrays, checksums)
                    for name, tensors in tensors_by_name.items():
                        files.write_tensors(part / f"{name}.safetensors", tensors)
            except FileExistsError:  # another process was faster; its run may lack what is to be kept
                self.write(config, arrays, info, kept)

    def _holds(self, hash: str, arrays: Params) -> bool:
        """Return whether the store holds an undamaged run with these measurements."""
        try:
            stored = self.run(hash).arrays
        except GlocalError:
            return False
        return all(np.array_equal(stored[k], array.numpy(), equal_nan=True) for k, array in arrays.items())

    def cohorts(self) -> list[StoredCohort]:
        """Return the cohorts that are not finished: those in training and those that were interrupted."""
        cohorts = []
        for path in sorted(path.parent for path in self.cohorts_path.glob("[!.]*/members.json")):
            try:
                with files.report_damage(path, "Its runs start again."), suppress(FileNotFoundError):
                    members, seen = _read_members(path), self._watch.look(path)
                    cohorts.append(StoredCohort(path, members["runs"], members["parameters"], seen))
            except files.DamagedError as error:
                warnings.warn(str(error), GlocalWarning, stacklevel=2)
        return cohorts

    def remove_finished(self, hashes: Collection[str], kept: Collection[str]) -> None:
        """Remove cohorts of these runs that are finished: their process was killed before it could."""
        for cohort in self.cohorts():
            needed = required_files(kept, cohort.parameters)
            complete = all(hash in hashes and self.finished(hash, needed) for hash in cohort.hashes)
            if complete and (claim := self.take(cohort)) is not None:
                claim.finish()

    def claim(self, hashes: Sequence[str], parameters: bool) -> Claim | None:
        """Claim a new cohort of runs, or return None if another process was faster."""
        members = {"runs": list(hashes), "parameters": parameters}
        path = self.cohorts_path / files.short_hash(json.dumps(members).encode())
        with files.report_os_errors("write to the store", self.path):
            path.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another process has finished the cohort in this moment
                files.write_json(path / "members.json", members)
        return self.take(StoredCohort(path, list(hashes), parameters))

    def take(self, cohort: StoredCohort) -> Claim | None:
        """Claim a cohort, or return None if another process holds it or has finished it."""
        with files.report_os_errors("resume the cohort", cohort.path):
            lease = Lease.take(cohort.path, self._watch, self.lease_seconds)
        return None if lease is None else Claim(cohort.path, cohort.hashes, cohort.parameters, lease)


def required_files(kept: Collection[str], parameters: bool) -> frozenset[str]:
    """Return the optional files that the runs of a cohort must have: `kept`, and parameters if it keeps them."""
    return frozenset(kept) | ({"parameters"} if parameters else set())


def load(store: str | Path) -> Runs:
    """Return all finished runs of a store, by algorithm, learning rate and seed."""
    return Runs(sorted(Store.open(store).runs(), key=lambda run: (run.algorithm, run.lr, run.seed)))


class Verified(NamedTuple):
    """A run or a cohort: why it cannot be used, or None, and which of its files have no checksums."""

    path: Path
    error: str | None
    unchecked: list[str]


def _read_members(path: Path) -> dict[str, Any]:
    """Read which runs a cohort has; they name it. Older stores have names of the runs alone."""
    members: dict[str, Any] = files.read_json(path / "members.json")
    named = {k: members[k] for k in ("runs", "parameters")}
    texts = json.dumps(named), " ".join(members["runs"])
    if path.name not in [files.short_hash(text.encode()) for text in texts]:
        raise ValueError("members.json does not agree with the folder's name")
    return members


@dataclass(frozen=True)
class StoredCohort:
    """A cohort that is not finished: its runs, whether their parameters are kept, and the last attempt to train it."""

    path: Path
    hashes: list[str]
    parameters: bool
    last: Seen = NO_ATTEMPT

    @property
    def failed(self) -> str | None:
        """The message of the error that ended the last attempt, or None."""
        return None if self.last.held else self.last.about.get("failed")


@dataclass
class Claim:
    """A cohort that this process trains until it is finished or left."""

    path: Path
    hashes: list[str]
    parameters: bool
    lease: Lease
    kept: list[str] = field(default_factory=list)
    """The files with θ_0, θ_1, ... and the buffers, of this attempt and of those that it goes on from."""

    def killed_attempts(self) -> int:
        """Return how many attempts just before this one were killed before their first checkpoint."""
        count = 0
        for number in range(self.lease.number - 1, 0, -1):
            attempt = attempt_path(self.path, number)
            if was_released(attempt) or (attempt / "checkpoint.safetensors").exists():
                break
            count += 1
        return count

    def leave(self, **about: Any) -> None:
        """Release the cohort and say why; its checkpoint stays."""
        self.lease.release(**about)

    def finish(self) -> None:
        """Remove the cohort, once all its runs are written."""
        with files.report_os_errors("write to the store", self.path), suppress(FileNotFoundError):
            files.remove_directory(self.path)
        self.lease.release()

    def save(self, snapshot: Snapshot) -> None:
        """Write the checkpoint of a task boundary in place of the previous one, of this attempt or an earlier one."""
        self.lease.check()
        with files.report_os_errors("write the checkpoint to", self.path):
            self.keep(snapshot.finished, snapshot.state.params, snapshot.state.buffers)
            tensors = tree.flatten({"state": snapshot.state.as_tree(), "record": snapshot.record.arrays})
            content = {"finished": snapshot.finished, "clock": snapshot.state.clock, "kept": self.kept}
            content |= {name: getattr(snapshot.record, name) for name in RECORD_SCALARS}
            path = self.lease.path / "checkpoint.safetensors"
            files.write_tensors(path, tensors, {"about": json.dumps(content)})
            for earlier in self._checkpoints():
                if earlier.parent < path.parent:
                    earlier.unlink(missing_ok=True)

    def keep(self, task: int, params: Params, buffers: Params) -> None:
        """Write θ_t and the buffers, if they are to be kept."""
        if self.parameters:
            name = f"{self.lease.path.name}/theta-{task:04}.safetensors"
            files.write_tensors(self.path / name, tree.flatten({"params": params, "buffers": buffers}))
            self.kept[task:] = [name]

    def copy(self, whole: Claim, last: Snapshot) -> None:
        """Write the last checkpoint of another cohort, and the θ_t that it has kept, for some of its runs."""
        from glocal.engine.loop import Snapshot

        runs = [whole.hashes.index(hash) for hash in self.hashes]
        for task, name in enumerate(whole.kept):
            parts = tree.select(tree.unflatten(files.read_tensors(whole.path / name)[0]), runs)
            self.keep(task, parts["params"], parts.get("buffers", {}))
        self.save(Snapshot(last.finished, last.state.select(runs), last.record.select(runs)))

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints of all attempts, the last one last. Older stores have one in the cohort's folder."""
        return sorted(self.path.glob("checkpoint.safetensors")) + sorted(
            self.path.glob("[0-9]*/checkpoint.safetensors")
        )

    def load(self, device: torch.device) -> Snapshot | None:
        """Read the last checkpoint, if there is one."""
        from glocal.engine.evaluate import Record
        from glocal.engine.loop import Snapshot
        from glocal.engine.state import State

        if not (checkpoints := self._checkpoints()):
            return None
        with files.report_damage(self.path, ""):
            tensors, metadata = files.read_tensors(checkpoints[-1])
            content = files.parse_json(metadata["about"])
            parts = tree.unflatten(tensors)
            arrays = {name: parts["record"][name] for name in (*ARRAYS, *parts["record"])}
            record = Record(arrays, **{name: content[name] for name in RECORD_SCALARS if name in content})
            _check_record(arrays["update_norm"], content["finished"], parts["state"]["diverged"])
            older = sorted(path.name for path in self.path.glob("theta-*.safetensors"))
            self.kept = content.get("kept", older[: content["finished"] + 1])
            self._check_kept(content["finished"])
        state = tree.map_tree(lambda leaf: leaf.to(device), parts["state"])
        return Snapshot(content["finished"], State.from_tree(state, content["clock"]), record)

    def _check_kept(self, finished: int) -> None:
        """Raise unless θ_0 … θ_t are there, if they are kept, and agree with their checksums."""
        if len(self.kept) != (finished + 1 if self.parameters else 0):
            raise ValueError(f"it has {len(self.kept)} files of parameters after {finished} tasks")
        for name in self.kept:
            files.read_tensors(self.path / name)

    def set_aside(self) -> Path:
        """Move a damaged checkpoint out of the way, so that the cohort starts again, and return its new folder."""
        return set_aside(self.path, list(self.path.rglob("*.safetensors")))

    def kept_parameters(self, runs: Sequence[int], tasks: int, frozen: Params) -> Iterator[Params | None]:
        """Yield θ_0 … θ_T and the buffers of every member in `runs` as 't/name', as `Run.state` reads them.

        The parameters in `frozen`, which all members share, are in no θ_t; they follow once, as 'frozen/name'.
        """
        with files.report_damage(self.path, "The same command trains its runs again."):
            self._check_kept(tasks)  # each file once; what follows reads single rows
            for run in runs:
                states: Params = {f"frozen/{k}": p for k, p in frozen.items()}
                for task, name in enumerate(self.kept):
                    rows = files.read_rows(self.path / name, run)
                    states |= {f"{task}/{k.partition('/')[2]}": t for k, t in rows.items()}
                yield states if self.parameters else None


def set_aside(folder: Path, paths: Sequence[Path] = ()) -> Path:
    """Move a damaged folder, or some of its files, into the store's folder `damaged`, and return where it is now."""
    target = folder.parent.parent / "damaged" / f"{folder.name}-{uuid.uuid4().hex[:8]}"
    with files.report_os_errors("move the damaged files of", folder):
        (target if paths else target.parent).mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.rename(target / "-".join(path.relative_to(folder).parts))
        return target if paths else folder.rename(target)


def _check_record(update_norm: torch.Tensor, finished: int, diverged: torch.Tensor) -> None:
    """Raise ValueError unless a checkpoint's record ends after so many tasks; a diverged run's may end before."""
    import torch

    runs, tasks = update_norm.shape
    expected = torch.arange(tasks) < finished
    complete = (update_norm.isfinite() == expected) | (expected & (diverged >= 0)[:, None])
    if not 0 <= finished <= tasks or diverged.shape != (runs,) or not complete.all():
        raise ValueError(f"its record does not end after {finished} of {tasks} tasks")
