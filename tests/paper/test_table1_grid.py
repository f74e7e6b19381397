"""The grid covers the published table, cell by cell, with the published angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glocal.challenges.rotated import random_angle
from glocal.errors import GlocalError
from glocal.paper import table1
from glocal.sweeps import resolve

ROTATED = table1.COLUMNS["rotated-mnist"]
DIGITS = table1.DEMO
GRID = [(column, row, lr) for column in table1.COLUMNS.values() for row in column.all_rows for lr in column.lrs]


def test_every_published_cell_has_exactly_one_configuration() -> None:
    covered = [column.published_cell(row, lr) for column, row, lr in GRID]
    assert len(table1.published_cells()) == 5 * 5 + 2 * 6 * 5
    assert all(covered.count(cell) == 1 for cell in table1.published_cells())


def test_every_row_is_an_algorithm_with_these_options_and_the_published_locality() -> None:
    for column, row, lr in GRID:
        made = resolve.algorithm(row.algorithm, row.options)
        assert column.find_row(row.algorithm, made.config["options"]) == row
        counterpart = column.published_cell(row, lr)
        assert counterpart is None or counterpart["locality"] == made.value.locality


def test_published_hyperparameters_of_rotated_mnist() -> None:
    options = {row.published: row.options for row in ROTATED.rows if row.published}
    assert options == {
        "agem": {"slots": 500, "filling": "batch"},
        "er": {"slots": 500},
        "si": {"penalty": 1.0, "damping": 1.0, "importance": "published"},
        "ewc": {"penalty": 1.4, "fisher": "published"},
        "ogd": {"slots": 500},
    }
    assert ROTATED.steps == 20 * 5 * 469


SPLIT: dict[str, dict[str, Any]] = {
    "split-cifar10": {
        "sgd": {},
        "agem": {"slots": 200, "filling": "batch"},
        "er": {"slots": 200},
        "si": {"penalty": 0.5, "damping": 1.0, "importance": "published"},
        # λ = 10 without ½.
        "ewc": {"penalty": 20.0, "fisher": "published", "statistics": "published"},
        # 40 samples for each of 5 tasks.
        "ogd-published": {"slots": 200, "statistics": "published"},
        "ogd-gtl": {"slots": 200},
        "icarl": {"slots": 200, "features": "raw"},
        "icarl-random": {"slots": 200, "features": "raw"},
        "gem": {"slots": 200, "margin": 0.5, "damping": 0.001},
        "derpp": {"slots": 200},
    },
    "split-tinyimagenet": {
        "sgd": {},
        "agem": {"slots": 500, "filling": "batch"},
        "er": {"slots": 500},
        "si": {"penalty": 0.5, "damping": 1.0, "importance": "published"},
        # λ = 25 without ½.
        "ewc": {"penalty": 50.0, "fisher": "published", "statistics": "published"},
        # 20 samples for each of 10 tasks.
        "ogd-published": {"slots": 200, "statistics": "published"},
        "ogd-gtl": {"slots": 200},
        "icarl": {"slots": 500, "features": "raw"},
        "icarl-random": {"slots": 500, "features": "raw"},
        "gem": {"slots": 500, "margin": 0.5, "damping": 0.001},
        "derpp": {"slots": 500},
    },
}


@pytest.mark.parametrize(("challenge", "tasks", "epochs"), [("split-cifar10", 5, 50), ("split-tinyimagenet", 10, 100)])
def test_published_protocol_of_the_split_challenges(challenge: str, tasks: int, epochs: int) -> None:
    column = table1.COLUMNS[challenge]
    others: dict[str, Any] = {name: {} for name in ("laplace", "optimal-soft", "pnn", "packnet", "hat")}  # by default
    assert {row.algorithm: row.options for row in column.all_rows} == SPLIT[challenge] | others
    compared = {row.algorithm: row.published for row in column.all_rows if row.published}
    names = ("agem", "er", "si", "ewc", "icarl")
    assert compared == {name: name for name in names} | {"ogd-published": "ogd"}
    assert (column.tasks, column.epochs, column.batch_size, column.examples) == (tasks, epochs, 32, 10_000)
    assert (column.network, column.setting) == ("resnet18", "task")
    assert column.lrs == (1e-4, 1e-3, 1e-2, 0.05, 0.1)
    assert column.seeds == (11, 13, 33, 21, 55)
    assert column.steps == tasks * epochs * 313


def test_forgetting_is_published_over_all_tasks_but_the_last() -> None:
    """Accuracy right after learning cannot pass 100: over T−1 tasks it does not, over T it would in twelve cells."""
    tasks = {name: column.tasks for name, column in table1.COLUMNS.items()}
    cells = [(c["acc_mean"], c["forgetting_mean"], tasks[c["challenge"]]) for c in table1.published_cells()]
    assert max(acc + forgetting * (1 - 1 / count) for acc, forgetting, count in cells) <= 100
    assert sum(acc + forgetting > 100 for acc, forgetting, _ in cells) == 12


def test_angles_are_those_of_the_method_and_the_seed() -> None:
    assert table1.published_angles("agem")[21][2] == 130.422031
    assert table1.published_angles("er")[55][19] == 55.377895
    assert table1.published_angles("sgd")[11][:2] == [136.616326, 147.289564]
    for method in ("ewc", "si", "ogd"):
        assert table1.published_angles(method) == table1.published_angles("sgd")
    for seed in table1.SEEDS:
        sequences = [table1.published_angles(method)[seed] for method in ("sgd", "agem", "er")]
        assert all(len(angles) == 20 and 0 <= min(angles) <= max(angles) < 180 for angles in sequences)
        # Nothing was replayed before the first task; after it the streams part.
        assert len({angles[0] for angles in sequences}) == 1 and len({angles[19] for angles in sequences}) == 3


@pytest.mark.parametrize(("row", "method"), [("er", "er"), ("agem", "agem"), ("ewc", "sgd"), ("ogd-gtl", "sgd")])
def test_every_row_meets_its_angles(row: str, method: str) -> None:
    made = table1.row_challenge(DIGITS, DIGITS.row(row), "published")
    assert not isinstance(made, str)
    assert made.options["angles"] == {str(seed): table1.published_angles(method)[seed] for seed in table1.SEEDS}
    assert made.tasks == DIGITS.tasks


def test_angles_from_the_seed_are_the_same_for_all() -> None:
    """The challenge by its name draws them from the seed alone."""
    chosen = DIGITS.select(seeds=(3,))
    assert {table1.row_challenge(chosen, row, "seed") for row in DIGITS.rows} == {"rotated-digits"}
    assert random_angle(3, 0) != random_angle(4, 0)


def test_seeds_and_tasks_without_published_angles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match=r"seed 3.*--angles seed"):
        table1.train([DIGITS.select(seeds=(11, 3))], store=tmp_path)
    with pytest.raises(GlocalError, match=r"21 tasks.* 20 were published"):
        table1.train([DIGITS.select(tasks=21)], store=tmp_path)


def test_buffers_differ_in_their_selection_alone() -> None:
    for column in (*table1.ICARL_COLUMNS.values(), table1.ICARL_DEMO):
        herding, random = column.rows
        assert (herding.algorithm, random.algorithm) == ("icarl", "icarl-random")
        assert herding.options == random.options
