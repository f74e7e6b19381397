"""`glocal paper`: table 1 and the figures of its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glocal.cli.main import main
from glocal.cli.paper import Table1
from glocal.errors import GlocalError
from glocal.metrics import summary
from glocal.paper import STUDIES, results, table1
from glocal.paper.table1 import COLUMNS
from glocal.store.run import Runs
from glocal.store.store import load
from glocal.sweeps import train_claim

SMALL = ["--demo", "--tasks", "2", "--epochs", "1", "--seeds", "11"]
RATES = ["0.02", "0.05", "0.2", "0.5"]
TABLE = ["paper", "table1", *SMALL, "--algorithms", "sgd", "er"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a small table, and the files made from it."""
    folder = tmp_path_factory.mktemp("paper")
    assert main([*TABLE, "--lrs", *RATES, "--store", str(folder / "store"), "--out", str(folder / "out")]) == 0
    return folder


def no_training(*_: object, **__: object) -> None:
    raise AssertionError("a finished run was trained again")


def test_what_is_finished_is_not_trained_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(load(finished / "store")) == 2 * 4
    monkeypatch.setattr(train_claim, "train", no_training)
    assert main([*TABLE, "--lrs", *RATES, "--store", str(finished / "store"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["algorithm"], row["lr"]) for row in rows["cells"]} == {
        (a, float(lr)) for a in ("sgd", "er") for lr in RATES
    }
    assert {row["algorithm"] for row in rows["test"]} == {"sgd", "er"}
    assert all(row["acc_published_mean"] is None and row["seeds"] == 1 for row in rows["cells"])


def test_one_task_has_nothing_to_forget_and_no_figure_of_it(tmp_path: Path) -> None:
    asked = ["--demo", "--tasks", "1", "--epochs", "1", "--seeds", "11", "--algorithms", "sgd", "--lrs", "0.1"]
    assert main(["paper", "table1", *asked, "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"distance.png"}


def test_a_part_belongs_to_the_whole(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rates and rows, or the figure of the same runs, take them from the store."""
    monkeypatch.setattr(train_claim, "train", no_training)
    part = ["--algorithms", "er", "--lrs", "0.2", "--store", str(finished / "store")]
    assert main(["paper", "table1", *SMALL, *part]) == 0
    picture = finished / "new" / "distance.png"
    assert main(["paper", "distance", *SMALL, *part, "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_methods_with_other_angles_share_a_table(finished: Path) -> None:
    """er met other rotations than sgd, as published, and still both stand on rotated-digits."""
    by_name = {run.config["algorithm"]["name"]: run.config["challenge"] for run in load(finished / "store")}
    assert by_name["er"]["options"]["angles"]["11"][1] == 118.297643
    assert by_name["sgd"]["options"]["angles"]["11"][1] == 147.289564
    text = (finished / "out" / "table1.md").read_text()
    assert text.count("### rotated-digits") == 1 and "`er` (global)" in text and "`sgd` (global)" in text
    for name in ("results.parquet", "table1.tex", "table1.csv", "table1-test.csv", "table1.txt", "distance.png"):
        assert (finished / "out" / name).stat().st_size > 0


def test_the_table_again_from_the_file_of_results(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for source in (["--store", str(finished / "store")], ["--results", str(finished / "out" / "results.parquet")]):
        capsys.readouterr()
        assert main([*TABLE, "--lrs", *RATES, *source, "--format", "json"]) == 0
        printed.append(json.loads(capsys.readouterr().out)["cells"])
    for here, there in zip(*printed, strict=True):
        assert {k: v for k, v in here.items() if v is None} == {k: v for k, v in there.items() if v is None}
        assert here["forgetting_mean"] == pytest.approx(there["forgetting_mean"], abs=1e-4)


def test_results_of_unequal_runs_are_not_averaged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = load(finished / "store")
    longer = [replace(run, config={**run.config, "seed": 13, "epochs": 3}) for run in ours]
    capsys.readouterr()
    assert main(["paper", "table1", "--results", str(results.write([*ours, *longer], tmp_path / "both.parquet"))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1
    assert "rotated-digits at lr 0.02 differ in epochs: 1 with seed 11, 3 with seed 13" in err


def test_of_results_that_are_read_those_that_are_asked_for(finished: Path, tmp_path: Path) -> None:
    """Tasks, epochs, angles and precision choose too, where they are given."""
    ours = load(finished / "store")
    seeded = [{**run.config, "challenge": {**run.config["challenge"], "options": {}}} for run in ours]
    changed = {
        "angles": [replace(run, config=config) for run, config in zip(ours, seeded, strict=True)],
        "epochs": [replace(run, config={**run.config, "epochs": 3}) for run in ours],
        "precision": [replace(run, config={**run.config, "precision": "bf16"}) for run in ours],
    }
    chosen: dict[str, Any] = {"epochs": 1, "precision": "fp32", "angles": "published"}
    for name, others in changed.items():
        file = results.write([*ours, *others], tmp_path / f"{name}.parquet")
        assert len(Table1(results=(file,)).runs()) == 2 * len(ours)
        found = Table1(results=(file,), **{name: chosen[name]}).runs()
        assert [run.config for run in found] == [results.with_named_angles(run).config for run in ours]
        assert len(Table1(results=(file,), tasks=2).runs()) == 2 * len(ours)
        with pytest.raises(GlocalError, match="unknown tasks in these results: '3'"):
            Table1(results=(file,), tasks=3).runs()


def test_names_that_the_results_do_not_have(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(finished / "out" / "results.parquet")
    for option, given, held in (("--algorithms", "sdg", "sgd"), ("--challenge", "rotated-digit", "rotated-digits")):
        assert main(["paper", "table1", "--results", file, option, given]) == 2
        assert f"Did you mean '{held}'" in capsys.readouterr().err
    assert main(["paper", "icarl-buffer", "--results", file, "--demo"]) == 2
    assert "unknown challenge in these results: 'split-digits'" in capsys.readouterr().err


def test_a_choice_that_the_results_do_not_have_leaves_no_files(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """er at its one rate is there, and so is every other rate, of sgd."""
    ours = [run for run in load(finished / "store") if run.config["algorithm"]["name"] == "sgd" or run.lr == 0.2]
    out, file = tmp_path / "out", str(results.write(ours, tmp_path / "some.parquet"))
    other = next(run.lr for run in ours if run.lr != 0.2)
    for asked, said in (
        (["--lrs", "7"], "unknown lr in these results: '7.0'"),
        (["--lrs", str(other), "--algorithms", "er"], f"has lr {other}, algorithm er"),
    ):
        assert main(["paper", "table1", "--results", file, *asked, "--out", str(out)]) == 2
        assert said in capsys.readouterr().err and not out.exists()


def test_a_smaller_job_loses_no_results(finished: Path, tmp_path: Path) -> None:
    """What another job wrote to the same folder stays in its file; the table is that of the last one."""
    out = ["--store", str(finished / "store"), "--out", str(tmp_path)]
    for algorithms in (["sgd", "er"], ["sgd"]):
        assert main(["paper", "table1", *SMALL, "--algorithms", *algorithms, "--lrs", *RATES, *out]) == 0
    assert len(results.read(tmp_path / "results.parquet")) == 8
    assert "`sgd`" in (tmp_path / "table1.md").read_text() and "`er`" not in (tmp_path / "table1.md").read_text()


def test_a_cpu_multiplies_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower it would be in bf16; a GPU has the column's own precision."""
    column = COLUMNS["split-cifar10"]
    assert column.precision == "bf16"
    asked: dict[str, Any] = {}
    monkeypatch.setattr(table1, "sweep", lambda *_, **how: asked.update(how) or Runs([]))
    part = column.select(["sgd"])
    table1.train([part], store=tmp_path, device="cpu")
    assert asked["precision"] == "fp32"
    table1.train([part], store=tmp_path, device="cpu", precision="bf16")
    assert asked["precision"] == "bf16"


WITHOUT_CLI = """import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tyro", "msgspec", "polars", "scipy", "matplotlib"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from benchmarks.table1_runs import main
main()
"""


def test_runs_of_a_machine_without_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--tasks", "2", "--epochs", "1", "--seeds", "11", "--algorithms", "er", "--lrs", "0.1"]
    store = ["--store", str(tmp_path / "store")]
    script = [sys.executable, "-c", WITHOUT_CLI, "--challenge", "rotated-digits", *size, *store]
    done = subprocess.run(script, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    (run,) = load(tmp_path / "store")
    assert main(["paper", "table1", "--demo", *size, *store, "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cells"]
    assert row["acc_mean"] == pytest.approx(100 * summary(run)["acc"], abs=1e-4) and row["algorithm"] == "er"
    assert len(load(tmp_path / "store")) == 1


def test_icarl_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = [
        "--tasks",
        "2",
        "--epochs",
        "1",
        "--seeds",
        "11",
        "--lrs",
        "0.05",
        "0.3",
        "--store",
        str(tmp_path / "store"),
    ]
    assert main(["paper", "icarl-buffer", "--demo", *size, "-o", str(tmp_path / "icarl.svg")]) == 0
    assert "icarl-random" in capsys.readouterr().out
    drawn = (tmp_path / "icarl.svg").read_text()
    assert all(text in drawn for text in ("split-digits", "icarl (local)", "icarl-random (local)"))
    runs = load(tmp_path / "store")
    assert {run.config["algorithm"]["name"] for run in runs} == {"icarl", "icarl-random"}

    other = replace(runs[0], config={**runs[0].config, "algorithm": {"name": "sgd", "options": {}}})
    file = str(results.write([*runs, other], tmp_path / "results.parquet"))
    again = ["paper", "icarl-buffer", "--results", file, "-o", str(tmp_path / "again.svg")]
    assert main([*again, "--lrs", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "icarl-random" in out and "0.3" in out and "0.05" not in out and "sgd" not in out
    assert "icarl-random (local)" in (tmp_path / "again.svg").read_text()
    for asked, said in (
        (["--lrs", "0.7"], "unknown lr in these results: '0.7'"),
        (["--epochs", "2"], "unknown epochs in these results: '2'"),
        (["--precision", "bf16"], "Allowed: fp32."),
    ):
        assert main([*again, *asked]) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and len(err.strip().splitlines()) == 1
    alone = str(results.write([other], tmp_path / "other.parquet"))
    assert main(["paper", "icarl-buffer", "--results", alone]) == 2
    assert "no matching run of icarl or icarl-random" in capsys.readouterr().err


def test_lists_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "experiments", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names == ["demo", "table1", "distance", "icarl-buffer", *STUDIES]
    assert main(["list", "experiments"]) == 0
    out = capsys.readouterr().out
    assert "175 runs" in " ".join(out.split()) and "icarl-buffer" in out


MISTAKES = {
    "no experiment": (["paper"], ["table1"]),
    "unknown experiment": (["paper", "tabel1"], ["table1"]),
    "unknown challenge": (["paper", "table1", "--challenge", "rotated-digits"], ["rotated-digits", "rotated-mnist"]),
    "unknown row": (["paper", "table1", "--algorithms", "ewk"], ["'ewk'", "'ewc'"]),
    "a row of another challenge": (["paper", "table1", "--algorithms", "icarl"], ["'icarl'", "rotated-mnist"]),
    "a seed without angles": (["paper", "table1", "--seeds", "12"], ["seed 12", "--angles seed"]),
    "more tasks than angles": (["paper", "table1", "--tasks", "21"], ["21", "20"]),
    "demo of another challenge": (["paper", "table1", "--demo", "--challenge", "rotated-mnist"], ["rotated-digits"]),
    "no data": (["paper", "table1"], ["glocal data fetch mnist"]),
    "no epochs": (["paper", "table1", "--demo", "--epochs", "0"], ["epochs", "0"]),
    "no such device": (["paper", "table1", "--demo", "--device", "tpu"], ["tpu"]),
    "results of nothing": (["paper", "table1", "--results", "none.parquet"], ["none.parquet"]),
    "iCaRL without new classes": (["paper", "icarl-buffer", "--challenge", "rotated-mnist"], ["split-cifar10"]),
    "a figure of no format": (["paper", "distance", "--demo", "-o", "d.gif"], [".gif", ".png"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_clear_line(mistake: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = MISTAKES[mistake]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1, err
    for words in said:
        assert words in err
