"""The code that draws interactive charts in a browser: uPlot, if it was fetched, and our script that uses it."""

from __future__ import annotations

from importlib import resources

from sentinel.web import fetch_charts

COMMAND = "python -m sentinel.web.fetch_charts"
MISSING = f"Interactive charts are missing: <code>{COMMAND}</code> brings them."
"""HTML of a note in place of the charts."""
TOOLS = """<div id="tools" role="group" aria-label="all charts" hidden>
<button type="button" data-way="left" title="to earlier steps">\u2190</button
><button type="button" data-way="right" title="to later steps">\u2192</button
><button type="button" data-way="in" title="closer">+</button
><button type="button" data-way="out" title="farther">\u2212</button
><button type="button" data-way="all">All steps</button>
<label>Smoothing <select id="smooth"><option value="">none</option><option value="10">10 steps</option>
<option value="50">50 steps</option><option value="200">200 steps</option><option value="1000">1,000 steps</option>
</select></label></div>"""
"""HTML of the controls that apply to all charts at once."""
STYLE = (resources.files("sentinel.web") / "style.css").read_text(encoding="utf-8")
"""CSS of page and report, light or dark by the browser's setting; still charts need no more."""
SCRIPT = (resources.files("sentinel.web") / "charts.js").read_text(encoding="utf-8")


def is_present() -> bool:
    """Whether the library is installed. It may be fetched while a daemon runs."""
    return all((fetch_charts.FOLDER / name).is_file() for name in (fetch_charts.SCRIPT, fetch_charts.STYLE))


def read_library() -> str:
    """Return the library's JavaScript. Raises OSError if it is missing."""
    return (fetch_charts.FOLDER / fetch_charts.SCRIPT).read_text(encoding="utf-8")


def read_style() -> str:
    """Return the CSS of a page, with that of the library if it is installed."""
    return STYLE + ((fetch_charts.FOLDER / fetch_charts.STYLE).read_text(encoding="utf-8") if is_present() else "")
