"""Keep freed memory at hand while a cohort trains on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


@cache
def keep_freed_memory() -> None:
    """Tell glibc not to hand large blocks back to the system after every step.

    A step of a cohort allocates tensors of tens of megabytes and frees them again; by default their pages are given
    back and faulted in anew every time, which costs a tenth of the step. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 1 << 26)
