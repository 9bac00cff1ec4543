'use strict';
// Requests what the address names: the list of runs, a run, or two side by side. charts.js reads the address; the token
// in it, which the browser sends nowhere, goes into the header of our requests.
const main = document.querySelector('main');
const views = document.getElementById('views');
const note = document.getElementById('note'), moment = document.getElementById('moment');
const answer = document.getElementById('answer');
const pause = document.getElementById('pause');
const filter = document.getElementById('filter'), words = document.getElementById('find'), firing = document.getElementById('firing');
const FOCUSABLE = 'a[href], button, summary, input, [tabindex]';
const OFTEN = 2000, SOMETIMES = 10000, SELDOM = 60000;  // ms between two requests: for a live run, for histories, and if nothing new comes
const PATIENCE = 30000;  // ms to wait for an answer, ten times that for a whole history: a daemon that stands still does not close the connection
let paused = false, pressed = false, wait = OFTEN, timer = 0, silentSince = '', answered = false;
let place = '';  // the path of what is shown, or was requested
const picked = new Set();

const runOf = () => address.seen.get('run') ?? '', otherOf = () => address.seen.get('with') ?? '';
const viewOf = () => address.seen.get('view') ?? 'all';
const clock = () => new Date().toLocaleTimeString().replace(/\s/g, '\u00a0');
const isHidden = shown => shown.closest('section[hidden]') !== null;
const draw = () => window.uPlot && drawCharts(main);
const isWhole = () => otherOf() !== '' || viewOf() === 'whole';

function pathOf() {
  if (!runOf()) return '/runs';
  const names = [runOf(), otherOf()].filter(Boolean).map(name => 'run=' + encodeURIComponent(name)).join('&');
  return (isWhole() ? '/whole?' : '/live?') + names;
}

// The zoomed part of a long run is requested again, with the samples that the whole run does not show.
function closePathOf() {
  const steps = address.seen.get('steps');
  return pathOf() + (steps && isWhole() && isThinned() ? '&steps=' + encodeURIComponent(steps) : '');
}

// A screen reader reads out each change of the note, but not of the time beside it.
function say(words, time = '') {
  if (note.textContent !== words) note.textContent = words;
  moment.textContent = time;
}

async function asked(path, method = 'GET') {
  const headers = {Authorization: 'Bearer ' + address.token};
  const response = await fetch(path, {method, headers, signal: AbortSignal.timeout(isWhole() ? 10 * PATIENCE : PATIENCE)});
  if (response.status === 401)
    throw new Error((answered ? 'Another daemon answers at this address' : 'This address lacks the token') +
      `: \`${['sentinel page', runOf()].join(' ').trim()}\` prints the whole one.`);
  if (response.status >= 500) throw new Error(`The daemon failed (HTTP ${response.status}); its log says why.`);
  return response.text();
}

// The content stays, marked as old. Each failed request writes a line into the browser's console.
function silent(error) {
  silentSince ||= clock();
  const run = main.querySelector('[data-id]')?.dataset.id, late = error.name === 'TimeoutError';
  say(error.name === 'Error' ? error.message + (answered ? ` Nothing new since ${silentSince}.` : '') :
    `The daemon does not answer since ${silentSince}: ${late ? 'it stands still, or reads a long history' : 'its run has ended, or it is being restarted'}. ` +
    (run ? `All of the run: \`sentinel page ${run}\`, or as a file: \`sentinel report ${run}\`.` : ''));
  document.body.classList.add('stale');
}

// A hidden page is requested seldom: its title counts the open incidents.
async function refresh() {
  clearTimeout(timer);
  try {
    if (!paused && !(isWhole() && main.dataset.path === closePathOf())) await update();
  } finally {
    clearTimeout(timer);
    timer = setTimeout(refresh, document.hidden ? SELDOM : wait);
  }
}

async function update() {
  const path = closePathOf();
  let text;
  try {
    text = await asked(path);
  } catch (error) {
    wait = Math.min(2 * wait, SELDOM);
    silent(error);
    return;
  }
  // The element under the pressed pointer must stay until the release; and an answer may come after a newer request.
  if (pressed || paused || path !== closePathOf()) return;
  [silentSince, answered] = ['', true];
  document.body.classList.remove('stale');
  keepingPlace(() => {
    main.innerHTML = text;
    main.dataset.path = path;
    link();
    draw();
  });
  const header = main.querySelector('header'), ended = header?.dataset.state === 'ended';
  const stored = !header?.dataset.state || main.querySelector('[data-stored]');
  wait = ended ? Math.min(2 * wait, SELDOM) : stored ? SOMETIMES : OFTEN;
  if (isWhole() && path !== closePathOf()) wait = 0;
  if (!window.uPlot && main.querySelector('figure[data-plot]')) say('Interactive charts are there now: load this page again.');
  else if (ended || isWhole()) say('');
  else say('Live.', clock());
  show();
}

function refreshNow() {
  wait = OFTEN;
  refresh();
}

