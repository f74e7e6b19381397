"""One run that cannot be read does not keep the others from tables, figures and `load`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import save_file
from small_sweep import sweep

import glocal
from glocal.cli.main import main
from glocal.engine.config import RunConfig
from glocal.errors import GlocalWarning
from glocal.files import read_tensors
from glocal.paper import results

LRS = [0.1, 0.2, 0.3]


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def forge(run: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change a run's configuration, and name it accordingly, as a store of the first format would hold it."""
    unsigned(run)
    change_json(run / "config.json", change)
    return run.rename(run.with_name(RunConfig(**json.loads((run / "config.json").read_text())).hash))


def unsigned(run: Path, **arrays: torch.Tensor) -> None:
    """Write the arrays without checksums."""
    tensors, _ = read_tensors(run / "arrays.safetensors")
    save_file(tensors | arrays, run / "arrays.safetensors", metadata={"order": json.dumps([*tensors, *arrays])})


def nested(run: Path) -> None:
    (run / "info.json").write_text('{"label":' + "[" * 5000 + "]" * 5000 + "}")


def change_info(key: str, value: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        unsigned(run)
        change_json(run / "info.json", lambda info: info.update({key: value}))

    return change


BAD: dict[str, Callable[[Path], object]] = {
    "deep nesting": nested,
    "flipped bit": lambda run: (run / "info.json").write_bytes(
        (run / "info.json").read_bytes().replace(b"er", b"Er", 1)
    ),
    "no info": lambda run: (run / "info.json").unlink(),
    "empty arrays": lambda run: (run / "arrays.safetensors").write_bytes(b""),
    "a number as label": change_info("label", 3),
    "a list as cost": change_info("cost", []),
    "no memory in cost": change_info("cost", {"seconds": 1.0}),
    "no setting": change_info("setting", None),
    "text as steps": change_info("diverged", "at once"),
    "other shapes": lambda run: unsigned(run, test_class_accuracy=torch.zeros(2, 2, dtype=torch.float64)),
    "more tasks": lambda run: forge(run, lambda config: config["challenge"].update(tasks=10**9)),
    "text as tasks": lambda run: forge(run, lambda config: config["challenge"].update(tasks="3")),
    "a huge seed": lambda run: forge(run, lambda config: config.update(seed=2**70)),
    "a list as lr": lambda run: forge(run, lambda config: config.update(lr=[0.1])),
    "no name": lambda run: forge(run, lambda config: config["challenge"].pop("name")),
    "a number as algorithm": lambda run: forge(run, lambda config: config.update(algorithm=3)),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("finished") / "store"
    sweep(store, LRS)
    return store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "store")


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_run_is_left_out(kind: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = glocal.load(store)[1]
    assert bad.path is not None and bad.lr == 0.2
    BAD[kind](bad.path)
    with pytest.warns(GlocalWarning, match="1 of 3 runs"):
        assert [run.lr for run in glocal.load(store)] == [0.1, 0.3]
    with pytest.warns(GlocalWarning):
        assert main(["table", str(store), "--format", "json"]) == 0
    assert [row["lr"] for row in json.loads(capsys.readouterr().out)] == [0.1, 0.3]


def test_bad_rows_of_a_results_file(store: Path, tmp_path: Path) -> None:
    path = results.write(glocal.load(store), tmp_path / "results.parquet")
    table = pl.read_parquet(path)
    for column, value in {"config": "{}", "info": "[" * 5000, "update_norm": [1.0], "test_class_accuracy": []}.items():
        rows = table.to_dicts()
        rows[1][column] = value
        pl.DataFrame(
            rows, {k: pl.List(pl.Float32) if k in results.LISTS else t for k, t in table.schema.items()}
        ).write_parquet(path)
        with pytest.warns(GlocalWarning, match="row 2 of 3"):
            assert [run.lr for run in results.read(path)] == [0.1, 0.3]
        content = path.read_bytes()
        with pytest.raises(glocal.GlocalError, match="row 2 of 3"):
            results.add(glocal.load(store), path)
        assert path.read_bytes() == content, "what cannot be read is not written over"
