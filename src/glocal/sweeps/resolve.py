"""Resolve names, files and objects to what the engine trains, and to their part of a run's configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from glocal import challenges
from glocal.algorithms import ALGORITHMS, Algorithm
from glocal.algorithms.algorithm import Locality
from glocal.challenges.challenge import Augment, Challenge, Setting
from glocal.engine.cohort import seeded_network
from glocal.errors import GlocalError, first_line, require, require_known
from glocal.files import read_tensors, report_damage, short_hash, user_path
from glocal.networks import NETWORKS
from glocal.networks.layer_calls import unfused_encoders
from glocal.networks.model import MakeNetwork, share_parameters
from glocal.networks.pretrained import Pretrained, list_names, load_state
from glocal.optimizers import OPTIMIZERS, PLAIN_SGD, Optimizer, is_built_in
from glocal.rng import generator, global_generator
from glocal.sweeps.optimizer_check import depends_on_scale, keeps_frozen_weights, rehearse_optimizer
from glocal.sweeps.options import convert
from glocal.sweeps.source import is_installed, source_hash
from glocal.sweeps.user_code import call_user_code, describe_error, is_file_spec, load_object


@dataclass(frozen=True)
class Resolved:
    """An object and the part of a run's configuration that stands for it."""

    value: Any
    config: dict[str, Any]
    note: str = ""
    """What the results should say about it."""


def challenge(
    spec: str | Challenge,
    tasks: int | None = None,
    data: str | Path | None = None,
    setting: str | None = None,
    validation: float | None = None,
    evaluate: str = "all",
) -> Resolved:
    """Resolve a challenge: a name, path.py:function where the function returns a `Challenge`, or a `Challenge`.

    Take only its first `tasks`, search the folder `data` first, report a split challenge in this setting, hold out a
    share of the training data for `validation`, and `evaluate` among 'all' classes or those 'seen' so far.
    """
    value: Any = spec
    if isinstance(spec, str) and is_file_spec(spec):
        make, _ = load_object(spec, "challenge")
        value = call_user_code(make, spec) if callable(make) else make
    elif isinstance(spec, str):
        value = challenges.make(spec, tasks=tasks, data=data)
    require(isinstance(value, Challenge), f"a challenge must be a name or a Challenge, not a {type(value).__name__}.")
    value = value if tasks is None else value.first(tasks)
    value = value if setting is None else _in_setting(value, setting)
    value = value if validation is None else value.with_validation(validation)
    value = value.among_seen_classes() if evaluate == "seen" else value
    config = {k: getattr(value, k) for k in ("name", "setting", "tasks", "outputs", "loss", "fingerprint")}
    config["options"] = dict(value.options)
    if callable(value.loss):
        has_classes = bool(value.task(0, 0).classes)
        config["loss"] = {**_identity(value.loss), "classes": has_classes}
    if value.normalise is not None:
        config["normalise"] = {"mean": list(value.normalise.mean), "std": list(value.normalise.std)}
    if value.augment is not None:
        built_in = isinstance(value.augment, Augment)
        config["augment"] = value.augment._asdict() if built_in else _identity(value.augment)
    if value.validation is not None:
        config["validation"] = value.validation
    if value.evaluate != "all":
        config["evaluate"] = value.evaluate
    return Resolved(value, config)


def _identity(function: Callable[..., Any]) -> dict[str, str]:
    """Return the name and the hash of the code of a user's function."""
    name = getattr(function, "__name__", type(function).__name__)
    return {"name": name, "source": source_hash(function)}


def _in_setting(challenge: Challenge, setting: str) -> Challenge:
    """Return the same tasks, reported as class- or task-incremental."""
    require_known("setting", setting, get_args(Setting))
    if setting == challenge.setting:
        return challenge
    if challenge.setting == "domain":
        raise GlocalError(f"{challenge.name} has the same classes in every task: its setting is domain, not {setting}.")
    if setting == "domain":
        raise GlocalError(f"{challenge.name} adds classes with every task: its setting is class or task, not domain.")
    options = {k: setting if k == "setting" else v for k, v in challenge.options.items()}
    return dataclasses.replace(challenge, setting=cast(Setting, setting), options=options)


