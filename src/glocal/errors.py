"""Errors that teach: what was given, what is allowed, what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GlocalError(Exception):
    """A mistake its maker can mend, told in one line. The command line prints it and exits with 2."""


def unknown(kind: str, given: object, allowed: Iterable[str]) -> GlocalError:
    """The error for a name that is not one of `allowed`: it names the nearest one, then all of them."""
    names = sorted(allowed)
    nearest = get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return GlocalError(f"unknown {kind} '{given}'.{hint} Allowed: {', '.join(names)}.")


def require(holds: bool, message: str) -> None:
    """Raise the message as an error unless its condition holds."""
    if not holds:
        raise GlocalError(message)
