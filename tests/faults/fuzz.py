"""Bad inputs: fuzzed files, and bad values for every option of every command and for functions in Python.

Each gets an answer or one clear sentence, within bounded time and memory, and never a traceback. Cases are drawn from
a seed. `python tests/faults/count.py --only bad_options` tries one group.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import tempfile
import traceback
import typing
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from outcome import Outcome
from safetensors.torch import save_file
from small_sweep import HERE, sweep
from torch import nn

import glocal
from glocal import challenges, curvature, lens
from glocal.algorithms import ALGORITHMS, ER
from glocal.challenges import datasets
from glocal.cli.main import COMMANDS, main
from glocal.cli.paper import Paper
from glocal.engine.config import RunConfig
from glocal.errors import GlocalError
from glocal.files import read_tensors
from glocal.optimizers import OPTIMIZERS
from glocal.sweeps import resolve
from glocal.sweeps.options import SweepOptions

Group: TypeAlias = Callable[[int], Outcome]
SECONDS, BYTES = 60, 4 << 30
"""What one case may take."""
TINY = """
import torch
from glocal import from_tasks

def make():
    x, y = torch.arange(48.0).reshape(12, 4) % 5, torch.arange(12) % 2
    return from_tasks("tiny", [((x, y), (x, y)), ((x + 1, y), (x + 1, y))], setting="domain")
"""


def in_a_folder(group: Callable[[Path, int], Outcome]) -> Group:
    """Give a group of cases a folder of its own."""

    @functools.wraps(group)
    def in_folder(cases: int) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            return group(Path(folder), cases)

    return in_folder


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError or MemoryError where a case takes too much."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_all(name: str, cases: Iterable[tuple[str, Callable[[], object]]]) -> Outcome:
    outcome = Outcome(name)
    for case, action in cases:
        problem = None
        try:
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                action()
        except GlocalError as error:
            if not str(error).strip() or not all(c.isprintable() or c == "\n" for c in str(error)):
                problem = f"a message {str(error)!r}"
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"[:1_000]
        outcome.count(case, problem)
    return outcome


def command(arguments: list[str]) -> None:
    """Run a command; raise unless it succeeds, or says in one sentence why it does not."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as stop:  # --help
            status = int(stop.code or 0)
    said = err.getvalue()
    assert status in (0, 2), f"exit code {status}: {said}"
    assert "Check what the code in" not in said, said
    assert status == 0 or said.strip().splitlines()[-1].startswith("glocal: "), said
    assert all(c.isprintable() or c == "\n" for c in out.getvalue() + said), said


# --- fuzzed files ---------------------------------------------------------------------------------------------------

