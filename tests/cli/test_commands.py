"""The commands do what they say."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import glocal
from glocal.cli.common import TrainingOptions
from glocal.cli.main import COMMANDS, main
from glocal.sweeps.sweep import sweep

QUICK = ["--tasks", "2", "--epochs", "1", "--batch-size", "500"]
TABLE_KEYS = {
    *("challenge", "algorithm", "locality", "lr", "seeds"),
    *("acc_mean", "acc_std", "forgetting_mean", "forgetting_std"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "store"
    command = ["sweep", "split-digits", "--algorithms", "er", "ewc", "--lrs", "0.05", "0.2", "--seeds", "1", "2"]
    assert main([*command, *QUICK, "--store", str(path)]) == 0
    return path


@pytest.mark.parametrize("command", [[], ["--help"], *([c, "--help"] for c in COMMANDS)])
def test_help_reads(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: glocal" in out and "{None}" not in out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from glocal.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_flags_override_the_sweep_file(elsewhere: Path) -> None:
    """In both directions, also to a value that is the default."""
    from glocal.cli.main import _parse

    file = elsewhere / "sweep.toml"
    file.write_text('challenge = "split-digits"\nlrs = [1]\nepochs = 3\nprecision = "bf16"\nkeep_parameters = true\n')
    sweep = _parse(["sweep", "--file", str(file), "--epochs", "2", "--precision", "fp32", "--seeds", "5"])
    assert (sweep.challenge, sweep.lrs, sweep.seeds) == ("split-digits", (1,), (5,))
    assert sweep.training == TrainingOptions(epochs=2, keep_parameters=True)
    assert _parse(["sweep", f"--file={file}", "--keep-parameters"]).training.keep_parameters
    assert not _parse(["sweep", f"--file={file}", "--no-keep-parameters"]).training.keep_parameters


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms", "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    everywhere = {"sgd", "stable-sgd", "joint", "er", "gem", "agem", "si", "pnn", "packnet", "hat"}
    near = {"ewc", "laplace", "icarl", "icarl-random", "ogd", "ogd-gtl", "ogd-ave", "ogd-published", "optimal-hard"}
    near |= {"optimal-soft", "der", "derpp"}
    expected = {**dict.fromkeys(everywhere, "global"), **dict.fromkeys(near, "local")}
    assert {n: row["locality"] for n, row in listed.items()} == expected
    assert all(row["memory_contents"] and row["memory_size"] and row["settings"] for row in listed.values())
    assert main(["list", "--json"]) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"rotated-digits", "split-mnist", "mlp", "demo", "ewc"} <= names


REGRESSION = """
import torch
from glocal.challenges import from_tasks

def lines():
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    return from_tasks("lines", [((x, x @ torch.randn(4, 2)),) * 2 for _ in range(2)], "domain", loss="squared-error")
"""


def test_regression_is_shown_by_its_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the stored test losses: the tasks are tested on their training data."""
    (tmp_path / "lines.py").write_text(REGRESSION)
    challenge, store = f"{tmp_path / 'lines.py'}:lines", tmp_path / "store"
    options = ["--epochs", "2", "--batch-size", "20", "--store", str(store)]
    assert main(["run", challenge, "sgd", "--lr", "0.05", "--seed", "1", *options]) == 0
    shown = capsys.readouterr().out
    (run,) = glocal.load(store)
    R = run.arrays["test_class_loss"]
    assert f"Average loss {R[2].mean():.3g}; forgetting, over all tasks but the last, {R[2, 0] - R[1, 0]:.3g}." in shown
    assert all(f"{x:.3g}" in shown for x in R[1:].ravel()) and "nan" not in shown
    assert main(["sweep", challenge, "--algorithms", "sgd", "--lrs", "0.05", "--seeds", "1", *options]) == 0
    shown = capsys.readouterr().out
    assert f"{R[2].mean():.3g}" in shown and f"{R[2, 0] - R[1, 0]:.3g}" in shown and "–" not in shown
    for kind in ("matrix", "accuracy"):
        assert main(["plot", str(store), "--kind", kind, "-o", str(tmp_path / f"{kind}.svg")]) == 0
        assert "(%)" not in (tmp_path / f"{kind}.svg").read_text()
    assert all(f">{x:.2g}<" in (tmp_path / "matrix.svg").read_text() for x in R.ravel())


