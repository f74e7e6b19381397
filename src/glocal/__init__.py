"""glocal: continual learning in PyTorch, by local and global approximations of the losses of past tasks."""

import os

# Set before the first matrix product, unless the user has set it: with it MKL rounds a product the same alone and in a
# batch, so that a run does not depend on its cohort.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from glocal.errors import GlocalError

__version__ = "0.2.0"

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm, Batch, Step
    from glocal.challenges import Challenge, from_tasks
    from glocal.store.run import Runs
    from glocal.store.store import load
    from glocal.sweeps.options import SweepOptions
    from glocal.sweeps.sweep import sweep

_MODULES = {
    "glocal.algorithms": ("Algorithm", "Batch", "Step"),
    "glocal.challenges": ("Challenge", "from_tasks"),
    "glocal.store.run": ("Runs",),
    "glocal.store.store": ("load",),
    "glocal.sweeps.options": ("SweepOptions",),
    "glocal.sweeps.sweep": ("sweep",),
}

__all__ = [
    "Algorithm",
    "Batch",
    "Challenge",
    "GlocalError",
    "Runs",
    "Step",
    "SweepOptions",
    "__version__",
    "from_tasks",
    "load",
    "sweep",
]


with suppress(ImportError):  # without that folder everything works, only slower
    import glocal.fast

    glocal.fast.register()


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `glocal --help` does not wait for PyTorch."""
    if name in ("curvature", "lens"):
        return import_module(f"glocal.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'glocal' has no attribute '{name}'")
