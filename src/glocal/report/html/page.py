"""Write the page: the template with its style, its script, the JavaScript of Vega-Lite, and the data as JSON."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from glocal import __version__
from glocal.errors import GlocalError
from glocal.files import report_os_errors, user_path
from glocal.report.html import content
from glocal.report.html.content import Examined, StoreContent
from glocal.report.summary import DEFAULT_VIEW, results_table, summarize, trend_tables, trends
from glocal.sweeps.command import sweep_commands

FOLDER = Path(__file__).parent


def write_report(stores: Sequence[StoreContent], path: str | Path, lens: Sequence[Examined] = ()) -> Path:
    """Write the page of one or two stores, with results of the lens, and return its path."""
    path, text = user_path(path), render_page(stores, lens)
    with report_os_errors("write to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def render_page(stores: Sequence[StoreContent], lens: Sequence[Examined] = ()) -> str:
    """Return the page as text. It loads nothing, as its content security policy enforces."""
    try:
        import jinja2
        from markupsafe import Markup

        from glocal.report.html.charts import specifications
    except ImportError as error:
        raise GlocalError("`glocal report` needs altair and jinja2: pip install 'glocal[report]'.") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    environment.filters["consecutive"] = lambda columns: [
        (g, [*members]) for g, members in groupby(columns, attrgetter("group"))
    ]
    groups = content.joined_groups(stores)
    data: dict[str, Any] = {"charts": specifications(), **content.chart_data(stores)}
    notes: list[str] = []
    if len(stores) == 2:
        notes, data["changes"] = content.changes(*stores)
    if lens:
        data["lens"] = [examined.data() for examined in lens]
    script = (FOLDER / "page.js").read_text("utf-8")
    return environment.get_template("page.html").render(
        stores=[
            (store, content.overview(store), content.problems(store), sweep_commands(store.runs)) for store in stores
        ],
        title=" and ".join(store.name for store in stores),
        lead=content.lead(groups),
        version=__version__,
        results=results_table([summarize(group) for group in groups]),
        trends=trend_tables(trends(groups, DEFAULT_VIEW)),
        families={f"{group.algorithm} ({group.locality})": content.family(group.runs[0]) for group in groups},
        notes=notes,
        changes=content.change_table(data.get("changes", [])),
        lens=lens,
        data=data,
        style=Markup((FOLDER / "page.css").read_text("utf-8")),
        scripts=[Markup(vega()), Markup(script)],
        hashes=[_source_hash(vega()), _source_hash(script)],
    )


@cache
def vega() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed, which vl-convert carries."""
    try:
        from vl_convert import javascript_bundle
    except ImportError as error:
        raise GlocalError("`glocal report` needs vl-convert-python: pip install 'glocal[report]'.") from error
    return str(javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def _source_hash(script: str) -> str:
    """Return how a content security policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
