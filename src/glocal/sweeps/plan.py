"""Plans: sweeps stored as files, which workers on any machine can train.

A plan holds the arguments of `glocal.sweep` as JSON, and the names of the runs. Code is named by its file and the hash
of the file. A worker loads it only from a file that its own user gave it and that has this hash: nothing in a store can
make it run other code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from glocal import files
from glocal.errors import GlocalError, first_line, require
from glocal.store.store import Store, Verified
from glocal.sweeps.options import KEPT, SweepOptions

if TYPE_CHECKING:
    from glocal.sweeps.resume import Job

WORKER_OPTIONS = ("store", "device", "on", "time", "gpus", "partition", "slurm", "address", "track")
"""Options that a worker chooses itself."""


@dataclass(frozen=True)
class Plan:
    """A plan of a store: its file, the arguments of the sweep, the hashes of its files of code, and its runs."""

    path: Path
    arguments: Mapping[str, Any]
    code: Mapping[str, str]
    runs: list[str]

    def finished(self, store: Store) -> bool:
        """Return whether the store holds all runs."""
        return not store.missing(self.runs, self._kept)

    def remove(self, store: Store) -> None:
        """Remove the plan and its cohorts, once it is finished."""
        store.remove_finished(self.runs, self._kept)
        self.path.unlink(missing_ok=True)

    @property
    def _kept(self) -> list[str]:
        return [name for name in KEPT if self.arguments["options"].get(f"keep_{name}")]

    def prepare(self, store: Store, device: str, code: Iterable[Path]) -> Job:
        """Return the runs, ready to be trained on a device, with code from these files alone."""
        from glocal.sweeps.sweep import prepare

        given = list(code)
        allowed = {_digest(path): path for path in given}

        def own_file(location: str) -> str:
            digest = self.code.get(location)
            advice = f"Give the worker this file, unchanged: --code {location}."
            if Path(location) in [path.absolute() for path in given]:
                advice = "This file has changed since the plan was written. Give it as it was then; or delete the plan "
                advice += "and repeat the sweep, which trains with the file as it is now."
            require(digest in allowed, f"the plan '{self.path}' needs code from '{location}'. {advice}")
            return str(allowed[str(digest)])

        arguments = _with_files(self.arguments, own_file)
        options = {k: v for k, v in arguments.pop("options").items() if k not in WORKER_OPTIONS}
        job = prepare(**arguments, **options, store=store.path, device=device)
        changed = (
            f"the plan '{self.path}' gives other runs on this machine than where it was written. Use the same version "
            "of glocal and the same data on both machines, or delete the plan and repeat the sweep with --plan."
        )
        require(list(job.requests) == self.runs, changed)
        job.context.store = store
        return job


def write_plan(
    challenge: Any,
    algorithms: Any,
    lrs: Iterable[float],
    seeds: Iterable[int],
    *,
    optimizer: Any = "sgd",
    **options: Any,
) -> tuple[Plan, Job]:
    """Write a sweep with these arguments into its store as a plan; return the plan and its runs.

    The arguments are those of `glocal.sweep`. All must have names, which classes and functions from Python have not.
    """
    from glocal.sweeps.sweep import pairs, prepare

    specs = {"algorithms": pairs(algorithms), "optimizer": pairs(optimizer)}
    job = prepare(challenge, specs["algorithms"], lrs, seeds, optimizer=specs["optimizer"], **options)
    members = [request.member for request in job.requests.values()]
    values = {"lrs": list(dict.fromkeys(m.lr for m in members)), "seeds": list(dict.fromkeys(m.seed for m in members))}
    arguments = {"challenge": challenge, **specs, **values, "options": _options(job.context.options)}
    code: dict[str, str] = {}

    def absolute(location: str) -> str:
        path = files.user_path(location).absolute()
        code[str(path)] = _digest(path)
        return str(path)

    named = _with_files(arguments, absolute)
    folder = job.context.store.path / "plans"
    job.stored_runs()  # sets damaged runs aside, which workers take for finished
    try:
        content = json.loads(json.dumps({"arguments": named, "code": code, "runs": list(job.requests)}))
    except TypeError as error:
        raise GlocalError(f"an option cannot be written into a plan: {first_line(error)}.") from error
    path = folder / f"{_name(content)}.json"
    with files.report_os_errors("write the plan to", folder):
        folder.mkdir(exist_ok=True)
        files.write_json(path, content)
    return Plan(path, named, code, list(job.requests)), job


def read_plans(store: Store) -> list[Plan]:
    """Return the plans of a store, the oldest first. Damaged plans are skipped; `verify_plans` reports them."""
    plans = []
    for path in _paths(store):
        # Another worker may remove a finished plan at this moment.
        with suppress(FileNotFoundError, files.DamagedError):
            plans += [(path.stat().st_mtime, plan)] if (plan := _read(path)) else []
    return [plan for _, plan in sorted(plans, key=lambda entry: (entry[0], entry[1].path))]


def verify_plans(store: Store) -> Iterator[Verified]:
    """Read every plan of a store, and check it against its name."""
    for path in _paths(store):
        try:
            _read(path)
            yield Verified(path, None, [])
        except GlocalError as error:
            yield Verified(path, str(error), [])


def _paths(store: Store) -> list[Path]:
    return sorted((store.path / "plans").glob("[!.]*.json"))


def _read(path: Path) -> Plan | None:
    """Read a plan, or return None if there is none."""
    with files.report_damage(path, "Delete it, and write it again with --plan."), suppress(FileNotFoundError):
        text = files.read_text(path)
        if path.stem != _name(json.loads(text)):
            raise ValueError("its content does not agree with its name")
        content = files.parse_json(text)
        return Plan(path, *(content[name] for name in ("arguments", "code", "runs")))
    return None


def _name(content: Any) -> str:
    return files.short_hash(json.dumps(content, sort_keys=True).encode())


def _options(options: SweepOptions) -> dict[str, Any]:
    """Return the options that are not defaults and that a worker does not choose; paths are made absolute."""
    hints = get_type_hints(SweepOptions)
    values = {f.name: getattr(options, f.name) for f in fields(SweepOptions) if f.name not in WORKER_OPTIONS}
    changed = {f.name: values[f.name] for f in fields(SweepOptions) if values.get(f.name, f.default) != f.default}
    return {k: str(files.user_path(v).absolute()) if Path in get_args(hints[k]) else v for k, v in changed.items()}


def _with_files(arguments: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the arguments with every path.py:Name in a file of another name, and check that all are named."""
    from glocal.sweeps.user_code import is_file_spec

    def renamed(spec: Any) -> str:
        if not isinstance(spec, str):
            kind = getattr(spec, "__name__", type(spec).__name__)
            raise GlocalError(f"{kind} from Python cannot be named in a plan: put it into a file, as path.py:{kind}.")
        location, _, name = spec.rpartition(":")
        return f"{rename(location)}:{name}" if is_file_spec(spec) and location else spec

    changed = {**arguments, "challenge": renamed(arguments["challenge"])}
    for kind in ("algorithms", "optimizer"):
        changed[kind] = [(renamed(spec), options) for spec, options in arguments[kind]]
    if "network" in arguments["options"]:
        changed["options"] = arguments["options"] | {"network": renamed(arguments["options"]["network"])}
    return changed


def _digest(path: Path) -> str:
    with files.report_os_errors("read the code in", path, "Give a Python file."):
        return files.short_hash(files.user_path(path).read_bytes())
