"""Every mistake a user can make ends in one clear line and exit code 2, and loses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from glocal.cli.main import main

RUN = ["run", "rotated-digits", "sgd", "--tasks", "1", "--epochs", "1", "--batch-size", "500"]

SAMPLE = ["sweep", "rotated-digits", "--algorithms", "er", "--sampler", "tpe", "--trials", "2", "--tasks", "2"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


NETWORK = """from torch import nn
def make(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear({inputs}, {outputs}))
"""
ALGORITHM = """from dataclasses import dataclass
from glocal.algorithms import Algorithm
@dataclass(frozen=True)
class Mine(Algorithm):
    {}
"""
SUBJECT = """import torch
def make():
    module = torch.nn.Linear(2, 2)
    return module, "cross-entropy", [(torch.ones(1, 2), torch.zeros(1).long())], [module.state_dict()]
"""
TRAINED = SUBJECT.replace("[module.state_dict()]", "2 * [module.state_dict()]")

MISTAKES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "unknown command": (lambda p: ["swep"], ["unknown command 'swep'", "'sweep'"]),
    "unknown flag": (lambda p: [*RUN, "--lrr", "0.1"], ["--lrr", "--lr"]),
    "no challenge": (lambda p: ["run"], ["challenge"]),
    "unknown challenge": (
        lambda p: ["run", "rotated-digit", "sgd"],
        ["'rotated-digit'", "Did you mean 'rotated-digits'"],
    ),
    "unknown algorithm": (lambda p: ["run", "rotated-digits", "ewk"], ["'ewk'", "Did you mean 'ewc'", "agem"]),
    "unknown network": (lambda p: [*RUN, "--network", "mpl"], ["'mpl'", "mlp"]),
    "unknown option": (lambda p: ["run", "rotated-digits", "ewc", "--options", "penlty=1"], ["'penlty'", "'penalty'"]),
    "option without value": (lambda p: ["run", "rotated-digits", "ewc", "--options", "penalty"], ["NAME=VALUE"]),
    "option of nobody": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--options", "ewc.penalty=1"],
        ["unknown algorithm", "'ewc'", "er"],
    ),
    "range without sampler": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--lrs", "1e-3..1"],
        ["'1e-3..1'", "--sampler tpe --trials N"],
    ),
    "range of an option without sampler": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--options", "er.slots=10..20"],
        ["'10..20'", "--sampler"],
    ),
    "sampler without trials": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--sampler", "tpe"],
        ["--trials"],
    ),
    "protocol without sampler": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--protocol", "first-task"],
        ["--protocol needs a sampler", "--sampler tpe"],
    ),
    "parallel without sampler": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--parallel", "3"],
        ["--parallel needs a sampler", "--sampler tpe"],
    ),
    "trials without sampler": (
        lambda p: ["sweep", "rotated-digits", "--algorithms", "er", "--trials", "3"],
        ["--trials needs a sampler", "--sampler tpe"],
    ),
    "sampler on all devices": (lambda p: [*SAMPLE, "--device", "all"], ["a sampler trains in this process", "device"]),
    "sampler without validation data": (
        lambda p: [*SAMPLE, "--lrs", "1e-3..1"],
        ["all-validation needs validation data", "--validation 0.1", "oracle-test"],
    ),
    "sampler with an unknown protocol": (
        lambda p: [*SAMPLE, "--protocol", "first-tsk"],
        ["'first-tsk'", "Did you mean 'first-task'"],
    ),
    "range that is reversed": (lambda p: [*SAMPLE, "--lrs", "1..0.1"], ["lr = 1..0.1", "LOW < HIGH"]),
    "two ranges": (lambda p: [*SAMPLE, "--lrs", "1..2", "3..4"], ["lr = 1..2, 3..4", "one range"]),
    "range of part of a slot": (
        lambda p: [*SAMPLE, "--options", "slots=1.5..20"],
        ["slots = '1.5'", "whole number"],
    ),
    "sampler in several processes": (lambda p: [*SAMPLE, "--workers", "2"], ["sampler", "workers"]),
    "option not a number": (
        lambda p: ["run", "rotated-digits", "ewc", "--options", "penalty=big"],
        ["finite number", "big"],
    ),
    "option out of choices": (
        lambda p: ["run", "rotated-digits", "ewc", "--options", "fisher=exakt"],
        ["exakt", "exact"],
    ),
    "negative penalty": (lambda p: ["run", "rotated-digits", "ewc", "--options", "penalty=-1"], ["penalty", "-1"]),
    "no slots": (lambda p: ["run", "rotated-digits", "er", "--options", "slots=0"], ["slots", "0"]),
    "option where there are none": (lambda p: [*RUN, "--options", "slots=3"], ["sgd has no options"]),
    "nothing of one's own to list": (lambda p: ["list", "--own", "absent.py:Mine"], ["absent.py"]),
    "ogd slots=20": (
        lambda p: ["run", "rotated-digits", "ogd", "--options", "slots=20"],
        ["ogd", "slots=20", "slots of at least 50"],
    ),
    "ogd-gtl slots=0": (
        lambda p: ["run", "rotated-digits", "ogd-gtl", "--options", "slots=0"],
        ["ogd-gtl", "slots", "0"],
    ),
    "gem slots=3": (
        lambda p: ["run", "rotated-digits", "gem", "--options", "slots=3"],
        ["gem", "slots=3", "5 tasks"],
    ),
    "gem margin=-1": (
        lambda p: ["run", "rotated-digits", "gem", "--options", "margin=-1"],
        ["gem", "margin", "-1"],
    ),
    "agem filling=batches": (
        lambda p: ["run", "rotated-digits", "agem", "--options", "filling=batches"],
        ["batches", "batch"],
    ),
    "si damping=0": (
        lambda p: ["run", "rotated-digits", "si", "--options", "damping=0"],
        ["si", "damping", "0"],
    ),
    "si importance=publishd": (
        lambda p: ["run", "rotated-digits", "si", "--options", "importance=publishd"],
        ["publishd", "published"],
    ),
    "ewc anchors=all": (
        lambda p: ["run", "rotated-digits", "ewc", "--options", "anchors=all"],
        ["all", "each"],
    ),
    "packnet keep=2": (
        lambda p: ["run", "rotated-digits", "packnet", "--options", "keep=2"],
        ["packnet", "keep", "2"],
    ),
    "hat scale=-1": (
        lambda p: ["run", "rotated-digits", "hat", "--options", "scale=-1"],
        ["hat", "scale", "-1"],
    ),
    "stable-sgd dropout=1": (
        lambda p: ["run", "rotated-digits", "stable-sgd", "--options", "dropout=1"],
        ["stable-sgd", "dropout", "1"],
    ),
    "der alpha=-1": (
        lambda p: ["run", "rotated-digits", "der", "--options", "alpha=-1"],
        ["der", "alpha", "-1"],
    ),
    "derpp beta=-1": (
        lambda p: ["run", "rotated-digits", "derpp", "--options", "beta=-1"],
        ["derpp", "beta", "-1"],
    ),
    "laplace sums=nearst": (
        lambda p: ["run", "rotated-digits", "laplace", "--options", "sums=nearst"],
        ["nearst", "nearest"],
    ),
    "optimal-hard threshold=1": (
        lambda p: ["run", "rotated-digits", "optimal-hard", "--options", "threshold=1"],
        ["optimal-hard", "threshold", "1"],
    ),
    "optimal-hard structure=full": (
        lambda p: ["run", "rotated-digits", "optimal-hard", "--options", "structure=full"],
        ["89,610 parameters", "low-rank"],
    ),
    "optimal-soft structure=kroneker": (
        lambda p: ["run", "rotated-digits", "optimal-soft", "--options", "structure=kroneker"],
        ["kroneker", "kronecker"],
    ),
    "optimal-soft structure=diagonal matrix=hessian": (
        lambda p: ["run", "rotated-digits", "optimal-soft", "--options", "structure=diagonal", "matrix=hessian"],
        ["optimal-soft", "full or low-rank"],
    ),
    "too few exemplars": (
        lambda p: ["run", "split-digits", "icarl", "--options", "slots=4"],
        ["icarl", "slots=4", "10"],
    ),
    "unknown features": (
        lambda p: ["run", "split-digits", "icarl", "--options", "features=rawest"],
        ["rawest", "raw"],
    ),
    "unknown setting": (lambda p: [*RUN, "--setting", "taks"], ["'taks'", "Did you mean 'task'"]),
    "a setting without new classes": (lambda p: [*RUN, "--setting", "task"], ["rotated-digits", "domain"]),
    "domain where classes are new": (
        lambda p: ["run", "split-digits", "sgd", "--setting", "domain"],
        ["split-digits", "class or task"],
    ),
    "an algorithm in the wrong setting": (
        lambda p: ["run", "split-digits", "pnn"],
        ["pnn", "task or domain", "split-digits", "class", "choose the setting 'task'"],
    ),
    "an algorithm without its new classes": (
        lambda p: ["run", "rotated-digits", "icarl"],
        ["icarl", "class or task", "new classes"],
    ),
    "lr not a number": (lambda p: [*RUN, "--lr", "fast"], ["--lr", "fast"]),
    "lr negative": (lambda p: [*RUN, "--lr", "-0.1"], ["lr", "-0.1"]),
    "lr nan": (lambda p: [*RUN, "--lr", "nan"], ["lr", "nan"]),
    "seed negative": (lambda p: [*RUN, "--seed", "-3"], ["seed", "-3"]),
    "no epochs": (lambda p: ["run", "rotated-digits", "sgd", "--epochs", "0"], ["epochs", "0"]),
    "no batch": (lambda p: ["run", "rotated-digits", "sgd", "--batch-size", "0"], ["batch_size", "0"]),
    "no tasks": (lambda p: ["run", "rotated-digits", "sgd", "--tasks", "0"], ["tasks", "0"]),
    "too many tasks": (lambda p: ["run", "split-digits", "sgd", "--tasks", "9"], ["9", "5"]),
    "no data": (lambda p: ["run", "rotated-mnist", "sgd"], ["mnist", "glocal data fetch mnist"]),
    "no photographs": (
        lambda p: ["run", "split-cifar10", "sgd"],
        ["cifar10", "data_batch_1", "cifar-10-python.tar.gz", "glocal data fetch cifar10"],
    ),
    "a damaged batch of photographs": (
        lambda p: ["run", "split-cifar10", "sgd", "--data", str(Path(write(p / "data_batch_2", "")).parent)],
        ["damaged", "data_batch_2 has 0 bytes instead of 31035320"],
    ),
    "no tiny photographs": (
        lambda p: ["run", "split-tinyimagenet", "sgd"],
        ["tiny-imagenet-200.zip", "glocal data fetch tinyimagenet"],
    ),
    "a damaged zip": (
        lambda p: [
            "run",
            "split-tinyimagenet",
            "sgd",
            "--data",
            str(Path(write(p / "tiny-imagenet-200.zip", "")).parent),
        ],
        ["damaged", "tiny-imagenet-200.zip has 0 bytes instead of 248100043"],
    ),
    "unknown data": (lambda p: ["data", "fetch", "minst"], ["'minst'", "mnist"]),
    "data of no name": (lambda p: ["data", "fetch"], ["glocal data fetch mnist"]),
    "no sweep algorithms": (lambda p: ["sweep", "rotated-digits"], ["--algorithms"]),
    "no sweep challenge": (lambda p: ["sweep", "--algorithms", "er"], ["challenge"]),
    "no gpu": (lambda p: [*RUN, "--device", "cuda"], ["cuda", "no GPU"]),
    "unknown device": (lambda p: [*RUN, "--device", "tpu"], ["tpu", "cpu"]),
    "missing sweep file": (lambda p: ["sweep", "--file", str(p / "none.toml")], ["none.toml", "cannot be read"]),
    "sweep file not toml": (lambda p: ["sweep", "--file", write(p / "s.toml", "a = = b")], ["not TOML"]),
    "unknown toml key": (
        lambda p: ["sweep", "--file", write(p / "s.toml", 'challenge = "rotated-digits"\nlerning = 1')],
        ["lerning", "lrs"],
    ),
    "toml value of wrong type": (lambda p: ["sweep", "--file", write(p / "s.toml", 'lrs = "fast"')], ["lrs"]),
    "toml algorithm without name": (
        lambda p: ["sweep", "rotated-digits", "--file", write(p / "s.toml", "[[algorithms]]\nslots = 3")],
        ["needs a name"],
    ),
    "no such user file": (lambda p: ["run", "rotated-digits", str(p / "my.py") + ":Mine"], ["my.py", "no file"]),
    "user file without a name": (lambda p: ["run", "rotated-digits", write(p / "my.py", "")], ["path.py:Name"]),
    "user file that does not load": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", "x = 1\nimport nothing_like_this") + ":Mine"],
        ["my.py", "line 2", "nothing_like_this"],
    ),
    "user file with a syntax error": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", "def f(:\n") + ":Mine"],
        ["my.py", "line 1", "SyntaxError"],
    ),
    "user file without that name": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", "class Mine: pass") + ":Mien"],
        ["Mien", "Mine"],
    ),
    "not an algorithm": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", "class Mine: pass") + ":Mine"],
        ["Mine"],
    ),
    "not a network": (
        lambda p: [*RUN, "--network", write(p / "net.py", "def make(shape, outputs): return 3") + ":make"],
        ["make", "nn.Module"],
    ),
    "network of one argument": (
        lambda p: [*RUN, "--network", write(p / "net.py", "def make(shape): return 3") + ":make"],
        ["make", "two arguments"],
    ),
    "not a challenge": (
        lambda p: ["run", write(p / "c.py", "def make(): return 3") + ":make", "sgd"],
        ["Challenge", "int"],
    ),
    "network of five outputs": (
        lambda p: [*RUN, "--network", write(p / "net.py", NETWORK.format(inputs=784, outputs=5)) + ":make"],
        ["make", "(2, 5)", "(2, 10)"],
    ),
    "network for other inputs": (
        lambda p: [*RUN, "--network", write(p / "net.py", NETWORK.format(inputs=99, outputs=10)) + ":make"],
        ["make", "(1, 28, 28)"],
    ),
    "challenge that fails": (
        lambda p: ["run", write(p / "c.py", "def make():\n    return 1 / 0") + ":make", "sgd"],
        ["c.py:make", "line 2", "ZeroDivisionError"],
    ),
    "algorithm that needs a value": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", ALGORITHM.format("strength: float")) + ":Mine"],
        ["Mine", "strength"],
    ),
    "algorithm with a rate of its own": (
        lambda p: ["run", "rotated-digits", write(p / "my.py", ALGORITHM.format("lr: float = 0.1")) + ":Mine"],
        ["Mine", "lr", "another name"],
    ),
    "toml algorithm with a number for a name": (
        lambda p: ["sweep", "rotated-digits", "--file", write(p / "s.toml", "[[algorithms]]\nname = 3")],
        ["needs a name"],
    ),
    "toml option without values": (
        lambda p: ["sweep", "rotated-digits", "--file", write(p / "s.toml", "algorithms = [{name='ewc', penalty=[]}]")],
        ["ewc.penalty", "no values"],
    ),
    "gpu of a very high number": (lambda p: [*RUN, "--device", "cuda:99999999999999999999"], ["cuda:N"]),
    "no store": (lambda p: ["table", str(p / "nowhere")], ["nowhere", "no store"]),
    "store is a file": (lambda p: ["table", write(p / "file", "")], ["is a file"]),
    "not a store": (lambda p: ["table", str(p)], ["not a glocal store"]),
    "sweep into a folder of other things": (
        lambda p: [*RUN, "--store", str(Path(write(p / "a", "")).parent)],
        ["not a glocal store"],
    ),
    "store cannot be made": (lambda p: [*RUN, "--store", write(p / "a", "") + "/store"], ["cannot create the store"]),
    "unknown table format": (lambda p: ["table", str(p), "--format", "xls"], ["xls", "csv"]),
    "empty store": (lambda p: ["table", str(_empty_store(p))], ["no finished run"]),
    "plot of an empty store": (lambda p: ["plot", str(_empty_store(p))], ["no"]),
    "locality of an unknown algorithm": (lambda p: ["locality", "ewk"], ["'ewk'", "Did you mean 'ewc'"]),
    "locality of two solutions": (
        lambda p: ["locality", "er", "--solutions", "2"],
        ["solutions = 2", "at least 3"],
    ),
    "locality with an unsupported setting": (
        lambda p: ["locality", "icarl", "--challenge", "rotated-digits"],
        ["icarl", "setting class or task", "rotated-digits"],
    ),
    "locality with --setting but no --challenge": (lambda p: ["locality", "er", "--setting", "task"], ["--challenge"]),
    "locality with divergence": (
        lambda p: ["locality", "sgd", "--lr", "1e30", "--epochs", "1", "--solutions", "3", "--examples", "50"],
        ["diverged", "Lower lr"],
    ),
    "locality without epochs": (lambda p: ["locality", "er", "--epochs", "0"], ["epochs", "at least 1"]),
    "locality with an unknown network": (lambda p: ["locality", "er", "--network", "mpl"], ["'mpl'", "mlp"]),
    "locality on an unknown device": (lambda p: ["locality", "er", "--device", "tpu"], ["cuda:N", "tpu"]),
    "lens on nothing": (lambda p: ["lens"], ["TARGET"]),
    "lens on no run": (lambda p: ["lens", str(p / "nowhere")], ["nowhere", "STORE/runs/HASH"]),
    "lens of another training with a flag for runs": (
        lambda p: ["lens", write(p / "m.py", SUBJECT) + ":make", "--network", "mlp"],
        ["--network is for a stored run"],
    ),
    "lens on no function": (lambda p: ["lens", write(p / "m.py", "three = 3") + ":three"], ["is not a function"]),
    "lens on three things": (
        lambda p: ["lens", write(p / "m.py", "def make(): return 1, 2, 3") + ":make"],
        ["(module, loss, tasks, checkpoints)", "tuple"],
    ),
    "lens on a function that fails": (
        lambda p: ["lens", write(p / "m.py", "def make():\n    return 1 / 0") + ":make"],
        ["line 2", "ZeroDivisionError"],
    ),
    "lens on no module": (
        lambda p: ["lens", write(p / "m.py", "def make(): return 1, 2, 3, 4") + ":make"],
        ["nn.Module", "int"],
    ),
    "lens on one checkpoint": (
        lambda p: ["lens", write(p / "m.py", SUBJECT) + ":make"],
        ["tasks: 1, checkpoints: 1", "one checkpoint after every task"],
    ),
    "lens on no tasks": (
        lambda p: ["lens", write(p / "m.py", TRAINED.replace("[(torch", "None and [(torch")) + ":make"],
        ["tasks", "NoneType"],
    ),
    "lens on modules for checkpoints": (
        lambda p: ["lens", write(p / "m.py", SUBJECT.replace("[module.state_dict()]", "[module, module]")) + ":make"],
        ["a Linear was given", "state_dict()"],
    ),
    "lens on labels beyond the classes": (
        lambda p: ["lens", write(p / "m.py", TRAINED.replace("zeros(1)", "full((1,), 7)")) + ":make"],
        ["labels 7 to 7", "0 to 1"],
    ),
    "lens on more inputs than labels": (
        lambda p: ["lens", write(p / "m.py", TRAINED.replace("ones(1", "ones(2")) + ":make"],
        ["x of task 1 has shape (2, 2) and y (1,)"],
    ),
    "lens into a text": (lambda p: ["lens", "m.py:make", "-o", "lens.txt"], ["suffix", ".txt", ".png"]),
    "unknown list": (lambda p: ["list", "algoritms"], ["algorithms"]),
    "file of an unknown user": (lambda p: ["run", "rotated-digits", "~nobody-here/x.py:N"], ["~nobody-here"]),
    "file with a long name": (lambda p: ["run", "rotated-digits", "x" * 300 + ".py:N"], ["xxx", "too long"]),
    "store with a long name": (lambda p: [*RUN, "--store", "x" * 300], ["xxx", "too long"]),
    "store with control characters": (lambda p: [*RUN, "--store", "a\x1b[2Jb"], ["a\\x1b[2Jb", "control characters"]),
    "table of a store with a long name": (lambda p: ["table", "x" * 300], ["xxx", "too long"]),
    "figure with a long name": (lambda p: ["lens", "x.py:f", "-o", "x" * 300 + ".png"], ["xxx", "too long"]),
    "lens on a long name": (lambda p: ["lens", "x" * 300], ["xxx", "too long"]),
    "data in a folder with a long name": (lambda p: ["data", "status", "--data", "x" * 300], ["xxx", "too long"]),
    "very large seed": (lambda p: [*RUN, "--seed", "9" * 30], ["seed", "30 digits"]),
    "very large number of epochs": (lambda p: [*RUN, "--epochs", "9" * 5000], ["epochs"]),
    "zero byte in a sweep file": (
        lambda p: [
            "sweep",
            "--file",
            write(p / "s.toml", 'network = "a\\u0000.py:f"\nalgorithms = ["er"]'),
            "split-digits",
        ],
        ["a\\x00.py"],
    ),
    "deeply nested sweep file": (
        lambda p: ["sweep", "--file", write(p / "s.toml", "lrs = " + "[" * 100_000)],
        ["not TOML"],
    ),
    "sweep file that never ends": (lambda p: ["sweep", "--file", "/dev/full"], ["/dev/full"]),
    "a thousand million combinations": (
        lambda p: [
            "sweep",
            "rotated-digits",
            "--file",
            write(p / "s.toml", "[[algorithms]]\nname='er'\n" + "".join(f"o{i}={[*range(10)]}\n" for i in range(9))),
        ],
        ["1,000,000,000"],
    ),
    "options given twice": (
        lambda p: [*RUN[:2], "ewc", "--options", "penalty=7", "--options", "fisher=exact"],
        ["--options was given 2 times"],
    ),
    "a flag in two spellings": (lambda p: [*RUN, "--train_eval=5", "--train-eval", "6"], ["--train-eval"]),
    "control characters": (lambda p: ["run", "rotated-digits", "\x1b]0;owned\x07"], ["\\x1b"]),
}


def _empty_store(path: Path) -> Path:
    from glocal.store.store import Store

    return Store.create(path / "empty").path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_clear_line(mistake: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = MISTAKES[mistake]
    assert main(arguments(elsewhere)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("glocal: ")
    for words in said:
        assert words in err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("finished") / "store"
    assert main([*RUN, "--store", str(store)]) == 0
    return store


def damage(kind: str, store: Path) -> None:
    run = next((store / "runs").glob("[!.]*"))
    if kind == "truncated arrays":
        path = run / "arrays.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "no configuration":
        (run / "config.json").unlink()
    elif kind == "configuration cut off":
        (run / "config.json").write_text('{"lr": ')
    elif kind == "configuration of another run":
        (run / "config.json").write_text((run / "config.json").read_text().replace('"seed": 11', '"seed": 12'))
    elif kind == "unknown field":
        (run / "config.json").write_text((run / "config.json").read_text().replace('"seed"', '"sede"'))
    elif kind == "no information":
        (run / "info.json").write_text("[]")
    elif kind == "mark cut off":
        (store / "glocal-store.json").write_text("{")
    elif kind == "later format":
        (store / "glocal-store.json").write_text('{"format": 999}')


BAD_RUNS = [
    "truncated arrays", "no configuration", "configuration cut off", "configuration of another run", "unknown field",
    "no information",
]  # fmt: skip
BAD_STORES = ["mark cut off", "later format"]


@pytest.mark.filterwarnings("ignore::glocal.errors.GlocalWarning")  # about the only run, which is left out
@pytest.mark.parametrize(
    ("kind", "command"),
    [*product(BAD_RUNS, ["table", "plot"]), *product(BAD_STORES, ["table", "plot", "run"])],
)
def test_a_damaged_store_is_named_and_left_as_it_is(
    kind: str, command: str, finished: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = elsewhere / "store"
    shutil.copytree(finished, store)
    damage(kind, store)
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != ".lock"}
    capsys.readouterr()
    assert main([*RUN, "--store", str(store)] if command == "run" else [command, str(store)]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1 and ("store" in err or command == "plot"), err
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != ".lock"} == before
