"""What all studies share: items are measured once, what was stopped goes on, and tables are those of their study."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from glocal.errors import GlocalError
from glocal.paper import STUDIES, get_study
from glocal.paper.studies.common import MeanInterval, split_seeds
from glocal.paper.study import (
    Context,
    Cost,
    Row,
    Study,
    WorkItem,
    item_hash,
    read_cost,
    read_table,
    run,
    total_cost,
    write_table,
)

SMALLEST: dict[str, WorkItem] = {
    "flatness": {"hidden": [3], "examples": 20, "steps": 3, "probes": 4, "batch_size": 200},
    "recursion": {"examples": 20},
    "theorem1": {"hidden": [3, 3], "examples": 20, "steps": 3, "batch_size": 200},
    "theorem2": {"hidden": [3, 3], "examples": 20, "steps": 3, "batch_size": 200},
    "approximation-error": {"hidden": [3], "examples": 20},
}
"""Studies that are made of cohorts, and what makes their items small."""


class Counted:
    """The demo of a study in its smallest items, one for each of two seeds, and how often it measures."""

    def __init__(self, name: str, stop_after: int | None = None) -> None:
        self.name, self.study, self.measured, self.stop_after = name, get_study(name), 0, stop_after

    def work_items(self, demo: bool) -> list[WorkItem]:
        first = self.study.work_items(True)[0] | {"tasks": 2, "epochs": 1, "lrs": [0.01, 0.1], "seeds": [11, 13]}
        return split_seeds([first | SMALLEST[self.name]])

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        if self.measured == self.stop_after:
            raise KeyboardInterrupt
        self.measured += 1
        return self.study.measure(item, context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.study, name)


def context(folder: Path) -> Context:
    return Context(torch.device("cpu"), None, folder)


def whole(items: Sequence[WorkItem]) -> list[tuple[str, list[int]]]:
    """WorkItems with their seeds put together, in words."""
    found: dict[str, list[int]] = {}
    for item in items:
        rest = {name: value for name, value in item.items() if name != "seeds"}
        found.setdefault(repr(rest), []).extend(item["seeds"])
    return list(found.items())


@pytest.mark.parametrize("name", SMALLEST)
def test_what_was_stopped_goes_on(name: str, tmp_path: Path) -> None:
    stopped = Counted(name, stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, context(tmp_path))
    went_on = Counted(name)
    rows, _ = run(went_on, context(tmp_path))
    assert went_on.measured == 1 and set(rows["seed"]) == {11, 13}
    again = Counted(name)
    assert run(again, context(tmp_path))[0].equals(rows) and again.measured == 0
    assert rows.columns == get_study(name).columns.split()


def test_seeds_apart_are_seeds_together(tmp_path: Path) -> None:
    """In the same order too: a table does not tell how its items were cut."""
    study = Counted("recursion")
    apart, _ = run(study, context(tmp_path))
    together = study.study.measure(study.work_items(True)[0] | {"seeds": [11, 13]}, context(tmp_path))
    names = ("network", "lr", "seed", "kind", "task", "learnt")
    assert apart.select(names).rows() == [tuple(row[n] for n in names) for row in together]
    for here, there in zip(apart.to_dicts(), together, strict=True):
        assert here["measured"] == pytest.approx(there["measured"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", SMALLEST)
def test_a_seed_is_a_piece_of_the_whole(name: str) -> None:
    """Each is another, and none is left out; who is stopped loses the runs of one seed."""
    study = get_study(name)
    items = study.work_items(False)
    assert all(len(item["seeds"]) == 1 and len(item["lrs"]) > 1 for item in items)
    assert len({item_hash(study, item) for item in items}) == len(items)
    seeds = {tuple(seeds) for _, seeds in whole(items)}
    assert len(seeds) == 1 and len(seeds.pop()) >= 3


def read(path: Path, study: Study) -> pl.DataFrame:
    return read_table(path, study.columns.split(), f"a table of {study.name}")


def table_of(study: Study, path: Path) -> Path:
    return write_table([dict.fromkeys(study.columns.split(), 1.0)], path)


@pytest.mark.parametrize("name", STUDIES)
def test_a_table_of_another_study_is_refused(name: str, tmp_path: Path) -> None:
    study = get_study(name)
    assert len(read(table_of(study, tmp_path / "own.parquet"), study)) == 1
    for other in STUDIES:
        strangers = set(study.columns.split()) - set(get_study(other).columns.split())
        if study.columns == get_study(other).columns:  # one experiment on two challenges
            continue
        path = table_of(get_study(other), tmp_path / "other.parquet")
        with pytest.raises(GlocalError, match=f"other.parquet' is not a table of {name}: it has no column ") as refused:
            read(path, study)
        assert set(str(refused.value).removesuffix(".").partition("it has no column ")[2].split(", ")) == strangers


def test_a_table_that_has_more_will_do() -> None:
    """Stability and plasticity are drawn from the runs of Table 1."""
    results = Path(__file__).parents[2] / "results" / "rotated-mnist.parquet"
    assert len(read(results, get_study("tradeoff"))) > 100


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a complete Parquet file"),
        (b"lr,seed\n0.1,0\n", "not a complete Parquet file"),
        (b"PAR1 and then no more", "not a complete Parquet file"),
        (b"PAR1 what is between is nothing PAR1", "is not a table of a study: "),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(content)
    with pytest.raises(GlocalError, match=r"bad\.parquet") as refused:
        read_table(path)
    assert said in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_folder_and_an_empty_table(tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match="not a file"):
        read_table(tmp_path)
    with pytest.raises(GlocalError, match="it has no rows"):
        read_table(write_table([], tmp_path / "empty.parquet"))
    with pytest.raises(GlocalError, match="No such file"):
        read_table(tmp_path / "none.parquet")


def test_a_table_keeps_what_it_cost(tmp_path: Path) -> None:
    """Resuming adds to the cost, and reading a table back keeps it."""
    study, here = Counted("recursion"), context(tmp_path / "store")
    begun = datetime.now(UTC).replace(microsecond=0)
    clock = time.perf_counter()
    rows, cost = run(study, here)
    waited = time.perf_counter() - clock
    assert cost is not None and 0 < cost.seconds <= waited and cost.device.startswith("cpu: ")
    assert begun <= datetime.fromisoformat(cost.finished) <= datetime.now(UTC)
    path = write_table(rows, tmp_path / "rows.parquet", cost)
    assert read_cost(path) == cost and read_cost(write_table(rows, tmp_path / "unknown.parquet")) is None
    assert read_table(path).equals(rows)
    kept = sorted((tmp_path / "store" / "studies" / "recursion").glob("*.parquet"))
    assert sum(known.seconds for one in kept if (known := read_cost(one))) == pytest.approx(cost.seconds)
    write_table(read_table(kept[0]), kept[0])
    rows_again, unknown = run(study, here)
    assert unknown is None and rows_again.equals(rows)


def test_costs_add_up() -> None:
    one, other = Cost(2.0, "cpu: A", "2026-01-02T00:00:00+00:00"), Cost(3.0, "cuda: B", "2026-01-01T00:00:00+00:00")
    assert total_cost([one, other, one]) == Cost(7.0, "cpu: A, cuda: B", one.finished)
    assert total_cost([one, None]) is None and total_cost([]) is None


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_listed_cost_counts_the_runs(name: str) -> None:
    """Of every study that is made of runs of its own."""
    items = [item for item in get_study(name).work_items(False) if "seeds" in item and "lrs" in item]
    variants = [len(item.get("regimes") or item.get("radii") or [""]) for item in items]
    runs = sum(len(item["lrs"]) * len(item["seeds"]) * n for item, n in zip(items, variants, strict=True))
    if runs:
        assert f"{runs} runs of" in STUDIES[name].cost


@pytest.mark.parametrize(
    ("low", "high", "phrase"),
    [(0.1, 1.0, "more"), (-1.0, -0.1, "less"), (-1.0, 1.0, "unclear"), (math.nan, math.nan, "unclear")],
)
def test_a_phrase_follows_its_interval(low: float, high: float, phrase: str) -> None:
    assert MeanInterval((low + high) / 2, low, high).phrase("more", "less", "unclear") == phrase
