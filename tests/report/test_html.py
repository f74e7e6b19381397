"""The HTML page: what it contains, that nothing in a store can become markup or a request, and the commands of runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_runs import fake_run, sweep
from torch import nn

import glocal
from glocal.challenges.datasets import digits_fingerprint
from glocal.cli.main import _parse, main
from glocal.cluster.status import Status
from glocal.engine.config import RunConfig
from glocal.errors import GlocalError
from glocal.lens import examine
from glocal.lens.record import is_built_in
from glocal.report.html import page
from glocal.report.html.content import Examined, StoreContent, changes, chart_data, joined_groups
from glocal.report.html.page import render_page
from glocal.store.lease import Seen
from glocal.store.run import Run, Runs
from glocal.store.store import StoredCohort
from glocal.sweeps.command import sweep_commands
from glocal.sweeps.sweep import prepare

HOSTILE = """</script><script>document.title='hacked'</script><img src=x onerror="document.title='hacked'">'"&\u2028"""


@pytest.fixture(autouse=True)
def without_vega(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its JavaScript takes seconds to bundle; the tests in a browser have it."""
    monkeypatch.setattr(page, "vega", lambda: "window.vegaEmbed = () => {};")


def content(runs: list[Run], name: str = "runs") -> StoreContent:
    return StoreContent(name, Runs(runs), Status(len(runs), 0, 0, 0, 0, None, [], [], []))


def data_of(text: str) -> Any:
    """The page's data, as strict JSON."""

    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found, parse_constant=fail)


def demo_runs() -> list[Run]:
    return sweep(["er", "ewc"], [0.01, 0.1], [0, 1], lambda name, lr, seed: 0.1 + lr + 0.01 * seed)


def test_a_policy_forbids_all_requests_and_all_other_scripts() -> None:
    text = render_page([content(demo_runs())])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    policy = policy.replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2 and re.findall("'sha256-(.*?)'", policy) == hashes
    assert text.count("<script") == 3
    assert not re.findall(r"""<[^>]+\b(?:src|href)=["'](?!#|data:,)[^>]*>""", text.replace(scripts[0], ""))


def test_text_of_a_store_never_becomes_markup() -> None:
    hostile: dict[str, Any] = {"challenge": HOSTILE, "label": HOSTILE}
    run, other = (fake_run(HOSTILE, **hostile, options={HOSTILE + "(": value}) for value in (HOSTILE, "b"))
    for own in (run, other):
        own.info["notes"].append(HOSTILE)
        own.info["versions"][HOSTILE] = HOSTILE
    text = render_page([content([run, other], HOSTILE), content([run], "b")])
    assert text.count("<script") == 3 and text.count("</script") == 3
    assert "<img" not in re.sub(r'<script type="module">.*?</script>', "", text, flags=re.DOTALL)
    assert data_of(text)["options"][1]["x"][0] == HOSTILE


def test_means_and_intervals_are_those_of_the_formula() -> None:
    """Forgetting is lost T / (2 (T−1)); the t-interval of two seeds is x̄ ∓ 12.7062 |x_1 − x_2| / 2."""
    data = chart_data([content(demo_runs())])
    group = next(g for g in data["groups"] if g["algorithm"] == "ewc" and g["lr"] == 0.1)
    points = [100 * (0.2 + 0.01 * seed) * 3 / 4 for seed in (0, 1)]
    mean, half = sum(points) / 2, 12.7062 * (points[1] - points[0]) / 2
    assert group["forgetting"] == pytest.approx([mean, mean - half, mean + half], rel=1e-4)
    assert group["metric"][0] == pytest.approx(100 * (0.9 - 0.205 / 2), rel=1e-4)
    assert [t for t, *_ in group["tasks"]] == [1, 2, 3] and group["tasks"][0][1] == 90
    lr = data["options"][0]
    row = next(r for s in lr["series"] if s["family"] == "ewc (local)" for r in s["rows"] if r["x"] == 0.1)
    assert row["forgetting"] == group["forgetting"] and row["seeds"] == 2
    assert lr["kind"] == "log" and [o["name"] for o in data["options"]] == ["learning rate"]


