"""The page's shell: it holds no data. Its script asks for them with the token, which stands in the address after `#`.

What stands there is never sent: not to a server, not as a referrer, into no log. A cookie would be, to every port of
this host, where other users of a login node listen.
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
"""Name -> what its button says. All but the last are of the steps that the daemon remembers."""

MARKS = """
  button { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--rule);
    border-radius: 4px; padding: .2rem .7rem; margin-right: .4rem; cursor: pointer; }
  button[aria-current], button[aria-pressed=true] { border-color: var(--s0); font-weight: 600; }
  button:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
  main > header { margin-top: .8rem; }  header h1 { margin: .4rem 0; }  header p { margin: .3rem 0; }
  header dl { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: .5rem 0; }
  dt { font-size: 12.5px; color: var(--muted); }
  dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
  .state { font-size: .9rem; font-weight: 600; padding: .15rem .6rem; border-radius: 1rem; border: 1px solid;
    vertical-align: middle; color: var(--muted); }
  .state.running { color: var(--s2); }  .state.stalled, .state.lost, .state.silent,
  .state.failed { color: var(--critical); }
  .stale .state { text-decoration: line-through; }  .stale header { opacity: .65; }
  header div[title] dt { text-decoration: underline dotted; cursor: help; }
  #filter label { margin-left: .4rem; white-space: nowrap; }
  #find { font: inherit; width: 9rem; color: var(--ink); background: var(--card);
    border: 1px solid var(--rule); border-radius: 4px; padding: .15rem .4rem; }
  header a { color: inherit; }  #views { display: inline; }
  #home { color: var(--ink); margin-right: .8rem; }  a#compare:not([href]) { color: var(--muted); }
  .runs .state { padding: 0 .5rem; white-space: nowrap; display: inline-block; max-width: 22rem; overflow: hidden;
    text-overflow: ellipsis; }
  .runs td[data-name=run] { min-width: 11rem; }
  .runs a { color: inherit; font-weight: 600; }  .runs small { color: var(--muted); }
  .runs .critical { color: var(--critical); }  .runs .warning { color: var(--warning); }
  .matrix { font: 13px/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; letter-spacing: .25em;
    overflow-wrap: anywhere; }
  .nodes:has(p + p) { columns: 20rem; }  .nodes p { margin: 0; }
  .matrix > span:first-child:not(.rank) { letter-spacing: 0; color: var(--muted); display: inline-block;
    min-width: 10rem; }
  .rank.silent, .rank.lost { color: var(--critical); font-weight: 700; }
  .bar { position: sticky; top: 0; z-index: 2; padding: .6rem 0; background: var(--paper); color: var(--muted); }
  .bar button { margin-bottom: .3rem; }  section[data-view] > h2 { margin-top: 1.2rem; }
  @media (max-width: 40rem) {
    .bar, .bar #tools { position: static; }  .runs, .runs tbody { display: block; }  .runs thead { display: none; }
    .runs tr { display: flex; flex-wrap: wrap; gap: 0 .8rem; border-bottom: 1px solid var(--rule); padding: .4rem 0; }
    .runs td { border: 0; padding: 0; }  .runs [data-name=step]::before, .runs [data-name=loss]::before,
    .runs [data-name=took]::before { content: attr(data-name) ' '; color: var(--muted); }
    .runs [data-name=run] { flex: 1; min-width: 0; overflow-wrap: anywhere; }
  }
  [hidden] { display: none !important; }
"""


def shell(style: str) -> str:
    """The HTML. `style`: the report's, which the live parts share."""
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
<style>{style}{charts.read_style()}{MARKS}</style>
</head>
<body>
<div class="bar"><a id="home">All runs</a> <nav id="views" aria-label="views" hidden>{views}</nav>
<button type="button" id="pause" aria-pressed="false">Pause</button><span id="note" role="status"></span>
<span id="answer" role="status"></span>
<span id="filter" role="group" aria-label="incidents" hidden><label>Incidents <input type="search" id="find"
placeholder="critical loss" title="Keys: / to filter, j and k to the next and the previous incident"></label>
<label><input type="checkbox" id="firing"> open</label> <span id="found" role="status"></span></span>
{charts.TOOLS}</div>
<main><p>Waiting for the daemon.</p></main>
{library}<script src="/charts.js"></script><script src="/page.js"></script>
</body>
</html>
"""
