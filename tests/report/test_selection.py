"""Runs chosen by conditions, and the frame with one row per run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_runs import fake_run

from glocal.errors import GlocalError
from glocal.report.html.content import swept
from glocal.store.run import SETTINGS, Run, Runs


@pytest.fixture
def runs() -> Runs:
    """Two of er, with 20 and 100 slots; ewc, trained by Adam, with an option that is not a number; sgd."""
    small = fake_run("er", 0.01, 11, options={"slots": 20}, label="er slots=20,a")
    large = fake_run("er", 0.1, 13, options={"slots": 100})
    ewc = fake_run("ewc", 0.1, 11, tasks=2, epochs=3, options={"penalty": 1.5, "exact": True})
    adam = {"name": "adam", "options": {"beta1": 0.9}}
    return Runs([small, large, replace(ewc, config={**ewc.config, "optimizer": adam}), fake_run("sgd", 1.0, 2)])


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("algorithm=er", [0, 1]),
        ("algorithm!=er", [2, 3]),
        ("algorithm=ewc,sgd", [2, 3]),
        ("algorithm!=er, sgd", [2]),
        ("label=er slots=20,a", [0]),  # the whole text before its parts
        ("locality=local", [2]),
        ("optimizer=sgd", [0, 1, 3]),
        ("beta1=0.90", [2]),
        ("exact=true", [2]),
        ("lr=0.10", [1, 2]),
        ("lr = 1e-1", [1, 2]),
        ("lr<0.1", [0]),
        ("lr<=0.1", [0, 1, 2]),
        ("lr>0.1", [3]),
        ("lr>=.1", [1, 2, 3]),
        ("slots>20", [1]),
        ("slots>3", [0, 1]),  # as numbers: as texts, 20 and 100 come before 3
        ("slots!=20", [1, 2, 3]),
        ("seed=2,13", [1, 3]),
        ("tasks=2", [2]),
        ("epochs>=3", [2]),
        ("network=mlp|batch_size=64|precision=fp32|challenge=rotated-digits|setting=domain", [0, 1, 2, 3]),
        ("algorithm=er|seed=11", [0]),
        ("slots>1000", []),
    ],
)
def test_conditions(conditions: str, expected: list[int], runs: Runs) -> None:
    assert [runs.data.index(run) for run in runs.where(*conditions.split("|"))] == expected


def test_conditions_beside_functions(runs: Runs) -> None:
    assert list(runs.where("algorithm=er", lambda run: run.seed > 11)) == [runs[1]]
    assert list(runs.where()) == list(runs) and list(Runs().where("lr>1")) == []


def test_an_option_does_not_hide_a_setting() -> None:
    run: Run = fake_run("er", 0.1, 3, options={"seed": 7, "slots": 5})
    others = {"angles", "outputs", "loss", "hidden", "train_eval", "protocol"}
    assert run.settings["seed"] == 3 and set(run.settings) == {*SETTINGS, "slots", *others}


def test_whatever_tells_runs_apart_is_a_setting(runs: Runs) -> None:
    """Of the challenge, the network and training; what is equal in all runs is no column."""
    plain, network = fake_run("sgd"), {"name": "mlp", "hidden": [100, 100]}
    others = [
        fake_run("sgd", network={**network, "source": "ab12"}),
        replace(plain, config={**plain.config, "patience": 2}),
        replace(plain, config={**plain.config, "challenge": {**plain.config["challenge"], "validation": 0.1}}),
        replace(plain, config={**plain.config, "parent": {"run": "0" * 16, "after": 2}}),
    ]
    every = Runs([plain, *others])
    frame = every.frame()
    assert frame.drop("hash").n_unique() == len(every) == 5
    assert not {"train_eval", "angles", "outputs", "hidden"} & set(frame.columns)
    for condition, run in zip(("network_source=ab12", "patience=2", "validation=0.1", "after=2"), others, strict=True):
        assert list(every.where(condition)) == [run]


def test_an_option_with_the_name_of_a_setting_keeps_it(runs: Runs) -> None:
    """The column of the setting is named after its part, training. The report compares by the option."""
    mine = [fake_run("mine", seed=s, options={"patience": float(p)}, lost=0.1 * p) for p in (2, 3) for s in (1, 2)]
    every = Runs([replace(run, config={**run.config, "patience": i}) for i, run in enumerate([*mine, fake_run("sgd")])])
    frame = every.frame()
    assert frame["patience"].to_list() == [2, 2, 3, 3, None] and frame["training_patience"].to_list() == [0, 1, 2, 3, 4]
    assert len(every.where("patience=2")) == 2 and list(every.where("training_patience=3")) == [every[3]]
    assert "patience" in swept(every)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("algorithm=err", "unknown algorithm of these runs: 'err'. Did you mean 'er'? Allowed: er, ewc, sgd."),
        ("algorithm!=er,err", "'err'"),
        ("seed=12", "Allowed: 11, 13, 2."),
        ("algorithms=er", "unknown name in a condition 'algorithms'. Did you mean 'algorithm'? Allowed: algorithm, an"),
        ("lr>=small", "only numbers can be compared"),
        ("label<3", "label is not a number: use = or !="),
        *((text, "such as algorithm=er,ewc or 'lr>=0.01'") for text in ("", "er", "lr", "lr>", "=3", "lr=")),
    ],
)
def test_a_wrong_condition_is_explained(condition: str, words: str, runs: Runs) -> None:
    with pytest.raises(GlocalError) as error:
        runs.where(condition)
    assert words in str(error.value)


def test_one_row_per_run(runs: Runs) -> None:
    """Of fake_run with T = 3: acc is learnt − lost / 2, and forgetting lost · 3/4, in percent."""
    runs.append(fake_run("sgd", 1.0, 3, diverged=4))
    frame = runs.frame()
    assert frame["hash"].n_unique() == len(runs) and set(SETTINGS) <= set(frame.columns)
    for name in SETTINGS:
        assert frame[name].to_list() == [run.settings[name] for run in runs]
    assert frame["slots"].to_list() == [20, 100, None, None, None]
    assert frame["beta1"].to_list() == [None, None, 0.9, None, None]
    assert Runs(runs[:1]).frame().columns == Runs(runs[:2]).frame().columns, (
        "an option is a column though all are equal"
    )
    rows = frame.to_dicts()
    assert (rows[0]["acc"], rows[0]["forgetting"]) == pytest.approx((85, 7.5))
    assert (rows[0]["learning_accuracy"], rows[0]["distance"]) == pytest.approx((90, 2))
    assert (rows[0]["forward_transfer"], rows[0]["backward_transfer"]) == pytest.approx((10, -7.5))
    assert (rows[0]["seconds"], rows[0]["memory_bytes"], rows[0]["loss"]) == (2.0, 1500, None)
    assert [row["diverged"] for row in rows] == [False] * 4 + [True] and rows[4]["acc"] is None
    assert runs.frame(forgetting="t")["forgetting"][0] == pytest.approx(5)


def test_options_of_several_kinds() -> None:
    """An option that only one of two runs has differs; values that are not all numbers are text."""
    options: list[dict[str, object]] = [{"a": 1, "b": 2, "c": True}, {"a": 0.5, "b": "auto"}, {"a": 2, "b": [1, 2]}]
    frame = Runs([fake_run(seed=i, options=own) for i, own in enumerate(options)]).frame()
    assert frame["a"].to_list() == [1.0, 0.5, 2.0]
    assert frame["b"].to_list() == ["2", "auto", "[1, 2]"]
    assert frame["c"].to_list() == [True, None, None]


def test_a_frame_of_no_runs_has_the_columns_of_any_other() -> None:
    assert Runs().frame().schema == Runs([fake_run()]).frame().schema


def test_frame_of_runs_without_classes() -> None:
    row = Runs([fake_run(lost=0.4, regression=True)]).frame().row(0, named=True)
    assert (row["loss"], row["forgetting"]) == pytest.approx((0.3, 0.3)) and row["acc"] is None
