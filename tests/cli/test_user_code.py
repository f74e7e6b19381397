"""Errors in code that a user gave: one sentence with its file and line, and no frame of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from glocal.cli.main import main

CODE = """
import sys
from dataclasses import dataclass
import torch
from torch import nn
import glocal
from glocal.algorithms import SGD

class Unprintable(Exception):
    def __str__(self): raise RuntimeError

def fails():
    return 1 / 0  # here

def leaves():
    sys.exit(0)  # here

def unprintable():
    raise Unprintable  # here

def give(what): return None

class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(784, outputs)
        INIT

    def forward(self, x):
        x = self.layer(x.flatten(1))
        if self.training:
            FORWARD
        return x

def make(shape, outputs):
    return Net(outputs)

def tasks():
    MAKE
    data = torch.zeros(20, 1, 28, 28), torch.arange(20) % 2
    return glocal.challenges.from_tasks("own", [(data, data)] * 2, "domain")

@dataclass(frozen=True)
class Mine(SGD):
    strength: float = 1.0

    def __post_init__(self):
        OPTIONS

    def init(self, model, params, example):
        MEMORY
        return super().init(model, params, example)

    def objective(self, model, params, memory, batch):
        OBJECTIVE
        return super().objective(model, params, memory, batch)

    def consolidate(self, model, params, memory, data):
        CONSOLIDATE
        return super().consolidate(model, params, memory, data)

    def predict(self, model, params, memory, x, task):
        PREDICT
        return super().predict(model, params, memory, x, task)

LOAD
"""
PLACES = ["LOAD", "MAKE", "INIT", "FORWARD", "OPTIONS", "MEMORY", "OBJECTIVE", "CONSOLIDATE", "PREDICT"]


def run(folder: Path, place: str, line: str) -> tuple[int, Path]:
    code = CODE
    for name in PLACES:
        code = code.replace(f"{name}\n", f"{line if name == place else 'pass'}\n")
    file = folder / "mine.py"
    file.write_text(code)
    parts = [f"{file}:tasks", f"{file}:Mine", "--network", f"{file}:make"]
    return main(["run", *parts, "--epochs", "1", "--store", str(folder / "store")]), file


@pytest.mark.parametrize("call", ["fails()", "leaves()", "unprintable()"])
@pytest.mark.parametrize("place", PLACES)
def test_errors_name_the_line(place: str, call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, place, call)
    sentence, *frames = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    errors = {"fails()": "ZeroDivisionError", "leaves()": "SystemExit", "unprintable()": "Unprintable"}
    line = {"fails()": 13, "leaves()": 16, "unprintable()": 19}[call]
    assert f"mine.py, line {line}: {errors[call]}" in sentence
    assert all("mine.py" in frame for frame in frames if frame.lstrip().startswith("File "))


RETURNS = {
    "OBJECTIVE": ["return None", "return 3", "return 'x'", "return batch.x", "return {}"],
    "MEMORY": ["return 3", "return None", "return {'a': 3}", "return {3: batch}"],
    "CONSOLIDATE": ["return None", "return {'a': 3}", "return 'x'"],
    "PREDICT": ["return None", "return x[:0]", "return 'x'", "return x.double()[:, 0, 0, :1]"],
    "FORWARD": ["return None", "return 'x'", "return x[:, :1, None]", "return (x, x)"],
    "INIT": ["self.layer = None", "self.layer.weight = None", "self.layer.register_buffer('n', None)"],
    "MAKE": ["return None", "return 3", "glocal.challenges.from_tasks('own', [None])"],
}


@pytest.mark.parametrize(("place", "line"), [(place, line) for place, lines in RETURNS.items() for line in lines])
def test_what_it_returns(place: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, place, line)
    sentence, *frames = capsys.readouterr().err.strip().splitlines() or [""]
    accepted = place == "INIT" and "buffer" in line
    assert status == (0 if accepted else 2), sentence
    assert all("mine.py" in frame for frame in frames if frame.lstrip().startswith("File "))
