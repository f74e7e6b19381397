"""Errors that users can correct. A message says what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class GlocalError(Exception):
    """An error that the user can correct. The command line prints its message and exits with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return text for a terminal: control characters, which could move the cursor or hide text, are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class GlocalWarning(UserWarning):
    """Something that the user should know, after which the work goes on."""


def unknown(kind: str, given: object, allowed: Iterable[str]) -> GlocalError:
    """Return the error for a name that is not in `allowed`; it suggests the nearest one and lists all."""
    names = sorted(allowed)
    nearest = get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return GlocalError(f"unknown {kind} '{given}'.{hint} Allowed: {', '.join(names)}.")


def require_known(kind: str, given: object, allowed: Collection[str]) -> None:
    """Raise `unknown(...)` if a name is not in `allowed`."""
    if not isinstance(given, str) or given not in allowed:
        raise unknown(kind, given, allowed)


def require(condition: bool, message: str) -> None:
    """Raise a GlocalError with this message unless the condition holds."""
    if not condition:
        raise GlocalError(message)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    try:
        message = str(error).strip()
    except Exception:  # a user's class of errors may fail here too
        message = ""
    return (message or type(error).__name__).splitlines()[0]