def test_any_option_that_was_swept_has_series() -> None:
    """One series for each value of everything else; here of two learning rates, and of one network."""
    runs = [
        fake_run(
            "er",
            lr,
            seed,
            lost=slots / 1000,
            options={"slots": slots},
            label=f"er slots={slots}",
            epochs=epochs,
        )
        for lr in (0.01, 0.1)
        for seed in (0, 1)
        for slots, epochs in ((10, 1), (20, 1), (20, 2))
    ]
    data = chart_data([content(runs)])
    options = {option["name"]: option for option in data["options"]}
    assert set(options) == {"learning rate", "epochs", "slots"}
    one, two = ("rotated-digits · 1 epoch", "rotated-digits · 2 epochs")
    assert [challenge["name"] for challenge in data["challenges"]] == [one, two]
    shown = [s for s in options["slots"]["series"] if s["challenges"] == [one]]
    assert [[row["x"] for row in s["rows"]] for s in shown] == [[10, 20], [10, 20]]
    assert shown[0]["rows"][1]["forgetting"][0] == pytest.approx(100 * 0.02 * 3 / 4, rel=1e-4)
    assert {tuple(s["challenges"]) for s in options["epochs"]["series"]} == {(one,), (one, two)}


def test_diverged_runs_are_named_and_have_no_numbers() -> None:
    runs = [*demo_runs(), fake_run("er", 0.5, 0, diverged=7)]
    text = render_page([content(runs)])
    data = data_of(text)
    (run,) = [r for r in data["runs"] if data["groups"][r["group"]]["lr"] == 0.5]
    assert run["metric"] is run["forgetting"] is run["matrix"][1][0] is None
    assert text == render_page([content(runs)])
    assert "diverged by step 7" in text and "9 finished, 1 diverged" in text


def test_curves_go_on_where_a_seed_stopped_early_and_seeds_are_whole() -> None:
    runs = [fake_run("er", seed=seed, epochs=3) for seed in (0, 20261118)]
    runs[1].arrays["epoch_loss"][:, 2] = np.nan
    text = render_page([content(runs)])
    (group,) = data_of(text)["groups"]
    curves = runs[0].arrays["epoch_loss"].copy()
    curves[:, 2] = (curves[:, 1] + curves[:, 2]) / 2  # the stopped seed keeps its last value
    assert [mean for _, mean, *_ in group["loss"]] == pytest.approx(curves.ravel().tolist(), 1e-4)
    assert "0, 20261118" in text


def test_failed_runs_are_told_with_their_error() -> None:
    failed = StoredCohort(
        Path("cohorts/01"), ["a", "b"], False, Seen(1, {"failed": "CUDA <out> of memory."}, held=False)
    )
    status = Status(8, 0, 0, 3, 2, None, [], [failed], [])
    text = render_page([StoreContent("runs", Runs(demo_runs()), status)])
    assert "8 finished, 0 diverged, 3 waiting, 2 failed" in text and "2 runs failed" in text
    assert "CUDA &lt;out&gt; of memory. Repeat" in text


def test_two_stores_are_paired_by_seed() -> None:
    """The differences 1, 2, 3 have the mean 2 and the interval 2 ∓ 4.302653 / √3; seed 3 is in one store alone."""
    old = [fake_run("er", seed=seed, lost=0.1) for seed in range(4)]
    new = [fake_run("er", seed=seed, lost=0.1 + (seed + 1) / 75, epochs=3) for seed in range(3)]
    notes, rows = changes(content(old, "a"), content(new, "b"))
    assert "epochs: 2 → 3 (1 of 1 groups)." in notes
    (row,) = [r for r in rows if r["statistic"] == "forgetting"]
    half = 4.302653 / math.sqrt(3)
    assert row["seeds"] == 3
    assert [row["mean"], row["low"], row["high"]] == pytest.approx([2, 2 - half, 2 + half], rel=1e-3)
    _, rows = changes(content(old, "a"), content([fake_run("er", regression=True)], "b"))
    assert [row["mean"] for row in rows] == [None, None, 0]  # of an accuracy and a loss there is no difference
    text = render_page([content(old, "a"), content(new, "b")])
    assert "Changes from a to b" in text and ">rotated-digits · a</th>" in text and ">rotated-digits · b</th>" in text


def test_two_stores_pair_equal_options_under_one_label() -> None:
    """Where a store has ewc at two penalties, the default's label names its value; the other store's is alike."""
    default, other = ({"penalty": value} for value in (1.4, 10.0))
    old = [fake_run("ewc", options=default), fake_run("ewc", options=other)]
    new = [fake_run("ewc", options=default, lost=0.2)]
    first, second = content(old, "a"), content(new, "b")
    notes, rows = changes(first, second)
    assert notes[0] == "1 of 2 groups are in a alone." and {row["algorithm"] for row in rows} == {"ewc penalty=1.4"}
    assert len(notes) == 2  # no group is in b alone, and one sentence says that the settings are equal
    assert [g.algorithm for g in joined_groups([second, first])] == [
        "ewc penalty=1.4",
        "ewc penalty=1.4",
        "ewc penalty=10",
    ]


