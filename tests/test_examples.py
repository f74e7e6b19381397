"""The examples that the documentation points to run as it says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from glocal.cli.main import main

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ["--tasks", "2", "--epochs", "1", "--batch-size", "500"]


def rows(store: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["table", str(store), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_algorithm_of_ones_own(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "rotated-digits", "--algorithms", f"{EXAMPLES / 'anchor.py'}:Anchor", "sgd", "--lrs", "0.3"]
    assert main([*command, "--seeds", "1", "--options", "Anchor.strength=0,3", *QUICK]) == 0
    found = {r["algorithm"]: r for r in rows(elsewhere / "runs", capsys)}
    assert set(found) == {"anchor strength=0", "anchor strength=3", "sgd"}
    assert found["anchor strength=0"]["locality"] == "local"
    assert found["anchor strength=0"]["acc_mean"] == found["sgd"]["acc_mean"], "without a pull it is plain SGD"
    strong, none = (found[f"anchor strength={s}"]["distance_mean"] for s in (3, 0))
    assert isinstance(strong, float) and isinstance(none, float) and strong < none, "the pull keeps it near"


def test_an_algorithm_of_ones_own_is_listed_with_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms", "--own", f"{EXAMPLES / 'anchor.py'}:Anchor", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["anchor"]["locality"] == "local" and found["anchor"]["grows"] == "P" and "ewc" in found
    assert main(["list", "options", "--own", f"{EXAMPLES / 'anchor.py'}:Anchor", "--json"]) == 0
    options = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert options["anchor.strength"]["default"] == 0.01 and "pull" in options["anchor.strength"]["description"]


def test_an_edited_algorithm_is_another_run(elsewhere: Path) -> None:
    mine = elsewhere / "anchor.py"
    text = (EXAMPLES / "anchor.py").read_text()
    for version in (text, text.replace("strength / 2", "strength / 3"), text):
        mine.write_text(version)
        assert main(["run", "rotated-digits", f"{mine}:Anchor", *QUICK]) == 0
    assert len(list((elsewhere / "runs" / "runs").glob("[!.]*"))) == 2


def test_a_challenge_of_ones_own(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{EXAMPLES / 'noisy.py'}:make_challenge", "joint", "--lr", "0.3", *QUICK]) == 0
    (row,) = rows(elsewhere / "runs", capsys)
    assert row["challenge"] == "noisy-digits" and isinstance(row["acc_mean"], float) and row["acc_mean"] > 50


def test_a_network_of_ones_own(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = f"{EXAMPLES / 'convolutional.py'}:make_network"
    assert main(["run", "split-digits", "er", "--lr", "0.05", "--network", network, *QUICK]) == 0
    (row,) = rows(elsewhere / "runs", capsys)
    assert row["seeds"] == 1


def test_a_sweep_file(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--file", str(EXAMPLES / "penalties.toml"), "--seeds", "11", "--lrs", "0.1", *QUICK]
    assert main(command) == 0
    labels = {r["algorithm"] for r in rows(elsewhere / "runs", capsys)}
    assert labels == {"sgd", "er slots=200", "ewc penalty=1", "ewc penalty=10", "ewc penalty=100"}


def test_a_page_from_checkpoints_to_a_figure(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of docs/locality.md, as it stands there."""
    monkeypatch.syspath_prepend(EXAMPLES)
    page = (EXAMPLES.parent / "docs" / "locality.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert 5 < len(code.strip().splitlines()) < 20
    runpy.run_path(str(EXAMPLES / "checkpoints.py"), run_name="__main__")
    found: dict[str, Any] = {}
    exec(compile(code, "docs/locality.md", "exec"), found)
    out = capsys.readouterr().out
    assert "Recommended: " in out and found["found"].advice.family in ("replay", "constraint", "quadratic")
    assert (elsewhere / "lens.png").read_bytes().startswith(b"\x89PNG")
    assert found["found"].distance.shape == (3, 3) and not found["network"].state_dict()["1.weight"].isnan().any()


def test_a_training_of_ones_own_under_the_lens(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", f"{EXAMPLES / 'checkpoints.py'}:make_subject", "--examples", "100", "-o", "f.pdf"]) == 0
    assert "Recommended: " in capsys.readouterr().out and (elsewhere / "f.pdf").exists()
