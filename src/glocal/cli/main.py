"""The `glocal` command: dispatch to a subcommand; an error is one line and exit code 2."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from glocal.cli.demo import Demo
from glocal.cli.lens import Lens
from glocal.cli.list import Data, List
from glocal.cli.locality import Locality
from glocal.cli.paper import Paper
from glocal.cli.plot import Plot
from glocal.cli.table import Table
from glocal.cli.train import Run, Sweep
from glocal.errors import GlocalError, require_known

COMMANDS: dict[str, Any] = {
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

DESCRIPTION = """A continual-learning laboratory for PyTorch. Every algorithm against forgetting approximates the losses
of tasks that it can no longer see; glocal trains, measures and compares local and global ones, many runs at a time.

Start with `glocal demo`. Every command has its own --help."""

INTERRUPTED = """interrupted. Finished work is in the store; run the same command again to resume: runs continue from
their last task, studies from their last finished measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, 2 after an error, 130 if it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _parse(arguments)()
    except GlocalError as error:
        return _print_error(str(error))
    except KeyboardInterrupt:
        _print_error(INTERRUPTED)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return 0


def _print_error(message: str) -> int:
    print(f"glocal: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parse(arguments: list[str]) -> Any:
    """Return the command with its arguments: a callable dataclass."""
    if arguments[:1] == ["--version"]:
        from glocal import __version__

        print(f"glocal {__version__}")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        return _tyro(_all_commands(), "glocal", arguments or ["--help"], description=DESCRIPTION)
    name, rest = arguments[0], arguments[1:]
    require_known("command", name, COMMANDS)
    if name == "paper" and rest and not rest[0].startswith("-"):
        from glocal.paper.experiments import EXPERIMENTS

        experiments = ("list", *EXPERIMENTS)
        require_known("experiment", rest[0], experiments)
    if name == "sweep" and (file := _value_of("--file", rest)) is not None:
        # Both --flag and --no-flag, so that a flag overrides the file in either direction.
        return _tyro(Sweep, "glocal sweep", rest, default=Sweep.from_file(Path(file)), flag_pairs=True)
    return _tyro(COMMANDS[name], f"glocal {name}", rest)


def _all_commands() -> Any:
    """Return the union of all commands, each described by its first line, for `glocal --help`."""
    kinds = []
    for name, kind in COMMANDS.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=summary)])
    return functools.reduce(operator.or_, kinds)


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of a flag before parsing: what follows '--file' or '--file='."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag:
            return following
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def _tyro(kind: Any, prog: str, arguments: list[str], flag_pairs: bool = False, **settings: Any) -> Any:
    """Parse arguments; the parser's framed error message becomes a GlocalError."""
    config = (tyro.conf.OmitArgPrefixes,) if flag_pairs else (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(kind, prog=prog, args=arguments, config=config, **settings)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise GlocalError(_one_line(stderr.getvalue())) from None


def _one_line(box: str) -> str:
    """Remove the frame from the parser's message."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if text and set(text) <= set("─-"):
            parts.append([])
        elif text and text[0] not in "╭╰":
            parts[-1].append(text)
    return "; ".join(" ".join(part) for part in parts if part) or "the command cannot be parsed; see glocal --help"


if __name__ == "__main__":
    sys.exit(main())