def test_table_as_json_and_csv_agree(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["table", str(store), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4 and all(row.keys() >= TABLE_KEYS for row in rows)
    assert all(0 <= row["acc_mean"] <= 100 and row["seeds"] == 2 for row in rows)
    assert main(["table", str(store), "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(r["acc_mean"]) for r in table] == pytest.approx([r["acc_mean"] for r in rows])


def test_where_selects_runs(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["table", str(store), "--where", "algorithm=er", "lr>=0.1", "--where", "seed=2", "--format=json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["algorithm"], row["lr"], row["seeds"]) == ("er", 0.2, 1)
    figure = tmp_path / "figure.svg"
    assert main(["plot", str(store), "--where", "algorithm=er", "-o", str(figure)]) == 0
    assert "er (global)" in figure.read_text() and "ewc" not in figure.read_text()
    for command in ("table", "plot"):
        assert main([command, str(store), "--where", "algorithm=er", "lr>0.2"]) == 2
        assert "none of the 8 runs" in capsys.readouterr().err


def test_table_with_one_row_per_run(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    table = ["table", str(store), "--per-run", "--where", "algorithm=er"]
    assert main([*table, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["lr"], row["seed"]) for row in rows] == [(0.05, 1), (0.05, 2), (0.2, 1), (0.2, 2)]
    assert all((store / "runs" / row["hash"]).is_dir() for row in rows)
    assert main([*table, "--format", "csv"]) == 0
    assert [row["hash"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == [r["hash"] for r in rows]
    assert main(table) == 2
    assert "--format csv" in capsys.readouterr().err


def test_class_and_task_incremental_from_the_same_runs(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = {}
    for scope in ("class", "task"):
        assert main(["table", str(store), "--format", "json", "--scope", scope]) == 0
        found[scope] = [row["acc_mean"] for row in json.loads(capsys.readouterr().out)]
    assert all(task >= among_all for task, among_all in zip(found["task"], found["class"], strict=True))
    assert found["task"] != found["class"]


@pytest.mark.parametrize("kind", ["forgetting", "distance", "matrix"])
def test_plot(kind: str, store: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / f"{kind}.png"
    assert main(["plot", str(store), "--kind", kind, "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_shows_table_figures_and_verdicts(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo with fewer networks."""

    def smaller(challenge: str, algorithms: Any, lrs: Any, seeds: Any, **options: Any) -> Any:
        return sweep(challenge, algorithms, lrs, seeds[:1], **options | {"tasks": 2, "epochs": 1, "batch_size": 500})

    monkeypatch.setattr("glocal.sweeps.sweep.sweep", smaller)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("sgd", "er", "ewc", "laplace", "ogd-gtl", "local", "global"))
    assert out.count("not settled: one seed") == 5
    assert all((elsewhere / "demo" / f"{kind}.png").exists() for kind in ("plasticity", "forgetting", "distance"))


def test_locality_prints_declared_and_measured_locality(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = str(Path(__file__).parents[2] / "examples" / "anchor.py") + ":Anchor"
    silent = tmp_path / "silent.py"
    silent.write_text("import glocal\nclass Silent(glocal.Algorithm):\n    name, locality = 'silent', 'local'\n")
    few = ["--solutions", "5", "--epochs", "1", "--examples", "60"]
    assert main(["locality", "er", "si", "icarl", own, f"{silent}:Silent", *few]) == 2
    out, err = capsys.readouterr()
    names = {"er", "si", "icarl", "anchor", "silent"}
    rows = {words[0]: words[1:3] for words in map(str.split, out.splitlines()) if names & set(words[:1])}
    assert rows.pop("er") == ["global", "global"] and rows.pop("icarl") == ["local", "local"]
    assert rows.pop("anchor") == ["local", "local"]
    assert rows == {"si": ["global", "local"]}, "what is not tested has no verdict"
    said = " ".join(out.split())
    assert "for 3 of 4 algorithms; 5 solutions each" in said and "(icarl on split-digits)" in said
    assert "1 of 5 failed. silent does not override `approximation`" in " ".join(err.split())


def test_locality_defaults_to_all_algorithms_that_support_the_setting() -> None:
    from glocal.algorithms import ALGORITHMS
    from glocal.cli.lens import Locality

    names = {a.name for a, _ in Locality(challenge="rotated-digits")._pairs()}
    assert names == {name for name, a in ALGORITHMS.items() if "domain" in a.settings}
    pairs = [(a.name, c.name) for a, c in Locality()._pairs()]
    assert [name for name, _ in pairs] == list(ALGORITHMS) and ("icarl", "split-digits") in pairs
    in_tasks = Locality(("pnn",), challenge="split-digits", setting="task")._pairs()
    assert [c.setting for _, c in in_tasks] == ["task"]


def test_lens_on_a_run_that_kept_its_parameters(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "rotated-digits", "ewc", "--keep-parameters", "--lr", "0.1", *QUICK]) == 0
    (run,) = (elsewhere / "runs" / "runs").glob("[!.]*")
    from glocal.paper.study import read_table

    capsys.readouterr()
    assert main(["lens", str(run), "--examples", "100", "--epsilon", "1e-6", "-o", "new/lens.png"]) == 0
    out = capsys.readouterr().out
    assert "in 1 of 1 pair" in out and "Wrote new/lens.png" in out
    assert (elsewhere / "new" / "lens.png").read_bytes().startswith(b"\x89PNG")
    assert main(["lens", str(run), "--examples", "100", "--epsilon", "1e6"]) == 0
    assert "0 of 1 pair" in capsys.readouterr().out and (elsewhere / "lens.png").exists()
    assert main(["lens", str(run), "--examples", "100", "--show", "perturbation"]) == 0
    rows = read_table(elsewhere / "lens-perturbation.parquet").to_dicts()
    assert {"eigen", "random", "eigen_test", "random_test"} <= rows[0].keys()
    assert any(row["eigen"] != row["eigen_test"] for row in rows)
