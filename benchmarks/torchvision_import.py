"""Import torchvision with a PyTorch that its compiled operators were not built for; none of them is used here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_compiled_operators() -> Iterator[None]:
    """Skip the registration of torchvision's compiled operators while it is imported."""
    register_fake = torch.library.register_fake

    def patched(op: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register_fake(op, *args, **kwargs)

    torch.library.register_fake = patched
    try:
        yield
    finally:
        torch.library.register_fake = register_fake
