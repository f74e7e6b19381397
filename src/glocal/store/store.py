"""The store: one directory per finished run, named by the hash of its configuration.

    STORE/runs/HASH/       config.json, info.json, arrays.safetensors and, if asked for, parameters.safetensors
    STORE/cohorts/HASH/    a cohort in training: its members, and one directory per attempt to train them, with a lease
                           (`glocal.store.lease`) and the checkpoint of the last task boundary

A cohort's directory is removed when all its runs are written. One that no process holds was interrupted; the next
process that needs its runs resumes it from the last attempt's checkpoint. An attempt writes to its own directory only.
Of two processes that finish the same run, the first one's is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glocal import files, tree
from glocal.engine.cohort import RunConfig
from glocal.engine.evaluate import ARRAYS, Record
from glocal.engine.loop import Snapshot
from glocal.engine.state import State
from glocal.errors import GlocalError, require
from glocal.store.lease import EXPIRY_SECONDS, Lease, Watch
from glocal.store.run import Run
from glocal.tree import Params

MARKER = "glocal-store.json"
FORMAT = 1
REQUIRED_INFO = {"label", "locality", "setting", "diverged", "steps", "cost", "versions", "notes"}
RECORD_SCALARS = ("seconds", "epoch_step_seconds", "peak_bytes", "executor", "notes")
"""Fields of a `Record` that are no arrays; a checkpoint stores them as JSON."""


class Store:
    """A folder of runs, which several processes and machines can use at the same time."""

    def __init__(self, path: str | Path, lease_seconds: float = EXPIRY_SECONDS) -> None:
        self.path, self.lease_seconds, self._watch = files.user_path(path), lease_seconds, Watch()
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
            names = os.listdir(store.path) if store.path.is_dir() else []
            occupied = any(not name.startswith(f".{MARKER}") for name in names)  # but for a marker being written
        if occupied or store.path.is_file():
            store._check()
        with files.report_os_errors("create the store", store.path):
            store.path.mkdir(parents=True, exist_ok=True)
            # The marker comes first: another process that creates the same store must not find the folders without it.
            if not (store.path / MARKER).exists():
                files.write_json(store.path / MARKER, {"format": FORMAT})
            for folder in (store.runs_path, store.cohorts_path):
                folder.mkdir(exist_ok=True)
                files.remove_leftovers(folder)
        return store

    def _check(self) -> None:
        if not (self.path / MARKER).exists():
            reason = "it is a file" if self.path.is_file() else f"it has no {MARKER}"
            raise GlocalError(f"'{self.path}' is not a glocal store: {reason}. Give another folder.")
        with files.report_damage(self.path / MARKER, "Give another folder."):
            version = files.read_json(self.path / MARKER)["format"]
        require(version == FORMAT, f"the store '{self.path}' has format {version}; this glocal reads format {FORMAT}.")

    def finished(self, hash: str, parameters: bool = False) -> bool:
        """Return whether the store holds a run, with its parameters if they are asked for."""
        run = self.runs_path / hash
        return run.is_dir() and (not parameters or (run / "parameters.safetensors").exists())

    def run(self, hash: str) -> Run:
        """Read one run."""
        path = self.runs_path / hash
        with files.report_damage(path, "Delete this folder and repeat the run's command."):
            config, info = files.read_json(path / "config.json"), files.read_json(path / "info.json")
            arrays, _ = files.read_tensors(path / "arrays.safetensors")
            run = Run(config, {k: t.numpy() for k, t in arrays.items()}, info, path)
            expected = RunConfig(**config).hash
            missing = (set(ARRAYS) - run.arrays.keys()) | (REQUIRED_INFO - set(info))
            if missing:
                raise KeyError(f"no {', '.join(sorted(missing))}")
            if expected != hash:
                raise ValueError(f"its configuration is that of {expected}")
        return run

    def runs(self) -> list[Run]:
        """Read all finished runs."""
        names = sorted(p.name for p in self.runs_path.glob("[!.]*")) if self.runs_path.is_dir() else []
        return [self.run(name) for name in names]

    def write(self, config: RunConfig, arrays: Params, info: Mapping[str, Any], parameters: Params | None) -> None:
        """Write a finished run, unless another process has."""
        path = self.runs_path / config.hash
        if self.finished(config.hash, parameters is not None):
            return
        with files.report_os_errors("write to the store", self.path), files.new_directory(path) as part:
            files.write_json(part / "config.json", config.as_dict())
            files.write_json(part / "info.json", dict(info))
            files.write_tensors(part / "arrays.safetensors", arrays)
            if parameters is not None:
                files.write_tensors(part / "parameters.safetensors", parameters)

    def cohorts(self) -> list[StoredCohort]:
        """Return the cohorts that are not finished: those in training and those that were interrupted."""
        cohorts = []
        for path in sorted(self.cohorts_path.glob("[!.]*/members.json")):
            with files.report_damage(path, "Delete this folder of an interrupted cohort."), suppress(FileNotFoundError):
                members, holder = files.read_json(path), self._watch.holder(path.parent)
                cohorts.append(StoredCohort(path.parent, members["runs"], members["parameters"], holder))
        return cohorts

    def claim(self, hashes: Sequence[str], parameters: bool) -> Claim | None:
        """Claim a new cohort of runs, or return None if another process was faster."""
        members = {"runs": list(hashes), "parameters": parameters}
        path = self.cohorts_path / hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]
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


@dataclass(frozen=True)
class StoredCohort:
    """A cohort that is not finished: its runs, whether their parameters are kept, and what its holder says."""

    path: Path
    hashes: list[str]
    parameters: bool
    holder: Mapping[str, Any] | None = None
    """None: no process trains it."""


@dataclass
class Claim:
    """A cohort that this process trains until it is finished or left."""

    path: Path
    hashes: list[str]
    parameters: bool
    lease: Lease
    kept: list[str] = field(default_factory=list)
    """The files with θ_0, θ_1, ... and the buffers, of this attempt and of those that it goes on from."""

    def leave(self) -> None:
        """Release the cohort; its checkpoint stays."""
        self.lease.release()

    def finish(self) -> None:
        """Remove the cohort, once all its runs are written."""
        with files.report_os_errors("write to the store", self.path), suppress(FileNotFoundError):
            files.remove_directory(self.path)
        self.lease.release()

    def save(self, snapshot: Snapshot) -> None:
        """Write the checkpoint of a task boundary in place of the previous one, of this attempt or an earlier one."""
        self.lease.check()
        with files.report_os_errors("write the checkpoint to", self.path):
            if self.parameters:
                name = f"theta-{snapshot.finished:04}.safetensors"
                state = {"params": snapshot.state.params, "buffers": snapshot.state.buffers}
                files.write_tensors(self.lease.path / name, tree.flatten(state))
                self.kept[snapshot.finished :] = [f"{self.lease.path.name}/{name}"]
            tensors = tree.flatten({"state": snapshot.state.as_tree(), "record": snapshot.record.arrays})
            about = {"finished": snapshot.finished, "clock": snapshot.state.clock, "kept": self.kept}
            about |= {name: getattr(snapshot.record, name) for name in RECORD_SCALARS}
            path = self.lease.path / "checkpoint.safetensors"
            files.write_tensors(path, tensors, {"about": json.dumps(about)})
            for earlier in self._checkpoints():
                if earlier.parent < path.parent:
                    earlier.unlink(missing_ok=True)

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints of all attempts, the last one last. Older stores have one in the cohort's folder."""
        return sorted(self.path.glob("checkpoint.safetensors")) + sorted(
            self.path.glob("[0-9]*/checkpoint.safetensors")
        )

    def load(self, device: torch.device) -> Snapshot | None:
        """Read the last checkpoint, if there is one."""
        if not (checkpoints := self._checkpoints()):
            return None
        path = checkpoints[-1]
        with files.report_damage(path, f"Delete '{self.path}'."):
            tensors, metadata = files.read_tensors(path)
            about = json.loads(metadata["about"])
            parts = tree.unflatten(tensors)
            arrays = {name: parts["record"][name] for name in (*ARRAYS, *parts["record"])}
            record = Record(arrays, **{name: about[name] for name in RECORD_SCALARS if name in about})
            self.kept = about.get("kept", sorted(p.name for p in self.path.glob("theta-*.safetensors")))
        state = tree.map_tree(lambda leaf: leaf.to(device), parts["state"])
        return Snapshot(about["finished"], State.from_tree(state, about["clock"]), record)

    def kept_parameters(self, run: int, frozen: Params) -> Params | None:
        """Return θ_0 … θ_T and the buffers of one member as 't/name', as `Run.state` reads them.

        The parameters in `frozen`, which all members share, are in no θ_t; they follow once, as 'frozen/name'.
        """
        if not self.parameters:
            return None
        states: Params = {f"frozen/{k}": p for k, p in frozen.items()}
        for task, name in enumerate(self.kept):
            tensors, _ = files.read_tensors(self.path / name)
            states |= {f"{task}/{k.partition('/')[2]}": t[run].clone() for k, t in tensors.items()}
        return states