def check_setting(algorithm: Algorithm, challenge: Challenge) -> None:
    """Raise an error if the algorithm does not support the setting of the challenge."""
    if challenge.setting in algorithm.settings:
        return
    hint = ""
    if challenge.setting == "class" and "task" in algorithm.settings:
        hint = " It needs to know at test time which task an input belongs to: choose the setting 'task'."
    elif challenge.setting == "domain":
        hint = " It needs new classes with every task, as the split challenges have."
    raise GlocalError(
        f"{name_of(algorithm)} is for the setting {' or '.join(algorithm.settings)}; "
        f"{challenge.name} has the setting {challenge.setting}.{hint}"
    )


def network(spec: str | MakeNetwork, challenge: Challenge, init: str | Path | None = None) -> Resolved:
    """Resolve a network: a name, path.py:function, or a function (input_shape, outputs) -> nn.Module.

    A user's network is identified by its code and by the initial network it makes, because a function may take its
    sizes from elsewhere; a network that starts from the file `init` also by the file's content.
    """
    if init is not None:
        return _pretrained(network(spec, challenge), challenge, user_path(init))
    if isinstance(spec, str) and not is_file_spec(spec):
        require_known("network", spec, NETWORKS)
        tokens = f"'{spec}' takes images or floats, but {challenge.name} has integer tokens: give a network for them."
        require(challenge.input_dtype.is_floating_point, tokens)
        return Resolved(NETWORKS[spec][0], {"name": spec})
    make, digest = load_object(spec, "network") if isinstance(spec, str) else (spec, "")
    own_name = type(spec).__name__ if callable(spec) else repr(spec)
    name = spec.rpartition(":")[2] if isinstance(spec, str) else getattr(spec, "__name__", own_name)
    remedy = "Pass one that makes the network: (input_shape, outputs) -> nn.Module."
    require(callable(make) and not isinstance(make, nn.Module), f"network '{name}' is not a function. {remedy}")
    try:
        inspect.signature(make).bind(challenge.input_shape, challenge.outputs)
    except (TypeError, ValueError) as error:
        raise GlocalError(f"network '{name}' must take two arguments, (input_shape, outputs): {error}.") from error
    module = call_user_code(partial(seeded_network, make, challenge, seed=0), name)
    _check_network(module, name, challenge)
    return Resolved(make, {"name": name, "source": digest or source_hash(make), "made": _fingerprint(module)})


def _pretrained(resolved: Resolved, challenge: Challenge, path: Path) -> Resolved:
    """Let a network start from a safetensors file."""
    advice = f"Write one with safetensors.torch.save_file(network.state_dict(), '{path.stem}.safetensors')."
    require(path.suffix == ".safetensors", f"init = '{path}' was given; it must be a safetensors file. {advice}")
    with report_damage(path, advice):
        state, _ = read_tensors(path)
        digest = short_hash(path.read_bytes())
    infinite = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    require(
        not infinite, f"{list_names(infinite)} in '{path}' have values that are not finite: give another checkpoint."
    )
    lacking = load_state(seeded_network(resolved.value, challenge, seed=0), state, f"'{path}'")
    note = f"'{path.name}' has no {list_names(lacking)}: the network's own initialisation is used" if lacking else ""
    return Resolved(Pretrained(resolved.value, state, f"'{path}'"), resolved.config | {"init": digest}, note)


def _check_network(module: nn.Module, name: str, challenge: Challenge) -> None:
    """Check that every example gives one row of outputs."""
    require(isinstance(module, nn.Module), f"network '{name}' returned a {type(module).__name__}, not an nn.Module.")
    require(any(p.requires_grad for p in module.parameters()), f"network '{name}' has no trainable parameters.")
    complex_names = [k for k, p in module.named_parameters() if p.is_complex()]
    require(not complex_names, f"network '{name}' has complex parameters ({', '.join(complex_names)}): use real ones.")
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = any(m.sparse and m.weight.requires_grad for m in embeddings)
    require(not sparse, f"network '{name}' has an embedding with sparse gradients: set sparse=False.")
    sparse_names = [k for k, b in module.named_buffers() if b.layout != torch.strided]
    require(
        not sparse_names,
        f"network '{name}' has sparse buffers ({', '.join(sparse_names)}): register dense ones.",
    )
    try:
        copied = share_parameters(module)
    except Exception as error:
        hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
        replacement = "use torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm."
        reason = replacement if any(isinstance(hook, WeightNorm) for hook in hooks) else first_line(error)
        raise GlocalError(f"network '{name}' cannot be copied: {reason}") from error
    examples = _example_inputs(challenge)
    for mode in ("evaluation", "training"):
        try:
            with torch.no_grad(), global_generator(generator(0, "check")), unfused_encoders():
                outputs = copied.train(mode == "training")(examples)
        except (Exception, SystemExit) as error:
            raise GlocalError(
                f"network '{name}' does not accept inputs of shape {tuple(challenge.input_shape)} ({challenge.name}) "
                f"in {mode} mode: {describe_error(error)}."
            ) from error
        is_tensor, expected = isinstance(outputs, torch.Tensor), (len(examples), challenge.outputs)
        result = f"outputs of shape {tuple(outputs.shape)}" if is_tensor else f"a {type(outputs).__name__}"
        message = f"network '{name}' returns {result} for {len(examples)} inputs in {mode} mode"
        require(
            is_tensor and outputs.shape == expected,
            f"{message}; {challenge.name} needs one tensor of shape {expected}.",
        )


