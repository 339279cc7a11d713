"""Pictures as inline SVG, and how all of them look.

Figures are drawn in placeholder colours that become CSS variables (``var(--dream)``), so one picture serves the light
and the dark page. Dream is blue and reality orange everywhere: two colours that all common kinds of colour blindness
keep apart (Okabe and Ito, 2008), and lines carry their names besides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from imagination.report.page import Plot

# placeholder -> CSS variable
COLOURS = {
    "#010101": "ink",
    "#020202": "muted",
    "#030303": "grid",
    "#040404": "dream",
    "#050505": "real",
    "#060606": "expert",
    "#070707": "paper",
}
INK, MUTED, GRID, DREAM, REAL, EXPERT, PAPER = COLOURS
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and in the font of the page
    "svg.hashsalt": "imagination",  # the same run gives the same bytes
    "font.size": 13.0,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
}
SHARES = ([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
styled = matplotlib.rc_context(STYLE)  # decorates what draws


def new_axes(x: str, y: str, *, wide: bool = False, share: bool = True) -> Axes:
    """The axes of a figure of half the page (``wide``) or of a third of it, named; ``share``: y runs from 0 to 1."""
    figure = Figure(figsize=(5.8, 3.3) if wide else (4.4, 2.8), layout="constrained")  # 72 units an inch
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", fontsize=13, color=MUTED)  # the unit lies above the axis: nobody tilts their head
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.02)
    if share:
        axes.set_ylim(0, 1.02)
        axes.set_yticks(*SHARES)
    return axes


def end_labels(axes: Axes, ends: Iterable[tuple[str, float, str]]) -> None:
    """Labels ``(text, y, colour)`` right of the axes, pushed apart where they would touch."""
    low, high = axes.get_ylim()
    gap, placed = 0.09 * (high - low), float("-inf")
    for text, y, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(y, placed + gap)
        axes.annotate(
            text, (1.0, placed), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
            va="center", color=colour, weight="bold", annotation_clip=False,
        )  # fmt: skip


def finished(axes: Axes, title: str, note: str, label: str = "") -> Plot:
    """The picture that was drawn on the axes. ``label``: for those who cannot see it; the title by default."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return Plot(title, note, _to_svg(figure, label or title), wide=figure.get_figwidth() > 5)


def _to_svg(figure: Figure, label: str) -> Markup:
    """The figure as an ``<svg>`` element that takes its colours and font from the page and scales with it."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|[A-Z]\w*Collection)_\d+"', "", svg
    )
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows SVG without, and a page without addresses calls nobody
    svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    svg = svg.replace("font-weight: ; ", "")
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    for placeholder, variable in COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    return Markup(re.sub(r"\n\s*", "\n", svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)).strip())
