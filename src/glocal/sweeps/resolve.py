"""From names, files and objects to what the engine trains, and to the record of what that was."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import math
import platform
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glocal import challenges
from glocal.algorithms import ALGORITHMS, Algorithm
from glocal.challenges.challenge import Challenge, Setting
from glocal.engine.cohort import seeded_network
from glocal.errors import GlocalError, unknown
from glocal.networks import NETWORKS
from glocal.networks.model import MakeNetwork
from glocal.sweeps import user_code


@dataclass(frozen=True)
class Resolved:
    """An object and the part of a run's configuration that stands for it."""

    value: Any
    config: dict[str, Any]


def challenge(
    given: str | Challenge, tasks: int | None = None, data: str | Path | None = None, setting: str | None = None
) -> Resolved:
    """A challenge by name, from a file (a function that returns one), or as it is; `setting` names what is reported."""
    if isinstance(given, str) and user_code.is_file_spec(given):
        make, _ = user_code.load(given, "challenge")
        given = user_code.call(make, given) if callable(make) else make
        if not isinstance(given, Challenge):
            raise GlocalError(f"a challenge's function returns a glocal Challenge, not a {type(given).__name__}.")
    if isinstance(given, str):
        made = challenges.make(given, tasks=tasks, data=data)
    elif isinstance(given, Challenge):
        made = given if tasks is None else given.first(tasks)
    else:
        raise GlocalError(f"a challenge is a name or a Challenge, not a {type(given).__name__}.")
    made = made if setting is None else _in_setting(made, setting)
    config: dict[str, Any] = {
        "name": made.name,
        "setting": made.setting,
        "tasks": made.tasks,
        "outputs": made.outputs,
        "loss": made.loss,
        "options": dict(made.options),
        "fingerprint": made.fingerprint,
    }
    # Only where they are set: what a run is named by does not change for challenges without them.
    if made.normalise is not None:
        config["normalise"] = {"mean": list(made.normalise.mean), "std": list(made.normalise.std)}
    if made.augment is not None:
        config["augment"] = made.augment._asdict()
    return Resolved(made, config)


def _in_setting(made: Challenge, setting: str) -> Challenge:
    """The same tasks, reported as class- or as task-incremental."""
    if setting not in ("task", "class", "domain"):
        raise unknown("setting", setting, ["task", "class", "domain"])
    if setting == made.setting:
        return made
    if made.setting == "domain":
        raise GlocalError(f"{made.name} keeps its classes from task to task: its setting is domain, not {setting}.")
    if setting == "domain":
        raise GlocalError(f"{made.name} brings new classes with every task: its setting is class or task, not domain.")
    options = {k: setting if k == "setting" else v for k, v in made.options.items()}
    return dataclasses.replace(made, setting=typing.cast(Setting, setting), options=options)


def check_setting(algorithm: Algorithm, challenge: Challenge) -> None:
    """Raise an error if the algorithm does not support the setting of the challenge."""
    if challenge.setting in algorithm.settings:
        return
    name, allowed = name_of(algorithm), " or ".join(algorithm.settings)
    hint = ""
    if challenge.setting == "class" and "task" in algorithm.settings:
        hint = " It asks at test time which task an input belongs to: choose the setting 'task'."
    elif challenge.setting == "domain":
        hint = " It needs new classes with every task, as the split challenges have."
    raise GlocalError(
        f"{name} is for the setting {allowed}; {challenge.name} has the setting {challenge.setting}.{hint}"
    )


def network(given: str | MakeNetwork, challenge: Challenge) -> Resolved:
    """A network by name, from a file, or as a function (input_shape, outputs) -> nn.Module.

    One that users bring is known by its source and by what it makes: a function may take its widths from elsewhere.
    """
    if isinstance(given, str) and not user_code.is_file_spec(given):
        if given not in NETWORKS:
            raise unknown("network", given, NETWORKS)
        return Resolved(NETWORKS[given][0], {"name": given})
    if isinstance(given, str):
        make, digest = user_code.load(given, "network")
        name = given.rpartition(":")[2]
    else:
        make, digest = given, ""
        name = getattr(given, "__name__", type(given).__name__)
    if isinstance(make, nn.Module) or not callable(make):
        raise GlocalError(
            f"network '{name}' is no function. Give one that makes it: (input_shape, outputs) -> nn.Module."
        )
    try:
        inspect.signature(make).bind(challenge.input_shape, challenge.outputs)
    except TypeError as error:
        raise GlocalError(f"network '{name}' must take two arguments, (input_shape, outputs): {error}.") from error
    made = seeded_network(make, challenge, seed=0)
    _check_network(made, name, challenge)
    return Resolved(make, {"name": name, "source": digest or user_code.source_hash(make), "made": _fingerprint(made)})


