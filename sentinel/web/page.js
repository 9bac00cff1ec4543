'use strict';
// What stands behind the # is never sent anywhere by the browser: here it goes into the header of our own requests.
const token = location.hash.slice(1);
const live = document.getElementById('run');
const whole = document.getElementById('whole');
const views = document.getElementById('views');
const note = document.getElementById('note');
const answer = document.getElementById('answer');
const pause = document.getElementById('pause');
const FOCUSABLE = 'a[href], button, summary, [tabindex]';
let chosen = '', view = 'all', paused = false, pressed = false;

async function asked(path, method = 'GET') {
  const response = await fetch(path, {method, headers: {Authorization: 'Bearer ' + token}});
  if (response.status === 401) throw new Error('This address lacks the token: `sentinel page` prints the whole one.');
  return response.text();
}

function silent(error) {
  note.textContent = error instanceof TypeError
    ? 'The daemon does not answer: its run has ended, or it is being restarted.' : error.message;
}

async function refresh() {
  if (paused || document.hidden || view === 'whole') return;
  try {
    const text = await asked('/live?run=' + encodeURIComponent(chosen));
    if (pressed) return;  // what is under the pointer must be there when it is released
    keepingPlace(() => { live.innerHTML = text; });
    show();
    note.textContent = 'Live. ' + new Date().toLocaleTimeString();
  } catch (error) {
    silent(error);
  }
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
  for (const button of views.children) button.setAttribute('aria-pressed', String(button.dataset.view === view));
}

async function readWhole() {
  whole.textContent = 'Reading the history.';
  note.textContent = '';
  try {
    whole.innerHTML = await asked('/whole?run=' + encodeURIComponent(chosen));
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
  else refresh();
});

document.addEventListener('click', async event => {
  const run = event.target.closest('[data-run]');
  const mark = event.target.closest('a.mark');
  if (run) {
    chosen = run.dataset.run;
    refresh();
  } else if (mark) {
    event.preventDefault();  // the address keeps its token
    const place = mark.closest('main, #whole');
    if (view !== 'whole' && view !== 'all') {
      view = 'all';
      show();
    }
    const found = place.querySelector(mark.getAttribute('href'));
    found?.scrollIntoView({block: 'center'});
    found?.focus({preventScroll: true});
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
  refresh();
});
document.addEventListener('visibilitychange', refresh);
document.addEventListener('pointerdown', () => { pressed = true; });
for (const end of ['pointerup', 'pointercancel']) document.addEventListener(end, () => { pressed = false; });
show();
refresh();
setInterval(refresh, 2000);
