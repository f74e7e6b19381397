"""Algorithms and networks from notebooks, the prompt and objects: accepted, and named by all that they compute with."""

from __future__ import annotations

import datetime
import importlib
import itertools
import linecache
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.errors import GlocalError
from glocal.sweeps.source import source_hash

CELL = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from glocal import Algorithm

SCALE = 1.0
WORDS = {"one", "two", "three", "four"}

def scaled(loss, by=SCALE):
    return SCALE * loss

WEIGHT = 3

class Base(Algorithm):
    weight = WEIGHT

    def five(self):
        return 5

@dataclass(frozen=True)
class Mine(Base):
    name: ClassVar[str] = "mine"
    strength: float = 0.1

    def objective(self, model, params, memory, batch):
        assert "one" in WORDS and self.name in {"mine", "yours", "theirs"}
        return scaled(model.loss(params, batch.x, batch.y))

class Wide:
    def __init__(self, width):
        self.width, self.mask = width, torch.ones(3)

    def __call__(self, shape, outputs):
        first = torch.nn.Linear(784, self.width)
        return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.Linear(self.width, outputs))

def make(shape, outputs, width=4):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, outputs))
"""
numbers = itertools.count()


def run_cell(code: str, keep_source: bool = True) -> ModuleType:
    """Run code as a notebook does, in a module without a file; older Pythons keep no source at their prompt."""
    filename, module = f"<ipython-input-{next(numbers)}>", ModuleType(f"cell_{next(numbers)}")
    if keep_source:
        linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(code, filename, "exec", dont_inherit=True), vars(module))
    return module


@pytest.mark.parametrize("keep_source", [True, False], ids=["notebook", "prompt"])
def test_classes_and_objects_of_a_cell_are_trained(tmp_path: Path, keep_source: bool) -> None:
    cell = run_cell(CELL, keep_source)
    quick: Any = {"tasks": 1, "epochs": 1, "batch_size": 1000, "lrs": [0.1], "seeds": [1], "store": tmp_path}
    (first,) = glocal.sweep("rotated-digits", [cell.Mine], network=cell.Wide(5), **quick)
    (again,) = glocal.sweep("rotated-digits", [cell.Mine], network=cell.Wide(5), **quick)
    (sgd,) = glocal.sweep("rotated-digits", ["sgd"], network=cell.Wide(5), **quick)
    assert first.path == again.path
    assert (first.arrays["test_class_accuracy"] == sgd.arrays["test_class_accuracy"]).all(), "it is SGD"
    (other,) = glocal.sweep("rotated-digits", [cell.Mine], network=cell.make, **quick)
    assert other.path != first.path


EDITS = {
    "a method": ("scaled(model.loss", "2 * scaled(model.loss"),
    "a constant of a method": ('"theirs"', '"ours"'),
    "a global number": ("SCALE = 1.0", "SCALE = 2.0"),
    "a global set": ('"four"', '"five"'),
    "a helper function": ("return SCALE * loss", "return SCALE + loss"),
    "a default": ("def scaled(loss, by=SCALE)", "def scaled(loss, by=SCALE + 1)"),
    "a class attribute from a global": ("WEIGHT = 3", "WEIGHT = 4"),
    "a base class": ("return 5", "return 6"),
    "a class attribute": ('name: ClassVar[str] = "mine"', 'name: ClassVar[str] = "yours"'),
}


@pytest.mark.parametrize("keep_source", [True, False], ids=["notebook", "prompt"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_change_the_name(edit: str, keep_source: bool) -> None:
    old, new = EDITS[edit]
    assert CELL.count(old) == 1
    before, after = (run_cell(code, keep_source).Mine for code in (CELL, CELL.replace(old, new)))
    assert source_hash(before) != source_hash(after)
    assert source_hash(before) == source_hash(run_cell(CELL + "\n\nunrelated = 3\n", keep_source).Mine)


@pytest.mark.slow
def test_names_are_the_same_in_every_process() -> None:
    """Here and in `python -`, with another order of Python's sets."""
    names = "Mine", "Wide(3)", "make", "lambda s, o: make(s, o, width=3)", "Wide(3).__call__"
    code = f"{CELL}\nfrom glocal.sweeps.source import source_hash\n"
    code += f"hashes = [source_hash(value) for value in ({', '.join(names)})]\n"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-"], input=code + "print(*hashes)", text=True, capture_output=True, env=environment
    )
    assert done.stdout.split() == run_cell(code, keep_source=False).hashes, done.stderr


