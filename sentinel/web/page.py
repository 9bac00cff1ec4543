"""The page's shell, without data. Its script requests the data with the token, which is in the address after `#`.

What follows `#` is never sent: not to a server, not as a referrer, into no log. A cookie would be sent to every port of
this host, where other users of a login node may listen.
"""

from __future__ import annotations

from importlib import resources

from sentinel.web import charts

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

SCRIPT = (resources.files("sentinel.web") / "page.js").read_text(encoding="utf-8")
VIEWS = {
    "all": "Overview",
    "curves": "Curves",
    "incidents": "Incidents",
    "layers": "Layers",
    "ranks": "Ranks",
    "gpus": "GPUs",
    "rules": "Rules",
    "run": "About",
    "whole": "Full history",
}
"""The views by name, with the words on their buttons. All but the last show the steps in the daemon's memory."""

STYLE = (resources.files("sentinel.web") / "page.css").read_text(encoding="utf-8")


def shell() -> str:
    """Return the HTML of the shell."""
    library = '<script src="/uplot.js"></script>' if charts.is_present() else ""
    views = "".join(f'<button type="button" data-view="{name}">{words}</button>' for name, words in VIEWS.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>Sentinel</title>
<style>{charts.read_style()}{STYLE}</style>
</head>
<body>
<div class="bar"><a id="home">All runs</a> <nav id="views" aria-label="views" hidden>{views}</nav>
<button type="button" id="pause" aria-pressed="false">Pause</button>
<span id="filter" role="group" aria-label="incidents" hidden><label>Incidents <input type="search" id="find"
placeholder="critical loss" title="Keys: / to filter, j and k to the next and the previous incident"></label>
<label><input type="checkbox" id="firing"> open</label> <span id="found" role="status"></span></span>
{charts.TOOLS}
<span id="note" role="status"></span><span id="moment"></span><span id="answer" role="status"></span></div>
<main><p>Waiting for the daemon.</p></main>
{library}<script src="/charts.js"></script><script src="/page.js"></script>
</body>
</html>
"""