def check_batches(make: MakeNetwork, challenge: Challenge, batch_size: int) -> None:
    """Raise an error if a task ends with a batch of one example and the network, as with BatchNorm, needs two."""
    module = seeded_network(make, challenge, seed=0).train()
    with suppress(Exception), torch.no_grad(), global_generator(generator(0, "check")):
        module(_example_inputs(challenge)[:1])
        return
    for index in range(challenge.tasks):
        size = challenge.task(index, 0).train.y.shape[0]
        require(
            (size - 1) % batch_size != 0,
            f"the network does not train on a single example, as with BatchNorm, but task {index + 1} of "
            f"{challenge.name} has {size}: batches of {batch_size} leave one. Choose another batch_size.",
        )


def _example_inputs(challenge: Challenge) -> torch.Tensor:
    """Return two inputs: of zeros, or the smallest and the largest token at every position."""
    if challenge.input_dtype.is_floating_point:
        return torch.zeros(2, *challenge.input_shape)
    tasks = [challenge.task(index, 0) for index in range(challenge.tasks)]
    splits = [data for task in tasks for data in task.splits.values()]
    rows = torch.stack([extreme for data in splits for extreme in data.x.aminmax(dim=0)])
    return torch.stack(rows.aminmax(dim=0))


def _fingerprint(module: nn.Module) -> str:
    """Return the hash of a network: how it prints, its state dict, what is frozen, and what else it holds."""
    digest = hashlib.sha256(repr(module).encode())
    for key, tensor in module.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest.update(" ".join(k for k, p in module.named_parameters() if not p.requires_grad).encode())
    if others := _unprinted(module):
        digest.update(source_hash(others).encode())
    return digest.hexdigest()[:16]


MODULE_ATTRIBUTES = {*vars(nn.Module())}


def _unprinted(module: nn.Module) -> dict[str, Any]:
    """Return buffers outside of the state dict and attributes that are numbers, as far as they are not printed.

    Of installed layers these are the arguments other than the defaults. Strings are left out: they may name a device or
    a folder, which differ between machines.
    """
    state = module.state_dict()
    values: dict[str, Any] = {k: b for k, b in module.named_buffers() if k not in state}
    for name, part in module.named_modules():
        kind, attributes, printed = type(part), vars(part), part.extra_repr()
        if is_installed(kind.__module__):
            arguments = inspect.signature(kind).parameters
            given = {
                k: attributes[k]
                for k, p in arguments.items()
                if k in attributes and repr(attributes.get(k)) != repr(p.default)
            }
            attributes = {k: value for k, value in given.items() if str(value) not in printed}
        for k in sorted(attributes.keys() - MODULE_ATTRIBUTES):
            values |= {f"{name}.{k}": attributes[k]} if _is_numeric(attributes[k]) else {}
    return values


def _is_numeric(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_numeric, value))
    if type(value) is dict:
        return all(map(_is_numeric, value.values()))
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and not value.is_meta)


