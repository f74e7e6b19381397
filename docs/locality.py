"""Generate docs/locality.md and its figures: a training in plain PyTorch, measured at two learning rates.

python docs/locality.py        about a minute and a half on a CPU
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
sys.path.insert(0, str(HERE.parent / "examples"))

from checkpoints import make_training  # noqa: E402

from glocal.cli import main as cli  # noqa: E402
from glocal.lens import examine  # noqa: E402
from glocal.paper import get_study  # noqa: E402
from glocal.paper.studies import forecast  # noqa: E402
from glocal.paper.studies.common import column, distinct  # noqa: E402
from glocal.paper.study import read_table  # noqa: E402
from glocal.paper.table1 import COLUMNS  # noqa: E402

NEAR_LR, FAR_LR = 0.1, 0.5
LENS = "glocal lens examples/checkpoints.py:make_training --examples 200 -o lens.png"
SWEEP = f"glocal sweep rotated-digits --algorithms ewc --lrs {NEAR_LR:g} --seeds 1 --tasks 3 --epochs 1"
RETRACE = "glocal lens runs/runs/* --retrace 1 -o steps.png"
"""Commands of the page, which are run in a folder with the examples."""
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

The loss L_o of every task o is compared with its second-order Taylor expansion at the task's solution θ_o. The error
ξ_o(θ) of the expansion is the absolute difference of the two at θ; the ε-region of the task is where it is below ε, a
number in units of the loss. With a learning rate of {near_lr:g} the example prints

```
{near}
```

| column | meaning, after the last task |
| --- | --- |
| inside | whether the last solution is in the ε-region of this task |
| distance | from θ_o to the last solution |
| radius | how far the region extends from θ_o in that direction, up to where the error first reaches ε |
| radius along v_1 – random | the same along v_1, the eigenvector of the largest eigenvalue, and in random directions |
| forgetting (predicted) | the increase of L_o, measured, and in parentheses predicted by the expansion |
| loss, λ_max, trace | L_o, the largest eigenvalue of its Hessian and the sum of all, at θ_o |

By default ε is 0.1 times the decrease of a task's loss during its training, averaged over the tasks. Set it with
`epsilon=`.

![Figure for the smaller learning rate](images/lens-near.png)

With a learning rate of {far_lr:g} training moves farther:

```
{far}
```

![Figure for the larger learning rate](images/lens-far.png)

The same as a command, for your own function that returns the network, the loss, the tasks and the checkpoints, or for
a run of a store that was trained with `--keep-parameters`:

```
{lens_command}
glocal run rotated-digits sgd --lr 0.1 --tasks 2 --epochs 1 --keep-parameters --store kept
glocal lens kept/runs/* --examples 100 -o lens.png                              # the store has one run
```

The first of them prints

```
{command}
```

Radii and errors are estimates, because the loss is the mean over the examples that are used. Fewer examples are
quicker, and the radii are less exact. That of task 1 is
{radii} examples, which are all.
Use as many as you can wait for.

The loss is `"cross-entropy"`, `"squared-error"`, or any function of outputs and targets that returns a mean over
samples. At most 2,000 examples per task are used (`examples=`). They are evenly spaced, except for a plain iterable
of batches, of which the first ones are taken: shuffle it. A checkpoint may also be the path of a safetensors file.
Networks with attention or recurrent layers are supported.

A pretrained network is examined in the same way. Checkpoints may be in half precision; they are read into float32.
They may hold the trained parameters alone, such as adapters: all others are as in the network that you give. If the
first task is the one that the network was pretrained on, give the pretrained network as θ_0 and as θ_1; the default ε
then leaves out that task.

## How to read the figure

- **Distances and ε-regions.** A point is the distance of a later solution θ_t from θ_o; its colour says which one. It
  is filled if θ_t is inside the region Ω^ε_o (ξ_o(θ_t) < ε) and open if it is outside. The grey bar below it is the
  region in the same direction, and ends where the error first reaches ε on the way from θ_o to θ_t; a bar up to the
  top means that no end was found. A filled point above its bar is where the error has fallen below ε again. The
  lines are the radii in other directions, as in the table.
- **Forgetting.** L_o(θ_t) − L_o(θ_o), predicted by the expansion and measured. In the grey band they differ by less
  than ε. A negative value means that a later task helped an earlier one.
- **Curvature.** The ten largest eigenvalues of every task's Hessian at its solution, and its trace (by Hutch++).
  The trace is the sum of all eigenvalues. It is smaller than the largest one, λ_max, if negative eigenvalues outweigh
  the other positive ones.

All numbers are attributes of the result: `distance`, `radius`, `inside`, `forgetting.measured`,
`forgetting.predicted`, `eigenvalues` and `trace`; `rows()` returns a table.

## What to train instead

The lens recommends no algorithm. [An experiment](reproduction/experiments.md#forecast) with an MLP on ten tasks of
Rotated-MNIST decided this by a registered rule. `laplace` with `implicit=true` was more
accurate than replay (`er`) of 500 examples in {won} of {settings} settings, but it keeps at least {factor} times
as much memory. Against replay with equal memory it was more accurate in {won_equal}, and replay in {lost_equal}; the
rule recommends one of them only if the other wins in fewer than {limit}. Other networks, data and optimisers were not
measured, nor were costs such as time and privacy.

What ε-regions predict is how much plain SGD itself forgets: their radius over the distance, on the finished run, has
R² = {forgotten:.2f} for its forgetting, but {gained:.2f} for the points by which a local algorithm with explicit steps
beats replay of 500 examples. The expansion uses the exact Hessian. How far one with a diagonal Hessian holds, as in
`ewc`, is measured [at every step](#errors-at-every-step).

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
{sweep_command}
{retrace_command}
```

After every step it measures $\\xi_o(\\theta) = |\\hat L_o(\\theta) - L_o(\\theta)|$ for every finished task o, for the
algorithm's own approximation $\\hat L_o$ and for Taylor expansions of order 0, 1 and 2, these with the exact Hessian
and all approximations of it that the network supports; `--retrace 20` measures after every 20 steps, and names the
step of a violation as a range. It prints the largest error, the distance from θ_o up to which the error stays below
ε, and the step at which training first left the region of an old task:

```
{steps}
```

![Errors of EWC's own approximation and of Taylor expansions at every step](images/lens-along.png)

The red line and the step above it are the first violation: the first step at which the error of a task is ε or more.
Order 0 is the constant L_o(θ_o). EWC's penalty adds at most {penalty} to it here, so the panels of *own* and
order 0 look alike. *own* is the algorithm's $\\hat L_o$, here EWC's penalty, divided equally between old tasks, plus
L_o(θ_o). Some algorithms state none (`sgd`: ξ_o is the loss itself), or only up to a constant (`si`), or in other
units (`der`, `icarl`). *own, from θ_o* compares the increases from θ_o, which are all that training depends on. In
Python:

```python
import glocal
from glocal.lens import open_run, training_errors

(run,) = glocal.load("runs")
errors = training_errors(open_run(run.path).retrace(every_steps=1).run)
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
results. {verdict}
[The reproduction](reproduction/studies.md#locality) explains this. Of the algorithms for which it differs, the paper's
Table 1 has only {in_table1}, so [the tests of its claims](reproduction.md) by measured classes change no other class.

`python docs/locality.py` generates this page.
"""


