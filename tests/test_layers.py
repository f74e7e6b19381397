"""The package's layers: nothing imports what stands to its right, and the core does without `fast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LAYERS = (
    *(
        "errors",
        "hyperparameters",
        "files",
        "accelerate",
        "rng",
        "precision",
        "tree",
        "losses",
        "inputs",
        "challenges",
        "networks",
        "risk",
        "curvature",
    ),
    *("optimizers", "algorithms", "engine", "store", "metrics", "selection"),
    *("sweeps", "cluster", "lens", "report", "track", "paper", "cli"),
)
CORE = LAYERS[: LAYERS.index("lens") + 1]
CURVATURE_IMPORTS = {"curvature", "accelerate", "precision", "risk", "losses", "tree", "errors", "inputs", "networks"}

KNOWN_VIOLATIONS: set[tuple[str, str]] = set()
"""(importer, imported) that are still to be removed. Remove the entry with the import; add none."""
KNOWN_FAST_IMPORTS: set[str] = set()
"""Folders of the core that still import `fast`."""
KNOWN_CURVATURE_IMPORTS: set[str] = set()
"""What `curvature` still imports beyond its list."""
KNOWN_CYCLES: set[str] = set()
"""Folders in which modules still import each other in a circle; '' is between folders."""


class Import(NamedTuple):
    importer: str
    imported: str
    inside_function: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def layer(module: str) -> str:
    """Return the folder or top-level file of a module: 'engine' for glocal.engine.loop, '' for glocal itself."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(module: str) -> Iterator[Import]:
    """Yield the package's modules that a module imports, also under TYPE_CHECKING and inside functions."""

    def visit(node: ast.AST, inside_function: bool) -> Iterator[Import]:
        inside_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in members]
        for name in dict.fromkeys(names):
            if name in MODULES and name != module:
                yield Import(module, name, inside_function)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside_function)

    yield from visit(ast.parse(MODULES[module].read_text()), False)


IMPORTS = [found for module in MODULES for found in imports_of(module)]
AT_MODULE_LEVEL = [found for found in IMPORTS if not found.inside_function]


def test_every_module_has_a_layer() -> None:
    assert {layer(module) for module in MODULES} - {"", "__main__", "fast"} <= set(LAYERS)


def test_nothing_imports_what_stands_to_its_right() -> None:
    wrong = {
        (layer(importer), layer(imported))
        for importer, imported, _ in AT_MODULE_LEVEL
        if layer(importer) in LAYERS
        and layer(imported) in LAYERS
        and LAYERS.index(layer(imported)) > LAYERS.index(layer(importer))
    }
    assert wrong == KNOWN_VIOLATIONS


def test_the_core_never_imports_fast() -> None:
    """Not inside functions either: `fast` registers itself."""
    assert {
        layer(importer) for importer, imported, _ in IMPORTS if layer(imported) == "fast" and layer(importer) in LAYERS
    } == KNOWN_FAST_IMPORTS


def test_curvature_imports_little() -> None:
    imported = {layer(found.imported) for found in IMPORTS if layer(found.importer) == "curvature"}
    assert imported - CURVATURE_IMPORTS - {"fast"} == KNOWN_CURVATURE_IMPORTS


@pytest.mark.parametrize("folder", ["", *sorted({layer(module) for module in MODULES} - {"", "__main__"})])
def test_no_import_cycles(folder: str) -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported, _ in AT_MODULE_LEVEL:
        if not folder and layer(importer) != layer(imported) and layer(importer) and layer(imported):
            graph.setdefault(layer(importer), set()).add(layer(imported))
        elif folder and layer(importer) == layer(imported) == folder:
            graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        assert folder in KNOWN_CYCLES, error.args[1]
    else:
        assert folder not in KNOWN_CYCLES


def test_the_core_imports_with_torch_numpy_and_safetensors_alone() -> None:
    blocked = [
        "tyro",
        "msgspec",
        "polars",
        "rich",
        "matplotlib",
        "PIL",
        "mlxtend",
        "scipy",
        "pandas",
        "sklearn",
        "pyarrow",
    ]
    core = [module for module in MODULES if layer(module) in CORE]
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport importlib\n"
    code += f"for module in {core}: importlib.import_module(module)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
