"""The store: one directory per finished run, named by the hash of its configuration.

    STORE/runs/HASH/       config.json, info.json, arrays.safetensors and, if asked for, parameters.safetensors
    STORE/cohorts/HASH/    a cohort in training: its members, its checkpoint at the last task boundary, its lock

A cohort's directory is removed when all its runs are written. One that no process holds was interrupted; the next
process that needs its runs resumes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from glocal import files, tree
from glocal.engine.cohort import RunConfig
from glocal.engine.evaluate import ARRAYS, Record
from glocal.engine.loop import Snapshot
from glocal.engine.state import State
from glocal.errors import GlocalError, require
from glocal.store.run import Run
from glocal.tree import Params

MARKER = "glocal-store.json"
FORMAT = 1
REQUIRED_INFO = {"label", "locality", "setting", "diverged", "steps", "cost", "versions", "notes"}
RECORD_SCALARS = ("seconds", "epoch_step_seconds", "peak_bytes", "executor", "notes")
"""Fields of a `Record` that are no arrays; a checkpoint stores them as JSON."""


class Store:
    """A folder of runs, which several processes can use at the same time."""

    def __init__(self, path: str | Path) -> None:
        self.path = files.user_path(path)
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
        """Write a finished run."""
        path = self.runs_path / config.hash
        with files.report_os_errors("write to the store", self.path), files.new_directory(path) as part:
            files.write_json(part / "config.json", config.as_dict())
            files.write_json(part / "info.json", dict(info))
            files.write_tensors(part / "arrays.safetensors", arrays)
            if parameters is not None:
                files.write_tensors(part / "parameters.safetensors", parameters)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Hold the store's lock, for the short time in which runs are claimed or released."""
        with files.report_os_errors("lock the store", self.path):
            lock = files.lock_file(self.path / ".lock")
        with lock:
            yield

    def interrupted(self) -> list[Claim]:
        """Claim and return all cohorts that no process trains. Call it while `claiming`."""
        return [claim for path in self._cohorts() if (claim := Claim.take(path)) is not None]

    def claim(self, hashes: Sequence[str], parameters: bool) -> Claim:
        """Claim a new cohort of runs that no process trains. Call it while `claiming`."""
        path = self.cohorts_path / hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]
        with files.report_os_errors("write to the store", self.path):
            with files.new_directory(path) as part:
                files.write_json(part / "members.json", {"runs": list(hashes), "parameters": parameters})
            claim = Claim.take(path)
        assert claim is not None, "a cohort created under the store's lock has no other owner"
        return claim

    def _cohorts(self) -> list[Path]:
        return sorted(self.cohorts_path.glob("[!.]*"))

    def busy(self) -> set[str]:
        """Return the hashes of runs that a process is training, this one included. Call it while `claiming`."""
        hashes: set[str] = set()
        for path in self._cohorts():
            if (claim := Claim.take(path)) is None:
                hashes.update(_members(path)["runs"])
            else:
                claim.leave()
        return hashes


@dataclass
class Claim:
    """A cohort that this process holds until it is finished or left."""

    path: Path
    hashes: list[str]
    parameters: bool
    lock: IO[bytes]

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """Claim the cohort, or return None if another process holds it."""
        with files.report_os_errors("resume the cohort", path):
            try:
                lock = files.lock_file(path / "lock", wait=False)
            except BlockingIOError:
                return None
        members = _members(path)
        return cls(path, members["runs"], members["parameters"], lock)

    def leave(self) -> None:
        """Release the cohort; its checkpoint stays."""
        self.lock.close()

    def finish(self, store: Store) -> None:
        """Remove the cohort, once all its runs are written."""
        with store.claiming(), files.report_os_errors("write to the store", store.path):
            files.remove_directory(self.path)
            self.lock.close()

    def save(self, snapshot: Snapshot) -> None:
        """Write the checkpoint of a task boundary in place of the previous one."""
        with files.report_os_errors("write the checkpoint to", self.path):
            if self.parameters:
                name = f"theta-{snapshot.finished:04}.safetensors"
                state = {"params": snapshot.state.params, "buffers": snapshot.state.buffers}
                files.write_tensors(self.path / name, tree.flatten(state))
            tensors = tree.flatten({"state": snapshot.state.as_tree(), "record": snapshot.record.arrays})
            about = {"finished": snapshot.finished, "clock": snapshot.state.clock}
            about |= {name: getattr(snapshot.record, name) for name in RECORD_SCALARS}
            files.write_tensors(self.path / "checkpoint.safetensors", tensors, {"about": json.dumps(about)})

    def load(self, device: torch.device) -> Snapshot | None:
        """Read the last checkpoint, if there is one."""
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        with files.report_damage(path, f"Delete '{self.path}'."):
            tensors, metadata = files.read_tensors(path)
            about = json.loads(metadata["about"])
            parts = tree.unflatten(tensors)
            arrays = {name: parts["record"][name] for name in (*ARRAYS, *parts["record"])}
            record = Record(arrays, **{name: about[name] for name in RECORD_SCALARS if name in about})
        state = tree.map_tree(lambda leaf: leaf.to(device), parts["state"])
        return Snapshot(about["finished"], State.from_tree(state, about["clock"]), record)

    def kept_parameters(self, run: int, frozen: Params) -> Params | None:
        """Return θ_0 … θ_T and the buffers of one member as 't/name', as `Run.state` reads them.

        The parameters in `frozen`, which all members share, are in no θ_t; they follow once, as 'frozen/name'.
        """
        if not self.parameters:
            return None
        states: Params = {f"frozen/{k}": p for k, p in frozen.items()}
        for path in sorted(self.path.glob("theta-*.safetensors")):
            tensors, _ = files.read_tensors(path)
            task = int(path.stem.removeprefix("theta-"))
            states |= {f"{task}/{k.partition('/')[2]}": t[run].clone() for k, t in tensors.items()}
        return states


def _members(path: Path) -> dict[str, Any]:
    with files.report_damage(path, "Delete this folder of an interrupted cohort."):
        members: dict[str, Any] = files.read_json(path / "members.json")
    return members
