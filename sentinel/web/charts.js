'use strict';
// Interactive charts, on the page and in a report. A figure holds its numbers as `data-plot`; the grid around it holds
// what all of its charts share as `data-grid`: the span of steps, incidents, steps that were rolled back.
//
// After the # of the address comes the token of a page, then what is shown and how, so that a copied address or a
// reload shows the same: `run=gpt-7&steps=100..200&smooth=50&log=loss`.
// Other scripts see only the names in the next line.
const {address, drawCharts, isThinned} = (() => {
const address = {
  token: '',
  seen: new URLSearchParams(),
  read() {
    const behind = location.hash.slice(1).split('&');
    this.token = behind[0].includes('=') ? '' : behind.shift();
    this.seen = new URLSearchParams(behind.join('&'));
  },
  write(seen) {
    return '#' + [this.token, seen.toString()].filter(Boolean).join('&');
  },
  // Replaces the entry in the browser's history: changes in how a run is shown make no new entries.
  keep() {
    const behind = this.write(this.seen);
    history.replaceState(null, '', behind === '#' ? location.pathname + location.search : behind);
    document.dispatchEvent(new Event('kept'));
  },
  set(name, value) {
    if (value) this.seen.set(name, value);
    else this.seen.delete(name);
    this.keep();
  },
};
address.read();
const LOG_TICKS = 6;  // most powers of ten with a line
const NEAR = 16;  // pixels before the pointer within which a sampled value is shown
const MARK_ROWS = 5, MARK_ROOM = 16;  // rows and pixels per row of incident numbers that would touch otherwise
const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [1, 3]];
const charts = new Map();  // place and title -> {plot, grid, figure, u, raw}
const tools = document.getElementById('tools');
let pointer = null;  // {u, x}: the chart under the pointer, and the place
let pointed = null;  // the step there, which all charts show

// Ends of a log scale: the next round numbers; the further apart the ends, the rounder.
function roundOut(low, high) {
  const size = value => 10 ** Math.floor(Math.log10(Math.min(value, Math.max(high - low, value / 1000))));
  const [from, to] = [Math.floor(low / size(low)) * size(low), Math.ceil(high / size(high)) * size(high)];
  return [from, to > from ? to : 10 * from];
}

// Ticks of a log scale: at powers of ten, between few of these also at 2 and 5 times, and within less than one decade
// at even distances, as on a linear scale.
function ticksOf(low, high) {
  const decades = Math.log10(high / low), step = Math.max(1, Math.ceil(decades / LOG_TICKS)), most = decades > 3 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low) / step) * step; power <= Math.log10(high); power += step)
    found.push(...most.map(times => Number(`${times}e${power}`)));
  const shown = found.filter(tick => tick >= low && tick <= high);
  if (shown.length > 2) return shown;
  const size = 10 ** Math.floor(Math.log10((high - low) / 4)), apart = size * [1, 2, 5, 10].find(times => times * size * 5 >= high - low);
  const first = Math.ceil(low / apart - 1e-9), last = Math.floor(high / apart + 1e-9);
  return Array.from({length: last - first + 1}, (_, n) => Number(((first + n) * apart).toPrecision(12)));
}

// First and last step to draw. A zoom into steps that a run does not have is ignored.
function viewOf(grid) {
  const [first, last] = (address.seen.get('steps') ?? '').split('..').map(Number);
  return first < last && first < grid.span[1] && last > grid.span[0] ? [first, last] : [grid.span[0], Math.max(grid.span[1], grid.span[0] + 1)];
}

function setView(range) {
  show(range);
  address.keep();
}

function show(range) {
  if (range && range[1] - range[0] >= 2) address.seen.set('steps', range.map(step => Math.round(step)).join('..'));
  else if (!range) address.seen.delete('steps');
  for (const {u, grid} of charts.values()) {
    const [min, max] = viewOf(grid);
    u.setScale('x', {min, max});
  }
}

