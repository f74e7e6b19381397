"""The commands that train stored runs again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from glocal.algorithms import ALGORITHMS
from glocal.challenges.registry import catalogue, default_options, is_named
from glocal.engine.config import PROTOCOL
from glocal.networks import NETWORKS
from glocal.optimizers import OPTIMIZERS
from glocal.store.run import Run
from glocal.sweeps.options import SweepOptions

CHALLENGES = {info.name: info for info in catalogue()}
DEFAULTS = {field.name: field.default for field in fields(SweepOptions)}


@dataclass(frozen=True)
class SweepCommand:
    """A command line, the runs that it trains, and what a user must know or fill in first."""

    text: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def sweep_commands(runs: Iterable[Run]) -> list[SweepCommand]:
    """Return as few `glocal sweep` commands as give exactly these runs, which have the same names again.

    Code of one's own, checkpoints and earlier stores have placeholders, which the notes explain: a run knows their
    hashes and not where they are.
    """
    parts: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        config = run.config
        shared = json.dumps([*_challenge_and_flags(run), config["challenge"], config.get("optimizer")], sort_keys=True)
        parts.setdefault(shared, {}).setdefault(json.dumps(config["algorithm"], sort_keys=True), []).append(run)
    result = []
    for algorithms in parts.values():
        commands: dict[tuple[Any, ...], dict[str, list[Run]]] = {}
        for block in (block for members in algorithms.values() for block in _blocks(members)):
            name, number = block[0].config["algorithm"]["name"], 0
            axes = tuple(sorted({run.lr for run in block})), tuple(sorted({run.seed for run in block}))
            while name in commands.get((*axes, number), {}):  # the same algorithm with other options
                number += 1
            commands.setdefault((*axes, number), {})[name] = block
        result += [_command(lrs, seeds, list(blocks.values())) for (lrs, seeds, _), blocks in commands.items()]
    return result


def _blocks(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs of one algorithm so that each part has every seed at every learning rate."""
    by_lr: dict[float, set[int]] = {}
    for run in runs:
        by_lr.setdefault(run.lr, set()).add(run.seed)
    return [
        [run for run in runs if by_lr[run.lr] == seeds] for seeds in {frozenset(s): s for s in by_lr.values()}.values()
    ]


def _command(lrs: Sequence[float], seeds: Sequence[int], algorithms: Sequence[Sequence[Run]]) -> SweepCommand:
    first = algorithms[0][0]
    (challenge, *flags), notes = _challenge_and_flags(first), []
    names, options = [], []
    for config in (runs[0].config["algorithm"] for runs in algorithms):
        name, kind = config["name"], None if "source" in config else ALGORITHMS.get(config["name"])
        names.append(f"PATH.py:{name}" if kind is None else name)
        options += [f"{name}.{text}" for text in _options(kind, config["options"])]
    arguments = [
        "glocal",
        "sweep",
        challenge,
        "--algorithms",
        *names,
        "--lrs",
        *map(repr, lrs),
        "--seeds",
        *map(str, seeds),
    ]
    arguments += ["--options", *options] if options else []
    optimizer = first.config.get("optimizer")
    if optimizer is not None:
        built_in = None if "source" in optimizer else OPTIMIZERS.get(optimizer["name"])
        texts = _options(built_in, optimizer["options"])
        arguments += ["--optimizer", optimizer["name"] if built_in else f"PATH.py:{optimizer['name']}"]
        arguments += ["--optimizer-options", *texts] if texts else []
    arguments += [str(flag) for flag in flags]
    if any("PATH.py:" in argument for argument in arguments):
        notes.append(
            "Replace PATH by the path of your own code. If it was a Python object, the runs are trained anew: "
            "a file has another hash."
        )
    if challenge == "PATH.py:FUNCTION":
        notes.append(f"FUNCTION is the one that returns your challenge '{first.challenge}'.")
    if "init" in first.config["network"]:
        notes.append(f"FILE is the checkpoint whose SHA-256 begins with {first.config['network']['init']}.")
    if first.after:
        notes.append(f"STORE has the runs of {first.after} tasks that these go on from.")
    if other := _python_options(first):
        notes.append(f"These options of the challenge can be given in Python only: {other}.")
    if first.config.get("protocol") != PROTOCOL:
        notes.append(
            f"The runs are of protocol {first.config.get('protocol')}; this version trains by protocol {PROTOCOL}."
        )
    return SweepCommand(shlex.join(arguments), tuple(run for runs in algorithms for run in runs), tuple(notes))


def _challenge_and_flags(run: Run) -> list[Any]:
    """Return the challenge and the flags of all but algorithm, optimiser, learning rate and seed."""
    config, challenge = run.config, run.config["challenge"]
    entry = CHALLENGES[run.challenge] if is_named(challenge) else None
    values: dict[str, Any] = {name: config.get(name) for name in DEFAULTS if name in config}
    network = config["network"]
    built_in = "source" not in network and network["name"] in NETWORKS
    values["network"] = network["name"] if built_in else f"PATH.py:{network['name']}"
    values["tasks"] = None if entry is not None and entry.tasks == run.tasks else run.tasks
    values["setting"] = None if entry is None or entry.setting == run.setting else run.setting
    values["evaluate"] = challenge.get("evaluate", "all")
    values["validation"] = share if isinstance(share := challenge.get("validation"), float) else None
    values |= {"init": "FILE" if "init" in network else None, "after": "STORE" if run.after else None}
    flags = [(f"--{name.replace('_', '-')}", x) for name, x in values.items() if x != DEFAULTS[name]]
    kept_files = [name for name in ("parameters", "state") if run.path and (run.path / f"{name}.safetensors").exists()]
    name = run.challenge if entry is not None else "PATH.py:FUNCTION"
    return [name, *(text for flag in flags for text in flag), *(f"--keep-{file}" for file in kept_files)]


def _options(kind: type | None, options: dict[str, Any]) -> list[str]:
    """Return the options that are not the defaults of a class as NAME=VALUE; all of them if it is not known."""
    defaults = {} if kind is None else {field.name: field.default for field in fields(kind)}
    return [f"{name}={value}" for name, value in options.items() if value != defaults.get(name, MISSING)]


def _python_options(run: Run) -> str:
    """Return the options of a built-in challenge that no flag can give."""
    if not is_named(run.config["challenge"]):
        return ""
    defaults = default_options(run.challenge) | {"setting": run.setting}
    options = run.config["challenge"]["options"]
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items() if value != defaults.get(name))