def algorithm(spec: str | Algorithm | type[Algorithm], options: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve an algorithm: a name or path.py:Name, a class, or an instance; `options` override its fields."""
    digest = ""
    if isinstance(spec, str) and is_file_spec(spec):
        spec, digest = load_object(spec, "algorithm")
    if isinstance(spec, str):
        require_known("algorithm", spec, ALGORITHMS)
        spec = ALGORITHMS[spec]
    kind = spec if isinstance(spec, type) else type(spec)
    if not issubclass(kind, Algorithm):
        raise GlocalError(f"'{kind.__name__}' is not an algorithm: it does not subclass glocal.Algorithm.")
    _check_class(kind, Algorithm)
    require_known(f"locality of {name_of(kind)}", kind.locality, get_args(Locality))
    value = _with_options(kind, spec, options)
    _check_methods(value, Algorithm)
    config = _config(value)
    if kind is not ALGORITHMS.get(value.name):
        config["source"] = digest or source_hash(kind)
    return Resolved(value, config)


def _check_class(kind: type, base: type) -> None:
    """Raise an error if the class of an algorithm or optimiser is not a dataclass whose fields a run's name covers."""
    fields = dataclasses.fields(kind)
    for parent in kind.mro()[: kind.mro().index(base)]:
        annotations = [k for k, hint in inspect.get_annotations(parent).items() if "ClassVar" not in str(hint)]
        ignored = ", ".join(k for k in annotations if not hasattr(base, k) and k not in {f.name for f in fields})
        require(not ignored, f"{parent.__name__} declares fields ({ignored}) without @dataclass(frozen=True).")
        slots = f"{parent.__name__} has slots=True, with which options cannot differ: omit it."
        require("__slots__" not in vars(parent), slots)
    computed = ", ".join(f.name for f in fields if not f.init)
    require(not computed, f"{name_of(kind)} has fields with init=False ({computed}): compute them in its methods.")
    covered = list(inspect.signature(kind).parameters) == [f.name for f in fields]
    require(covered, f"{name_of(kind)} has its own __init__, which a run's name cannot cover: use dataclass fields.")
    printable = f"the {base.__name__.lower()}'s name is {name_of(kind)!r}; use letters and digits."
    require(name_of(kind).isprintable(), printable)
    clash = any(f.name == "lr" for f in fields)
    require(not clash, f"{name_of(kind)} has a field lr, which is the run's learning rate; use another name.")


def _check_methods(value: Any, base: type) -> None:
    """Raise an error if a method is misspelt, or does not take the arguments that the engine calls it with."""
    methods = {k: f for k, f in inspect.getmembers(base, inspect.isfunction) if not k.startswith("_")}
    for name, _ in inspect.getmembers(type(value), inspect.isfunction):
        likely = [] if name.startswith("_") or name in methods else get_close_matches(name, methods, 1, cutoff=0.85)
        if likely and not any({name, likely[0]} <= vars(kind).keys() for kind in type(value).mro()):
            raise GlocalError(
                f"{name_of(value)} has a method '{name}', which the protocol does not know: did you mean "
                f"'{likely[0]}'? If not, give it another name, or one that begins with an underscore."
            )
    below = {name: f for kind in type(value).mro()[: type(value).mro().index(base)] for name, f in vars(kind).items()}
    others = [name for name, f in below.items() if inspect.isfunction(f) and not name.startswith("_")]
    require(
        not others or not methods.keys().isdisjoint(below),
        f"{name_of(value)} has the method{'s' * (len(others) > 1)} {', '.join(others)}, which nothing calls. "
        f"The engine calls {', '.join(methods)}.",
    )
    for name, method in methods.items():
        arguments = [*inspect.signature(method).parameters][1:]
        signature = inspect.signature(getattr(value, name))
        message = (
            f"{name_of(value)}.{name} takes ({', '.join(signature.parameters)}); "
            f"it is called with ({', '.join(arguments)})."
        )
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise GlocalError(message) from error
        swapped = any(a != b and a in arguments for a, b in zip(signature.parameters, arguments, strict=False))
        require(not swapped, message)


def _config(value: Any) -> dict[str, Any]:
    """Return the name and the options of an algorithm or optimiser, as a run's configuration has them."""
    options = dataclasses.asdict(value)
    for option, content in options.items():
        try:
            json.dumps(content)
        except (TypeError, ValueError) as error:
            message = f"{name_of(value)}.{option} = {content!r} cannot be part of a run's name: use numbers or strings."
            raise GlocalError(message) from error
    return {"name": name_of(value), "options": options}


def _with_options(kind: type, spec: Any, options: Mapping[str, Any] | None) -> Any:
    """Return the object `spec` of a dataclass, or one with the class's defaults, with some options instead."""
    fields = dataclasses.fields(kind)
    current = {} if isinstance(spec, type) else {f.name: getattr(spec, f.name) for f in fields}
    names, hints = [f.name for f in fields], get_type_hints(kind)
    for name in options or {}:
        require(bool(fields), f"{name_of(kind)} has no options; '{name}' was given.")
        require_known(f"option of {name_of(kind)}", name, names)
    settings = {**current, **(options or {})}
    values = {name: convert(f"{name_of(kind)}.{name}", hints[name], value) for name, value in settings.items()}
    missing = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING and f.name not in values]
    require(not missing, f"{name_of(kind)} needs a value for {', '.join(missing)}: set it in the options.")
    return call_user_code(partial(kind, **values), name_of(kind))


