"""The device a benchmark is asked to run on."""

from __future__ import annotations

import torch

from glocal.errors import GlocalError
from glocal.sweeps.resolve import choose_device


def chosen(name: str) -> torch.device:
    """The device, or one line that says why not."""
    try:
        return choose_device(name)
    except GlocalError as error:
        raise SystemExit(str(error)) from None