def _check_network(made: nn.Module, name: str, challenge: Challenge) -> None:
    """Push one example through: it must come out as one row of outputs."""
    if not isinstance(made, nn.Module):
        raise GlocalError(f"network '{name}' returned a {type(made).__name__}, not an nn.Module.")
    if not any(p.requires_grad for p in made.parameters()):
        raise GlocalError(f"network '{name}' has no parameters to learn.")
    try:
        with torch.no_grad():
            shape = tuple(made.eval()(torch.zeros(1, *challenge.input_shape)).shape)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        given = tuple(challenge.input_shape)
        raise GlocalError(
            f"network '{name}' cannot take inputs of shape {given} ({challenge.name}): {reason}."
        ) from error
    if shape != (1, challenge.outputs):
        wanted = (1, challenge.outputs)
        raise GlocalError(
            f"network '{name}' gives outputs of shape {shape} for one input; {challenge.name} needs {wanted}."
        )


def _fingerprint(made: nn.Module) -> str:
    digest = hashlib.sha256(repr(made).encode())
    for key, tensor in made.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def algorithm(given: str | Algorithm | type[Algorithm], options: Mapping[str, Any] | None = None) -> Resolved:
    """An algorithm by name or from a file, with options; or as a class or an object."""
    digest = ""
    if isinstance(given, str) and user_code.is_file_spec(given):
        given, digest = user_code.load(given, "algorithm")
    if isinstance(given, str):
        if given not in ALGORITHMS:
            raise unknown("algorithm", given, ALGORITHMS)
        given = ALGORITHMS[given]
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Algorithm):
        raise GlocalError(f"'{kind.__name__}' is not an algorithm: it does not subclass glocal.Algorithm.")
    fields = dataclasses.fields(kind)
    own = {} if isinstance(given, type) else {f.name: getattr(given, f.name) for f in fields}
    typed = _typed_options(kind, {**own, **(options or {})})
    missing = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING and f.name not in typed]
    if missing:
        raise GlocalError(f"{name_of(kind)} needs a value for {', '.join(missing)}: give one in its options.")
    if any(f.name == "lr" for f in fields):
        raise GlocalError(
            f"{name_of(kind)} has a field named lr, which is the run's learning rate; give it another name."
        )
    made = kind(**typed)
    config: dict[str, Any] = {"name": name_of(kind), "options": dataclasses.asdict(made)}
    if type(made) is not ALGORITHMS.get(made.name):
        config["source"] = digest or user_code.source_hash(type(made))
    return Resolved(made, config)


def choose_device(name: str) -> torch.device:
    """'auto' takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise GlocalError(f"device must be auto, cpu, cuda or cuda:N; '{name}' was given.")
    device = torch.device(name)
    if not torch.cuda.is_available():
        raise GlocalError(f"device '{name}' was asked for, but PyTorch sees no GPU here. Use --device cpu or auto.")
    if (device.index or 0) >= torch.cuda.device_count():
        raise GlocalError(f"device '{name}' was asked for; there are {torch.cuda.device_count()} GPUs, counted from 0.")
    return device


def device_name(device: torch.device) -> str:
    """What a device is, in words: 'cuda: NVIDIA H200'."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type}: {name}"


def name_of(algorithm: Algorithm | type[Algorithm]) -> str:
    """Its declared name, or the class's where a user declared none."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    declared = kind.__dict__.get("name")
    return declared if isinstance(declared, str) else kind.__name__


def label_of(algorithm: Algorithm) -> str:
    """The name and every option that is not at its default."""
    changed = [
        f"{f.name}={getattr(algorithm, f.name):g}"
        if isinstance(getattr(algorithm, f.name), float)
        else f"{f.name}={getattr(algorithm, f.name)}"
        for f in dataclasses.fields(algorithm)
        if getattr(algorithm, f.name) != f.default
    ]
    return " ".join([name_of(algorithm), *changed])


def _typed_options(kind: type[Algorithm], options: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    typed = {}
    for key, value in options.items():
        if key not in fields:
            if not fields:
                raise GlocalError(f"{name_of(kind)} has no options; '{key}' was given.")
            raise unknown(f"option of {name_of(kind)}", key, fields)
        typed[key] = _typed(f"{name_of(kind)}.{key}", fields[key], value)
    return typed


def _typed(name: str, hint: Any, value: Any) -> Any:
    """A value, perhaps the text of one, as its field's type."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if value in allowed:
            return value
        raise unknown(f"value of {name}:", value, [str(a) for a in allowed])
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value in (None, "none", "None") else _typed(name, inner[0], value)
    try:
        if hint is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if hint is int:
            return int(str(value))
        if hint is float:
            number = float(value)
            if math.isfinite(number):
                return number
            raise ValueError
        return hint(value)
    except (ValueError, KeyError, TypeError):
        kind = {bool: "true or false", int: "a whole number", float: "a finite number"}.get(hint, str(hint))
        raise GlocalError(f"{name} must be {kind}; '{value}' was given.") from None


def field_descriptions(kind: type) -> dict[str, str]:
    """The docstrings under a class's fields, its bases' included."""
    described: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                described[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return described
