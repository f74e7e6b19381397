"""Run the code of the pages in docs/tutorials, and write what it prints and draws into them.

    python docs/tutorials.py [PAGE ...]        about half a minute on a CPU

What a Python block prints goes to the block without a language below it. A figure that a page PAGE.md shows as
../images/PAGE-NAME.png is the file NAME.png that its code wrote.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BLOCK = re.compile(r"^(```python\n(.*?)^```\n)(?:\n```\n.*?^```\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    torch.set_num_threads(1)
    for page in [Path(name).resolve() for name in sys.argv[1:]] or sorted((HERE / "tutorials").glob("*.md")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page.write_text(run(page.read_text()))
            for figure in re.findall(rf"\.\./images/{page.stem}-(\S+\.png)", page.read_text()):
                shutil.copy(figure, HERE / "images" / f"{page.stem}-{figure}")


def run(text: str) -> str:
    """Return the text of a page with the output of its code."""
    namespace: dict[str, Any] = {"__name__": "__main__"}

    def execute(match: re.Match[str]) -> str:
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(compile(match[2], "page", "exec", dont_inherit=True), namespace)
        output = "\n".join(line.rstrip() for line in stdout.getvalue().splitlines())
        return match[1] + (f"\n```\n{output}\n```\n" if output else "")

    return BLOCK.sub(execute, text)


if __name__ == "__main__":
    main()
