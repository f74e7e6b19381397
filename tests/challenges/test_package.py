"""The package as a whole: its documented example runs, its public names exist, and it imports few libraries."""

from __future__ import annotations

import doctest
import subprocess
import sys

from glocal import challenges


def test_the_documented_examples_run() -> None:
    for module, examples in ((challenges, 8), (sys.modules["glocal.challenges.from_tasks"], 4)):
        results = doctest.testmod(module)
        assert results.attempted >= examples
        assert results.failed == 0


def test_public_names_exist() -> None:
    assert all(hasattr(challenges, name) for name in challenges.__all__)


def test_importing_needs_only_torch_numpy_and_safetensors() -> None:
    others = ("mlxtend", "pandas", "PIL", "rich", "tyro", "polars", "msgspec", "matplotlib", "requests")
    code = f"import sys, glocal.challenges\nprint([name for name in {others} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