function readable(value, unit, digits = 4) {
  const scale = {bytes: [[1e12, 'TB'], [1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB'], [1, '']], seconds: [[1, 's'], [1e-3, 'ms']]}[unit] ?? [[1, '']];
  const [size, name] = scale.find(([least]) => Math.abs(value) >= least) ?? (value ? scale.at(-1) : [1, '']);
  const shown = Number((value / size).toPrecision(digits));
  return ((shown && (Math.abs(shown) >= 1e6 || Math.abs(shown) < 1e-3) ? shown.toExponential() : shown) + ' ' + name).trim();
}

// The numbers of an axis, with as many digits as needed to distinguish them.
function numbersAt(places, unit) {
  const largest = Math.max(...places.map(Math.abs)), apart = places[1] - places[0];
  const digits = apart > 0 ? Math.ceil(Math.log10(largest / apart)) + 1 : 4;
  return places.map(y => readable(y, unit, Math.min(Math.max(digits, 4), 12)));
}

// An exponential mean: after `steps` steps the weight of a value is about a third, however often it was sampled.
function smoothed(xs, ys, steps) {
  let mean = 0, weight = 0, before = null;
  return ys.map((y, i) => {
    if (y == null) return y;
    weight = weight * Math.exp(-(xs[i] - (before ?? xs[i])) / steps) + 1;
    mean += (y - mean) / weight;
    before = xs[i];
    return mean;
  });
}

function isLogarithmic(plot) {
  return address.seen.getAll('log').includes(plot.title) || (plot.log && !address.seen.getAll('linear').includes(plot.title));
}

// [steps, values of line 0, ...] at the steps of all lines: undefined where a line has no sample, null where it is not finite.
function align(plot) {
  const tables = plot.lines.map(line => {
    let step = 0;
    return [line.steps.map(more => step += more), line.values];
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

// What is drawn: the values of each line and, if smoothing is on, their mean.
function tableOf(chart) {
  const [xs, ...lines] = chart.raw, steps = Number(address.seen.get('smooth'));
  const drawable = isLogarithmic(chart.plot) ? y => y <= 0 ? null : y : y => y;
  return [xs, ...lines.flatMap(ys => {
    const values = ys.map(y => y == null ? y : drawable(y));
    return steps > 0 ? [values, smoothed(xs, values, steps)] : [values];
  })];
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function point(to) {
  pointer = to;
  pointed = to && Math.round(to.u.posToVal(to.x - to.u.over.getBoundingClientRect().left, 'x'));
}

// The index of the newest sample of a line up to a step; null without one.
function sampleAt(chart, nth, step) {
  const xs = chart.raw[0], ys = chart.raw[nth];
  let at = xs.length - 1;
  while (at >= 0 && (xs[at] > step || ys[at] === undefined)) at--;
  return at < 0 ? null : at;
}

// The value of a line at the step under the pointer, on whichever chart; otherwise the newest value that is drawn.
function valueAt(chart, nth, at) {
  if (pointed === null) at = sampleAt(chart, nth, viewOf(chart.grid)[1]);
  const y = at === null ? undefined : chart.raw[nth][at];
  return y === undefined ? '-' : y === null ? 'not finite' : readable(y, chart.plot.unit);
}

function nearest(chart, u, nth) {
  const line = Number(address.seen.get('smooth')) > 0 ? Math.ceil(nth / 2) : nth, at = pointed === null ? null : sampleAt(chart, line, pointed);
  return at !== null && u.valToPos(pointed, 'x') - u.valToPos(chart.raw[0][at], 'x') <= NEAR ? at : null;
}

function seriesOf(chart) {
  const several = Number(address.seen.get('smooth')) > 0;
  const step = {label: 'step', value: () => (pointed ?? Math.min(viewOf(chart.grid)[1], chart.raw[0].at(-1))).toLocaleString()};
  return [step, ...chart.plot.lines.flatMap((line, at) => {
    const stroke = colour(`--s${line.style}`);
    const common = {stroke, dash: DASHES[line.style], gaps: (u, nth, i0, i1, gaps) => addGaps(chart, u, nth, gaps)};
    const shown = {...common, label: line.label, width: 1.5, alpha: several || line.faint ? 0.35 : 1, value: (u, _, __, idx) => valueAt(chart, at + 1, idx)};
    return several ? [shown, {...common, label: '', width: 2, points: {show: false}, class: 'mean'}] : [shown];
  })];
}

// No line across steps that were rolled back and are no longer known: nothing is known there.
function addGaps(chart, u, nth, gaps) {
  const [xs, ys] = [u.data[0], u.data[nth]];
  for (const [first, last] of chart.grid.bands)
    if (!xs.some((x, i) => x > first && x < last && ys[i] !== undefined))
      gaps.push([u.valToPos(first, 'x', true), u.valToPos(last, 'x', true)]);
  return gaps.sort((one, other) => one[0] - other[0]);
}

function optionsOf(chart) {
  const {plot, figure} = chart, logarithmic = isLogarithmic(plot);
  const axis = {stroke: colour('--muted'), grid: {stroke: colour('--rule'), width: 1}, ticks: {show: false}, font: '12px system-ui, sans-serif'};
  const places = logarithmic ? {splits: (u, _, low, high) => ticksOf(low, high), filter: (u, splits) => splits} : {};
  return {
    width: figure.clientWidth || 400, height: 210, padding: [14, 14, 0, 0],
    scales: {x: {time: false, range: () => viewOf(chart.grid)}, y: logarithmic ? {distr: 3, range: (u, low, high) => roundOut(low ?? 0.1, high ?? 1)} : {}},
    axes: [
      {...axis, size: 26, space: 70, values: (u, splits) => splits.map(x => Number.isInteger(x) ? x.toLocaleString() : '')},
      {...axis, ...places, size: 62, gap: 6, values: (u, splits) => numbersAt(splits, plot.unit)},
    ],
    series: seriesOf(chart),
    cursor: {
      y: false, points: {size: 7}, dataIdx: (u, nth, closest) => nth === 0 ? closest : nearest(chart, u, nth), drag: {x: true, y: false, setScale: false, dist: 4},
      sync: {key: 'steps', scales: ['x', null], filters: {pub: kind => kind === 'mousemove' || kind === 'mouseleave'}},
      bind: {
        mousedown: (u, place, zoom) => event => event.shiftKey ? startPan(u, event) : event.button === 0 && event.target === place && zoom(event),
        dblclick: () => () => setView(null),
      },
    },
    hooks: {
      setSelect: [u => {
        const {left, width} = u.select;
        if (!width) return;
        u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        setView([u.posToVal(left, 'x'), u.posToVal(left + width, 'x')]);
      }],
      drawClear: [u => drawBands(chart, u)],
      draw: [u => { drawLost(chart, u); placeMarks(chart, u); }],
    },
  };
}

function startPan(u, event) {
  const {min, max} = u.scales.x, from = event.clientX, perPixel = (max - min) / u.over.clientWidth;
  const move = moved => show([min, max].map(step => step - (moved.clientX - from) * perPixel));
  document.addEventListener('mousemove', move);
  document.addEventListener('mouseup', () => {
    document.removeEventListener('mousemove', move);
    address.keep();  // only at the end: browsers refuse an address that changes at every frame
  }, {once: true});
}

function drawBands(chart, u) {
  const {ctx, bbox} = u;
  ctx.save();
  ctx.fillStyle = colour('--band');
  ctx.globalAlpha = 0.6;
  for (const band of chart.grid.bands) {
    const [from, to] = band.map(step => Math.max(bbox.left, Math.min(u.valToPos(step, 'x', true), bbox.left + bbox.width)));
    if (to > from) ctx.fillRect(from, bbox.top, Math.max(1.5, to - from), bbox.height);
  }
  ctx.restore();
}

// Steps whose value is not finite, as crosses at the top: a gap would look like the end of the run.
function drawLost(chart, u) {
  const {ctx, bbox} = u, [xs, ...lines] = chart.raw, half = 3 * devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.3 * devicePixelRatio;
  lines.forEach((ys, nth) => {
    ctx.strokeStyle = colour(`--s${chart.plot.lines[nth].style}`);
    ctx.beginPath();
    let before = -Infinity;
    ys.forEach((y, i) => {
      if (y !== null) return;
      const x = u.valToPos(xs[i], 'x', true);
      if (x < bbox.left || x > bbox.left + bbox.width || x - before < 3 * half) return;
      before = x;
      for (const way of [1, -1]) {
        ctx.moveTo(x - half, bbox.top - way * half);
        ctx.lineTo(x + half, bbox.top + way * half);
      }
    });
    ctx.stroke();
  });
  ctx.restore();
}

// Marks are links, so that the keyboard reaches them, too.
function placeMarks(chart, u) {
  let ends = [];
  for (const link of u.over.querySelectorAll('a.mark')) {
    const x = u.valToPos(Number(link.dataset.step), 'x'), half = 5 * link.textContent.length;
    link.hidden = x < -1 || x > u.over.clientWidth + 1;
    if (link.hidden) continue;
    const row = ends.findIndex(end => end <= x - half), free = row < 0 ? ends.length % MARK_ROWS : row;
    ends[free] = x + half;
    link.style.left = x + 'px';
    link.firstChild.style.top = free * MARK_ROOM + 'px';
  }
}

function makeMarks(chart) {
  for (const link of chart.u.over.querySelectorAll('a.mark')) link.remove();
  for (const {step, label, severity, title, linked} of chart.grid.marks) {
    const link = document.createElement('a'), number = document.createElement('b');
    link.className = `mark ${severity}`;
    if (linked) link.href = `#case-${label}`;
    link.title = title;
    link.dataset.step = step;
    number.textContent = label;
    link.append(number);
    chart.u.over.append(link);
  }
}

const sizes = new ResizeObserver(changes => {
  for (const {target, contentRect: {width}} of changes) {
    const u = [...charts.values()].find(chart => chart.figure === target)?.u;
    if (u && width && Math.round(width) !== u.width) u.setSize({width: Math.round(width), height: u.height});
  }
});

function build(chart) {
  chart.u?.destroy();
  chart.shape = shapeOf(chart.plot);
  point(null);
  const {figure, plot} = chart, title = document.createElement('figcaption'), scale = document.createElement('button');
  const logarithmic = isLogarithmic(plot);
  scale.type = 'button';
  scale.textContent = logarithmic ? 'log' : 'linear';
  scale.title = `draw ${plot.title} ${logarithmic ? 'linear' : 'on a log scale'}`;
  scale.dataset.scale = plot.title;
  title.append(plot.caption, scale);
  figure.replaceChildren(title);
  chart.raw = align(plot);
  const u = chart.u = new uPlot(optionsOf(chart), tableOf(chart), figure);
  // Before uPlot's own listeners.
  u.over.addEventListener('mousemove', event => { point({u, x: event.clientX}); }, true);
  u.over.addEventListener('mouseleave', () => { point(null); }, true);
  makeMarks(chart);
  sizes.observe(figure);
}

function update(chart) {
  chart.raw = align(chart.plot);
  makeMarks(chart);
  chart.u.setData(tableOf(chart));
}

const shapeOf = plot => JSON.stringify([plot.title, plot.unit, isLogarithmic(plot), plot.lines.map(line => line.label)]);

// Draws the charts in `root`; an existing chart gets new numbers and keeps its place under the pointer.
function drawCharts(root) {
  for (const place of root.querySelectorAll('.charts[data-grid]')) {
    const grid = JSON.parse(place.dataset.grid);
    for (const figure of place.querySelectorAll('figure[data-plot]')) {
      const plot = JSON.parse(figure.dataset.plot), name = `${root.id} ${plot.title}`, old = charts.get(name);
      if (old && old.shape === shapeOf(plot)) {
        figure.replaceWith(old.figure);
        update(Object.assign(old, {plot, grid}));
      } else {
        old?.u.destroy();
        charts.set(name, {plot, grid, figure});
        build(charts.get(name));
      }
    }
  }
  for (const [name, chart] of charts)
    if (!chart.figure.isConnected) {
      chart.u.destroy();
      charts.delete(name);
    }
  if (tools) tools.hidden = charts.size === 0;
  point(pointer);  // there may be another step under the pointer now
  for (const {u} of charts.values())
    if (pointed === null) u.setLegend({}, false);
    else u.setCursor({left: u.valToPos(pointed, 'x'), top: 0});
}

// Whether a line has more samples than it shows.
const isThinned = () => [...charts.values()].some(chart => chart.plot.thinned);

function buildAll() {
  for (const chart of charts.values()) build(chart);
}

document.addEventListener('click', event => {
  const button = event.target.closest('[data-scale]');
  if (!button) return;
  const chart = [...charts.values()].find(one => one.figure.contains(button)), {title, log} = chart.plot;
  const logarithmic = isLogarithmic(chart.plot);
  for (const name of ['log', 'linear']) {
    const others = address.seen.getAll(name).filter(one => one !== title);
    address.seen.delete(name);
    others.forEach(one => address.seen.append(name, one));
  }
  if (log === logarithmic) address.seen.append(log ? 'linear' : 'log', title);
  address.keep();
  build(chart);
  chart.figure.querySelector('[data-scale]').focus();
});

// A mark opens its incident's card, also one folded into another's consequences. The address does not change.
document.addEventListener('click', event => {
  const mark = event.target.closest('a[href^="#case-"]');
  if (!mark) return;
  event.preventDefault();
  document.dispatchEvent(new Event('incident'));
  const found = mark.closest('main').querySelector(mark.getAttribute('href'));
  for (let fold = found?.closest('details'); fold; fold = fold.parentElement.closest('details')) fold.open = true;
  found?.scrollIntoView({block: 'center'});
  found?.focus({preventScroll: true});
});

tools?.addEventListener('click', event => {
  const way = event.target.closest('[data-way]')?.dataset.way, chart = charts.values().next().value;
  if (!way || !chart) return;
  const [first, last] = viewOf(chart.grid), share = (last - first) / 4;
  const [from, to] = {in: [1, -1], out: [-2, 2], left: [-1, -1], right: [1, 1], all: [0, 0]}[way];
  const range = [first + from * share, last + to * share], [low, high] = chart.grid.span;
  setView(way === 'all' || (range[0] <= low && range[1] >= high) ? null : range);
});

const smoothing = document.getElementById('smooth');
if (smoothing) {
  smoothing.value = address.seen.get('smooth') ?? '';
  smoothing.addEventListener('change', () => {
    address.set('smooth', smoothing.value);
    buildAll();
  });
}
addEventListener('hashchange', () => {  // a link, the back button, or an address that the user typed
  address.read();
  if (smoothing) smoothing.value = address.seen.get('smooth') ?? '';
  buildAll();
  document.dispatchEvent(new Event('address'));
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', buildAll);
return {address, drawCharts, isThinned};
})();
