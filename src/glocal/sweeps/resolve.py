"""Resolve names, files and objects to what the engine trains, and to their part of a run's configuration."""

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
    spec: str | Challenge, tasks: int | None = None, data: str | Path | None = None, setting: str | None = None
) -> Resolved:
    """Resolve a challenge.

    Args:
        spec: a name, path.py:function where the function returns a `Challenge`, or a `Challenge`.
        tasks: take only the first tasks.
        data: folder to search first for data sets.
        setting: report a split challenge in this setting, "task" or "class".
    """
    if isinstance(spec, str) and user_code.is_file_spec(spec):
        make, _ = user_code.load(spec, "challenge")
        spec = user_code.call(make, spec) if callable(make) else make
        if not isinstance(spec, Challenge):
            raise GlocalError(f"a challenge's function must return a glocal Challenge, not a {type(spec).__name__}.")
    if isinstance(spec, str):
        value = challenges.make(spec, tasks=tasks, data=data)
    elif isinstance(spec, Challenge):
        value = spec if tasks is None else spec.first(tasks)
    else:
        raise GlocalError(f"a challenge must be a name or a Challenge, not a {type(spec).__name__}.")
    if setting is not None:
        value = _in_setting(value, setting)
    config: dict[str, Any] = {
        "name": value.name,
        "setting": value.setting,
        "tasks": value.tasks,
        "outputs": value.outputs,
        "loss": value.loss,
        "options": dict(value.options),
        "fingerprint": value.fingerprint,
    }
    if value.normalise is not None:
        config["normalise"] = {"mean": list(value.normalise.mean), "std": list(value.normalise.std)}
    if value.augment is not None:
        config["augment"] = value.augment._asdict()
    return Resolved(value, config)


def _in_setting(challenge: Challenge, setting: str) -> Challenge:
    """Return the same tasks, reported as class- or task-incremental."""
    if setting not in ("task", "class", "domain"):
        raise unknown("setting", setting, ["task", "class", "domain"])
    if setting == challenge.setting:
        return challenge
    if challenge.setting == "domain":
        raise GlocalError(f"{challenge.name} has the same classes in every task: its setting is domain, not {setting}.")
    if setting == "domain":
        raise GlocalError(f"{challenge.name} adds classes with every task: its setting is class or task, not domain.")
    options = {k: setting if k == "setting" else v for k, v in challenge.options.items()}
    return dataclasses.replace(challenge, setting=typing.cast(Setting, setting), options=options)


def check_setting(algorithm: Algorithm, challenge: Challenge) -> None:
    """Raise an error if the algorithm does not support the setting of the challenge."""
    if challenge.setting in algorithm.settings:
        return
    name, allowed = name_of(algorithm), " or ".join(algorithm.settings)
    hint = ""
    if challenge.setting == "class" and "task" in algorithm.settings:
        hint = " It needs to know at test time which task an input belongs to: choose the setting 'task'."
    elif challenge.setting == "domain":
        hint = " It needs new classes with every task, as the split challenges have."
    raise GlocalError(
        f"{name} is for the setting {allowed}; {challenge.name} has the setting {challenge.setting}.{hint}"
    )


def network(spec: str | MakeNetwork, challenge: Challenge) -> Resolved:
    """Resolve a network: a name, path.py:function, or a function (input_shape, outputs) -> nn.Module.

    A user's network is identified by its source and by the initial network it makes, because a function may take its
    sizes from elsewhere.
    """
    if isinstance(spec, str) and not user_code.is_file_spec(spec):
        if spec not in NETWORKS:
            raise unknown("network", spec, NETWORKS)
        return Resolved(NETWORKS[spec][0], {"name": spec})
    if isinstance(spec, str):
        make, digest = user_code.load(spec, "network")
        name = spec.rpartition(":")[2]
    else:
        make, digest = spec, ""
        name = getattr(spec, "__name__", type(spec).__name__)
    if isinstance(make, nn.Module) or not callable(make):
        raise GlocalError(
            f"network '{name}' is not a function. Pass one that makes the network: (input_shape, outputs) -> nn.Module."
        )
    try:
        inspect.signature(make).bind(challenge.input_shape, challenge.outputs)
    except TypeError as error:
        raise GlocalError(f"network '{name}' must take two arguments, (input_shape, outputs): {error}.") from error
    module = seeded_network(make, challenge, seed=0)
    _check_network(module, name, challenge)
    source = digest or user_code.source_hash(make)
    return Resolved(make, {"name": name, "source": source, "made": _fingerprint(module)})


