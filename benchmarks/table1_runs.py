"""Train rows of the paper's Table 1 with torch, numpy, safetensors and rich alone, on a machine without the CLI.

Copy the store to another machine, where `glocal paper table1 --store STORE` makes the table from its runs.

python -m benchmarks.table1_runs --challenge split-cifar10 --algorithms er ewc --device cuda --store runs-paper
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glocal.paper.table1 import ANGLES, COLUMNS, DEMO, train
from glocal.report.progress import Bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--challenge", choices=[*COLUMNS, DEMO.challenge], default="rotated-mnist")
    parser.add_argument("--algorithms", nargs="+", default=(), help="rows of the table (default: all standard ones)")
    parser.add_argument("--extra", action="store_true", help="add the rows that the paper's table does not have")
    parser.add_argument("--lrs", nargs="+", type=float, default=(), help="learning rates (default: published)")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), help="seeds (default: 11 13 33 21 55)")
    parser.add_argument("--tasks", type=int, help="stop after this many tasks")
    parser.add_argument("--epochs", type=int, help="epochs per task (default: as published)")
    parser.add_argument("--angles", choices=ANGLES, default="published", help="angles of rotated-mnist")
    parser.add_argument("--precision", help="fp32, tf32 or bf16 (default: fp32; bf16 for ResNet-18 on a GPU)")
    parser.add_argument("--store", type=Path, default=Path("runs-paper"), help="folder that keeps finished runs")
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options = vars(parser.parse_args())
    column = {**COLUMNS, DEMO.challenge: DEMO}[options.pop("challenge")]
    sizes = {name: options.pop(name) for name in ("algorithms", "extra", "lrs", "seeds", "tasks", "epochs")}
    train([column.select(**sizes)], **options, progress=Bars())


if __name__ == "__main__":
    main()
