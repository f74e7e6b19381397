"""Makes docs/locality.md and its figures: a training of one's own under the lens, at two learning rates.

python docs/locality.py
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

from checkpoints import make_training  # noqa: E402

import glocal  # noqa: E402
from glocal.lens import examine  # noqa: E402
from glocal.lens.record import open_run  # noqa: E402
from glocal.lens.region import training_errors  # noqa: E402
from glocal.report.error_curves import table  # noqa: E402

NEAR, FAR = 0.1, 0.5
TEXT = """# How local is my training?

An algorithm that approximates old losses at their solutions (`ewc`, `laplace`, `ogd`, …) is right as long as training
stays near them: that is the paper's locality assumption. `glocal.lens.examine` measures whether yours does. It takes
any `nn.Module`, a loss, the tasks' data and the state dicts between the tasks, and says how far training went, how far
the second-order expansions of old losses hold, what was forgotten and what of it they predict, and which family of
algorithms that speaks for. `python docs/locality.py` makes this page.

## From checkpoints to a figure

[examples/checkpoints.py](../examples/checkpoints.py) is a training in plain PyTorch: three tasks of turned digits, a
small network, SGD. In its folder, `python checkpoints.py` leaves `theta-0.pt`, the initialisation, to `theta-3.pt`;
and there:

```python
import torch
from checkpoints import make_loaders, make_network
from torch import nn

from glocal.lens import examine

network = make_network()
tasks = make_loaders()  # a DataLoader a task; pairs of tensors (x, y) and Datasets will do
checkpoints = [torch.load(f"theta-{{t}}.pt") for t in range(4)]

result = examine(network, nn.CrossEntropyLoss(), tasks, checkpoints)
print(result)
print(result.advice.family, result.advice.algorithms)
result.plot("lens.png")
```

The loss is `"cross-entropy"`, `"squared-error"`, or any function of outputs and targets that is a mean over samples. At
most 2,000 examples of a task are looked at (`examples=`): evenly spaced ones of tensors, of a Dataset and of a
DataLoader that gives all of one; the first ones of whatever else gives batches, so mix those. Networks with attention
or recurrent layers will do. The same as a command, with a function that returns the four:

```
glocal lens examples/checkpoints.py:make_training -o lens.png
glocal lens runs/runs/0123456789abcdef       # a run of a store, trained with --keep-parameters
```

