"""No code is loaded from a file because a stranger's store names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import glocal
from glocal.algorithms import SGD
from glocal.algorithms.partition import Partition
from glocal.cli.main import main
from glocal.engine.config import RunConfig
from glocal.errors import GlocalError
from glocal.lens.record import open_run
from glocal.networks.model import MakeNetwork

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from torch import nn
from glocal.algorithms import SGD
from glocal.algorithms.partition import Partition

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


@dataclass(frozen=True)
class Decay(SGD):
    """An algorithm of this module."""

    name = "decay"
    decay: float = 0.5


def linear(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, outputs))


@pytest.mark.parametrize("trained", ["objects", "file"])
def test_own_parts_may_be_objects(tmp_path: Path, trained: str) -> None:
    own: Any = ([Decay(decay=0.9)], linear)
    if trained == "file":
        own = ([(f"{__file__}:Decay", {"decay": 0.9})], f"{__file__}:linear")
    quick: Any = {"tasks": 1, "batch_size": 4000, "store": tmp_path / "store", "network": own[1]}
    (run,) = glocal.sweep("rotated-digits", own[0], [0.1], [1], **quick)
    assert run.path is not None
    for given in (Decay, Decay(decay=0.9)):
        stored = open_run(run.path, network=linear, algorithm=given)
        assert asdict(stored.cohort.algorithm) == {"decay": 0.9}
    with pytest.raises(GlocalError, match=r"algorithm is not the one of the run: its decay is 0\.5, in the run 0\.9"):
        open_run(run.path, network=linear, algorithm=Decay())
    with pytest.raises(GlocalError, match="network is not the one of the run: its code has changed"):
        open_run(run.path, network=lambda shape, outputs: linear(shape, outputs), algorithm=Decay)
    for wrong in (Decay, nn.Linear(784, 10), 3):
        with pytest.raises(GlocalError, match=r"network '.*' (is not a function|must take two arguments)"):
            open_run(run.path, network=wrong, algorithm=Decay)  # type: ignore[arg-type]


class Wrapper(SGD):
    """Trains another network than the user's."""

    name = "wrapper"

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return lambda shape, outputs: nn.Sequential(make(shape, outputs), nn.Dropout(0.5))


class Split(Partition):
    name = "split"


def test_all_missing_parts_are_asked_for_at_once(tmp_path: Path) -> None:
    """The algorithm is needed to train the run again, and to examine it only if it changes the network."""
    quick: Any = {"tasks": 2, "batch_size": 4000, "epochs": 1, "keep_parameters": True}
    decay, wrapper, split = glocal.sweep(
        "rotated-digits", [Decay, Wrapper, Split], [0.1], [1], network=linear, store=tmp_path, **quick
    )
    for run in (wrapper, split):
        assert run.path is not None
        flags = rf"--network PATH\.py:linear --algorithm PATH\.py:{run.algorithm}; in Python network=, algorithm="
        with pytest.raises(GlocalError, match=flags):
            open_run(run.path)
        with pytest.raises(GlocalError, match=rf"give --algorithm PATH\.py:{run.algorithm};"):
            open_run(run.path, network=linear)
    assert decay.path is not None
    flags = r"--network PATH\.py:linear --algorithm PATH\.py:decay \(only to train the run again\);"
    with pytest.raises(GlocalError, match=flags):
        open_run(decay.path)
    stored = open_run(decay.path, network=linear)
    trace, known = stored.trace(), open_run(decay.path, network=linear, algorithm=Decay).trace()
    point = trace.checkpoints[2]
    assert float(trace.value(0, point)) == float(known.value(0, point))
    with pytest.raises(GlocalError, match=r"give --algorithm PATH\.py:decay \(only to train the run again\)"):
        stored.retrace()


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
