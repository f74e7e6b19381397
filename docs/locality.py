"""Generate docs/locality.md and its figures: a training in plain PyTorch, measured at two learning rates.

python docs/locality.py        about a minute on a CPU
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
sys.path.insert(0, str(HERE.parent / "examples"))

from checkpoints import make_training  # noqa: E402

import glocal  # noqa: E402
from glocal.lens import Examination, examine, open_run, training_errors  # noqa: E402
from glocal.paper.studies import forecast  # noqa: E402
from glocal.paper.studies.common import column, distinct  # noqa: E402
from glocal.paper.study import read_table  # noqa: E402
from glocal.paper.table1 import COLUMNS  # noqa: E402
from glocal.report.lens_figures import errors_table, examination_table  # noqa: E402
from glocal.report.table import Table  # noqa: E402

NEAR_LR, FAR_LR = 0.1, 0.5
TEMPLATE = """# How local is my training?

This page measures a training in plain PyTorch. You get a table and a figure.

Algorithms such as `ewc`, `laplace` and `ogd` approximate the losses of old tasks at their solutions. That works as
long as training stays near these solutions, which the paper calls the locality assumption (Assumption 3.2).
`glocal.lens.examine` checks it for your training. It takes any `nn.Module`, a loss, the data of the tasks and a
checkpoint after every task, and it reports

- how far training moved, and how far the second-order Taylor expansions of the old losses hold;
- how much was forgotten, and how much forgetting the expansions predict;
- the curvature of the losses.

## Example

[examples/checkpoints.py](../examples/checkpoints.py) trains a small network with SGD on three tasks of rotated
digits. In its folder,

```
python checkpoints.py
```

saves the initialisation as `theta-0.pt` and the solutions of the tasks as `theta-1.pt` to `theta-3.pt`. Then, in the
same folder:

```python
import torch
from checkpoints import make_loaders, make_network
from torch import nn

from glocal.lens import examine

network = make_network()
tasks = make_loaders()  # one DataLoader per task; (x, y) tensors and Datasets work, too
checkpoints = [torch.load(f"theta-{{t}}.pt") for t in range(4)]

result = examine(network, nn.CrossEntropyLoss(), tasks, checkpoints)
print(result)
result.plot("lens.png")
```

With a learning rate of {near_lr:g} it prints

```
{near}
```

![Figure for the smaller learning rate](images/lens-near.png)

With a learning rate of {far_lr:g} training moves farther:

```
{far}
```

![Figure for the larger learning rate](images/lens-far.png)

The same as a command, for your own function that returns the network, the loss, the tasks and the checkpoints, or for
a run of a store that was trained with `--keep-parameters`:

```
glocal lens examples/checkpoints.py:make_training --examples 200 -o lens.png    # quicker than the default, 2,000
glocal run rotated-digits sgd --lr 0.1 --tasks 2 --epochs 1 --keep-parameters --store kept
glocal lens kept/runs/* --examples 100 -o lens.png                              # the store has one run
```

The first of them prints

```
{command}
Wrote lens.png
```

*inside*, *distance* and *radius* are about the solution after the last task. *along v_1 – random* are the radii along
the eigenvector of the largest eigenvalue and in random directions. Forgetting is measured, in parentheses predicted.

The loss is `"cross-entropy"`, `"squared-error"`, or any function of outputs and targets that returns a mean over
samples. At most 2,000 examples per task are used (`examples=`). They are evenly spaced, except for a plain iterable
of batches, of which the first ones are taken: shuffle it. A checkpoint may also be the path of a safetensors file.
Networks with attention or recurrent layers are supported.

A pretrained network is examined in the same way. Checkpoints may be in half precision; they are read into float32.
They may hold the trained parameters alone, such as adapters: all others are as in the network that you give. If the
first task is the one that the network was pretrained on, give the pretrained network as θ_0 and as θ_1; the default ε
then leaves out that task.

## How to read the figure

- **Distance.** For every task o, the distance of later solutions θ_t from θ_o. A filled point is inside the region
  Ω^ε_o (ξ_o(θ_t) < ε), an open one outside. The line ends where the second-order expansion of L_o first differs from
  L_o by ε on the way from θ_o to θ_t. The grey box extends from the radius of the region along the eigenvector of the
  largest eigenvalue to its radius in random directions. `epsilon=` sets ε; its default is 0.1 times the mean of
  L_o(θ_0) − L_o(θ_o) over the tasks.
