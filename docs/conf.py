"""Settings of the documentation site, which `make docs` builds from the Markdown pages of this folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from glocal import __version__

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COPIES = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
"""Pages of the site that show files outside of this folder."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")

project, author, release = "glocal", "The glocal authors", __version__
project_copyright = f"2026, {author}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as GitHub names them
suppress_warnings = ["myst.header"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path, html_css_files = ["site.css"], ["site.css"]
html_extra_path = ["demo-report.html"]
html_title = f"glocal {release}"
html_math_renderer = "mathml"
html_show_sourcelink = html_copy_source = False
highlight_language = "text"
default_role = "code"  # what docstrings have in single backticks
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay on one screen; docstrings state what matters
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # methods are documented where a base class declares them
python_display_short_literal_types = True


def show_copies(app: Any, page: str, source: list[str]) -> None:
    """Put the text of a file outside of this folder into its page, and make links lead to pages of the site."""
    folder = (DOCS / page).parent
    if page in COPIES:
        folder = (ROOT / COPIES[page]).parent
        source[0] = (ROOT / COPIES[page]).read_text() + source[0]
    pages = {ROOT / name: DOCS / f"{copy}.md" for copy, name in COPIES.items()}

    def redirect(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups()
        target = (folder / path).resolve()
        if target.is_dir():  # the site has no folders
            return text
        link = os.path.relpath(pages.get(target, target), (DOCS / page).parent)
        return f"{image}[{text}]({link}{anchor or ''})"

    if page not in app.env.found_docs or app.env.doc2path(page).suffix != ".md":
        return
    parts = re.split(r"(^```.*?^```)", source[0], flags=re.DOTALL | re.MULTILINE)
    source[0] = "".join(part if part.startswith("```") else LINK.sub(redirect, part) for part in parts)


def convert_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring's Markdown: tables, indented code, and signs with another meaning."""
    result: list[str] = []
    previous, code, doctest = "", False, False  # the last line that is not empty, and whether these blocks go on
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not previous.startswith("    ") and i and not lines[i - 1]:
            code = True
            result += ["::", ""]
        code = code and (indented or not line)
        doctest = line.lstrip().startswith(">>>") or (doctest and bool(line))
        if line.startswith("|") and line.endswith("|"):
            if not previous.startswith("|"):
                result += [".. list-table::", "   :header-rows: 1", ""]
            if set(line) - set("|- "):
                cells = line.strip("| ").split(" | ")
                result += [f"   {'  ' if column else '* '}- {cell}" for column, cell in enumerate(cells)]
        elif code or doctest:
            result.append(line)
        else:
            parts = enumerate(line.split("`"))  # every second part is code
            result.append("`".join(part if i % 2 else re.sub(r"[\\*|]", r"\\\g<0>", part) for i, part in parts))
        previous = line or previous
    # Napoleon takes "text:" at the beginning of an attribute's docstring for its type; a comment comes first.
    lines[:] = ["..", "", *result] if what in ("attribute", "property") else result


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples without a docstring; their names are in the signature."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def visit_math(translator: Any, node: Any) -> None:
    """Write an equation as MathML, which needs no script from elsewhere."""
    block = isinstance(node, nodes.math_block)
    mathml = tex2mathml(node.astext(), as_block=block)
    # docutils puts the subscript of \hat L below it, instead of to its right.
    hat = r"<munderover>\s*(<mi>\w</mi>)(.*?)(<mo stretchy=\"false\">ˆ</mo>)\s*</munderover>"
    mathml = re.sub(hat, r"<msub><mover>\1\3</mover>\2</msub>", mathml, flags=re.DOTALL)
    translator.body.append(mathml)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("source-read", show_copies)
    app.connect("autodoc-process-docstring", convert_docstring, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
