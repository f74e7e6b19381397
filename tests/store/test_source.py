"""Algorithms and networks from notebooks, the prompt and objects: accepted, and named by all that they compute with."""

from __future__ import annotations

import datetime
import hashlib
import inspect
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

import pytest
import torch
from torch import nn

import glocal
from glocal.errors import GlocalError
from glocal.sweeps.resolve import load_object
from glocal.sweeps.source import source_hash

CELL = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from glocal import Algorithm

SCALE = 1.0
WORDS = {"one", "two", "three", "four"}

def scaled(loss):
    return SCALE * loss

@dataclass(frozen=True)
class Mine(Algorithm):
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

    names = [source_hash(make(kind)) for kind in (nn.ReLU, nn.Tanh, nn.ReLU, torch.relu, torch.tanh)]
    assert names[0] == names[2] and len(set(names)) == 4


def test_names_of_code_that_takes_nothing_from_outside_are_the_hash_of_its_source() -> None:
    """As in earlier versions, so that their runs are found."""
    anchor, _ = load_object(str(Path(__file__).parents[2] / "examples" / "anchor.py:Anchor"), "algorithm")
    network, _ = load_object(str(Path(__file__).parents[2] / "examples" / "convolutional.py:make_network"), "network")
    for target in (anchor, network):
        assert source_hash(target) == hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]
