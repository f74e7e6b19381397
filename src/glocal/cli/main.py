"""The `glocal` command: dispatch to a subcommand; an error is one line and exit code 2."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from glocal.cli.lens import Lens, Locality
from glocal.cli.list import Data, List
from glocal.cli.paper import Paper
from glocal.cli.show import Choose, Demo, Plot, Report, Table, Track, Verify
from glocal.cli.train import Run, Sweep, SweepFile
from glocal.cli.work import Status, Work
from glocal.errors import GlocalError, GlocalWarning, first_line, printable, require, require_known

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "list": List,
    "run": Run,
    "sweep": Sweep,
    "work": Work,
    "status": Status,
    "table": Table,
    "choose": Choose,
    "plot": Plot,
    "report": Report,
    "track": Track,
    "verify": Verify,
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


MAX_MESSAGE = 4_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, 2 after an error, 130 if it was interrupted."""
    with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.formatwarning = _format_warning
    if sys.stdout is None or sys.stderr is None:  # it was closed before Python started
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may not be able to print θ
            stream.reconfigure(errors="replace")
    try:
        command = _parse(list(sys.argv[1:] if arguments is None else arguments))
        try:
            _check_values(command)
            command()
        except (Exception, SystemExit) as error:
            if isinstance(error, GlocalError | OSError | MemoryError):
                raise
            if isinstance(error, RuntimeError) and re.search(
                "allocate|Storage size", first_line(error)
            ):  # torch's words
                raise MemoryError from error
            if not _report_user_error(error):
                raise
            return 2
        sys.stdout.flush()
    except GlocalError as error:
        return _print_error(str(error))
    except KeyboardInterrupt:
        _print_error(INTERRUPTED)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        return _print_error(f"cannot read or write '{error.filename or 'the output'}': {error.strerror or error}.")
    except MemoryError:
        return _print_error("not enough memory: use smaller numbers.")
    return 0


def _check_values(command: Any) -> None:
    """Raise an error for paths that cannot exist and for integers that do not fit into 64 bits."""
    from glocal.files import user_path

    for name, value in vars(command).items():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Path):
                user_path(part)
            if isinstance(part, int):
                require(
                    abs(part) < 2**63, f"{name} was given a number of {len(str(part))} digits; it must be below 2^63."
                )


def _report_user_error(error: BaseException) -> bool:
    """Print an error of code that the user gave, and the lines of this code; return False if it is not involved."""
    from glocal.sweeps.user_code import USER_MODULE, describe_error, user_frames

    user_files = [module.__file__ for name, module in sys.modules.items() if name.startswith(USER_MODULE)]
    if not user_files:
        return False
    frames = user_frames(error)
    hint = "" if frames else f" Check what the code in {', '.join(map(str, user_files))} returns."
    _print_error(f"{describe_error(error)}.{hint}")
    print("".join(traceback.StackSummary.from_list(frames).format()), end="", file=sys.stderr)
    return True


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of ours as a sentence, without the line of code that gave it."""
    place = "" if issubclass(category, GlocalWarning) else f"{filename}:{lineno}: {category.__name__}: "
    return f"glocal: {printable(f'{place}{message}')}\n"


def _print_error(message: str) -> int:
    message = printable(" ".join(message.split()))
    print(f"glocal: {message if len(message) < MAX_MESSAGE else message[:MAX_MESSAGE] + ' …'}", file=sys.stderr)
    return 2


def _parse(arguments: list[str]) -> Any:
    """Return the command with its arguments: a callable dataclass."""
    if arguments[:1] == ["--version"]:
        from glocal import __version__

        print(f"glocal {__version__}")
        raise SystemExit(0)
    if arguments[:1] == ["paper"]:
        return _parse_command(arguments[1:], Paper.commands, "glocal paper", Paper.__doc__)
    return _parse_command(arguments or ["--help"], COMMANDS, "glocal", DESCRIPTION)


def _parse_command(arguments: list[str], commands: Mapping[str, Any], prog: str, description: str | None) -> Any:
    if not arguments or arguments[0].startswith("-"):
        return _tyro(_union(commands), prog, arguments, description=description)
    name, rest = arguments[0], arguments[1:]
    require_known("command" if commands is COMMANDS else "experiment", name, commands)
    _refuse_repeated(commands[name], rest)
    if commands[name] is Sweep:
        sweep_file, _ = _tyro(SweepFile, "glocal sweep", rest, return_unknown_args=True, add_help=False)
        if sweep_file.file is not None:
            return _tyro(Sweep, "glocal sweep", rest, default=Sweep.from_file(sweep_file.file))
    return _tyro(commands[name], f"{prog} {name}", rest)


def _refuse_repeated(kind: Any, arguments: list[str]) -> None:
    """Raise an error if a flag is given twice, because only the last would count; values of some flags add up."""
    additive = {f"--{name}" for name, hint in get_type_hints(kind).items() if hint == tuple[tuple[str, ...], ...]}
    flags = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    for flag, count in Counter(flags).items():
        message = f"{flag} was given {count} times; give it once, with all its values behind it."
        require(count == 1 or flag in additive, message)


def _union(commands: Mapping[str, Any]) -> Any:
    """Return the type of one of several commands, for their summaries and the completion of their names."""
    kinds = []
    for name, kind in commands.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        if kind is Paper:
            kind = make_dataclass("Paper", [("experiment", _union(Paper.commands))])
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=summary)])
    return functools.reduce(operator.or_, kinds)


def _tyro(kind: Any, prog: str, arguments: list[str], **settings: Any) -> Any:
    """Parse arguments; the parser's framed error message becomes a GlocalError."""
    # Flags override a file in both directions, so with one there are both --flag and --no-flag.
    pairs = () if "default" in settings else (tyro.conf.FlagCreatePairsOff,)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, *pairs)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(kind, prog=prog, args=arguments, config=config, **settings)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    lines = re.sub(r"^[╭╰].*$", "", stderr.getvalue(), flags=re.MULTILINE)
    parts = re.split("[─-]{10,}", lines.replace("│", " "))
    raise GlocalError("; ".join(" ".join(part.split()) for part in parts if part.strip()))
