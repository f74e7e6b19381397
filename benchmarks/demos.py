"""How long the demonstrations take: every experiment of the paper with `--demo`, and `glocal locality`.

python -m benchmarks.demos [NAME ...]

Each is a process of its own, from its start to its end, with an empty store. Beside the seconds stand those that its
threads were at work, which tell how much of the machine it had. Named ones take the place of those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import machine
from glocal import __version__
from glocal.errors import unknown
from glocal.paper.experiments import STUDIES

FILE = Path(__file__).parent / "results" / "demos-cpu.json"
GOALS = {**{f"paper {name} --demo": 60.0 for name in STUDIES}, "locality": 180.0}


def timed(command: str) -> dict[str, float]:
    """A command of glocal's, in a folder of its own and on a CPU."""
    told = [sys.executable, "-m", "glocal", *command.split(), "--device", "cpu"]
    with TemporaryDirectory() as folder:
        begun, before = time.perf_counter(), os.times()
        subprocess.run(told, cwd=folder, check=True, capture_output=True)
        took, after = time.perf_counter() - begun, os.times()
    work = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": took, "at_work": work}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="these alone", metavar="NAME")
    given = parser.parse_args()
    console = Console()
    for name in set(given.names) - {*STUDIES}:
        raise unknown("demonstration", name, tuple(STUDIES))
    chosen = [command for command in GOALS if not given.names or command.split()[:2][-1] in given.names]
    found = {command: timed(command) for command in track(chosen, "commands", console=console, transient=True)}
    table = Table("glocal", "s", "at work", "goal", title="Demonstrations, on a CPU")
    for command, took in found.items():
        colour = "green" if took["seconds"] < GOALS[command] else "red"
        told = f"[{colour}]{took['seconds']:.0f}[/]", f"{took['at_work']:.0f}"
        table.add_row(command, *told, f"< {GOALS[command]:.0f}")
    console.print(table)
    made: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    made["versions"] = {"torch": torch.__version__, "glocal": __version__}
    others = json.loads(FILE.read_text())["commands"] if given.names and FILE.exists() else {}
    FILE.write_text(json.dumps({**made, "goals_s": GOALS, "commands": others | found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
