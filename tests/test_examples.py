"""The examples run with the commands that their docstrings give; tests/test_pages.py runs examples/checkpoints.py."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import glocal
from glocal.cli.main import main

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ["--tasks", "2", "--epochs", "1", "--batch-size", "500"]


def rows(store: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["table", str(store), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sweep_with_a_custom_algorithm(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "rotated-digits", "--algorithms", f"{EXAMPLES / 'anchor.py'}:Anchor", "sgd", "--lrs", "0.3"]
    assert main([*command, "--seeds", "1", "--options", "Anchor.strength=0,3", *QUICK]) == 0
    table = {row["algorithm"]: row for row in rows(elsewhere / "runs", capsys)}
    assert set(table) == {"anchor strength=0", "anchor strength=3", "sgd"}
    assert table["anchor strength=0"]["locality"] == "local"
    assert table["anchor strength=0"]["acc_mean"] == table["sgd"]["acc_mean"], "without a penalty it is plain SGD"
    strong, zero = (table[f"anchor strength={strength}"]["distance_mean"] for strength in (3, 0))
    assert isinstance(strong, float) and isinstance(zero, float) and strong < zero, "the penalty limits the distance"


def test_list_includes_a_custom_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms", "--own", f"{EXAMPLES / 'anchor.py'}:Anchor", "--json"]) == 0
    algorithms = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (
        algorithms["anchor"]["locality"] == "local"
        and algorithms["anchor"]["memory_size"] == "P"
        and "ewc" in algorithms
    )
    assert main(["list", "options", "--own", f"{EXAMPLES / 'anchor.py'}:Anchor", "--json"]) == 0
    options = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert options["anchor.strength"]["default"] == 0.01 and "penalty" in options["anchor.strength"]["description"]


def test_options_of_any_type_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom glocal.algorithms import SGD\n\n"
        "@dataclass(frozen=True)\nclass Mine(SGD):\n    name = 'mine'\n    sizes: tuple[int, ...] = (1, 2, 3)\n"
    )
    assert main(["list", "options", "--own", f"{file}:Mine"]) == 0
    assert "(1, 2, 3)" in capsys.readouterr().out


def test_editing_an_algorithm_makes_a_new_run(elsewhere: Path) -> None:
    copy = elsewhere / "anchor.py"
    source = (EXAMPLES / "anchor.py").read_text()
    for version in (source, source.replace("strength / 2", "strength / 3"), source):
        copy.write_text(version)
        assert main(["run", "rotated-digits", f"{copy}:Anchor", *QUICK]) == 0
    assert len(list((elsewhere / "runs" / "runs").glob("[!.]*"))) == 2


def test_custom_challenge(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{EXAMPLES / 'noisy.py'}:make_challenge", "joint", "--lr", "0.3", *QUICK]) == 0
    (row,) = rows(elsewhere / "runs", capsys)
    assert row["challenge"] == "noisy-digits" and isinstance(row["acc_mean"], float) and row["acc_mean"] > 50


def test_custom_network(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = f"{EXAMPLES / 'convolutional.py'}:make_network"
    assert main(["run", "split-digits", "er", "--lr", "0.05", "--network", network, *QUICK]) == 0
    (row,) = rows(elsewhere / "runs", capsys)
    assert row["seeds"] == 1


def test_sweep_file(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--file", str(EXAMPLES / "penalties.toml"), "--seeds", "11", "--lrs", "0.1", *QUICK]
    assert main(command) == 0
    labels = {r["algorithm"] for r in rows(elsewhere / "runs", capsys)}
    assert labels == {"sgd", "er slots=200", "ewc penalty=1", "ewc penalty=10", "ewc penalty=100"}


def test_pretrained_features_with_adapters(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All runs keep the frozen weights of the file, and are better than adapters of an untrained network."""
    example = runpy.run_path(str(EXAMPLES / "adapters.py"))
    save_file(example["pretrain"](epochs=1), "features.safetensors")
    network = ["--network", f"{EXAMPLES / 'adapters.py'}:make_network", "--setting", "task", "--keep-parameters"]
    command = ["sweep", "split-digits", *network, "--algorithms", "er", "--lrs", "0.1", "--seeds", "1", "2", *QUICK]
    assert main([*command[:-1], "50", "--init", "features.safetensors"]) == main([*command[:-1], "50"]) == 0
    pretrained, untrained = sorted(
        rows(elsewhere / "runs", capsys), key=lambda row: "init" not in str(row["challenge"])
    )
    assert float(str(pretrained["acc_mean"])) > float(str(untrained["acc_mean"])) + 10
    for run in glocal.load(elsewhere / "runs"):
        same = torch.equal(run.state(2)["features.1.weight"], load_file("features.safetensors")["features.1.weight"])
        assert same == ("init" in run.config["network"]) == any("features.safetensors" in n for n in run.info["notes"])


@pytest.mark.slow
def test_adapters_as_a_script(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "adapters.py"), run_name="__main__")
    assert len(glocal.load(elsewhere / "runs")) == 18 and "acc_mean" in capsys.readouterr().out


def test_page_about_own_data(elsewhere: Path) -> None:
    page = EXAMPLES.parent / "docs" / "data.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    path = elsewhere / "messages.py"  # runs are named by the source of functions
    path.write_text(code)
    runs = runpy.run_path(str(path))["runs"]
    assert len(runs) == 8 and {run.config["challenge"]["validation"] for run in runs} == {"own"}
    assert runs[0].config["challenge"]["options"] == {"classes": ["ham", "news", "spam"]}
    assert max(run.arrays["test_class_accuracy"][-1].mean() for run in runs) > 0.8
