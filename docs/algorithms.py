"""Generate docs/algorithms.md: train every algorithm on the embedded digits with five learning rates and five seeds.

    python docs/algorithms.py [--store DIR] [--device auto|cpu|cuda]

Finished runs are kept in the store, so an interrupted call can be repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import glocal
from glocal.algorithms import ALGORITHMS
from glocal.report.summary import render
from glocal.store.run import Run

LRS = (0.003, 0.01, 0.03, 0.1, 0.3)
SEEDS = (11, 13, 33, 21, 55)
SETTINGS = {"rotated-digits": None, "split-digits": "task"}
PAGE = Path(__file__).with_suffix(".md")
TEMPLATE = r"""# Algorithms

This page lists every algorithm in glocal: whether its approximation of old losses is local or global, what it stores,
and how accurate it is and how much it forgets on two small challenges. The files in
[src/glocal/algorithms](../src/glocal/algorithms) state the equations. `glocal list algorithms` prints what each
algorithm stores, `glocal list options` its options.

## Approximations

Every algorithm approximates the loss $L_o$ of an old task by some $\hat L_o$, which is part of what it minimises.

| algorithm | $\hat L_o(\theta)$ | locality |
|---|---|---|
| `sgd`, `stable-sgd` | $0$; `stable-sgd` adds dropout and a decaying learning rate | global |
| `joint` | $L_o(\theta)$: keeps all data | global |
| `er` | mean loss on the examples of task $o$ in a reservoir | global |
| `gem`, `agem` | mean loss on stored examples, as constraints linearised at the current $\theta$: `gem` has one per task, `agem` one for all tasks | global |
| `si` | an equal share per task of $c\sum_i\Omega_i(\theta_i-\theta_{{t-1,i}})^2$, with $\Omega$ from the path of training | global |
| `pnn`, `packnet`, `hat` | $L_o(\theta_o)$: columns, weights or units of finished tasks are frozen | global |
| `ewc` | $L_o(\theta_o)$ plus an equal share per task of $\frac\lambda2\sum_i F_i(\theta_i-\theta_{{t-1,i}})^2$; $F$ exact, sampled, empirical or as published | local |
| `laplace` | the same with a Kronecker product $G\otimes A$ per layer | local |
| `ogd`, `ogd-gtl`, `ogd-ave` | the outer-product quadratic as a constraint: updates orthogonal to the gradients of old outputs | local |
| `ogd-published` | the procedure behind the published OGD row | local |
| `optimal-hard`, `optimal-soft` | the second-order expansion at $\theta_o$, as a constraint (Theorem 4.1) or in the objective | local |
| `icarl`, `icarl-random` | distance to the previous network's outputs on exemplars, chosen by herding or at random; in both cases the outputs depend on $\theta_o$ | local |
| `der`, `derpp` | distance to the outputs recorded when the examples were stored | local |

Where published code differs from a method's definition, an option selects it (`fisher`, `importance`, `filling`,
`features`, `statistics`); `glocal list options` describes every option.

With `implicit=true`, `laplace` and `optimal-soft` solve for their penalty in every step. Explicit steps on a quadratic
diverge at high learning rates; these do not, but steps on the loss still can ([implicit](experiments/implicit.md)).

## Locality and memory

A **local** approximation of an old task's loss depends on the solution at which it was made, and holds only near it; a
**global** one does not (Definition 3.1). The family says how the approximation enters training: as extra examples
(replay), as a constraint on the update, as a quadratic penalty, or as parameters reserved for a task (partition).

| algorithm | locality | family | settings | memory contents | memory size after T tasks |
|---|---|---|---|---|---|
{algorithms}

P is the number of parameters and K the number of outputs; other names are options of the algorithm. `hat` trains `mlp`,
`resnet18`, any `nn.Sequential`, and networks that declare their unit groups (`glocal.networks.hat`). `hat` and
`packnet` keep the BatchNorm statistics of the first task. `gem` and `agem` pass their stored examples after the batch
of the stream, and BatchNorm's running statistics include them. GEM's published code passes them before it, which gives
the same parameters and other statistics.

## Accuracy, forgetting and cost

The paper's MLP was trained on the 5,000 embedded digits with the default options of every algorithm, which are not
tuned to these challenges. `pnn`, `packnet` and `hat` receive the task of each test input; `joint` keeps the data of all
tasks, which still come one after another, each with the same weight: in few epochs it may be behind replay. To train on all
data at once, make a challenge of a single task.
The memory column does not count network parameters, which is where `pnn` and `hat` store old tasks. The runs
used this device: {machines}. To reproduce this page, run `python docs/algorithms.py`.

{results}
"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("runs-docs"))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    runs: list[Run] = []
    for challenge, setting in SETTINGS.items():
        for name, algorithm in ALGORITHMS.items():
            if (setting or "domain") in algorithm.settings:
                print(f"{challenge}: {name}", flush=True)
                runs += glocal.sweep(
                    challenge, [name], LRS, SEEDS, setting=setting, store=args.store, device=args.device
                )
    PAGE.write_text(page(runs))


def page(runs: Sequence[Run]) -> str:
    """Fill the template with the list of algorithms and the results of the runs."""
    machines = sorted({f"{run.info['versions']['device']}, torch {run.info['versions']['torch']}" for run in runs})
    results = str(render(runs, "markdown")).rstrip()
    return TEMPLATE.format(algorithms=algorithm_rows(), machines="; ".join(machines), results=results)


def algorithm_rows() -> str:
    """Return one Markdown table row per algorithm."""
    return "\n".join(
        f"| `{name}` | {a.locality} | {a.family} | {', '.join(a.settings)} | {a.memory_contents} | {a.memory_size} |"
        for name, a in ALGORITHMS.items()
    )


if __name__ == "__main__":
    main()
