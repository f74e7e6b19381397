"""How long the demonstrations take: every experiment of the paper with `--demo`, and `glocal locality`.

python -m benchmarks.demos [NAME ...]

Each is a process of its own, from its start to its end, with an empty store.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import machine
from glocal import __version__
from glocal.paper.studies import TITLES

FILE = Path(__file__).parent / "results" / "demos-cpu.json"
GOALS = {**{f"paper {name} --demo": 60.0 for name in TITLES}, "locality": 180.0}


def seconds(command: str) -> float:
    """A command of glocal's, in a folder of its own and on a CPU."""
    with TemporaryDirectory() as folder:
        begun = time.perf_counter()
        told = [sys.executable, "-m", "glocal", *command.split(), "--device", "cpu"]
        subprocess.run(told, cwd=folder, check=True, capture_output=True)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="these alone, and write nothing", metavar="NAME")
    given = parser.parse_args()
    console = Console()
    chosen = [command for command in GOALS if not given.names or command.split()[:2][-1] in given.names]
    found = {command: seconds(command) for command in track(chosen, "commands", console=console, transient=True)}
    table = Table("glocal", "s", "goal", title="Demonstrations, on a CPU")
    for command, took in found.items():
        colour = "green" if took < GOALS[command] else "red"
        table.add_row(command, f"[{colour}]{took:.0f}[/]", f"< {GOALS[command]:.0f}")
    console.print(table)
    if not given.names:
        made = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        made["versions"] = {"torch": torch.__version__, "glocal": __version__}
        FILE.write_text(json.dumps({**made, "goals_s": GOALS, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