def test_two_stores_pair_equal_settings_under_one_label() -> None:
    """Where a store has runs of two and of three tasks, its labels name them; the other store's need not."""
    old = [fake_run("er", tasks=tasks, seed=seed) for tasks in (2, 3) for seed in (1, 2)]
    notes, rows = changes(content(old, "a"), content(old[2:], "b"))
    assert notes == ["1 of 2 groups are in a alone.", "The settings of all groups in both are equal."]
    assert [row["mean"] for row in rows] == [0, 0, 0]


def examined() -> Examined:
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    thetas = [{"weight": float(t) * torch.ones(2, 3), "bias": torch.zeros(2)} for t in range(3)]
    result = examine(nn.Linear(3, 2), "cross-entropy", [(x, y), (x, 1 - y)], thetas, epsilon=0.1, eigenvalues=2)
    return Examined(replace(fake_run(), path=Path("runs/runs/0123")), result)


def test_versions_of_an_own_algorithm_are_compared() -> None:
    """By the hash of their code, beside an algorithm that has none."""
    runs = [fake_run("mine", lost=lost) for lost in (0.1, 0.2)]
    for run, source in zip(runs, ("0a", "0b"), strict=True):
        run.config["algorithm"]["source"] = source
    data = chart_data([content([*runs, fake_run("er")])])
    (option,) = [option for option in data["options"] if option["name"] == "source"]
    assert [[row["x"] for row in series["rows"]] for series in option["series"]] == [["0a", "0b"]]


def test_results_of_the_lens() -> None:
    """Two tasks are one pair, at the distance √6 of the checkpoints, and all logits are equal: nothing is forgotten."""
    own = examined()
    text = render_page([content(demo_runs())], [own])
    (lens,) = data_of(text)["lens"]
    (pair,) = lens["pairs"]
    assert pair["pair"] == "1 → 2" and pair["inside"] is True and pair["measured"] == pytest.approx(0, abs=1e-6)
    assert pair["distance"] == pytest.approx(math.sqrt(6), rel=1e-4)
    assert [row["task"] for row in lens["eigenvalues"]] == [1, 1, 2, 2]
    assert own.result.finding in text and "seed 0 · 0123" in text


def test_the_report_of_the_documentation_is_a_page_of_today() -> None:
    """Its style, script, charts, kinds of data, sections and columns are those of a page with other numbers."""

    def parts(text: str) -> list[Any]:
        data, (style,) = data_of(text), re.findall(r"<style>.*?</style>", text, re.DOTALL)
        body, *_, script = re.split(r'<script type="module">', text)
        names = re.findall(r' id="(.*?)"|<h[24].*?>(.*?)</h|class="sort">(.*?)<', body)
        return [style, script, data["charts"], data.keys(), *names]

    committed = (Path(__file__).parents[2] / "docs" / "demo-report.html").read_text()
    runs = sweep(["sgd", "er", "ewc", "laplace", "ogd-gtl"], [0.02, 0.04, 0.08, 0.16], [1, 2], lambda *_: 0.1)
    assert parts(committed) == parts(render_page([content(runs)])), "`make demo-report` writes it again"