def _check_network(module: nn.Module, name: str, challenge: Challenge) -> None:
    """Check that one example gives one row of outputs."""
    if not isinstance(module, nn.Module):
        raise GlocalError(f"network '{name}' returned a {type(module).__name__}, not an nn.Module.")
    if not any(p.requires_grad for p in module.parameters()):
        raise GlocalError(f"network '{name}' has no trainable parameters.")
    try:
        with torch.no_grad():
            shape = tuple(module.eval()(torch.zeros(1, *challenge.input_shape)).shape)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GlocalError(
            f"network '{name}' does not accept inputs of shape {tuple(challenge.input_shape)} ({challenge.name}): "
            f"{reason}."
        ) from error
    if shape != (1, challenge.outputs):
        raise GlocalError(
            f"network '{name}' gives outputs of shape {shape} for one input; {challenge.name} needs "
            f"{(1, challenge.outputs)}."
        )


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256(repr(module).encode())
    for key, tensor in module.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def algorithm(spec: str | Algorithm | type[Algorithm], options: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve an algorithm: a name or path.py:Name, a class, or an instance; `options` override its fields."""
    digest = ""
    if isinstance(spec, str) and user_code.is_file_spec(spec):
        spec, digest = user_code.load(spec, "algorithm")
    if isinstance(spec, str):
        if spec not in ALGORITHMS:
            raise unknown("algorithm", spec, ALGORITHMS)
        spec = ALGORITHMS[spec]
    kind = spec if isinstance(spec, type) else type(spec)
    if not issubclass(kind, Algorithm):
        raise GlocalError(f"'{kind.__name__}' is not an algorithm: it does not subclass glocal.Algorithm.")
    fields = dataclasses.fields(kind)
    current = {} if isinstance(spec, type) else {f.name: getattr(spec, f.name) for f in fields}
    values = _convert_options(kind, {**current, **(options or {})})
    missing = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING and f.name not in values]
    if missing:
        raise GlocalError(f"{name_of(kind)} needs a value for {', '.join(missing)}: set it in the options.")
    if any(f.name == "lr" for f in fields):
        raise GlocalError(f"{name_of(kind)} has a field lr, which is the run's learning rate; use another name.")
    value = kind(**values)
    config: dict[str, Any] = {"name": name_of(kind), "options": dataclasses.asdict(value)}
    if type(value) is not ALGORITHMS.get(value.name):
        config["source"] = digest or user_code.source_hash(type(value))
    return Resolved(value, config)


def choose_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise GlocalError(f"device must be auto, cpu, cuda or cuda:N; '{name}' was given.")
    device = torch.device(name)
    if not torch.cuda.is_available():
        raise GlocalError(f"device '{name}' is not available: PyTorch sees no GPU. Use the device cpu or auto.")
    if (device.index or 0) >= torch.cuda.device_count():
        raise GlocalError(f"device '{name}' is not available: there are {torch.cuda.device_count()} GPUs, from cuda:0.")
    return device


def device_name(device: torch.device) -> str:
    """Describe a device, for example 'cuda: NVIDIA H200'."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type}: {name}"


def name_of(algorithm: Algorithm | type[Algorithm]) -> str:
    """Return the declared name of an algorithm, or its class name if it declares none."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    declared = kind.__dict__.get("name")
    return declared if isinstance(declared, str) else kind.__name__


def label_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm and every option that differs from its default."""
    changed = [
        f"{f.name}={getattr(algorithm, f.name):g}"
        if isinstance(getattr(algorithm, f.name), float)
        else f"{f.name}={getattr(algorithm, f.name)}"
        for f in dataclasses.fields(algorithm)
        if getattr(algorithm, f.name) != f.default
    ]
    return " ".join([name_of(algorithm), *changed])


def _convert_options(kind: type[Algorithm], options: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    values = {}
    for name, value in options.items():
        if name not in fields:
            if not fields:
                raise GlocalError(f"{name_of(kind)} has no options; '{name}' was given.")
            raise unknown(f"option of {name_of(kind)}", name, fields)
        values[name] = _convert(f"{name_of(kind)}.{name}", fields[name], value)
    return values


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Convert a value, or its text from the command line, to the type of its field."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if value in allowed:
            return value
        raise unknown(f"value of {name}:", value, [str(a) for a in allowed])
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value in (None, "none", "None") else _convert(name, inner[0], value)
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
    """Return the docstrings under the fields of a dataclass and of its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                descriptions[field.target.id] = " ".join(str(text.value.value).split())
    return descriptions