// Open details stay open, and the keyboard focus stays: on the n-th of the elements that lead to the same place.
function keepingPlace(change) {
  const key = found => (found.closest('article')?.id ?? '') + (found.dataset.pick || found.id || found.getAttribute('href') || found.textContent);
  const alike = name => [...main.querySelectorAll(FOCUSABLE)].filter(found => key(found) === name);
  const open = [...main.querySelectorAll('details[open] > summary')].map(key);
  const focus = main.contains(document.activeElement) ? document.activeElement : null;
  const name = focus && key(focus), nth = focus ? alike(name).indexOf(focus) : -1;
  change();
  for (const summary of main.querySelectorAll('details > summary'))
    if (open.includes(key(summary))) summary.parentElement.open = true;
  if (focus) alike(name)[nth]?.focus({preventScroll: true});
}

// Sets the addresses of links to runs, each with the token in it.
function link() {
  for (const run of main.querySelectorAll('a[data-run]')) run.href = address.write(new URLSearchParams({run: run.dataset.run}));
  for (const box of main.querySelectorAll('[data-pick]')) box.checked = picked.has(box.dataset.pick);
  const compare = document.getElementById('compare'), [run, other] = picked;
  if (!compare) return;
  if (other) compare.href = address.write(new URLSearchParams({run, with: other}));
  else compare.removeAttribute('href');
}

function show() {
  const view = viewOf();
  for (const section of main.querySelectorAll('section[data-view]'))
    section.hidden = view !== 'all' && section.dataset.view !== view;
  document.title = main.querySelector('[data-title]')?.dataset.title ?? 'Sentinel';
  document.getElementById('home').href = address.write(new URLSearchParams());
  views.hidden = !runOf() || otherOf() !== '';
  pause.hidden = isWhole() || main.querySelector('header')?.dataset.state === 'ended';  // these do not change
  for (const button of views.children) button.setAttribute('aria-pressed', String(button.dataset.view === view));
  document.getElementById('tools').hidden = [...main.querySelectorAll('.uplot')].every(isHidden);
  filterIncidents();
}

// Shows an incident with all its consequences if one of them contains each of the words.
function filterIncidents() {
  const wanted = (address.seen.get('find') ?? '').toLowerCase().split(/\s+/).filter(Boolean), open = address.seen.has('open');
  const cards = [...main.querySelectorAll('article.case')].filter(card => !card.parentElement.closest('article'));
  const fits = card => (!open || card.dataset.state === 'firing') && wanted.every(word => card.textContent.toLowerCase().includes(word));
  for (const card of cards) card.hidden = ![card, ...card.querySelectorAll('article')].some(fits);
  filter.hidden = cards.every(isHidden);
  document.getElementById('found').textContent = wanted.length || open ? `${cards.filter(card => !card.hidden).length} of ${cards.length}` : '';
  if (document.activeElement !== words) words.value = address.seen.get('find') ?? '';
  firing.checked = open;
}

function stepTo(way) {
  const cards = [...main.querySelectorAll('article.case[id]')].filter(card => card.checkVisibility());
  const at = cards.indexOf(document.activeElement.closest('article.case'));
  const next = cards[at < 0 ? (way > 0 ? 0 : cards.length - 1) : at + way];
  next?.focus({preventScroll: true});
  next?.scrollIntoView({block: 'center'});
}

// Shows what the address names now.
function open() {
  if (place !== pathOf()) {
    place = pathOf();
    setPaused(false);  // otherwise nothing would be shown
    delete main.dataset.path;
    main.textContent = isWhole() ? 'Reading the history.' : '';
    draw();
  }
  show();
  refreshNow();
}

document.addEventListener('incident', () => {
  if (isWhole() || viewOf() === 'all') return;
  address.set('view', '');
  show();
});

views.addEventListener('click', event => {
  const button = event.target.closest('[data-view]');
  if (!button) return;
  address.set('view', button.dataset.view === 'all' ? '' : button.dataset.view);
  open();
});

main.addEventListener('change', event => {
  const run = event.target.dataset.pick;
  if (!run) return;
  if (event.target.checked) picked.add(run);
  else picked.delete(run);
  if (picked.size > 2) picked.delete(picked.values().next().value);  // the one that was ticked first
  link();
});

words.addEventListener('input', () => {
  address.set('find', words.value);
  filterIncidents();
});
firing.addEventListener('change', () => {
  address.set('open', firing.checked ? '1' : '');
  filterIncidents();
});
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches('input, select')) {
    if (event.key === 'Escape') event.target.blur();
  } else if (event.key === '/' && !filter.hidden) {
    event.preventDefault();  // the key is not part of the search words
    words.focus();
  } else if (event.key === 'j' || event.key === 'k') stepTo(event.key === 'j' ? 1 : -1);
});

document.addEventListener('click', async event => {
  if (event.target.id !== 'reload') return;
  try {
    answer.textContent = await asked('/-/reload', 'POST');
  } catch (error) {
    silent(error);
  }
});

function setPaused(wanted) {
  paused = wanted;
  pause.textContent = paused ? 'Go on' : 'Pause';
  pause.setAttribute('aria-pressed', String(paused));
  if (paused) say('Paused.');
}

pause.addEventListener('click', () => {
  setPaused(!paused);
  refreshNow();
});
document.addEventListener('visibilitychange', refreshNow);
document.addEventListener('address', open);
document.addEventListener('kept', () => {
  if (isWhole() && main.dataset.path && main.dataset.path !== closePathOf()) refreshNow();
});
document.addEventListener('pointerdown', () => { pressed = true; });
for (const end of ['pointerup', 'pointercancel', 'contextmenu']) document.addEventListener(end, () => { pressed = false; });
open();