def test_the_lens_examines_runs_with_own_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own algorithms that change the network, two with one name, beside a built-in one."""
    code, store, output = tmp_path / "mine.py", tmp_path / "store", tmp_path / "report.html"
    code.write_text(
        "import torch\nfrom torch import nn\nfrom glocal import from_tasks\nfrom glocal.algorithms import SGD\n"
        "class Mine(SGD):\n    name = 'mine'\n    def network(self, make, tasks): return make\n"
        "class Other(Mine): name = 'other'\n"
        "def net(shape, outputs): return nn.Linear(4, outputs)\n"
        "def tasks():\n    data = torch.arange(48.0).reshape(12, 4) % 5, torch.arange(12) % 2\n"
        "    return from_tasks('tiny', [(data, data)] * 2, 'domain')\n"
    )
    edited = tmp_path / "edited.py"
    edited.write_text(f"{code.read_text()}# edited\n")
    own = [f"{code}:Other", f"{edited}:Mine", f"{code}:Mine"]
    kept: Any = {"network": f"{code}:net", "epochs": 1, "keep_parameters": True, "store": store}
    runs = glocal.sweep(f"{code}:tasks", [*own[1:], "sgd"], [0.1], [1], **kept)
    names = [run.path.name for run in runs if run.path]
    command = ["report", str(store), "-o", str(output)]
    assert main([*command, "--lens", *names]) == 2
    asked = "--challenge PATH.py:FUNCTION --network PATH.py:net --algorithm PATH.py:"
    assert asked in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--network", f"{code}:net"]) == 2
    assert "--network is for runs to examine: name them with --lens" in capsys.readouterr().err
    given = ["--challenge", f"{code}:tasks", "--network", f"{code}:net", "--algorithm", *own]
    assert main([*command, "--lens", *names, *given]) == 0
    assert len(data_of(output.read_text())["lens"]) == 3


def test_five_hundred_runs_fit_into_five_megabytes() -> None:
    """With the JavaScript of Vega, which takes 0.9."""
    algorithms = ["sgd", "er", "agem", "si", "ewc", "laplace", "ogd", "icarl", "hat", "gem"]
    numbers = random.Random(0)
    lost = lambda *_: numbers.random()  # noqa: E731
    runs = sweep(algorithms, [0.001, 0.003, 0.01, 0.03, 0.1], range(10), lost, tasks=20, epochs=5)
    text = render_page([content(runs)])
    assert len(runs) == 500 and len(text.encode()) < 4e6


@pytest.mark.parametrize(
    "command",
    [
        "rotated-digits --algorithms er ewc sgd --lrs 0.01 0.3 --seeds 1 2 --tasks 3 --options ewc.penalty=1,10",
        "split-digits --algorithms er derpp --lrs 0.1 --seeds 0 --setting task --validation 0.1 --patience 2"
        " --optimizer sgd adamw --optimizer-options adamw.weight_decay=0.1,0.2 sgd.momentum=0.9 --horizon 9",
        "split-digits --algorithms hat --evaluate seen --setting task --precision bf16 --train-eval 9 --epochs 2",
    ],
)
def test_commands_of_runs_give_the_same_runs(command: str, tmp_path: Path) -> None:
    def requests(text: str) -> dict[str, RunConfig]:
        arguments = _parse(["sweep", *shlex.split(text)]).arguments() | {"store": tmp_path}
        return {name: request.config for name, request in prepare(**arguments).requests.items()}

    wanted = requests(command)
    dropped = next(iter(wanted)) if len(wanted) > 3 else None  # then lrs × seeds is no product
    runs = [
        Run(c.as_dict(), {}, {"setting": c.challenge["setting"]}, tmp_path / name)
        for name, c in wanted.items()
        if name != dropped
    ]
    found: set[str] = set()
    for own in sweep_commands(reversed(runs)):
        names = {run.path.name for run in own.runs if run.path}
        assert own.notes == () and requests(own.text.removeprefix("glocal sweep ")).keys() == names
        assert not found & names
        found |= names
    assert found == wanted.keys() - {dropped}


def test_commands_of_runs_with_own_algorithms_give_the_same_runs(tmp_path: Path) -> None:
    """They write the algorithm's `name`; a class's name is as good, also before an option."""
    code = tmp_path / "mine.py"
    code.write_text(
        "from dataclasses import dataclass\nfrom glocal.algorithms import SGD\n"
        "@dataclass(frozen=True)\nclass SlowHard(SGD):\n    name = 'slow-hard'\n    decay: float = 0.5\n"
        "class One(SGD): name = 'twin'\nclass Two(SGD): name = 'twin'\n"
    )

    def requests(algorithm: str, *options: str) -> dict[str, RunConfig]:
        words = ["rotated-digits", "--algorithms", "er", algorithm, "--lrs", "0.1", "--seeds", "1"]
        arguments = _parse(["sweep", *words, *(["--options", *options] if options else [])]).arguments()
        return {name: r.config for name, r in prepare(**arguments | {"store": tmp_path / "store"}).requests.items()}

    wanted = requests(f"{code}:SlowHard", "SlowHard.decay=0.9")
    runs = [Run(c.as_dict(), {}, {"setting": "domain"}, tmp_path / "store" / name) for name, c in wanted.items()]
    (command,) = sweep_commands(runs)
    words = shlex.split(command.text.replace("PATH.py", str(code)))
    assert prepare(**_parse(words[1:]).arguments() | {"store": tmp_path / "store"}).requests.keys() == wanted.keys()
    for algorithm, owner in (("SlowHard", "slow-hard"), ("slow-hard", "SlowHard")):
        assert requests(f"{code}:{algorithm}", f"{owner}.decay=0.9").keys() == wanted.keys()
    with pytest.raises(GlocalError, match=r"unknown algorithm in .* 'twin'.*Allowed: One, SlowHard, Two"):
        requests(f"{code}:twin")
    with pytest.raises(GlocalError, match="unknown algorithm with options: 'sgd'"):
        requests(f"{code}:SlowHard", "sgd.decay=0.9")


def test_commands_tell_an_own_algorithm_from_a_built_in_one_of_the_same_name(tmp_path: Path) -> None:
    """Also if its options have other defaults, and if both are in one store."""
    code = tmp_path / "mine.py"
    code.write_text(
        "from dataclasses import dataclass\nfrom glocal import algorithms\n"
        "@dataclass(frozen=True)\nclass ER(algorithms.ER):\n    name = 'er'\n    slots: int = 7\n"
    )

    def requests(words: list[str]) -> dict[str, RunConfig]:
        arguments = _parse(words).arguments() | {"store": tmp_path / "store"}
        return {name: request.config for name, request in prepare(**arguments).requests.items()}

    default = f"er.slots={glocal.algorithms.ER().slots}"
    command = ["sweep", "rotated-digits", "--lrs", "0.1", "--seeds", "1", "--algorithms"]
    wanted = [requests([*command, "er"]), requests([*command, f"{code}:ER", "--options", default])]
    configs = {name: config for own in wanted for name, config in own.items()}
    runs = [Run(c.as_dict(), {}, {"setting": "domain"}, tmp_path / "store" / name) for name, c in configs.items()]
    commands = [shlex.split(own.text.replace("PATH.py", str(code))) for own in sweep_commands(runs)]
    assert [requests(words[1:]).keys() for words in commands] == [own.keys() for own in wanted]


def test_commands_tell_an_own_challenge_from_a_built_in_one_of_the_same_name(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import glocal, torch\n"
        "def mine():\n    data = torch.arange(48.0).reshape(12, 1, 2, 2) % 5, torch.arange(12) % 2\n"
        "    return glocal.from_tasks('rotated-digits', [(data, data)] * 5, 'domain')\n"
    )

    def requests(words: list[str]) -> dict[str, RunConfig]:
        arguments = _parse(words).arguments() | {"store": tmp_path / "store"}
        return {name: request.config for name, request in prepare(**arguments).requests.items()}

    options = ["--algorithms", "er", "--lrs", "0.1", "--seeds", "1"]
    wanted = [requests(["sweep", name, *options]) for name in ("rotated-digits", f"{code}:mine")]
    configs = {name: config for own in wanted for name, config in own.items()}
    runs = [Run(c.as_dict(), {}, {"setting": "domain"}, tmp_path / "store" / name) for name, c in configs.items()]
    named, own = sweep_commands(runs)
    assert named.notes == () and "FUNCTION" in " ".join(own.notes) and "'rotated-digits'" in " ".join(own.notes)
    commands = [c.text.replace("PATH.py:FUNCTION", f"{code}:mine") for c in (named, own)]
    assert [requests(shlex.split(text)[1:]).keys() for text in commands] == [own.keys() for own in wanted]
    assert [is_built_in("challenge", run.config) for run in runs] == [True, False], "what the lens asks for"


def test_commands_say_what_a_run_does_not_know(tmp_path: Path) -> None:
    network = {"name": "Net", "source": "0123", "made": "4567", "init": "89ab"}
    run = fake_run("er", network=network)
    challenge = {**run.config["challenge"], "fingerprint": digits_fingerprint()}
    run = replace(run, config={**run.config, "challenge": challenge, "parent": {"run": "cd", "after": 2}})
    (command,) = sweep_commands([run])
    assert {"PATH.py:Net", "FILE", "STORE"} <= {*shlex.split(command.text)}
    assert [
        word for note in command.notes for word in ("PATH", "89ab", "STORE", "angles", "protocol 1") if word in note
    ] == [
        "PATH",
        "89ab",
        "STORE",
        "protocol 1",
    ]


def test_what_cannot_be_shown_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["sweep", "rotated-digits", "--algorithms", "sgd", "--plan", "--store", str(tmp_path / "empty")])
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "has no finished run yet" in capsys.readouterr().err
    assert main(["report", "a", "b", "c"]) == 2
    assert "3 stores were given" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.delitem(sys.modules, "glocal.report.html.charts", raising=False)
    with pytest.raises(GlocalError, match=r"pip install 'glocal\[report\]'"):
        render_page([content(demo_runs())])
