"""Networks that start from a checkpoint: a whole network, or a part of it such as a backbone without its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from glocal.errors import GlocalError, require
from glocal.networks.model import MakeNetwork

MAX_LISTED = 4
"""Names that a message lists."""


@dataclass(frozen=True)
class Pretrained:
    """A function that makes networks which start from the tensors of a checkpoint, converted to the network's dtype."""

    make: MakeNetwork
    state: Mapping[str, Tensor]
    source: str

    def __call__(self, input_shape: Sequence[int], outputs: int) -> nn.Module:
        module = self.make(input_shape, outputs)
        load_state(module, self.state, self.source)
        return module


def load_state(module: nn.Module, state: Mapping[str, Any], source: str) -> list[str]:
    """Copy a state dict, or a part of one, into a network and return the names that it lacks.

    Names that the network does not have, and shapes that differ, are errors. Messages call the state dict `source`.
    """
    current, names = module.state_dict(), [str(name) for name in state]
    unknown = [name for name in names if name not in current]
    # As torch.compile, DataParallel and Lightning write them.
    starts = [names[0][: i + 1] for i, letter in enumerate(names[0]) if letter == "."] if names == unknown != [] else []
    prefix = next((start for start in starts if all(name.removeprefix(start) in current for name in names)), None)
    rename = f"{{k.removeprefix('{prefix}'): t for k, t in state.items()}}"
    require(prefix is None, f"the names in {source} begin with '{prefix}': give {rename}.")
    misfit = f"{source} does not fit the network"
    require(bool(names), f"{misfit}: it holds no tensors.")
    expected = f"the network has {list_names(list(current))}"
    require(not unknown, f"{misfit}: it has {list_names(unknown)}, and {expected}. Leave them out or rename them.")
    tensors = {k: t for k, t in state.items() if isinstance(t, Tensor) and isinstance(current[k], Tensor)}
    kinds = [k for k, t in tensors.items() if t.is_floating_point() != current[k].is_floating_point()]
    require(not kinds, f"{misfit}: {list_names(kinds)} must be floats where the network has floats.")
    try:
        missing = module.load_state_dict(state, strict=False).missing_keys
    except (RuntimeError, AttributeError) as error:  # AttributeError: values that are not tensors
        reason = str(error).strip().splitlines()[-1].strip()
        raise GlocalError(f"{misfit}: {reason}") from error
    loaded = {current[name].data_ptr() for name in tensors}  # tied ones have several names
    return [name for name in missing if not isinstance(current[name], Tensor) or current[name].data_ptr() not in loaded]


def list_names(names: Sequence[str]) -> str:
    """Return "'a', 'b'", and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED]) + more
