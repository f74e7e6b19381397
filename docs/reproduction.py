"""Makes docs/reproduction.md and its figures from the files in results/. Nothing is trained.

python docs/reproduction.py
"""

from __future__ import annotations

from pathlib import Path

from glocal.paper import results
from glocal.paper.comparison import Comparison, Line, compare, titled
from glocal.paper.studies import TITLES, get
from glocal.paper.study import draw, read_table
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

{split}{studies}{missing}"""

SPLIT = {
    "split-cifar10": """Five tasks of two classes, fifty epochs each, batch 32, ResNet-18 of 11,173,962 parameters in
bf16, the published hyperparameters; accuracy among the task's own classes.""",
    "split-tinyimagenet": """ResNet-18 in bf16 on the part of the data at hand, two tasks of twenty classes with 200
images each: short runs, which show that every algorithm trains and what the whole column would cost.""",
}


def split(challenge: str) -> str:
    """A section for a split challenge, where its results are."""
    file = RESULTS / f"{challenge}.parquet"
    if not file.exists():
        return ""
    runs = results.read(file)
    made = compare(runs)
    parts = [f"## {challenge}", f"{SPLIT[challenge]} {cost(runs)}"]
    if any(line.acc.units is not None for line in made.lines):
        parts.append(agreement(made))
    return "\n\n".join([*parts, str(render(made, "markdown")).strip()]) + "\n\n"


def table_of(name: str) -> Path:
    """Where a study's rows are; stability and plasticity are read from table 1's."""
    return RESULTS / f"{'rotated-mnist' if name == 'tradeoff' else name}.parquet"


def study(name: str) -> str:
    """A section for a study, where its table is: its figure, and what its rows show."""
    file = table_of(name)
    if not file.exists():
        return ""
    made, rows = get(name), read_table(file)
    picture = draw(made, rows, HERE / "images" / f"{name}.png")
    _, title = TITLES[name]
    told = " ".join(made.conclude(rows))
    parts = (
        f"## {name}: {title}",
        f"`glocal paper {name}` ({made.cost(False)})",
        told,
        f"![{title}](images/{picture.name})",
    )
    return "\n\n".join(parts) + "\n\n"


def missing() -> str:
    absent = [name for name in (*SPLIT, *TITLES) if not table_of(name).exists()]
    if not absent:
        return ""
    return f"## Not here yet\n\nIn place, but not run at full size: {', '.join(f'`{name}`' for name in absent)}.\n"


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
        split="".join(split(challenge) for challenge in SPLIT),
        studies="".join(study(name) for name in TITLES),
        missing=missing(),
    )
    (HERE / "reproduction.md").write_text(page.rstrip() + "\n")


if __name__ == "__main__":
    main()
