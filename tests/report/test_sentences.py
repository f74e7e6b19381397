"""Sentences on runs of which the truth is known."""

from __future__ import annotations

import pytest
from fake_runs import fake_run, sweep

from glocal.report.sentences import what_it_shows

LRS = (0.001, 0.01, 0.05, 0.1)
STEP = {0.001: 0, 0.01: 1, 0.05: 2, 0.1: 3}
SEEDS = (1, 2, 3)


def test_forgetting_that_rises() -> None:
    # Of three tasks, forgetting over two is ¾ of what is lost: 0.1 a step is 7.5 points, two steps 15.
    runs = sweep(("er", "ewc"), LRS, SEEDS, lambda a, lr, s: 0.1 + (0.1 * STEP[lr] if a == "ewc" else 0) + 0.001 * s)
    distance, test, best = what_it_shows(runs)
    assert "grows 10-fold" in distance and "2 algorithms" in distance  # √100
    assert "0.05 and 0.1" in test and "0.001 and 0.01" in test
    assert "ewc (local, +15.00 ± 0.00 points) forgets more" in test
    assert "er (global, " in test and "forgets about the same" in test
    assert "ewc agrees with the paper" in test and "claims nothing of global" in test
    assert "er (global)" in best and "sgd" not in best


def test_forgetting_that_falls() -> None:
    test = what_it_shows(sweep(("ogd", "si"), LRS, SEEDS, lambda a, lr, s: 0.5 - 0.1 * STEP[lr]))[1]
    assert "si (global, -15.00" in test and "ogd (local, -15.00" in test and "forget less" in test
    assert "ogd does not agree with the paper" in test and "more;" not in test


def test_within_the_standard_error_is_the_same() -> None:
    # Differences by seed, in units of what is lost: +0.02, −0.02, +0.006: mean 0.002, standard error about 0.012.
    noise = {1: 0.02, 2: -0.02, 3: 0.006}
    test = what_it_shows(sweep(("ogd",), (0.01, 0.1), SEEDS, lambda a, lr, s: 0.3 + (noise[s] if lr == 0.1 else 0)))[1]
    assert "ogd (local, +0.15 ± " in test and "forgets about the same" in test
    assert "ogd does not agree" in test
    sure = what_it_shows(sweep(("ogd",), (0.01, 0.1), SEEDS, lambda a, lr, s: 0.3 + 0.05 * (lr == 0.1) + noise[s]))[1]
    assert "forgets more" in sure and "ogd agrees" in sure


def test_some_agree_and_some_do_not() -> None:
    sign = {"ewc": 1, "ogd": -1, "icarl": 1}
    test = what_it_shows(sweep(sign, LRS, SEEDS, lambda a, lr, s: 0.4 + sign[a] * 0.1 * STEP[lr]))[1]
    assert "ewc and icarl agree, and ogd does not, with the paper" in test
    assert "global" not in test


def test_only_global_algorithms() -> None:
    test = what_it_shows(sweep(("er",), LRS, SEEDS, lambda a, lr, s: 0.1 * STEP[lr]))[1]
    assert "er (global, +15.00" in test and "forgets more" in test and "none of them is local" in test


def test_one_seed() -> None:
    test = what_it_shows(sweep(("ewc",), (0.01, 0.1), (1,), lambda a, lr, s: lr))[1]
    assert "0.1 against 0.01" in test and "+6.75 points" in test  # ¾ of 0.09
    assert "one seed" in test and "±" not in test


def test_one_learning_rate() -> None:
    sentences = what_it_shows(sweep(("er", "ewc"), (0.1,), SEEDS, lambda a, lr, s: 0.1))
    assert len(sentences) == 3
    assert "one learning rate" in sentences[0] and "6.32" in sentences[0]  # 20 √0.1
    assert "cannot be compared" in sentences[1]
    assert "forget least, equally (7.50 points)" in sentences[2]