- **Forgetting.** L_o(θ_t) − L_o(θ_o), predicted by the expansion and measured. In the grey band they differ by less
  than ε. A negative value means that a later task helped an earlier one.
- **Curvature.** The ten largest eigenvalues of every task's Hessian at its solution, and its trace (by Hutch++).
  The trace is the sum of all eigenvalues. It is smaller than the largest one, λ_max, if negative eigenvalues outweigh
  the other positive ones.

All numbers are attributes of the result: `distance`, `radius`, `inside`, `forgetting.measured`,
`forgetting.predicted`, `eigenvalues` and `trace`; `rows()` returns a table.

## What to train instead

The lens recommends no algorithm. [An experiment](reproduction/experiments.md#forecast) with an MLP on ten tasks of
Rotated-MNIST decided this by a rule that was registered before it was run. `laplace` with `implicit=true` was more
accurate than replay (`er`) of 500 examples in {won} of {settings} settings, but it keeps at least {factor:.0f} times
as much memory. Against replay with equal memory it was more accurate in {won_equal}, and replay in {lost_equal}; the
rule recommends one of them only if the other wins in fewer than {limit}. Other networks, data and optimisers were not
measured, nor were costs such as time and privacy.

What ε-regions predict is how much plain SGD itself forgets: their radius over the distance has R² = {forgotten:.2f}
for its forgetting, but {gained:.2f} for the points by which a local algorithm beats replay. The expansion uses the
exact Hessian; a diagonal one, as in `ewc`, holds in a smaller region.

## Other instruments

`glocal lens TARGET --show NAME ...` applies other instruments to the same training. Each prints a table and writes a
figure and a Parquet file; `all` applies all of them.

| name | measures |
| --- | --- |
| `error` | errors of expansions of order 0, 1 and 2, and the order of their growth |
| `assumption` | the smallest ε for which the locality assumption holds |
| `forgetting` | predicted and measured forgetting of every pair of tasks, term by term |
| `recursion` | the recursion of the average forgetting E(t) |
| `theorem1`, `theorem2` | both sides of Theorem 4.1 and of Theorem 5.1 |
| `ground-truth` | the entry of the true label in the Hessian of the loss (appendix) |
| `perturbation` | perturbation scores of eigenvectors and of random directions |
| `flatness` | largest eigenvalue, trace, and the forgetting that followed |
| `rank`, `spectrum` | rank and eigenvalues of the average Hessian (1/t) Σ_{{o<t}} H_o |

In Python, continuing the example:

```python
from glocal.lens import measure, trace_checkpoints

trace = trace_checkpoints(network, nn.CrossEntropyLoss(), tasks, checkpoints, examples=500)
measure(trace, "theorem1").plot("theorem1.png")  # .rows is a list of dicts
```

## Errors at every step

Checkpoints show training only at the ends of tasks. `--retrace` trains a run of a store again from its configuration
and measures it on the way; the run need not have kept its parameters. The command reports whether the repeated run
equals the stored one, because results differ slightly between machines.

```
glocal sweep rotated-digits --algorithms ewc --lrs {steps_lr:g} --seeds 1 --tasks 3 --epochs 1
glocal lens runs/runs/* --retrace 20 --examples 100 -o steps.png     # --retrace 1 made the figure below
```

After every 20 steps of an epoch and at its end it measures ξ_o(θ) = |\\hat L_o(θ) − L_o(θ)| for every finished task o,
for the algorithm's own \\hat L_o and for Taylor expansions of order 0, 1 and 2, these with the exact Hessian and all
approximations of it that the network supports. It prints the largest error, the distance from θ_o up to which the
error stays below ε, and the step at which training first left the region of an old task:

```
{steps}
```

![Errors of EWC's own approximation and of Taylor expansions at every step](images/lens-along.png)

Each line is a task; vertical grey lines mark the beginnings of tasks, the dashed line is ε, and the vertical red line
the first violation. *own* is the algorithm's \\hat L_o, here EWC's penalty, divided equally between old tasks, plus
L_o(θ_o). Some algorithms state none (`sgd`: ξ_o is the loss itself), or only up to a constant (`si`), or in other
units (`der`, `icarl`). *own, from θ_o* compares the increases from θ_o, which are all that training depends on. In
Python:

```python
import glocal
from glocal.lens import open_run, training_errors

(run,) = glocal.load("runs")
errors = training_errors(open_run(run.path).retrace(every_steps=20, examples=100).run)
errors.assumptions["own"].first_violation  # see also errors.curves, errors.radii and errors.rows()
errors.plot("steps.png")
```

`glocal.lens.record(cohort, every_steps=1)` returns the same kind of runs without a store. During training,
`glocal run --monitor EPSILON` checks the assumption at the ends of epochs.

## Is my algorithm local?

This is a different question: not where training went, but whether an algorithm's approximation depends on the
solution at all (Definition 3.1). `glocal locality` tests it on an ensemble of solutions:

```
glocal locality examples/anchor.py:Anchor
```

Without names it tests all algorithms, in one to two minutes on two cores, and `glocal paper locality --demo` draws the
results. 18 of our 22 algorithms come out as declared; `si`, `pnn`, `packnet` and `hat` come out local, which
[the reproduction](reproduction/studies.md#locality) explains.

`python docs/locality.py` generates this page.
"""


def main() -> None:
    torch.set_num_threads(1)
    outputs = {"steps": step_errors()}
    for name, lr in (("near", NEAR_LR), ("far", FAR_LR)):
        torch.manual_seed(0)
        result = examine(*make_training(lr))
        result.plot(HERE / "images" / f"lens-{name}.png")
        outputs[name] = "\n".join([*str(result).splitlines()[: -len(result.closing)], *wrapped_closing(result)])
    outputs["command"] = as_command()
    lrs = {"near_lr": NEAR_LR, "far_lr": FAR_LR, "steps_lr": NEAR_LR}
    (HERE / "locality.md").write_text(TEMPLATE.format(**lrs, **wins(), **outputs))


def wins() -> dict[str, float]:
    """Return what `forecast` finds: settings that an algorithm won, the ratio of memories, and R² of ε-regions."""
    rows = read_table(RESULTS / "forecast.parquet")
    few, equal = (column(forecast.leads(rows, replay), "lead") for replay in (forecast.REPLAY, forecast.LARGE_REPLAY))
    widths, settings = distinct(rows, "width"), forecast.settings_table(rows)
    explained = [forecast.r_squared(settings, "radius_over_travel", target) for target in ("sgd_forgetting", "gain")]
    forgotten, gained = (share(np.arange(len(settings))) for share in explained)
    slots = COLUMNS["rotated-mnist"].row(forecast.REPLAY).options["slots"]
    return {
        "settings": len(few),
        "won": (few > 0).sum(),
        "won_equal": (equal > 0).sum(),
        "lost_equal": (equal < 0).sum(),
        "factor": min(forecast.equal_memory(int(width)) for width in widths) / slots,
        "limit": forecast.MIN_WINS,
        "forgotten": forgotten,
        "gained": gained,
    }


def step_errors() -> str:
    """Train EWC, measure its errors at every step, save the figure and return the table."""
    with tempfile.TemporaryDirectory() as store:
        (run,) = glocal.sweep("rotated-digits", ["ewc"], [NEAR_LR], [1], tasks=3, epochs=1, store=store, device="cpu")
        assert run.path is not None
        errors = training_errors(open_run(run.path).retrace(every_steps=1).run)
    errors.plot(HERE / "images" / "lens-along.png")
    return as_text(errors_table(errors))


def as_command() -> str:
    """Return what the page's first `glocal lens` prints."""
    result = examine(*make_training(), examples=200)
    return "\n".join([as_text(examination_table(result)), "", *wrapped_closing(result)])


def as_text(table: Table) -> str:
    console = Console(file=StringIO(), width=100, record=True)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())


def wrapped_closing(result: Examination) -> list[str]:
    return [part for line in result.closing for part in textwrap.wrap(line, 118)]


if __name__ == "__main__":
    main()
