'use strict';
// What stands behind the # is never sent anywhere by the browser. charts.js reads it; the token goes into the header of our
// own requests.
const live = document.getElementById('run');
const whole = document.getElementById('whole');
const views = document.getElementById('views');
const note = document.getElementById('note');
const answer = document.getElementById('answer');
const pause = document.getElementById('pause');
const FOCUSABLE = 'a[href], button, summary, [tabindex]';
const OFTEN = 2000, SELDOM = 60000;  // ms between two requests: of a run that goes on, of one that says nothing new
let chosen = '', view = 'all', paused = false, pressed = false;
let wait = OFTEN, timer = 0, silentSince = '';

async function asked(path, method = 'GET') {
  const response = await fetch(path, {method, headers: {Authorization: 'Bearer ' + token}});
  if (response.status === 401) throw new Error('This address lacks the token: `sentinel page` prints the whole one.');
  if (response.status >= 500) throw new Error(`The daemon failed (HTTP ${response.status}); its log says why.`);
  return response.text();
}

// What was shown stays. It is said once: each request that fails writes a line into the browser's console.
function silent(error) {
  if (!(error instanceof TypeError)) {
    note.textContent = error.message;
    return;
  }
  if (silentSince) return;
  silentSince = new Date().toLocaleTimeString();
  const run = live.querySelector('[data-id]')?.dataset.id;
  note.textContent = `The daemon does not answer since ${silentSince}: its run has ended, or it is being restarted. ` +
    (run ? `All of the run: \`sentinel page ${run}\`, or as a file: \`sentinel report ${run}\`.` : '');
  document.body.classList.add('stale');
}

function answered() {
  silentSince = '';
  document.body.classList.remove('stale');
}

async function refresh() {
  clearTimeout(timer);
  try {
    if (!paused && !document.hidden && view !== 'whole') await update();
  } finally {
    clearTimeout(timer);
    timer = setTimeout(refresh, wait);
  }
}

async function update() {
  const run = chosen;
  let text;
  try {
    text = await asked('/live?run=' + encodeURIComponent(run));
  } catch (error) {
    wait = Math.min(2 * wait, SELDOM);
    silent(error);
    return;
  }
  // What is under the pointer must be there when it is released; and an answer may come after another run was chosen.
  if (pressed || paused || run !== chosen) return;
  answered();
  note.textContent = 'Live. ' + new Date().toLocaleTimeString();
  keepingPlace(() => {
    live.innerHTML = text;
    draw(live);
  });
  const ended = live.querySelector('[data-state=ended]');
  wait = ended ? Math.min(2 * wait, SELDOM) : OFTEN;
  if (ended) note.textContent = '';
  show();
}

function refreshNow() {
  wait = OFTEN;
  refresh();
}

// What is open stays open, and the keyboard stays where it is: on the n-th of those that lead to the same.
function keepingPlace(change) {
  const key = found => found.dataset.run || found.id || found.getAttribute('href') || found.textContent;
  const alike = name => [...live.querySelectorAll(FOCUSABLE)].filter(found => key(found) === name);
  const open = [...live.querySelectorAll('details[open] > summary')].map(key);
  const focus = live.contains(document.activeElement) ? document.activeElement : null;
  const name = focus && key(focus), nth = focus ? alike(name).indexOf(focus) : -1;
  change();
  for (const summary of live.querySelectorAll('details > summary'))
    if (open.includes(key(summary))) summary.parentElement.open = true;
  if (focus) alike(name)[nth]?.focus({preventScroll: true});
}

function show() {
  live.hidden = view === 'whole';
  whole.hidden = view !== 'whole';
  for (const section of live.querySelectorAll('section[data-view]'))
    section.hidden = view !== 'all' && section.dataset.view !== view;
  document.title = live.querySelector('[data-title]')?.dataset.title ?? 'Sentinel';
  for (const button of views.children) button.setAttribute('aria-pressed', String(button.dataset.view === view));
}

function draw(root) {
  if (window.uPlot) drawCharts(root);
  else if (root.querySelector('figure[data-plot]')) note.textContent = 'Interactive charts are there now: load this page again.';
}

document.addEventListener('incident', () => {
  if (view === 'whole' || view === 'all') return;
  view = 'all';
  show();
});

async function readWhole() {
  whole.textContent = 'Reading the history.';
  note.textContent = '';
  try {
    whole.innerHTML = await asked('/whole?run=' + encodeURIComponent(chosen));
    draw(whole);
  } catch (error) {
    whole.textContent = '';
    silent(error);
  }
}

views.addEventListener('click', event => {
  const button = event.target.closest('[data-view]');
  if (!button) return;
  view = button.dataset.view;
  show();
  if (view === 'whole') readWhole();
  else refreshNow();
});

document.addEventListener('click', async event => {
  const run = event.target.closest('[data-run]');
  if (run) {
    chosen = run.dataset.run;
    refreshNow();
  } else if (event.target.id === 'reload') {
    try {
      answer.textContent = await asked('/-/reload', 'POST');
    } catch (error) {
      silent(error);
    }
  }
});

pause.addEventListener('click', () => {
  paused = !paused;
  pause.textContent = paused ? 'Go on' : 'Pause';
  pause.setAttribute('aria-pressed', String(paused));
  if (paused) note.textContent = 'Paused.';
  refreshNow();
});
document.addEventListener('visibilitychange', refreshNow);
document.addEventListener('pointerdown', () => { pressed = true; });
for (const end of ['pointerup', 'pointercancel']) document.addEventListener(end, () => { pressed = false; });
show();
refresh();
