"""What is installed: pinned versions, allowed licences, a page that lists them, and nothing that calls the network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
AUDITED = """
import sys
calls = []
sys.addaudithook(lambda event, args: calls.append((event, args)) if event in {
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"} else None)

from glocal.cli.main import main

store = sys.argv[1] + "/store"
tiny = ["--tasks", "2", "--epochs", "1", "--batch-size", "500", "--lrs", "0.1", "--seeds", "1"]
assert main(["sweep", "rotated-digits", "--algorithms", "er", "ewc", *tiny, "--store", store]) == 0
assert main(["table", store]) == 0
assert main(["plot", store, "-o", sys.argv[1] + "/plot.png"]) == 0
assert main(["report", store, "-o", sys.argv[1] + "/report.html"]) == 0
assert not calls, calls

import socket
try:
    socket.create_connection(("127.0.0.1", 9), timeout=0.1)
except OSError:
    pass
assert calls, "the hook hears connections"
"""


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "docs" / "dependencies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


@pytest.mark.parametrize("name", sorted(SCRIPT.needed()))
def test_a_package_is_pinned_and_its_licence_allowed(name: str) -> None:
    assert version(name).partition("+")[0] == SCRIPT.pinned()[name], "run make, or make lock if pyproject.toml changed"
    assert SCRIPT.allowed(SCRIPT.licence(name)), SCRIPT.licence(name)


def test_only_what_is_needed_is_pinned() -> None:
    assert SCRIPT.pinned().keys() == SCRIPT.needed().keys(), "run make lock"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch for CUDA needs triton")
def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "dependencies.md").read_text() == SCRIPT.page(), "run python docs/dependencies.py"


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "MIT AND AGPL-3.0-only", "unknown"])
def test_other_licences_are_refused(licence: str) -> None:
    assert not SCRIPT.allowed(licence)


@pytest.mark.slow
def test_nothing_calls_the_network(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AUDITED, str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
