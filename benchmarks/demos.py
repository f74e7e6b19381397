"""Duration of the demonstrations: `glocal paper NAME --demo` for every study, and `glocal locality`, on a CPU.

    python -m benchmarks.demos [NAME ...]        writes results/demos-cpu.json

Every command is timed from the start of its process to its end, with an empty store. Its CPU seconds show how much of
the machine it had. If names are given, only their entries in the file are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import RESULTS, save
from glocal.errors import unknown
from glocal.paper import STUDIES

FILE = RESULTS / "demos-cpu.json"
GOALS = {**{f"paper {name} --demo": 60.0 for name in STUDIES}, "locality": 180.0}


def time_command(command: str) -> dict[str, float]:
    """Run a glocal command in an empty folder on a CPU; return its elapsed and its CPU seconds."""
    arguments = [sys.executable, "-m", "glocal", *command.split(), "--device", "cpu"]
    with TemporaryDirectory() as folder:
        start, before = time.perf_counter(), os.times()
        subprocess.run(arguments, cwd=folder, check=True, capture_output=True)
        elapsed, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": elapsed, "cpu_seconds": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="time only these (default: all)", metavar="NAME")
    names = parser.parse_args().names
    console = Console()
    for name in names:
        if name not in STUDIES:
            raise unknown("demonstration", name, tuple(STUDIES))
    # The name 'locality' selects both 'glocal paper locality --demo' and 'glocal locality'.
    selected = [command for command in GOALS if not names or command.split()[:2][-1] in names]
    results = {command: time_command(command) for command in track(selected, console=console, transient=True)}
    table = Table("glocal", "seconds", "CPU seconds", "goal", title="Demonstrations on a CPU")
    for command, result in results.items():
        color = "green" if result["seconds"] < GOALS[command] else "red"
        seconds = f"[{color}]{result['seconds']:.0f}[/]"
        table.add_row(command, seconds, f"{result['cpu_seconds']:.0f}", f"< {GOALS[command]:.0f}")
    console.print(table)
    previous = json.loads(FILE.read_text())["commands"] if names and FILE.exists() else {}
    save(FILE, {"goals_s": GOALS, "commands": previous | results})


if __name__ == "__main__":
    main()
