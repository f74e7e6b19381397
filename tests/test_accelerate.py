"""Accelerations registered with `glocal.accelerate`, and that the core works without `glocal.fast`."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glocal import accelerate, networks
from glocal.fast import TRITON
from glocal.networks import hat

CORE = [path for path in Path(accelerate.__file__).parent.rglob("*.py") if "fast" not in path.parts]


@accelerate.accelerated("layers.test")
def double(x: int) -> int:
    return 2 * x


def fast_double(x: int) -> int:
    """Return something else for x > 10, to see which function was called."""
    return 2 * x + 1000 if x > 10 else NotImplemented


def test_a_function_is_plain_until_an_acceleration_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "_targets", {})
    assert double(11) == 22 and accelerate.find("layers.test") is None
    accelerate.register("layers.test", f"{__name__}:fast_double")
    assert double(11) == 1022
    assert double(3) == 6  # the acceleration does not apply


def test_every_registered_acceleration_is_asked_for() -> None:
    for name, target in {**TRITON, **accelerate._targets}.items():
        assert re.fullmatch(r"(step|layers)\.\w+", name), name
        assert target.startswith("glocal.fast."), target
        assert any(f'"{name}"' in path.read_text() for path in CORE), name


TRAIN = """
import sys
if "plain" in sys.argv:
    sys.modules["glocal.fast"] = None  # importing it fails, as without the folder
import glocal, torch
from glocal import accelerate
from glocal.networks import resnet18
assert bool(accelerate._targets) != ("plain" in sys.argv)
generator = torch.Generator().manual_seed(0)
data = [torch.randn(40, 1, 6, 6, generator=generator), torch.arange(40) % 2]
challenge = glocal.from_tasks("two", [(data, data), ([data[0].flip(0), data[1]], data)], setting="domain")
make = lambda shape, outputs: resnet18(shape, outputs, 2)
runs = glocal.sweep(challenge, ["ewc"], [0.01, 0.1], [0], network=make, epochs=1, batch_size=10, store=sys.argv[1])
for run in runs:
    print({name: array.tolist() for name, array in run.arrays.items()})
"""


def test_training_is_the_same_without_fast(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels round differently")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    outputs = [
        subprocess.run([sys.executable, script, mode], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        for mode in ("plain", "fast")
    ]
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 2


@pytest.mark.parametrize("module", [accelerate, networks, hat])
def test_examples_in_docstrings(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.attempted and not results.failed
