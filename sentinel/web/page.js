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
  if (!paused && !document.hidden && view !== 'whole') await update();
  clearTimeout(timer);
  timer = setTimeout(refresh, wait);
}

async function update() {
  try {
    const text = await asked('/live?run=' + encodeURIComponent(chosen));
    if (pressed || paused) return;  // what is under the pointer must be there when it is released
    answered();
    keepingPlace(() => { live.innerHTML = text; });
    show();
    point();
    const ended = live.querySelector('[data-state=ended]');
    wait = ended ? Math.min(2 * wait, SELDOM) : OFTEN;
    note.textContent = ended ? '' : 'Live. ' + new Date().toLocaleTimeString();
  } catch (error) {
    wait = Math.min(2 * wait, SELDOM);
    silent(error);
  }
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
  else refreshNow();
});

document.addEventListener('click', async event => {
  const run = event.target.closest('[data-run]');
  const mark = event.target.closest('a[href^="#case-"]');
  if (run) {
    chosen = run.dataset.run;
    refreshNow();
  } else if (mark) {
    event.preventDefault();  // the address keeps its token
    const place = mark.closest('main, #whole');
    if (view !== 'whole' && view !== 'all') {
      view = 'all';
      show();
    }
    const found = place.querySelector(mark.getAttribute('href'));
    for (let fold = found?.closest('details'); fold; fold = fold.parentElement.closest('details')) fold.open = true;
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

// One line at the same step on all charts, and what they show there: read from the curves as they are drawn.
const readout = document.getElementById('readout');
const drawn = new WeakMap();
let pointer = null;

function pointsOf(path) {
  if (!drawn.has(path)) drawn.set(path, [...path.getAttribute('d').matchAll(/[ML]([\d.]+) ([\d.]+)/g)].map(m => [+m[1], +m[2]]));
  return drawn.get(path);
}

function readable(value, unit) {
  const scale = {bytes: [[1e12, 'TB'], [1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB']], seconds: [[1, 's'], [1e-3, 'ms']]}[unit] ?? [];
  const [size, name] = scale.find(([least]) => Math.abs(value) >= least) ?? [1, ''];
  const shown = Number((value / size).toPrecision(4));
  return (shown && (Math.abs(shown) >= 1e6 || Math.abs(shown) < 1e-3) ? shown.toExponential() : shown) + ' ' + name;
}

// What line `nth` of a chart shows at x: a value, or the lowest and the highest of several steps; the newest before a gap in
// what is sampled.
function valueAt(svg, plot, nth, x) {
  for (const lost of svg.querySelectorAll('path.lost.s' + nth % 5))
    if ([...lost.getAttribute('d').matchAll(/M(\d+)/g)].some(m => +m[1] + 3 === x)) return 'not finite';
  const points = pointsOf(svg.querySelectorAll('path.curve')[nth]).filter(([at]) => at <= x);
  const at = Math.max(...points.map(point => point[0]));
  if (!(x - at <= 16)) return '-';
  const values = points.filter(point => point[0] === at).map(([, y]) => {
    const value = plot.low + (plot.bottom - y) / (plot.bottom - plot.top) * (plot.high - plot.low);
    return readable(plot.logarithmic ? 10 ** value : value, plot.unit);
  });
  return [...new Set(values)].reverse().join(' to ');
}

function point() {
  for (const line of document.querySelectorAll('.cursor')) line.remove();
  const over = pointer && document.elementFromPoint(...pointer)?.closest('.charts svg[data-plot]');
  readout.hidden = true;
  if (!over) return;
  const box = over.getBoundingClientRect();
  const {first, last, left, right} = JSON.parse(over.dataset.plot);
  const share = ((pointer[0] - box.left) / box.width * over.viewBox.baseVal.width - left) / (right - left);
  if (share < 0 || share > 1) return;
  const step = Math.round(first + share * (last - first));
  const x = left + Math.floor((step - first) * (right - left) / (last - first || 1));  // as the curves are drawn
  const rows = [['step', step.toLocaleString()]];
  for (const svg of over.closest('.charts').querySelectorAll('svg[data-plot]')) {
    const plot = JSON.parse(svg.dataset.plot);
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
    for (const [name, value] of Object.entries({class: 'cursor', x1: x, x2: x, y1: plot.top, y2: plot.bottom}))
      line.setAttribute(name, value);
    svg.append(line);
    plot.lines.forEach((name, nth) => rows.push([name, valueAt(svg, plot, nth, x)]));
  }
  readout.replaceChildren(...rows.flatMap(row => row.map(words => {
    const cell = document.createElement('span');
    cell.textContent = words;
    return cell;
  })));
  readout.hidden = false;
  const room = readout.getBoundingClientRect();
  const beside = pointer[0] + 16 + room.width > innerWidth ? pointer[0] - 16 - room.width : pointer[0] + 16;
  readout.style.left = Math.max(0, beside) + 'px';
  readout.style.top = Math.max(0, Math.min(pointer[1] + 16, innerHeight - room.height)) + 'px';
}

for (const kind of ['pointermove', 'pointerdown'])
  document.addEventListener(kind, event => {
    pointer = [event.clientX, event.clientY];
    requestAnimationFrame(point);
  });
document.addEventListener('scroll', () => { pointer = null; point(); }, {passive: true});

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
