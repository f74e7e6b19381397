"""No code is loaded from a file because a stranger's store names it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import glocal
from glocal.cli.main import main
from glocal.engine.config import RunConfig
from glocal.errors import GlocalError
from glocal.lens.record import open_run

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from torch import nn
from glocal.algorithms import SGD

def make(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, outputs))

class Mine(SGD):
    name = "mine"
"""


def rewrite(run: Path, part: str, changes: dict[str, Any]) -> Path:
    """Change a run's configuration, and rename the run so that its name agrees."""
    config = json.loads((run / "config.json").read_text())
    config[part] = changes
    (run / "config.json").write_text(json.dumps(config))
    return run.rename(run.with_name(RunConfig(**config).hash))


@pytest.mark.parametrize(("part", "name"), [("network", "make"), ("algorithm", "Mine"), ("challenge", "make")])
def test_a_configuration_cannot_name_code_to_run(tmp_path: Path, part: str, name: str) -> None:
    mark, code = tmp_path / "it-ran", tmp_path / "theirs.py"
    code.write_text(CODE.format(mark=str(mark)))
    (run,) = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], tasks=1, batch_size=4000, store=tmp_path / "store")
    assert run.path is not None
    path = rewrite(run.path, part, {**run.config[part], "name": f"{code}:{name}", "options": {}})
    with pytest.raises(GlocalError):
        open_run(path)
    assert main(["lens", str(path)]) == 2
    assert not mark.exists()


def test_a_named_file_is_not_loaded_unless_it_is_the_runs(tmp_path: Path) -> None:
    mark, code = tmp_path / "it-ran", tmp_path / "mine.py"
    code.write_text(CODE.format(mark=str(mark)))
    quick: Any = {"tasks": 1, "batch_size": 4000, "store": tmp_path / "store"}
    (run,) = glocal.sweep("rotated-digits", [f"{code}:Mine"], [0.1], [1], network=f"{code}:make", **quick)
    assert run.path is not None and mark.exists()
    parts = {"network": f"{code}:make", "algorithm": f"{code}:Mine"}
    assert open_run(run.path, **parts).cohort.algorithm.name == "mine"
    mark.unlink()
    code.write_text(code.read_text() + "\n# edited\n")
    now = hashlib.sha256(code.read_bytes()).hexdigest()[:16]
    told = f"code has changed since the run was trained .hash {run.config['network']['source']} then, {now} now"
    for given in (parts, {"network": parts["network"]}):
        with pytest.raises(
            GlocalError, match=f"this network is not the one of the run: its {told}.*train the run again"
        ):
            open_run(run.path, **given)
    assert not mark.exists()
