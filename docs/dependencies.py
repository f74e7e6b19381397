"""Generate docs/dependencies.md: the packages that `make` installs, their licences and what needs them.

python docs/dependencies.py
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
LICENCES = {
    *(
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
    ),
    *(
        "ISC",
        "LGPL-2.1-or-later",
        "LGPL-3.0-or-later",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Public Domain",
        "Zlib",
    ),
}
"""Licences that a dependency may have: it may be used and passed on with glocal, whatever glocal's licence is."""
NAMES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 3-Clause": "BSD-3-Clause",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""How metadata without a licence expression name them."""
TEMPLATE = """# Dependencies

`make` installs these packages on Linux, at the versions and with the hashes of [requirements.txt](../requirements.txt),
and for the tests those of [requirements-test.txt](../requirements-test.txt). torch alone has no hash there, because
its builds for CPUs and GPUs differ; a build for CUDA brings NVIDIA's libraries, under NVIDIA's licence. The licences
are those that the packages' metadata state. `make lock` renews both files, and `python docs/dependencies.py` this page.

| package | version | licence | needed by |
|---|---|---|---|
{rows}
"""


def pinned() -> dict[str, str]:
    """Return the versions of requirements-test.txt for this machine, and that of torch from the Makefile."""
    lines = re.findall(r"^([a-z0-9][^\\]*)\\?$", (ROOT / "requirements-test.txt").read_text(), re.MULTILINE)
    lines += re.findall(r"torch==\d\S*", (ROOT / "Makefile").read_text())
    requirements = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]
    return {r.name: str(r.specifier).removeprefix("==") for r in requirements}


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of all packages that requirements ask for on this machine, without the libraries of CUDA."""
    glocal_extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(text, frozenset[str]()) for text in requirements]
    while waiting:
        text, parent_extras = waiting.pop()
        requirement = Requirement(text)
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *parent_extras)
        )
        if not applies or (name, extras) in seen or name.startswith(("nvidia-", "cuda-")):
            continue
        seen.add((name, extras))
        dependencies = (
            [t for extra in extras for t in glocal_extras[extra]] if name == "glocal" else distribution(name).requires
        )
        waiting += [(text, extras) for text in dependencies or []]
    return {name for name, _ in seen} - {"glocal"}


def needed() -> dict[str, str]:
    """Return all packages and what needs them: glocal itself, one of its extras, or its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kinds = {"glocal": project["dependencies"], **project["optional-dependencies"]}
    kinds["test"] = [*kinds.pop("test"), "setuptools"]
    return {name: kind for kind in reversed(kinds) for name in sorted(closure(kinds[kind]))}


def licence(name: str) -> str:
    """Return the licence that a package's metadata state."""
    metadata = distribution(name).metadata
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    texts = [metadata.get("License-Expression"), metadata.get("License"), *classifiers]
    short = [text for text in texts if text and len(text) < 120 and "\n" not in text]
    return NAMES.get(short[0], short[0]) if short else "unknown"


def allowed(licence: str) -> bool:
    """Return whether all parts of a licence expression are allowed."""
    return all(part.strip("() ") in LICENCES for part in re.split(" AND | OR ", licence))


def page() -> str:
    versions = pinned()
    rows = [f"| {name} | {versions[name]} | {licence(name)} | {kind} |" for name, kind in sorted(needed().items())]
    return TEMPLATE.format(rows="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(page())
