"""Makes docs/algorithms.md: every algorithm on embedded digits, five learning rates, five seeds. Resumable.

python docs/algorithms.py [--store DIR] [--device auto|cpu|cuda]
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
TEXT = """# The algorithms

Each approximates the losses of finished tasks in its own way; the file of its name in
[src/glocal/algorithms](../src/glocal/algorithms) says how. `python docs/algorithms.py` makes this page.

| name | locality | family | settings | what the memory holds | numbers kept after T tasks |
|---|---|---|---|---|---|
{listed}

P parameters, K outputs; other names are the algorithm's options, which `glocal list options` describes. `hat` takes
`mlp`, `resnet18`, any `nn.Sequential`, and networks that declare their unit groups (`glocal.networks.hat`). It and
`packnet` normalise by BatchNorm's statistics of the first task.

## Accuracy, forgetting and cost

The paper's MLP on the 5,000 embedded digits, every option at its default, on {where}. Defaults are not tuned to these
challenges. `pnn`, `packnet` and `hat` are told an input's task at test time; `joint` sees all data. What `pnn` and
`hat` keep of finished tasks are parameters of their networks, which the memory does not count.

{results}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("runs-docs"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    runs = []
    for challenge, setting in SETTINGS.items():
        for name, algorithm in ALGORITHMS.items():
            if (setting or "domain") not in algorithm.settings:
                continue
            print(f"{challenge}: {name}", flush=True)
            runs += glocal.sweep(challenge, [name], LRS, SEEDS, setting=setting, store=given.store, device=given.device)
    PAGE.write_text(page(runs))


def page(runs: Sequence[Run]) -> str:
    where = sorted({f"{run.info['versions']['device']}, torch {run.info['versions']['torch']}" for run in runs})
    listed = [
        f"| `{name}` | {a.locality} | {a.family} | {', '.join(a.settings)} | {a.memory_contents} | {a.memory_size} |"
        for name, a in ALGORITHMS.items()
    ]
    return TEXT.format(listed="\n".join(listed), where="; ".join(where), results=str(render(runs, "markdown")).rstrip())


if __name__ == "__main__":
    main()