With `--show` the same training is looked at by the other instruments, each of which prints a table and writes a figure
and a Parquet file: `error` and `assumption` (the expansions' errors, their order, and the smallest ε), `forgetting` (of
every pair of tasks, with the share of each term), `recursion`, `theorem1`, `theorem2`, `ground-truth`, `perturbation`,
`flatness`, `rank` and `spectrum` (of the paper's average Hessian (1/t) Σ_{{o<t}} H_o, which after one task is half of
that task's), or `all`. In Python they take a subject:

```python
from glocal.lens.instruments import measure
from glocal.lens.trace import trace_checkpoints

subject = trace_checkpoints(network, nn.CrossEntropyLoss(), tasks, checkpoints, examples=500)
measure(subject, "theorem1").plot("theorem1.png")  # and .rows, a list of dicts
```

At a learning rate of {near_lr:g} it prints

```
{near}
```

![The training at the smaller learning rate](images/lens-near.png)

and at {far_lr:g}, where training goes farther,

```
{far}
```

![The training at the larger learning rate](images/lens-far.png)

## What it shows

- **Where training went.** Over every task o, how far later solutions θ_t are from θ_o. A line ends where, on the way
  from θ_o to θ_t, the second-order expansion of L_o is first wrong by ε: the border of the region Ω^ε_o. A filled point
  is a θ_t inside (ξ_o(θ_t) < ε), an open one outside. The grey box reaches from the radius in the steepest direction,
  the eigenvector of the largest eigenvalue, to that in random directions. ε is a tenth of what learning a task gained,
  L_o(θ_0) − L_o(θ_o), in the mean, unless `epsilon` is given.
- **What was forgotten.** L_o(θ_t) − L_o(θ_o), as the expansion predicts it and as it is; in the grey band they differ
  by less than ε. Below 0 a later task helped an earlier one.
- **How the losses bend.** The ten largest eigenvalues of every task's Hessian at its solution, and its trace (Hutch++).

Everything in them is in `found`: `distance`, `radius`, `inside`, `forgetting.measured` and `.predicted`, `eigenvalues`,
`trace`, and `rows()`, a table.

## At every step

Checkpoints are the ends of tasks. A run of a store can also be trained again, by its configuration, and looked at on
its way; it need not have kept its parameters. That it is the same way is checked: other machines round otherwise.

```
glocal sweep rotated-digits --algorithms ewc --lrs {way_lr:g} --seeds 1 --tasks 3 --epochs 1
glocal lens runs/runs/0123456789abcdef --retrace 1 -o way.png      # or --retrace 10, or --retrace epochs
```

At every moment ξ_o(θ) = |\\hat L_o(θ) − L_o(θ)| is measured for every finished task o: by the algorithm's own
\\hat L_o, with its memory as it was then, and by expansions of order 0, 1 and 2, with the Hessian whole and in all the
forms that the network allows. It prints how large errors became, how far from θ_o they stayed below ε, and at which
step training first left an old task's region, and writes a figure and a Parquet file with all numbers:

```
{way}
```

![ξ_o along training, by EWC's own approximation and by expansions](images/lens-along.png)

Lines are tasks, grey ones their ends; the dashed line is ε, the red one the first break. *Own* is \\hat L_o as the
algorithm states it: here EWC's penalty, of several tasks an equal share, on top of L_o(θ_o). Some state none (`sgd`:
ξ_o is the loss itself), or one up to a constant (`si`) or in units of its own (`der`, `icarl`). *Own, from θ_o* counts
both losses from their values at θ_o, which is all that training follows. In Python the same is

```python
from glocal.lens.region import training_errors
from glocal.lens.record import open_run

found = training_errors(open_run("runs/runs/0123456789abcdef").retrace(every_steps=1).run)
found.assumptions["own"].first_violation  # and .curves, .stays, .rows()
found.plot("way.png")
```

and `along` takes each of the runs that `glocal.lens.record.record(cohort, every_steps=1)` returns. During
training, `glocal run --monitor EPSILON` watches it at the ends of epochs.

## What is recommended, and why

1. Some θ_t is outside the region of an earlier task: the assumption that local algorithms need is broken, so **replay**
   (`er`, `agem`, `gem`), whose approximation does not depend on θ_o.
2. All are inside. Then a quadratic holds. If nothing was forgotten, |E(t)| < ε, and the ten largest eigenvalues are
   half of the trace or more, few directions matter, and Theorem 1 allows a **constraint**: updates orthogonal to them
   (`ogd`, `ogd-gtl`, `optimal-hard`). Otherwise a **quadratic penalty** (`ewc`, `laplace`, `optimal-soft`).
3. With one task learnt nobody knows where the next one leads: a penalty if the task went less far than its region
   reaches in the steepest direction, replay otherwise, as the safe choice.

It is a rule of thumb with its reason stated, not a theorem: it does not know what memory, time or privacy cost you. The
expansion here has the whole Hessian; a diagonal one, as `ewc` keeps it, is right in a smaller region.

## Is my algorithm local?

That is another question: not where training went, but whether the approximation an algorithm states depends on the
solution at all (Definition 1). `glocal locality` tests it on an ensemble of solutions, for all algorithms or for yours:

```
glocal locality                              all of them, one to two minutes on two cores
glocal locality er ewc path.py:Mine
glocal paper locality --demo                 the same as a table and a figure
```
"""


def main() -> None:
    torch.set_num_threads(1)
    said = {}
    for name, lr in (("near", NEAR), ("far", FAR)):
        torch.manual_seed(0)
        found = examine(*make_training(lr))
        found.plot(HERE / "images" / f"lens-{name}.png")
        said[name] = _wrapped(str(found))
    said["way"] = _way()
    (HERE / "locality.md").write_text(TEXT.format(near_lr=NEAR, far_lr=FAR, way_lr=NEAR, **said))


def _way() -> str:
    """EWC at every step."""
    with tempfile.TemporaryDirectory() as store:
        (run,) = glocal.sweep("rotated-digits", ["ewc"], [NEAR], [1], tasks=3, epochs=1, store=store, device="cpu")
        assert run.path is not None
        found = training_errors(open_run(run.path).retrace(every_steps=1).run)
    found.plot(HERE / "images" / "lens-along.png")
    console = Console(file=StringIO(), width=100, record=True)
    console.print(table(found))
    return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())


def _wrapped(text: str) -> str:
    """The table as it is, and the sentences below it in lines."""
    *table, sentences = text.splitlines()
    return "\n".join([*table, *textwrap.wrap(sentences, 118)])


if __name__ == "__main__":
    main()
