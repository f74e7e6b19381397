"""Tensors that took long to make, kept on disk: a safetensors file that holds the SHA-256 of what is in it.

A file that is damaged, or was made from something else, counts as absent: it is made again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glocal.challenges.disk import writing

ELSEWHERE = "set XDG_CACHE_HOME to a writable folder"


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().reshape(-1).data)
    return digest.hexdigest()


def keep(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write the file in one move: whoever reads at the same time sees the old one, or none, or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with writing(path, ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with writing(path, ELSEWHERE):
            try:
                save_file(dict(tensors), part, {**about, "sha256": _checksum(tensors)})
            except SafetensorError as error:  # How safetensors reports a full disk.
                raise OSError(str(error)) from error
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def kept(path: Path, about: Mapping[str, str]) -> dict[str, Tensor] | None:
    """The tensors in the file, if it is whole and about this."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            said = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return None
    return tensors if said == {**about, "sha256": _checksum(tensors)} else None
