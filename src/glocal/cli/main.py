"""The `glocal` command: one file a subcommand, one line an error."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from glocal.cli.data import Data
from glocal.cli.demo import Demo
from glocal.cli.lens import Lens
from glocal.cli.list import List
from glocal.cli.locality import Locality
from glocal.cli.paper import Paper
from glocal.cli.plot import Plot
from glocal.cli.run import Run
from glocal.cli.sweep import Sweep
from glocal.cli.table import Table
from glocal.errors import GlocalError, unknown

COMMANDS = {
    "demo": Demo,
    "list": List,
    "run": Run,
    "sweep": Sweep,
    "table": Table,
    "plot": Plot,
    "locality": Locality,
    "lens": Lens,
    "paper": Paper,
    "data": Data,
}

COMMAND_LINE: Any = functools.reduce(
    operator.or_,
    [Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)] for name, kind in COMMANDS.items()],
)

DESCRIPTION = """A continual-learning laboratory. Every remedy against forgetting approximates the losses of tasks it
can no longer see; glocal trains, measures and compares them, local and global ones, many runs at a time.

Start with `glocal demo`. Every command says more with --help."""

INTERRUPTED = """stopped. What was finished is in the store; run the same command again to go on: runs from their last
task, studies from their last piece."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it did what it says, 2 if something must be mended first, 130 if it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(ValueError):  # outside the main thread there are no signals to handle
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _parse(arguments)()
    except GlocalError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        _complain(INTERRUPTED)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return 0


def _complain(message: str) -> int:
    print(f"glocal: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parse(arguments: list[str]) -> Any:
    if arguments[:1] == ["--version"]:
        from glocal import __version__

        print(f"glocal {__version__}")
        raise SystemExit(0)
    if not arguments:
        arguments = ["--help"]
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise unknown("command", arguments[0], COMMANDS)
    if arguments[0] == "paper" and len(arguments) > 1 and not arguments[1].startswith("-"):
        from glocal.paper.experiments import EXPERIMENTS
        from glocal.paper.studies import TITLES

        named = ("list", *EXPERIMENTS, *TITLES)
        if arguments[1] not in named:
            raise unknown("experiment", arguments[1], named)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                COMMAND_LINE,
                prog="glocal",
                description=DESCRIPTION,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise GlocalError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The parser's framed message without its frame."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if text and set(text) <= set("─"):
            parts.append([])
        elif text and text[0] not in "╭╰":
            parts[-1].append(text)
    return "; ".join(" ".join(part) for part in parts if part) or "the command cannot be read; see glocal --help"


if __name__ == "__main__":
    sys.exit(main())
