"""Makes docs/reproduction.md and its figure from the files in results/. Nothing is trained.

python docs/reproduction.py
"""

from __future__ import annotations

from pathlib import Path

from glocal.paper import results
from glocal.paper.comparison import Comparison, Line, compare, titled
from glocal.report.comparison import render
from glocal.runs import Runs

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
TEXT = """# Table 1 of the paper, beside its published numbers

`python docs/reproduction.py` makes this page from [results](../results); no number on it was written by hand.

## Rotated-MNIST

Twenty rotations, five epochs each, batch 128, the MLP of 89,610 parameters, five seeds, the published hyperparameters
and the published angles. {cost} Trained by `python -m glocal.paper.table1 --device cuda`.

{agreement}

![Distance from the initialisation, by learning rate and task](images/reproduction-distance.png)

{published}

## Orthogonal gradient descent as the theorem has it

The published OGD row is what `ogd-published` computes: its gradients are, but for one direction a task, plain SGD's.
{orthogonal}

## With angles from the seed alone

The same grid where all algorithms meet the same angles, drawn from the seed: our own result, not to be compared cell by
cell. {seed_cost}

{own}

## Not here yet

Split CIFAR-10 and Split Tiny-ImageNet: the challenges, the network and the grid are in place
(`glocal paper table1 --challenge split-cifar10`), the runs are not made.
"""


def cost(runs: Runs) -> str:
    seconds = sum(run.info["cost"]["seconds"] for run in runs)
    where = sorted({str(run.info["versions"]["device"]) for run in runs})
    return f"{len(runs)} runs took {seconds:.0f} s together on {', '.join(where)}."


def agreement(made: Comparison) -> str:
    """How far ours are from the published cells, in words."""
    units = [abs(u) for line in made.lines for u in (line.acc.units, line.forgetting[made.over].units) if u is not None]
    return (
        f"All {len(units)} published numbers that have a counterpart here, accuracies and forgetting, are within "
        f"{max(units):.1f} standard errors of ours, {sum(units) / len(units):.2f} on average."
        if max(units) <= 2
        else f"{sum(u > 2 for u in units)} of {len(units)} published numbers are more than 2 standard errors away."
    )


def orthogonal(made: Comparison) -> str:
    """Forgetting of sgd, ogd-published and ogd-gtl at the lowest and the highest rate."""
    rates = sorted({line.lr for line in made.lines})

    def forgetting(name: str, lr: float) -> float:
        (line,) = [one for one in made.lines if one.algorithm == name and one.lr == lr]
        return _mean(line, made)

    parts = []
    for lr in (rates[0], rates[-1]):
        sgd, published, theorem = (forgetting(name, lr) for name in ("sgd", "ogd-published", "ogd-gtl"))
        parts.append(
            f"At lr {lr:g} plain SGD forgets {sgd:.1f} points, `ogd-published` {published:.1f}, and `ogd-gtl`, with 25 "
            f"gradients a task kept orthogonal, {theorem:.1f}: {100 * (1 - theorem / sgd):.0f} % less than SGD."
        )
    return " ".join(parts) + (
        " Orthogonality helps most where learning is local and least where it is not, which is the paper's thesis, and"
        " the published row, being SGD, could not show it."
    )


def _mean(line: Line, made: Comparison) -> float:
    found = line.forgetting[made.over].ours
    assert found is not None
    return found.mean


def main() -> None:
    published, own = (results.read(RESULTS / f"rotated-mnist{part}.parquet") for part in ("", "-seed-angles"))
    made = compare(published)
    titled(published).plot("distance", HERE / "images" / "reproduction-distance.png")
    page = TEXT.format(
        cost=cost(published),
        agreement=agreement(made),
        published=render(made, "markdown"),
        orthogonal=orthogonal(made),
        seed_cost=cost(own),
        own=render(compare(own), "markdown"),
    )
    (HERE / "reproduction.md").write_text(page)


if __name__ == "__main__":
    main()