def optimizer(spec: str | Optimizer | type[Optimizer], options: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve an optimiser: a name or path.py:Name, a class or an instance; `options` override its fields.

    The configuration of plain SGD, the default, is empty: it is no part of a run's name.
    """
    digest = ""
    if isinstance(spec, str) and is_file_spec(spec):
        spec, digest = load_object(spec, "optimizer")
    if isinstance(spec, str):
        require_known("optimizer", spec, OPTIMIZERS)
        spec = OPTIMIZERS[spec]
    kind = spec if isinstance(spec, type) else type(spec)
    subclass = f"'{kind.__name__}' is not an optimizer: it does not subclass glocal.optimizers.Optimizer."
    require(issubclass(kind, Optimizer), f"{subclass} Built in are {', '.join(OPTIMIZERS)}.")
    _check_class(kind, Optimizer)
    value = _with_options(kind, spec, options)
    if value == PLAIN_SGD:
        return Resolved(value, {})
    config = _config(value)
    if not is_built_in(value):
        _check_methods(value, Optimizer)
        rehearse_optimizer(value)
        config["source"] = digest or source_hash(kind)
    return Resolved(value, config)


def check_optimizer(algorithm: Algorithm, optimizer: Optimizer) -> None:
    """Raise an error if an algorithm does not keep what it promises under an optimiser."""
    name, other = name_of(algorithm), name_of(optimizer)
    if algorithm.scales_gradients and not depends_on_scale(optimizer):
        raise GlocalError(f"{name} scales gradients, which {other} undoes by its own scaling: use sgd.")
    if algorithm.freezes_weights:
        message = f"{name} freezes weights by gradients of 0; with %s they would move all the same: %s."
        require(not optimizer.weight_decay, message % ("weight decay", "set weight_decay=0"))
        require(optimizer.state == "reset", message % ("state=kept", "set state=reset"))
        require(keeps_frozen_weights(optimizer), message % (other, "use sgd or adam"))


def choose_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' is the GPU if there is one."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise GlocalError(f"device must be auto, cpu, cuda or cuda:N; '{name}' was given.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        reason = f"there are {gpus} GPUs, from cuda:0" if gpus else "PyTorch sees no GPU. Use the device cpu or auto"
        raise GlocalError(f"device '{name}' is not available: {reason}.")
    return device


def device_name(device: torch.device) -> str:
    """Describe a device, for example 'cuda: NVIDIA H200'."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type}: {name}"


def name_of(part: Algorithm | Optimizer | type) -> str:
    """Return the declared name of an algorithm or optimiser, or its class name if it declares none."""
    kind = part if isinstance(part, type) else type(part)
    return str(vars(kind).get("name", kind.__name__))


def label_of(algorithm: Algorithm, optimizer: Optimizer = PLAIN_SGD) -> str:
    """Return the names of an algorithm and an optimiser, and their options that differ from the defaults.

    Plain SGD is left out: 'ewc penalty=10', 'er · adamw weight_decay=0.1'.
    """

    def label(part: Algorithm | Optimizer) -> str:
        values = [(f, getattr(part, f.name)) for f in dataclasses.fields(part)]
        texts = [f"{f.name}={v:g}" if isinstance(v, float) else f"{f.name}={v}" for f, v in values if v != f.default]
        return " ".join([name_of(part), *texts])

    return label(algorithm) if optimizer == PLAIN_SGD else f"{label(algorithm)} · {label(optimizer)}"
