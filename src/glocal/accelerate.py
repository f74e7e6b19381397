"""Optional accelerations: faster code that may stand in for plain PyTorch in two places.

The core computes everything with plain PyTorch and never imports `glocal.fast`. In two places it asks here for
something faster, by name:

- ``step.*``: compile a training step, e.g. trace it or capture it in a CUDA graph (used by `glocal.engine`);
- ``layers.*``: layers of stacked networks (used by `glocal.networks`).

`import glocal` registers what is in `glocal.fast`. Without that folder nothing is registered, and everything works,
only slower.

An acceleration of a function takes the same arguments and returns the same result, or `NotImplemented` for arguments
that it does not accelerate (another device, dtype or size):

>>> @accelerated("layers.example")
... def double(x):
...     return x + x
>>> double(2)
4
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pkgutil import resolve_name
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_targets: dict[str, str] = {}
_load = cache(resolve_name)


def register(name: str, target: str) -> None:
    """Register an acceleration: `target` is "module:attribute", imported when it is first used."""
    _targets[name] = target


def find(name: str) -> Callable[..., Any] | None:
    """Return the acceleration registered under this name, or None."""
    return _load(_targets[name]) if name in _targets else None


def accelerated(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a plain function: use the acceleration of this name where one is registered and applies."""

    def decorate(plain: Callable[P, R]) -> Callable[P, R]:
        @wraps(plain)
        def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
            fast = find(name)
            result = NotImplemented if fast is None else fast(*args, **kwargs)
            return plain(*args, **kwargs) if result is NotImplemented else result

        return dispatch

    return decorate
