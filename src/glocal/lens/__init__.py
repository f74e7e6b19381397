"""The lens: instruments that show why a run forgets. Each measures one definition or theorem of the paper.

`examine` looks at a training of one's own; the other instruments are in the files of their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glocal.lens.examination import Examination, examine

__all__ = ["Examination", "examine"]


def __getattr__(name: str) -> Any:
    """Loaded when it is used: the other instruments do not need it."""
    if name in __all__:
        from glocal.lens import examination

        return getattr(examination, name)
    raise AttributeError(f"module 'glocal.lens' has no attribute '{name}'")