def test_state_of_objects_and_closures() -> None:
    cell = run_cell(CELL)
    assert source_hash(cell.Wide(3)) == source_hash(cell.Wide(3)) != source_hash(cell.Wide(4))
    masked = cell.Wide(3)
    masked.mask[1] = 0
    assert source_hash(masked) != source_hash(cell.Wide(3))
    assert source_hash(masked.__call__) != source_hash(cell.Wide(3).__call__)

    def with_closure(width: Any) -> Any:
        def network(shape: Any, outputs: int) -> nn.Module:
            return cell.Wide(width)(shape, outputs)

        return network

    assert source_hash(with_closure(3)) == source_hash(with_closure(3)) != source_hash(with_closure(4))
    assert source_hash(partial(cell.make, width=3)) != source_hash(partial(cell.make, width=4))
    with pytest.raises(GlocalError, match=r"width' in .* is a lock"):
        source_hash(with_closure(threading.Lock()))
    with pytest.raises(GlocalError, match=r"Wide\['width'\] is a lock"):
        source_hash(cell.Wide(threading.Lock()))
    with open(__file__) as file, pytest.raises(GlocalError, match="TextIOWrapper"):
        source_hash(cell.Wide(file))


def test_objects_that_are_not_written_in_python() -> None:
    cell = run_cell(CELL)
    first, same, other = (source_hash(cell.Wide(datetime.date(year, 1, 1))) for year in (2020, 2020, 2021))
    assert first == same != other
    cached = "from functools import cache" + CELL.replace("def make", "@cache\ndef make")
    first, same, other = (source_hash(run_cell(cached.replace("=4", f"={width}")).make) for width in (4, 4, 5))
    assert first == same != other


def test_activations_that_are_passed_around() -> None:
    def make(activation: Any) -> Any:
        return lambda shape, outputs: nn.Sequential(nn.Flatten(), activation(), nn.Linear(784, outputs))

    first, other = ([1].count, [2].count), (np.random.default_rng(0).normal, np.random.default_rng(1).normal)
    assert all(source_hash(make(a)) != source_hash(make(b)) for a, b in (first, other))
    names = [source_hash(make(kind)) for kind in (nn.ReLU, nn.Tanh, nn.ReLU, torch.relu, torch.tanh)]
    assert names[0] == names[2] and len(set(names)) == 4


def test_values_that_change_while_the_code_stays() -> None:
    cell = run_cell(CELL + "\nDEFAULT = 1\ndef network(shape, outputs, width=DEFAULT): return width\n")
    hashes = {source_hash(cell.Mine)}
    for owner, name, value in ((cell, "SCALE", 2.0), (cell.Base, "weight", 7), (cell.Mine, "name", "other")):
        setattr(owner, name, value)
        hashes.add(source_hash(cell.Mine))
    cell.scaled.__defaults__ = (5.0,)
    hashes.add(source_hash(cell.Mine))
    assert len(hashes) == 5


@pytest.mark.parametrize("read", ["globals()['K']", "eval('K')"])
def test_what_the_code_does_not_name_is_refused(read: str) -> None:
    cell = run_cell(f"K = 1.0\ndef scaled(x):\n    return {read} * x\n")
    with pytest.raises(GlocalError, match="a run's name must cover what 'scaled' computes with"):
        source_hash(cell.scaled)


def test_sparse_tensors() -> None:
    """As constants of a graph network; the layout counts, the order of the entries does not."""
    entries = torch.tensor([[0, 1], [1, 0]]), torch.tensor([2.0, 3.0])

    def hash_of(graph: torch.Tensor) -> str:
        return source_hash(lambda x: graph @ x)

    graph = torch.sparse_coo_tensor(*entries, (2, 3), check_invariants=True)
    turned = torch.sparse_coo_tensor(entries[0].flip(1), entries[1].flip(0), (2, 3), check_invariants=True)
    others = (2 * graph, torch.sparse_coo_tensor(*entries, (2, 4), check_invariants=True), graph.to_dense())
    assert hash_of(graph) == hash_of(turned) not in {hash_of(other) for other in others}


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> ModuleType:
    """Import a user's module from a file."""
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    loaded = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, loaded)
    return loaded


