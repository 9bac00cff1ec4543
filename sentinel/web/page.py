"""The page's shell: it holds no data. The script asks for them with the token, which stands in the address after `#`.

What stands there is never sent: not to a server, not as a referrer, into no log. A cookie would be, to every port of
this host, where other users of a login node listen.
"""

from __future__ import annotations

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

SCRIPT = """'use strict';
const token = location.hash.slice(1);
const place = document.getElementById('run');
const note = document.getElementById('note');
let chosen = '', paused = false;

async function refresh() {
  if (paused || document.hidden) return;
  try {
    const headers = {Authorization: 'Bearer ' + token};
    const answer = await fetch('/live?run=' + encodeURIComponent(chosen), {headers});
    if (answer.status === 401) {
      note.textContent = 'This address lacks the token: `sentinel page` prints the whole one.';
      return;
    }
    const open = [...place.querySelectorAll('details[open] > summary')].map(summary => summary.textContent);
    const focus = document.activeElement?.dataset?.run;
    place.innerHTML = await answer.text();
    for (const summary of place.querySelectorAll('details > summary'))
      if (open.includes(summary.textContent)) summary.parentElement.open = true;
    if (focus) place.querySelector('[data-run="' + CSS.escape(focus) + '"]')?.focus();
    note.textContent = 'Live. ' + new Date().toLocaleTimeString();
  } catch (error) {
    note.textContent = 'The daemon does not answer: its run has ended, or it is being restarted.';
  }
}

place.addEventListener('click', event => {
  const run = event.target.closest('[data-run]');
  if (run) { chosen = run.dataset.run; refresh(); }
});
document.getElementById('pause').addEventListener('click', event => {
  paused = !paused;
  event.target.textContent = paused ? 'Go on' : 'Pause';
  event.target.setAttribute('aria-pressed', String(paused));
  refresh();
});
document.addEventListener('visibilitychange', refresh);
refresh();
setInterval(refresh, 2000);
"""

MARKS = """
  nav button, #pause { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--rule);
    border-radius: 4px; padding: .2rem .7rem; margin-right: .4rem; cursor: pointer; }
  nav button[aria-current] { border-color: var(--s0); font-weight: 600; }
  button:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
  .alarm { color: var(--critical); font-weight: 600; }
  .matrix { font: 13px/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; letter-spacing: .25em;
    overflow-wrap: anywhere; }
  .rank.silent, .rank.lost { color: var(--critical); font-weight: 700; }
  .bar { display: flex; gap: 1rem; align-items: baseline; color: var(--muted); }
"""


def shell(style: str) -> str:
    """The HTML. `style`: the report's, which the live parts share."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>Sentinel</title>
<style>{style}{MARKS}</style>
</head>
<body>
<div class="bar"><button type="button" id="pause" aria-pressed="false">Pause</button><span id="note" role="status">
</span></div>
<main id="run"><p>Waiting for the daemon.</p></main>
<script src="/page.js"></script>
</body>
</html>
"""