def test_all_diverged() -> None:
    sentences = what_it_shows([fake_run(seed=s, diverged=5) for s in SEEDS])
    assert len(sentences) == 3 and all("All 3 runs diverged" in sentence for sentence in sentences)
    assert all("The only run diverged" in sentence for sentence in what_it_shows([fake_run(diverged=1)]))


def test_some_diverged_are_left_out() -> None:
    runs = sweep(("ewc",), LRS, SEEDS, lambda a, lr, s: 0.1 + 0.1 * STEP[lr] + 0.001 * s)
    dead = [fake_run("ewc", 0.1, s, diverged=1) for s in (4, 5)]
    distance, test, _ = what_it_shows([*runs, *dead])
    assert "2 diverged runs left out" in distance and "+15.00 ± 0.00 points" in test
    gone = [r for r in runs if r.lr < 0.1] + dead
    distance, test, _ = what_it_shows(gone)
    assert "0.001 to 0.05" in distance
    assert "0.05 against 0.001" in test and "+15.00" in test  # three rates left: highest against lowest, two steps


def test_other_seeds_at_other_rates() -> None:
    runs = [fake_run("ewc", 0.01, s, lost=0.1 + 0.01 * s) for s in (1, 2)]
    runs += [fake_run("ewc", 0.1, s, lost=0.3 + 0.01 * s) for s in (3, 4)]
    # ¾ (0.335 − 0.115) = 16.5 points; each side's variance ¾² · 0.5 points², of two seeds: 0.53 together.
    assert "ewc (local, +16.50 ± 0.53 points) forgets more" in what_it_shows(runs)[1]


def test_distance_that_shrinks_or_stays() -> None:
    shrinking = [fake_run(lr=lr, distance=d) for lr, d in ((0.01, 8.0), (0.1, 2.0))]
    assert "shrinks to 0.25 of it, from 8 to 2" in what_it_shows(shrinking)[0]
    same = [fake_run(lr=lr, distance=2.0) for lr in (0.01, 0.1)]
    assert "stays the same" in what_it_shows(same)[0]
    assert "from nothing" in what_it_shows([fake_run(lr=0.01, distance=0.0), fake_run(lr=0.1)])[0]


def test_the_best_against_plain_sgd() -> None:
    lost = {("sgd", 0.01): 0.4, ("sgd", 0.1): 0.5, ("er", 0.01): 0.2, ("er", 0.1): 0.1, ("joint", 0.1): 0.0}
    runs = [fake_run(name, lr, lost=x) for (name, lr), x in lost.items()]
    best = what_it_shows(runs)[2]
    # ACC = 90 − lost/2: er 85, sgd 70 at best; forgetting ¾ lost: er 7.5, sgd 30 at best.
    assert "er (global) at 0.1 forgets least (7.50 points), 22.50 points below plain sgd" in best
    assert "er (global) at 0.1 is most accurate (85.00 %), 15.00 points above plain sgd" in best
    assert "joint training left aside" in best
    alone = what_it_shows([r for r in runs if r.algorithm == "sgd"])[2]
    assert "sgd (global) at 0.01 forgets least (30.00 points);" in alone and "plain sgd" not in alone


def test_one_task_cannot_forget() -> None:
    sentences = what_it_shows([fake_run(lr=lr, tasks=1) for lr in (0.01, 0.1)])
    assert "cannot be compared" in sentences[1] and "Forgetting is undefined" in sentences[2]


def test_each_challenge_is_told_of() -> None:
    runs = [fake_run(challenge=name, lr=lr) for name in ("a", "b") for lr in (0.01, 0.1)]
    sentences = what_it_shows(runs)
    assert [sentence[:3] for sentence in sentences] == ["a: "] * 3 + ["b: "] * 3


@pytest.mark.parametrize("algorithms", [(), ("er",), ("er", "ewc", "sgd")])
def test_sentences_are_single_lines_that_end(algorithms: tuple[str, ...]) -> None:
    for sentence in what_it_shows(sweep(algorithms, LRS, SEEDS, lambda a, lr, s: lr)):
        assert sentence.endswith(".") and "\n" not in sentence and "nan" not in sentence and "  " not in sentence