TOKENS = [
    b"\0",
    b"[",
    b"{",
    b'"',
    b"-1",
    b"0",
    b"1e999",
    b"nan",
    b"null",
    b"\xff\xfe",
    b"\x1b[2J",
    b"9" * 40,
    b"9" * 5000,
]
TOKENS += [b"[" * 5000, b"\n", b"=", b"true", b"1.5", b"\xf0\x9f\x98\x80", b"../..", b"$x^{$", b"[/x]"]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    10**30,
    1e308,
    -0.5,
    "",
    "x",
    "\x1b[2J",
    [],
    [1],
    {},
    {"a": 1},
    "9" * 400,
    [[[]]],
]


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Change bytes in one to three places."""
    for _ in range(draw.randint(1, 3)):
        a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        b = draw.choice([b, min(a + 4, len(content))])
        part = content[a:b]
        new = draw.choice([b"", part + part, bytes(len(part)), draw.randbytes(len(part)), draw.choice(TOKENS)])
        content = content[:a] + new + (b"" if draw.random() < 0.1 else content[b:])
    return content


def mutate_value(value: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Replace or remove one value somewhere in JSON."""

    def places(part: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for key, inner in part.items():
            yield part, key
            yield from places(inner) if isinstance(inner, dict) else ()

    part, key = draw.choice(list(places(value)))
    part[key] = draw.choice(VALUES)
    if draw.random() < 0.05:
        del part[key]
    return value


@in_a_folder
def fuzz_sweep_files(folder: Path, cases: int) -> Outcome:
    """TOML files of sweeps."""
    (folder / "tiny.py").write_text(TINY)
    good = f"""challenge = "{folder}/tiny.py:make"
network = "{HERE}/linear.py:make"
lrs = [0.1, 0.2]
seeds = [1]
epochs = 1
batch_size = 12
optimizer = {{name = "adam", beta1 = [0.8, 0.9]}}
algorithms = ["sgd", {{name = "er", slots = [4, 5]}}]
""".encode()
    draw, path = random.Random(1), folder / "sweep.toml"

    def case(number: int) -> tuple[str, Callable[[], object]]:
        content = mutate(good, draw)

        def action() -> None:
            path.write_bytes(content)
            with contextlib.chdir(folder):
                command(["sweep", "--file", str(path), "--device", "cpu", "--store", str(folder / "store")])

        return repr(content), action

    return try_all("fuzzed sweep files", map(case, range(cases)))


@in_a_folder
def fuzz_stores(folder: Path, cases: int) -> Outcome:
    """Files of runs without checksums: bytes that differ, and values that differ under a name that agrees."""
    store, draw = folder / "store", random.Random(2)
    sweep(store, [0.1, 0.2], keep_parameters=True)
    good = folder / "good"
    for run in (store / "runs").glob("[!.]*"):
        for name in ("arrays.safetensors", "parameters.safetensors"):
            tensors, _ = read_tensors(run / name)
            save_file(tensors, run / name, metadata={"order": json.dumps(list(tensors))})
    shutil.copytree(store, good)

    def case(number: int) -> tuple[str, Callable[[], object]]:
        name = draw.choice(["config.json", "info.json", "arrays.safetensors", "parameters.safetensors"])
        run = draw.choice(sorted((good / "runs").glob("[!.]*")))
        structured = name.endswith("json") and draw.random() < 0.7
        old = (run / name).read_bytes()
        content = json.dumps(mutate_value(json.loads(old), draw)).encode() if structured else mutate(old, draw)

        def action() -> None:
            shutil.rmtree(store)
            shutil.copytree(good, store)
            path = store / "runs" / run.name
            (path / name).write_bytes(content)
            if structured and name == "config.json":
                with contextlib.suppress(Exception):
                    path.rename(path.with_name(RunConfig(**json.loads(content)).hash))
            for found in glocal.load(store):
                _ = found.diverged, found.finished, found.challenge, found.locality
                with contextlib.suppress(GlocalError):
                    found.state(1)
            shown: list[list[str]] = [
                ["table"],
                ["status"],
                ["table", "--format", "markdown"],
                ["plot", "-o", f"{folder}/x.svg"],
            ]
            which = shown[number % len(shown)]
            command([which[0], str(store), *which[1:]])

        return f"{name}: {content[:300]!r}", action

    return try_all("fuzzed stores", map(case, range(cases)))


@in_a_folder
def fuzz_data_files(folder: Path, cases: int) -> Outcome:
    """Files of data sets, as if their checksums agreed."""
    draw, bytes_of_images = random.Random(3), bytes(range(200)) * 4
    idx = b"\0\0\x08\x03" + (1).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2 + bytes_of_images[:784]
    labels = b"\0\0\x08\x01" + (1).to_bytes(4, "big") + b"\1"
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1], b"fine_labels": [0, 1]}
    images = np.zeros((64, 64, 3), np.uint8)
    from PIL import Image

    Image.fromarray(images).save(jpeg := io.BytesIO(), "JPEG")
    with zipfile.ZipFile(archive := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as written:
        root = datasets.ZIP_ROOT
        written.writestr(root + "wnids.txt", "n1\nn2")
        written.writestr(root + "train/n1/images/n1_0.JPEG", jpeg.getvalue())
        written.writestr(root + "val/images/v0.JPEG", jpeg.getvalue())
        written.writestr(root + "val/val_annotations.txt", "v0.JPEG\tn2\t0\n")
    (folder / "labels").write_bytes(labels)
    path = folder / "data"
    cifar = pickle.dumps(batch, 3).replace(b"numpy._core", b"numpy.core")
    readers: list[tuple[bytes, Callable[..., Any], tuple[Any, ...]]] = [
        (idx, datasets.load_mnist.__wrapped__, (path, folder / "labels", path, folder / "labels")),
        (gzip.compress(idx), datasets.load_mnist.__wrapped__, (path, folder / "labels", path, folder / "labels")),
        (cifar, datasets.load_cifar10.__wrapped__, (path, path)),
        (cifar, datasets.load_cifar100.__wrapped__, (path, path)),
        (archive.getvalue(), lambda file: datasets.decode_tinyimagenet(file), (path,)),
    ]

    def case(number: int) -> tuple[str, Callable[[], object]]:
        good, load, paths = readers[number % len(readers)]
        content = mutate(good, draw)

        def action() -> None:
            path.write_bytes(content)
            datasets._load("mnist", load, *paths)

        return repr(content[:300]), action

    for good, load, paths in readers:
        path.write_bytes(good)
        datasets._load("mnist", load, *paths)  # or the cases would test nothing
    return try_all("fuzzed data sets", map(case, range(cases)))


@in_a_folder
def fuzz_checkpoints(folder: Path, cases: int) -> Outcome:
    """Safetensors files that runs start from."""
    (folder / "tiny.py").write_text(TINY)
    path, draw = folder / "init.safetensors", random.Random(4)
    save_file(nn.Linear(4, 2).state_dict(), path)
    good = path.read_bytes()

    def case(number: int) -> tuple[str, Callable[[], object]]:
        content = mutate(good, draw)

        def action() -> None:
            path.write_bytes(content)
            resolve.network(f"{HERE}/linear.py:make", tiny, path)

        return repr(content), action

    tiny = resolve.challenge(f"{folder}/tiny.py:make").value
    return try_all("fuzzed checkpoints", map(case, range(cases)))


@in_a_folder
def fuzz_code(folder: Path, cases: int) -> Outcome:
    """Python files that are cut off or not Python."""
    draw, path = random.Random(5), folder / "mine.py"
    good = TINY.encode()

    def case(number: int) -> tuple[str, Callable[[], object]]:
        cut = good[: draw.randrange(len(good))]
        content = draw.choice([cut, cut + draw.choice(TOKENS), draw.randbytes(100), draw.choice(TOKENS)])

        def action() -> None:
            path.write_bytes(content)
            command(["run", f"{path}:make", "sgd", "--network", f"{HERE}/linear.py:make", "--store", str(folder / "s")])

        return repr(content), action

    return try_all("fuzzed code", map(case, range(cases)))


# --- bad arguments --------------------------------------------------------------------------------------------------

NAMES = [
    "",
    "x",
    "\x1b]0;owned\x07",
    "[/x]",
    "a" * 5000,
    "x.py",
    "x.py:",
    ":x",
    "/nowhere/x.py:N",
    "~nobody/x.py:N",
    "θ\0",
]
NAMES += ["/dev/full", "/dev/zero.py:x", "x" * 300 + ".py:N", "..", "$x^{$", "-1", "nan"]
NUMBERS = [
    "",
    "x",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "1e999",
    "9" * 30,
    "9" * 5000,
    "-0",
    "1_0",
    "١",
    "0x10",
    "1,2",
    "\0",
]


def options_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a command and their types."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from options_of(hints[field.name])
        else:
            yield f"--{field.name.replace('_', '-')}", hints[field.name]


@in_a_folder
def bad_options(folder: Path, cases: int) -> Outcome:
    """Bad values for every option of every command."""
    (folder / "tiny.py").write_text(TINY)
    tiny, network = f"{folder}/tiny.py:make", ["--network", f"{HERE}/linear.py:make"]
    with contextlib.chdir(folder):
        command(["run", tiny, "er", *network, "--store", "good", "--keep-parameters", "--options", "slots=4"])
    run = next((folder / "good" / "runs").glob("[!.]*"))
    own = ["--challenge", tiny, *network]
    base = {
        "run": [tiny, "sgd", *network],
        "sweep": [tiny, "--algorithms", "sgd", "--lrs", "0.1", "--seeds", "1", *network],
        "work": ["good"],
        "status": ["good"],
        "table": ["good"],
        "choose": ["good"],
        "plot": ["good"],
        "lens": [str(run), *own, "--examples", "4", "--eigenvalues", "2"],
        "locality": ["er", *own, "--solutions", "3", "--examples", "8", "--epochs", "1"],
        "demo": ["--device", "tpu"],
    }
    commands: dict[tuple[str, ...], Any] = {(name,): kind for name, kind in COMMANDS.items() if name != "paper"}
    commands |= {("paper", name): kind for name, kind in Paper.commands.items()}
    tests: list[list[str]] = [[], [""], ["x"], ["\0"], ["--x"], ["paper", "x"], ["run"], ["run", "x"], ["-"], ["--"]]
    for words, kind in commands.items():
        start = [*words, *base.get(words[0], ["--device", "tpu"] if words[0] == "paper" else [])]
        tests += [[*words, *NAMES[:3]], [*start, "--x"], [*start, "x", "y", "z"], [*start, *["-"] * 3]]
        for flag, hint in options_of(kind):
            if flag == "--watch" or (words[0] == "paper" and flag == "--device"):
                continue  # it waits, or starts an experiment
            types_of = {hint, *typing.get_args(hint), *(a for t in typing.get_args(hint) for a in typing.get_args(t))}
            values = NUMBERS if types_of & {int, float} else [] if bool in types_of else NAMES
            tests += [[*start, flag], *([*start, flag, value] for value in values)]
            tests += [[*start, flag, "x=1", "=", "er.slots=x", value] for value in NAMES[:6] if "options" in flag]
    random.Random(6).shuffle(tests)

    def case(arguments: list[str]) -> tuple[str, Callable[[], object]]:
        def action() -> None:
            with contextlib.chdir(folder):
                command(arguments)

        return " ".join(arguments)[:300], action

    return try_all("bad options", map(case, tests[:cases]))


ODD: list[Any] = [
    None,
    0,
    -1,
    1.5,
    float("nan"),
    10**30,
    "",
    "x",
    "\x1b[2J\0",
    [],
    {},
    (),
    object(),
    len,
    torch.zeros(0),
]
ODD += [
    torch.zeros(3, 3),
    np.zeros(2, object),
    [None],
    [[1]],
    {"a": object()},
    nn.Linear(2, 2),
    int,
    lambda *_: 1 / 0,
    b"x",
]


@in_a_folder
def bad_calls(folder: Path, cases: int) -> Outcome:
    """Odd values for every argument of functions in Python."""
    x, y = torch.arange(48.0).reshape(12, 4) % 5, torch.arange(12) % 2
    data = [((x, y), (x, y))] * 2
    challenge = glocal.from_tasks("tiny", data, "domain")
    network = nn.Linear(4, 2)
    states = [network.state_dict() for _ in range(3)]

    def eigenpairs(model: Any, loss: Any, data: Any, k: Any) -> None:
        curvature.eigenpairs(model, loss, data, k=k)

    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (
            glocal.from_tasks,
            {"name": "tiny", "tasks": data, "setting": "domain", "outputs": 2, "loss": "cross-entropy"},
        ),
        (glocal.from_tasks, {"name": "tiny", "tasks": data, "transform": None}),
        (glocal.load, {"store": folder / "store"}),
        (challenges.make, {"name": "rotated-digits", "tasks": 1, "data": None}),
        (challenges.locate, {"name": "mnist", "data": None}),
        (lens.examine, {"module": network, "loss": "cross-entropy", "tasks": [(x, y)] * 2, "checkpoints": states}),
        (
            lens.trace_checkpoints,
            {"module": network, "loss": "cross-entropy", "tasks": [(x, y)] * 2, "checkpoints": states},
        ),
        (lens.open_run, {"path": "x", "network": "x", "algorithm": "x", "challenge": "x", "device": "cpu"}),
        (eigenpairs, {"model": network, "loss": nn.CrossEntropyLoss(), "data": [(x, y)], "k": 2}),
        *((kind, {f.name: getattr(kind(), f.name) for f in fields(kind)}) for kind in OPTIMIZERS.values()),
    ]
    swept = {"challenge": challenge, "algorithms": [ER(slots=4)], "lrs": [0.1], "seeds": [1], "optimizer": "sgd"}
    options = {field.name: getattr(SweepOptions(), field.name) for field in fields(SweepOptions)}
    options |= {"network": lambda *_: nn.Linear(4, 2), "epochs": 1, "store": folder / "store", "device": "cpu"}
    calls.append((glocal.sweep, swept | options))
    given = {**swept, **options}

    def algorithm(name: str, **values: Any) -> None:
        glocal.sweep(**(given | {"algorithms": [(name, values)]}))

    tests: list[tuple[str, Callable[[], object]]] = []
    for function, arguments in calls:
        for name in arguments:
            for value in ODD:
                if name == "model" and isinstance(value, torch.Tensor):
                    continue  # a dense matrix
                call = functools.partial(function, **(arguments | {name: value}))
                tests.append((f"{function.__name__}({name}={value!r})"[:200], call))
    for name, kind in ALGORITHMS.items():
        for field in fields(kind):
            for value in ODD:
                call = functools.partial(algorithm, name, **{field.name: value})
                tests.append((f"{name}({field.name}={value!r})"[:200], call))
    random.Random(7).shuffle(tests)
    with contextlib.chdir(folder):  # a store may be called 'x'
        return try_all("bad calls", tests[:cases])


GROUPS: dict[Group, int] = {
    fuzz_sweep_files: 500,
    fuzz_stores: 700,
    fuzz_data_files: 1_000,
    fuzz_checkpoints: 500,
    fuzz_code: 200,
    bad_options: 1_500,
    bad_calls: 2_500,
}
"""Groups of cases, and how many of them are tried."""
