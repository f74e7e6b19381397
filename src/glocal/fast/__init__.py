"""Optional accelerations, registered at the seams of `glocal.accelerate`. Delete this folder and everything works, only
slower."""

from glocal import accelerate

ACCELERATIONS: dict[str, str] = {}
"""Name at a seam -> "module:attribute"; nothing is imported before it is used."""


def register() -> None:
    for name, target in ACCELERATIONS.items():
        accelerate.register(name, target)
