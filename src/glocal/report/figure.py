"""Make and save figures: their look, their width, and files that do not change with the date."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from glocal.errors import require, require_known
from glocal.files import report_os_errors
from glocal.report.style import RC, require_figure, wrap

Look: TypeAlias = Literal["screen", "paper", "talk"]
SCALES: dict[str, float] = {"screen": 1.0, "paper": 0.85, "talk": 1.5}
"""Sizes of texts, lines and points, as multiples of those on a screen."""
SCALED = ("font.size", "axes.labelsize", "axes.titlesize", "figure.titlesize", "lines.linewidth", "lines.markersize")
MAX_WIDTH = 40.0
LEGEND_BELOW_RATIO = 0.85
"""Below this fraction of the panels' preferred width, the legend goes below the figure."""
LEGEND_MARGIN = 0.3
"""Inches by which a figure is higher than the legend beside its panels."""


class InlineFigure(Figure):
    """A figure that notebooks show."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def make_figure(
    draw: Callable[[Figure], None], dpi: int = 150, width: float | None = None, style: Look = "screen"
) -> InlineFigure:
    """Draw a figure.

    Args:
        draw: draws into the figure, whose width is the maximum available, and sets its preferred size.
        dpi: pixels per inch of a PNG file.
        width: inches, such as the width of a column; by default the panels' preferred width.
        style: 'paper' has smaller texts and thinner lines, 'talk' larger and thicker ones.
    """
    require(30 <= dpi <= 1200, f"dpi = {dpi} was given; it must be 30 to 1200.")
    require(width is None or 2 <= width <= MAX_WIDTH, f"width = {width} was given; it must be 2 to 40 inches.")
    require_known("style of a figure", style, SCALES)
    scale = SCALES[style]
    with matplotlib.rc_context(RC | {name: RC[name] * scale for name in SCALED}):
        figure = InlineFigure(figsize=((width or MAX_WIDTH) / scale, 4.0), layout="constrained", dpi=dpi)
        draw(figure)
        figure_width, height = scale * figure.get_size_inches()
        lines = 0
        if width is not None:
            share, figure_width = width / figure_width, width
            if share < LEGEND_BELOW_RATIO:
                lines = sum(_move_below(figure, legend, width) for legend in list(figure.legends))
            height = height * min(max(share, 0.85), 1.3) + 0.2 * scale * lines
        if not lines:  # the legend is beside the panels
            heights = (legend.get_window_extent().height / figure.dpi for legend in figure.legends)
            height = max([height, *(legend_height + LEGEND_MARGIN for legend_height in heights)])
        figure.set_size_inches(figure_width, height)
    return figure


def save_figure(
    draw: Callable[[Figure], None],
    path: str | Path,
    dpi: int = 150,
    width: float | None = None,
    style: Look = "screen",
) -> Path:
    """Draw a figure as `make_figure` does and save it, without a date, so that equal data give equal files."""
    path = require_figure(path)
    if path.suffix.lower() == ".pgf":
        tex = matplotlib.rcParams["pgf.texsystem"]
        message = f"a .pgf file needs LaTeX, and '{tex}' is not installed. Install it, or write a .pdf file."
        require(shutil.which(tex) is not None, message)
    dates = {".pdf": "CreationDate", ".svg": "Date"}
    options: dict[str, Any] = {"metadata": {dates[s]: None}} if (s := path.suffix.lower()) in dates else {}
    figure = make_figure(draw, dpi, width, style)
    with report_os_errors("write to", path), matplotlib.rc_context(RC):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **options)
        if path.suffix.lower() == ".pgf":  # Matplotlib leaves '_' in texts to a package that the document must load
            active = r"\catcode`\_=\active\def_{\ifmmode\sb\else\_\fi}"
            path.write_text(path.read_text().replace(r"\catcode`\^=\active", rf"{active}\catcode`\^=\active"))
    return path


def _move_below(figure: Figure, legend: Legend, width: float) -> int:
    """Put a legend below the panels and return the number of its lines."""
    texts = [" ".join(text.get_text().split()) for text in legend.get_texts()]
    note = wrap(" ".join(legend.get_title().get_text().split()), 0.9 * width)
    columns = max(1, int(width * 12 / (max(map(len, texts), default=0) + 8)))
    handles = [handle for handle in legend.legend_handles if handle is not None]
    options: dict[str, Any] = {"ncols": columns, "title": note, "alignment": "left", "handlelength": 2.8}
    figure.legend(handles, texts, loc="outside lower left", **options)
    legend.remove()
    return -(-len(texts) // columns) + len(note.split("\n"))