def main() -> None:
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "100"
    parts = {"lens_command": LENS, "sweep_command": SWEEP, "retrace_command": RETRACE}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("examples").symlink_to(HERE.parent / "examples")
        parts |= {"command": command_output(LENS), **step_errors()}
    for name, lr in (("near", NEAR_LR), ("far", FAR_LR)):
        torch.manual_seed(0)
        result = examine(*make_training(lr))
        result.plot(HERE / "images" / f"lens-{name}.png")
        parts[name] = str(result)
    numbers = {"near_lr": NEAR_LR, "far_lr": FAR_LR, "radii": radii(), **locality_verdict(), **wins()}
    (HERE / "locality.md").write_text(TEMPLATE.format(**parts, **numbers))


def wins() -> dict[str, float]:
    """Return what `forecast` finds: settings that an algorithm won, the ratio of memories, and R² of ε-regions."""
    rows = read_table(RESULTS / "forecast.parquet")
    few, equal = (column(forecast.leads(rows, replay), "lead") for replay in (forecast.REPLAY, forecast.LARGE_REPLAY))
    widths, settings = distinct(rows, "width"), forecast.settings_table(rows)
    shares = [forecast.r_squared(settings, "radius_over_travel", target) for target in ("sgd_forgetting", "gain")]
    forgetting_share, gain_share = (share(np.arange(len(settings))) for share in shares)
    slots = COLUMNS["rotated-mnist"].row(forecast.REPLAY).options["slots"]
    return {
        "settings": len(few),
        "won": (few > 0).sum(),
        "won_equal": (equal > 0).sum(),
        "lost_equal": (equal < 0).sum(),
        "factor": min(forecast.equal_memory(int(width)) for width in widths) // slots,
        "limit": forecast.MIN_WINS,
        "forgotten": forgetting_share,
        "gained": gain_share,
    }


def step_errors() -> dict[str, str]:
    """Run the commands of the section and save their figure; return what they print and what EWC's penalty adds."""
    command_output(SWEEP)
    steps = command_output(RETRACE)
    shutil.copy("steps.png", HERE / "images" / "lens-along.png")
    rows = read_table(Path("steps.parquet"))
    penalty_rows, constant_rows = (
        rows.filter(approximation=name).sort("step", "task") for name in ("own, from θ_o", "order 0")
    )
    return {"steps": steps, "penalty": f"{(penalty_rows['approximate'] - constant_rows['approximate']).max():.2g}"}


def radii() -> str:
    """Return the radius of the first task by the number of examples."""
    module, loss, loaders, checkpoints = make_training(NEAR_LR)
    total = len(loaders[0].dataset)
    radius_by_examples = {
        n: examine(module, loss, loaders, checkpoints, examples=n).radius[-1, 0] for n in (200, 400, total)
    }
    *few, most = (f"{radius:.3g} with {n}" for n, radius in radius_by_examples.items())
    return f"{', '.join(few)} and {most}"


def locality_verdict() -> dict[str, str]:
    """Return whether the study `locality` finds the declared classes, and which others Table 1 has."""
    summary = get_study("locality").summarize(read_table(RESULTS / "locality.parquet"))
    published = {row.algorithm for column in COLUMNS.values() for row in column.rows}
    exceptions = {row["algorithm"] for row in summary.table if row["declared"] != row["found"]}
    return {"verdict": summary.verdict, "in_table1": ", ".join(f"`{name}`" for name in sorted(exceptions & published))}


def command_output(command: str) -> str:
    """Return what a command prints."""
    _, *words = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert cli.main([path for word in words for path in (glob.glob(word) or [word])]) == 0
    return "\n".join(line.rstrip() for line in stdout.getvalue().rstrip().splitlines())


if __name__ == "__main__":
    main()
