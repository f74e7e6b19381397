"""The paper's claims on made-up runs whose answers are known by hand."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from fake_runs import published_runs, table1_run
from scipy import stats

from glocal.paper import claims
from glocal.paper.claims import TableRow, Values
from glocal.paper.comparison import compare
from glocal.paper.scoreboard import Claim, scoreboard
from glocal.paper.table1 import COLUMNS, SEEDS
from glocal.report.table import signed

COLUMN = COLUMNS["rotated-mnist"]
LRS = COLUMN.lrs


def values(*by_seed: tuple[float, ...], lrs: tuple[float, ...] = LRS) -> Values:
    """Values of seeds 1, 2, … at each learning rate."""
    return {lr: {s: own[i] for s, own in enumerate(by_seed, 1)} for i, lr in enumerate(lrs)}


def changing(*changes: float, level: float = 20.0) -> Values:
    """For each seed, `level` at the two lowest rates, so much more at the two highest, and the level between."""
    return values(*((level, level, level, level + x, level + x) for x in changes))


def row(name: str, locality: str, forgetting: Values, published: tuple[float, ...] = (1, 2, 3, 4, 5)) -> TableRow:
    """Accuracy falls as forgetting rises; the distance is the learning rate."""
    acc = {lr: {s: 90 - x for s, x in own.items()} for lr, own in forgetting.items()}
    distance = {lr: dict.fromkeys(own, lr) for lr, own in forgetting.items()}
    means = dict(zip(LRS, published, strict=True)) if published else {}
    known = {"forgetting": means, "acc": {lr: 90 - x for lr, x in means.items()}} if means else {}
    return TableRow(name, locality, {"forgetting": forgetting, "acc": acc, "distance": distance}, known, 0)


def test_rank_correlation_with_the_learning_rate() -> None:
    """Two neighbours exchanged make ρ = 1 − 6 · 2 / (5 · 24) = 0.9. Of 1 and 0.9 the mean is 0.95 and the standard
    error 0.05; t = 12.706, so the interval begins at 0.315, and is cut at 1."""
    rising, exchanged = (1.0, 2.0, 3.0, 4.0, 9.0), (2.0, 1.0, 3.0, 4.0, 9.0)
    assert tuple(claims.lr_correlation(values(rising, rising))) == pytest.approx((1, 1, 1))
    assert tuple(claims.lr_correlation(values(rising[::-1], rising[::-1]))) == pytest.approx((-1, -1, -1))
    assert tuple(claims.lr_correlation(values(rising, exchanged))) == pytest.approx((0.95, 0.3147, 1), abs=1e-4)
    mean, low, high = claims.lr_correlation(values(exchanged))
    assert mean == pytest.approx(0.9) and math.isnan(low) and math.isnan(high)


def test_minimum_of_the_mean_and_of_seeds() -> None:
    """Means 3, 4, 2, 5, 6: lowest at 0.01, as for one seed of three; the others have theirs at 0.001."""
    three = values((1.0, 4.0, 2.0, 5.0, 6.0), (1.0, 4.0, 3.0, 5.0, 6.0), (7.0, 4.0, 1.0, 5.0, 6.0))
    assert claims.minimum(three) == (0.01, 1, 3)
    partly = {**three, 0.1: {s: x for s, x in three[0.1].items() if s != 3}}  # seed 3 diverged at 0.1
    assert claims.minimum(partly) == (0.001, 2, 2)
    assert claims.minimum({**three, 0.1: {}})[1:] == (0, 0)


def test_lowest_at_low_rates_minus_lowest_at_others() -> None:
    """1 − 2, 1 − 3 and 7 − 1, where of these rates 0.001 alone is low."""
    three = values((1.0, 4.0, 2.0, 5.0, 6.0), (1.0, 4.0, 3.0, 5.0, 6.0), (7.0, 4.0, 1.0, 5.0, 6.0))
    interval = stats.ttest_1samp([-1, -2, 6], 0).confidence_interval(0.95)
    assert tuple(claims.low_rates_minimum(three)) == pytest.approx((1, *interval))


def test_permutations_settle_a_sign_at_half_of_the_level() -> None:
    """The highest of 20 has p = 0.05 one way and 0.1 both ways; the highest of 56 settles it."""
    words = "above", "below", "unclear", "too few"
    assert [claims.Permutation(1.0, 1, n, n).phrase(*words) for n in (20, 39, 40, 56)] == [
        "too few",
        "too few",
        "above",
        "above",
    ]
    assert claims.Permutation(1.0, 2, 55, 56).phrase(*words) == "unclear"
    assert claims.Permutation(-1.0, 56, 1, 56).phrase(*words) == "below"


def test_interaction_with_seeds_as_units() -> None:
    """Local rows change by 8, 10 and 12 on average, the global row by 1, 2 and 3: 7, 8 and 9, with t = 4.303 and a
    standard error of 1/√3. A seed that one row lacks does not count."""
    local, other = [changing(10, 12, 14, 50), changing(6, 8, 10, 50)], [changing(1, 2, 3)]
    found, seeds = claims.interaction_by_seed(local, other)
    assert seeds == 3
    assert tuple(found) == pytest.approx((8, 8 - 4.3027 / 3**0.5, 8 + 4.3027 / 3**0.5), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "local", "expected"),
    [
        ((10, 8, 1, 0, -6), "ab", (9 + 5 / 3, 1, 10, 10)),  # the two highest of five: one of ten choices
        ((10, 8, 1, 0, -6), "ac", (5.5 - 2 / 3, 2, 9, 10)),  # only a and b are higher
        ((1, 1, 0, 0), "ac", (0, 5, 5, 6)),  # sums of pairs: 2, 1, 1, 1, 1, 0
    ],
)
def test_permutations_counted_by_hand(changes: tuple[float, ...], local: str, expected: tuple[float, ...]) -> None:
    named = dict(zip("abcde", changes, strict=False))
    assert tuple(claims.permutation_test(named, set(local))) == pytest.approx(expected)


def test_classes_come_from_the_challenge_of_the_same_kind() -> None:
    table = pl.DataFrame(
        {
            "challenge": ["rotated-mnist", "rotated-mnist", "split-mnist"],
            "algorithm": ["si", "si", "si"],
            "found": ["local", "local", "global"],
        }
    )
    assert claims.measured_locality(table, "rotated-mnist") == {"si": "local"}
    assert claims.measured_locality(table, "split-cifar10") == {"si": "global"}


def test_impostors() -> None:
    """A row passes against itself everywhere, and nowhere ten standard errors away; against another as its z says."""
    same = claims.impostors(compare([*published_runs("er"), *published_runs("si")]))
    assert same["er", "er"] == same["si", "si"] == (10, 10)
    passed = 0
    for lr in LRS:
        er, si = (COLUMN.published_cell(COLUMN.row(name), lr) for name in ("er", "si"))
        assert er and si
        for what in ("acc", "forgetting"):
            error = math.sqrt(si[f"{what}_std"] ** 2 / 4 + 1 / 5)
            passed += abs(er[f"{what}_mean"] - si[f"{what}_mean"]) <= 2 * error
    assert same["er", "si"] == (passed, 10) and 0 < passed < 10
    far = claims.impostors(compare([*published_runs("er", 10.0), *published_runs("si")]))
    assert far["er", "er"] == (0, 10) and far["si", "si"] == (10, 10)
    zero = [table1_run("sgd", lr, seed, 0.0, 0.0) for lr in LRS for seed in SEEDS]  # has no published row of its own
    assert claims.impostors(compare([*published_runs("er"), *zero])) == {("er", "er"): (10, 10), ("sgd", "er"): (0, 10)}
    assert claims.impostors(compare([run for run in published_runs("er") if run.seed == 11])) == {
        ("er", "er"): (10, 10)
    }


def test_rows_of_a_table_with_a_diverged_run() -> None:
    runs = [*published_runs("er"), *published_runs("ewc")]
    runs[-1] = table1_run("ewc", 0.1, SEEDS[-1], 50.0, 20.0, diverged=3)
    runs += [table1_run("sgd", lr, seed, 70.0, 20.0) for lr in LRS for seed in SEEDS]
    rows = {found.algorithm: found for found in claims.table_rows(compare(runs))}
    assert [(name, found.locality, found.diverged) for name, found in rows.items()] == [
        ("er", "global", 0),
        ("sgd", "global", 0),
        ("ewc", "local", 1),
    ]
    assert rows["er"].published["forgetting"][0.05] == 8.91 and rows["sgd"].published == {}
    assert sorted(rows["ewc"].values["acc"][0.1]) == sorted(SEEDS[:-1])
    assert rows["er"].values["forgetting"][0.05][33] == pytest.approx(8.91)


def board(si: str, seeds: int = 3) -> list[Claim]:
    """ewc and ogd rise, agem and er rise less, and si falls, which the experiment finds to be `si`."""

    def seen(*steps: float) -> Values:
        return values(*(tuple(20 + np.array(steps) + 0.1 * s * np.arange(5)) for s in range(seeds)))

    rows = [
        row("ewc", "local", seen(0, 1, 2, 6, 7)),
        row("ogd", "local", seen(0, 1, 2, 8, 9)),
        row("agem", "global", seen(0, 1, 2, 3, 4)),
        row("er", "global", seen(0, 2, 1, -1, 1)),
        row("si", "global", seen(4, 3, 2, 1, 0), published=(5, 4, 3, 2, 1)),
    ]
    rows += [row("sgd", "local", seen(9, 9, 9, 0, 0), published=())]  # not in the paper's table: it does not count
    return scoreboard("made up", rows, {x.algorithm: x.locality for x in rows} | {"si": si})


def test_verdicts() -> None:
    """From low to high ewc changes by 6, ogd by 8, agem by 3, er by −1 and si by −3 points, and each seed by 0.3 more
    than the one before it: local rows by 7, global ones by −1/3."""
    found = board("local")
    kinds = [(claim.paper.kind, claim.measured.kind) for claim in found]
    assert kinds == [
        ("reproduced", "contradicted"),  # si forgets least at the highest rate
        ("contradicted", "contradicted"),  # agem rises
        ("reproduced", "contradicted"),
        ("reproduced", "not settled"),  # er's interval has 0 in it
        ("reproduced", "reproduced"),
        ("not testable", "not testable"),  # of five rows
        ("reproduced", "reproduced"),
        ("reproduced", "reproduced"),
    ]
    lowest, correlated, more, signs, seeds, algorithms, accuracy, distance = found
    assert lowest.measured.verdict == "contradicted: `si`" and lowest.measured.ours == "2 for, 1 against"
    assert lowest.measured.published == more.measured.published == "2 for, 1 against"
    # er's ρ is between −0.5 and 0.3, by seed; all three published |ρ| are 1.
    assert correlated.paper.verdict == "contradicted: `agem`, `si`"
    assert (correlated.paper.published, correlated.paper.ours) == ("3 against", "2 against, 1 not settled")
    assert signs.paper.published == "2 more, 1 less"
    assert signs.paper.ours == "1 more, 1 less, 1 not settled"
    assert distance.paper.published == "–" and distance.paper.ours == "5 for"
    assert (more.paper.ours, more.paper.n) == ("2 for", "3 seeds")  # sgd does not count
    # Published: 3 for all but si's −3; (3 + 3)/2 − (3 + 3 − 3)/3 = 2.
    assert (seeds.paper.published, seeds.paper.ours) == ("+2.00", "+7.33 [+7.33, +7.33]")
    assert seeds.paper.n == "3 seeds, 2 + 3"
    # si with the locals: (6 + 8 − 3)/3 − (3 − 1)/2 = 2.67. Higher: ewc and ogd with agem, and with er.
    assert seeds.measured.ours.startswith("+2.67") and algorithms.measured.ours == "+2.67, p = 3/10"
    assert algorithms.paper.ours == "+7.33, p = 1/10" and algorithms.paper.verdict.endswith("p ≥ 1/10")
    assert accuracy.paper.ours.startswith("−7.33") and distance.paper.published == "–"
    assert all(claim.paper == claim.measured for claim in board("global"))


def test_published_means() -> None:
    """Of 120 orders two have |ρ| = 1; ten have at least 0.9, so p = 0.08 for the published ρ = 0.9, which does not
    contradict that there is no correlation."""
    rows = [
        row("ewc", "local", changing(1, 2, 3), (1, 2, 3, 3, 2)),
        row("er", "global", changing(1, 2), (2, 1, 3, 8, 9)),
    ]
    found = scoreboard("made up", rows, {"ewc": "local", "er": "global"})
    assert [claim.paper.published for claim in found[:7]] == [
        "1 for",
        "1 not settled",
        "1 for",
        "1 more",
        "−6.00",
        "−6.00, p = 1/2",
        "+6.00",
    ]


def test_a_class_without_algorithms_is_not_testable() -> None:
    rows = [row(name, "local", changing(1, 2, 3)) for name in ("ewc", "ogd")]
    (reason,) = {
        (claim.paper.verdict, claim.paper.ours)
        for claim in scoreboard("made up", rows, {"ewc": "local", "ogd": "local"})
    }
    assert reason == ("not testable: a class has no algorithms", "–")


def test_equal_published_means_are_not_correlated() -> None:
    rows = [row("ewc", "local", changing(1, 2)), row("er", "global", changing(1, 2), (3, 3, 3, 3, 3))]
    assert scoreboard("made up", rows, {"ewc": "local", "er": "global"})[1].paper.published == "1 not settled"


def test_one_seed_is_not_testable() -> None:
    found = board("global", seeds=1)
    assert {claim.paper.kind for claim in found} == {"not testable"}
    assert found[0].paper.ours == "2 with too few seeds" and found[4].paper.ours == "+7.33"
    assert {claim.paper.reason for claim in found} == {"too few seeds", "p ≥ 1/10"}


def test_claims_on_the_exemplars_of_icarl() -> None:
    """Herding minus random: −0.1, 0 and 0.1 points. With random exemplars forgetting rises, unless seeds disagree."""
    herding = row("icarl", "local", changing(3, 4, 5))
    for changes, flat in (((3.1, 4, 4.9), "contradicted"), ((-3, 0, 3), "not settled")):
        random = row("icarl-random", "local", changing(*changes), published=())
        others = [row("er", "global", changing(0, 1, 2))]
        *_, rises, same = scoreboard("made up", [random, herding, *others], {"icarl": "local", "er": "global"})
        assert same.paper.kind == flat and same.paper == same.measured and same.paper.published == "–"
        low, high = stats.ttest_1samp(-np.array(changes), 0).confidence_interval(0.95)
        assert same.paper.ours == f"{signed(0.0 - float(np.mean(changes)))} [{signed(low)}, {signed(high)}]"
        assert rises.paper.kind == "not settled" and rises.paper.n == "3 seeds, 1 + 1"
    assert "iCaRL" in rises.claim and rises.paper.ours.startswith("+4.00 [")