def test_values_in_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = module(monkeypatch, tmp_path, "own_settings", "SCALE = 1.0\nOTHER = 1\ndef f(): return OTHER\n")
    code = "import own_settings, torch\ndef loss(x): return own_settings.SCALE * torch.relu(x) + own_settings.f()\n"
    own = module(monkeypatch, tmp_path, "own_losses", code)
    before = source_hash(own.loss)
    assert before == source_hash(own.loss)
    settings.SCALE = 2.0  # type: ignore[attr-defined]
    scaled = source_hash(own.loss)
    settings.OTHER = 2  # type: ignore[attr-defined]
    assert len({before, scaled, source_hash(own.loss)}) == 3
    for line in ("import own_settings; return own_settings.SCALE", "return vars(own_settings)['SCALE']"):
        code = f"import own_settings\ndef loss(x):\n    {line}\n"
        with pytest.raises(GlocalError, match="own_settings"):
            source_hash(run_cell(code).loss)


def test_a_file_that_was_edited_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old code runs until the module is reloaded."""
    code = "def loss(x):\n    return 2 * x\n"
    own = module(monkeypatch, tmp_path, "own_edited", code)
    before = source_hash(own.loss)
    (tmp_path / "own_edited.py").write_text("# A comment\n" + code.replace("2", "30"))
    assert source_hash(own.loss) == before
    assert source_hash(importlib.reload(own).loss) != before


MEMBERS = """
import abc, enum, functools, typing
from collections import namedtuple
import torch

class Kind(enum.Enum):
    A = 1

class Pair(typing.NamedTuple):
    a: int = 1

T = typing.TypeVar("T")

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * x

class Odd(abc.ABC, typing.Generic[T]):
    __slots__ = ("x",)
    kind, pair, point = Kind.A, Pair(), namedtuple("Point", "x y")(1, 2)

    @functools.cached_property
    def cached(self): return NUMBER

    @property
    def own(self): return Kind, Pair, Square, self.x

    @staticmethod
    def static(): return str.join, math

    @abc.abstractmethod
    def f(self): ...

import math
NUMBER = 1
"""


def test_classes_with_unusual_members() -> None:
    cell = run_cell(MEMBERS)
    before = source_hash(cell.Odd)
    assert before == source_hash(run_cell(MEMBERS).Odd)
    cell.NUMBER = 2  # type: ignore[attr-defined]
    assert source_hash(cell.Odd) != before
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(GlocalError, match="nested"):
        source_hash(partial(print, nested))


METHOD = "\n    def act(self, x): return x * %d"
OBJECTS = {
    "a named tuple": f"class C(typing.NamedTuple):\n    w: int = 3{METHOD}\nown = C()",
    "an enum's member": f"class C(enum.Enum):\n    A = 1{METHOD}\nown = C.A",
    "a list": f"class C(list):{METHOD}\nown = C([1])",
    "a dict": f"class C(dict):{METHOD}\nown = C(a=1)",
    "a UserDict": f"class C(collections.UserDict):{METHOD}\nown = C(a=1)",
    "a number": f"class C(float):{METHOD}\nown = C(1)",
    "an array": f"class C(np.ndarray):{METHOD}\nown = np.zeros(2).view(C)",
    "a tensor's attribute": "own = torch.zeros(2); own.k = %d",
    "a list's attribute": "class C(list): pass\nown = C([1]); own.k = %d",
    "a factory": "own = collections.defaultdict(lambda: %d)",
    "a made dataclass": "own = dataclasses.make_dataclass('C', ['a'], namespace={'k': %d})(1)",
    "a closure of a library": "own = torch.optim.swa_utils.get_ema_multi_avg_fn(0.%d)",
}
OBJECTS_CELL = """
import collections, dataclasses, enum, typing
import numpy as np, torch
from torch.optim import swa_utils
{}
def use(x): return own, x
"""


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_named_by_what_they_add_to_their_types(kind: str) -> None:
    before, same, after = (source_hash(run_cell(OBJECTS_CELL.format(OBJECTS[kind] % k)).use) for k in (2, 2, 3))
    assert before == same != after


@pytest.mark.slow
def test_such_names_are_the_same_in_every_process() -> None:
    cells = [MEMBERS + "\nuse = Odd", *(OBJECTS_CELL.format(text % 2) for text in OBJECTS.values())]
    code = f"""
import sys, types
from glocal.sweeps.source import source_hash
for code in {cells!r}:
    sys.modules["cell"] = types.ModuleType("cell")
    exec(compile(code, "cell", "exec"), vars(sys.modules["cell"]))
    print(source_hash(sys.modules["cell"].use))
"""
    answers = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ).stdout
        for environ in ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    ]
    assert answers[0] == answers[1] and len(set(answers[0].split())) == len(cells)
