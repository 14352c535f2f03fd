"use strict";
// Draws the page from the JSON beside it. Texts of runs are untrusted: they reach the page as textContent alone, and
// none of them reaches Bokeh, which reads mathematics and HTML out of some of its texts.

const content = JSON.parse(document.getElementById("content").textContent);
const several = content.runs.length > 1;
const phone = matchMedia("(max-width: 40rem)"), narrow = matchMedia("(max-width: 67.99rem)"), dark = matchMedia("(prefers-color-scheme: dark)");

const AXES = { step: "Step", tokens: "Tokens", time: "Time" };
const DRAGS = { zoom: "Zoom", pan: "Pan", none: "Do nothing" };
const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3], [16, 4]];
const MARKS = ["circle", "square", "triangle", "diamond", "inverted_triangle", "star", "hex"];
const UNSMOOTHED = new Set(["lr", "loss_scale"]);  // they have corners, and no noise
const SPIKES = 0.005;  // the part of a curve's values that may lie off scale
const FEW = 12;  // events of one kind that are drawn from top to bottom
const STATES = { running: "● running", done: "✓ finished", stopped: "■ stopped", diverged: "✗ diverged", bad_input: "✗ failed", died: "✗ died", unknown: "? silent" };

// ----- small things ---------------------------------------------------------------------------------------------------

const $ = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null).map(shown));
  return node;
}

// Control characters are shown by their pictures: a sample holds whatever bytes a model wrote.
function shown(child) {
  if (child instanceof Node) return child;
  return String(child).replace(/[\u0000-\u0008\u000b-\u001f]/g, c => String.fromCharCode(0x2400 + c.charCodeAt(0))).replaceAll("\u007f", "\u2421");
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const number = value => typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The first place of a sorted array whose value is not less.
function place(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(values, value) {
  const after = place(values, value);
  if (after === 0) return 0;
  return after === values.length || value - values[after - 1] <= values[after] - value ? after - 1 : after;
}

// ----- numbers in words -----------------------------------------------------------------------------------------------

function spoken(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1e12 || size < 1e-3 ? value.toExponential(3)
    : size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
  return text.replace("-", "−");
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential().replace(/^(-?\d\.\d{2})\d+/, "$1").replace("e+", "e").replaceAll("-", "−");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(6))}${letter}`.replace("-", "−");
  return String(Number(value.toPrecision(6))).replace("-", "−");
}

function duration(seconds) {
  const total = Math.round(seconds), part = (value, unit) => value ? ` ${value} ${unit}` : "";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min${part(total % 60, "s")}`;
  if (total < 172800) return `${Math.floor(total / 3600)} h${part(Math.floor(total % 3600 / 60), "min")}`;
  return `${Math.floor(total / 86400)} d${part(Math.floor(total % 86400 / 3600), "h")}`;
}

const onAxis = (axis, value) => axis === "time" ? duration(value) : short(value);
const exactly = (axis, value) => axis === "step" ? `step ${Math.round(value).toLocaleString("en")}` : axis === "tokens" ? `${short(Number(value.toPrecision(4)))} tokens` : duration(value);

// ----- ticks ----------------------------------------------------------------------------------------------------------

function spacing(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return (power >= 10 ? [1, 2, 2.5, 5, 10] : [1, 2, 5, 10]).find(factor => factor * power >= rough * 0.999) * power;
}

function evenTicks(low, high, count, space = spacing((high - low) / count)) {
  const first = Math.ceil(low / space - 1e-9), last = Math.floor(high / space + 1e-9), ticks = [];
  for (let index = first; index <= last && ticks.length < 100; index++) ticks.push(Number((index * space).toPrecision(12)));
  return ticks;
}

function timeTicks(low, high, count) {
  const rough = (high - low) / count;
  const space = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].find(each => each >= rough);
  return rough < 1 ? evenTicks(low, high, count) : evenTicks(low, high, count, space ?? 86400 * spacing(rough / 86400));
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return evenTicks(low, high, count);
  const every = Math.max(1, Math.ceil(decades / count)), powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) if (power % every === 0) powers.push(power);
  const choices = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]].map(factors => powers
    .flatMap(power => factors.map(factor => Number((factor * 10 ** power).toPrecision(6)))).filter(tick => tick >= low && tick <= high));
  return choices.find(ticks => ticks.length <= count + 2) ?? choices.at(-1);
}

// ----- what is shown: in the address too, so that a link or a reload keeps it -------------------------------------------

const saysAxis = (run, axis) => Object.values(run.curves).some(curve => curve.x[axis]);
const hasAxis = axis => content.runs.some(run => saysAxis(run, axis));
const onThisAxis = run => saysAxis(run, state.x) || !Object.keys(run.curves).length;
const DEFAULTS = { x: "step", log: null, smooth: 2, raw: true, clip: true, drag: matchMedia("(pointer: coarse)").matches ? "none" : "zoom", from: null, to: null, hidden: "", reload: false };
const state = { ...DEFAULTS, hidden: new Set() };

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const flag = (name, otherwise) => given.has(name) ? given.get(name) === "1" : otherwise;
  const finite = name => given.has(name) && Number.isFinite(Number(given.get(name))) ? Number(given.get(name)) : null;
  state.x = given.get("x") in AXES && hasAxis(given.get("x")) ? given.get("x") : DEFAULTS.x;
  state.drag = given.get("drag") in DRAGS ? given.get("drag") : DEFAULTS.drag;
  state.smooth = clamp(finite("smooth") ?? DEFAULTS.smooth, 0, 20);
  state.log = flag("log", looksLog());
  for (const name of ["raw", "clip", "reload"]) state[name] = flag(name, DEFAULTS[name]);
  [state.from, state.to] = [finite("from"), finite("to")];
  if (state.from === null || state.to === null || state.from >= state.to) state.from = state.to = null;
  state.hidden = new Set((given.get("hidden") ?? "").split(".").filter(Boolean).map(Number).filter(index => index in content.runs));
}

function writeAddress() {
  const kept = new URLSearchParams();
  const text = value => typeof value === "boolean" ? Number(value) : typeof value === "number" ? Number(value.toPrecision(8)) : value;
  const put = (name, value, otherwise) => { if (value !== otherwise) kept.set(name, text(value)); };
  for (const name of ["x", "smooth", "raw", "clip", "drag", "from", "to", "reload"]) put(name, state[name], DEFAULTS[name]);
  put("log", state.log, looksLog());
  put("hidden", [...state.hidden].sort((a, b) => a - b).join("."), "");
  const address = kept.size ? `#${kept}` : location.pathname + location.search;
  try { history.replaceState(null, "", address); } catch { location.hash = kept; }  // some browsers: not for files
}

// A logarithmic axis where the loss halves or more, as in the run's own picture.
function looksLog() {
  const panel = content.panels.find(each => each.log);
  const values = (panel?.curves ?? []).flatMap(each => content.runs.flatMap(run => run.curves[each.key]?.y ?? [])).filter(Number.isFinite);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return low > 1e-9 && high / low >= 2;
}

// ----- colours, dashes and marks --------------------------------------------------------------------------------------

const paint = index => {
  const own = content.palette[index % content.palette.length];
  return own === "#000000" ? color("--ink") : own;  // black on a dark page would not be seen
};
const look = index => ({ color: paint(index), dash: DASHES[index % DASHES.length], mark: MARKS[index % MARKS.length] });

const SHAPES = {
  circle: "M4 0a4 4 0 1 1-8 0a4 4 0 1 1 8 0", square: "M-3.500-3.500h7v7h-7z", triangle: "M0-4.500L4.200 3.200H-4.200z", diamond: "M0-5L3.600 0L0 5L-3.600 0z",
  inverted_triangle: "M0 4.500L4.200-3.200H-4.200z", star: "M0-5L1.300-1.700L4.800-1.500L2.100.700L3 4.100L0 2.200L-3 4.100L-2.100.700L-4.800-1.500L-1.300-1.700z", hex: "M0-4.500L3.900-2.200V2.200L0 4.500L-3.900 2.200V-2.200z",
};

function swatch(index, { line = true, mark = true } = {}) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const part = (tag, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
  };
  const { color: stroke, dash, mark: shape } = look(index);
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 34 12");
  svg.setAttribute("aria-hidden", "true");
  svg.dataset.look = JSON.stringify([index, { line, mark }]);
  if (line) part("path", { d: "M1 6H33", stroke, "stroke-width": 2.2, "stroke-dasharray": dash.join(" "), fill: "none" });
  if (mark) part("path", { d: SHAPES[shape], fill: stroke, transform: "translate(17 6)" });
  return svg;
}

// Of one run each curve has a colour of its own; of several each run has.
const lookOf = series => several ? series.run : series.index;

// ----- curves ---------------------------------------------------------------------------------------------------------

// The mean of the values within half a window; it narrows towards the start, where losses fall fastest.
function smoothed(steps, values, window) {
  if (!(window > 0) || values.length < 3) return values;
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const bound = 1e6 * Math.max(1, sizes[sizes.length >> 1] ?? 1);  // larger values would spoil the running sums
  const means = new Array(values.length);
  let low = 0, high = 0, sum = 0, count = 0;
  const add = (value, sign) => { if (Number.isFinite(value)) { sum += sign * clamp(value, -bound, bound); count += sign; } };
  for (let index = 0; index < values.length; index++) {
    const half = Math.min(window / 2, steps[index] - steps[0]);
    while (high < values.length && steps[high] <= steps[index] + half) add(values[high++], 1);
    while (steps[low] < steps[index] - half) add(values[low++], -1);
    means[index] = count ? sum / count : NaN;
  }
  return means;
}

const numbers = points => ({ x: points.x, y: points.y.map(number) });
for (const run of content.runs)
  for (const curve of Object.values(run.curves)) {
    curve.y = curve.y.map(number);
    curve.base = curve.mean ? numbers(curve.mean) : { x: curve.x, y: curve.y };
  }

const longest = () => Math.max(1, ...content.runs.flatMap((run, index) => state.hidden.has(index) ? [] : Object.values(run.curves).map(curve => curve.x[state.x] ? curve.x.step.at(-1) ?? 0 : 0)));
const windowSteps = () => longest() * state.smooth / 100;
// Of a run that is far shorter than the longest, no more than a part of its own.
const windowOf = steps => Math.min(windowSteps(), (steps.at(-1) - steps[0]) * Math.max(state.smooth, 5) / 100);

// Of several runs, a panel of several lines becomes a panel for each, as one of several kinds of points does: a colour
// can say but one thing.
function panels() {
  return content.panels.flatMap(panel => {
    const [lines, points] = [true, false].map(line => panel.curves.filter(curve => (curve.mark === "line") === line));
    const most = Math.max(lines.length, points.length);
    if (!several || most < 2) return [panel];
    return Array.from({ length: most }, (_, index) => {
      const curves = [lines[index], points[index]].filter(Boolean);
      return { ...panel, key: index ? `${panel.key}.${curves[0].key}` : panel.key, title: curves.length > 1 ? panel.title : `${panel.title}: ${curves[0].label}`, curves };
    });
  });
}

class Chart {
  constructor(panel, first) {
    this.panel = panel;
    this.first = first;  // the large one, with the events
    this.off = new Set();  // curves that its legend hides
    this.series = panel.curves.flatMap((curve, index) => content.runs.map((run, r) => ({ ...curve, index, run: r, data: run.curves[curve.key] })))
      .filter(each => each.data?.y.length);
    this.build();
    this.draw();
  }

  build() {
    const title = make("h3", {}, this.panel.title, this.panel.unit ? make("span", { class: "unit" }, ` ${this.panel.unit}`) : "");
    this.at = make("span", { class: "at" });
    this.canvas = make("div", { class: "canvas" });
    this.cross = make("div", { class: "cross", hidden: true });
    this.plot = make("div", { class: "plot", tabindex: 0, role: "img" }, this.canvas, this.cross);
    const tool = (text, label, onclick) => make("button", { type: "button", title: label, "aria-label": `${label}: ${this.panel.title}`, onclick }, text);
    const tools = make("span", { class: "tools" }, tool("PNG", "Save as a picture", () => this.save()),
      this.first ? null : tool("⤢", "Full width", () => {
        this.node.classList.toggle("wide-panel");
        requestAnimationFrame(() => requestAnimationFrame(() => this.fit()));  // Bokeh has its new width by then
      }));
    this.node = make("article", { class: `card panel${this.first ? " wide-panel" : ""}`, "data-key": this.panel.key },
      make("div", { class: "head" }, title, this.at, tools), this.legend());
    this.node.append(this.plot);
    this.plot.addEventListener("keydown", event => onKey(event, this));
    this.plot.addEventListener("blur", leave);
  }

  legend() {
    if (this.panel.curves.length < 2) return "";
    const present = this.panel.curves.map((curve, index) => [curve, index]).filter(([curve]) => this.series.some(each => each.key === curve.key));
    return make("div", { class: "legend", role: "group", "aria-label": `Curves of ${this.panel.title}` }, ...present.map(([curve, index]) => {
      const line = curve.mark === "line";
      const button = make("button", { type: "button", "aria-pressed": "true", onclick: () => this.toggle(curve.key, button) },
        several ? make("span", {}, line ? "▬" : "●") : swatch(index, { line, mark: !line }), make("span", {}, curve.label));
      return button;
    }));
  }

  toggle(key, button) {
    if (!this.off.delete(key)) this.off.add(key);
    button.setAttribute("aria-pressed", String(!this.off.has(key)));
    this.show();
  }

  visible(series) {
    return !state.hidden.has(series.run) && !this.off.has(series.key) && Boolean(series.data.x[state.x]);
  }

  get height() {
    return this.first ? (phone.matches ? 290 : 380) : phone.matches ? 190 : 225;
  }

  // ----- drawing

  draw() {
    const { Range1d, LinearScale, FixedTicker, BoxZoomTool, PanTool, WheelZoomTool } = Bokeh;
    this.shade = new Bokeh.BoxAnnotation({ visible: false, fill_alpha: 0.15, line_color: null, level: "overlay" });
    this.zoom = new BoxZoomTool({ dimensions: "width", overlay: this.shade });
    this.pan = new PanTool({ dimensions: "width" });
    const wheel = new WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } });
    this.figure = new Bokeh.Plotting.Figure({
      name: this.panel.key, height: this.height, sizing_mode: "stretch_width", toolbar_location: null, tools: [this.zoom, this.pan, wheel],
      active_scroll: wheel, active_drag: null, x_range: new Range1d({ start: 0, end: 1 }), y_range: new Range1d({ start: 0, end: 1 }),
      extra_y_ranges: { edge: new Range1d({ start: 0, end: 1 }) }, extra_y_scales: { edge: new LinearScale() },
      min_border_left: 58, min_border_right: 14, min_border_top: 8, min_border_bottom: 26, outline_line_color: null,
    });
    for (const axis of [...this.figure.xaxes, ...this.figure.yaxes])
      axis.setv({ axis_line_color: null, minor_tick_line_color: null, major_tick_line_color: null, major_label_text_font_size: "12px", major_label_text_font: "system-ui, sans-serif", ticker: new FixedTicker({ ticks: [] }) });
    for (const [grid, axis] of [[this.figure.xgrids[0], this.figure.xaxes[0]], [this.figure.ygrids[0], this.figure.yaxes[0]]]) grid.ticker = axis.ticker;
    if (this.first) this.drawEvents();
    for (const series of this.series) this.drawRaw(series);  // below all others
    for (const series of this.series) this.drawSeries(series);
    this.figure.x_range.change.connect(() => onZoom(this));
    this.figure.on_event("mousemove", event => this.dragged || hover(this, event.sx, event.sy));
    this.figure.on_event("panstart", () => { this.dragged = true; leave(); });
    this.figure.on_event("panend", () => { this.dragged = false; });
    this.figure.on_event("mouseleave", () => touched || leave());  // a finger leaves when it is lifted
    this.figure.on_event("tap", event => hover(this, event.sx, event.sy));
    this.figure.on_event("doubletap", () => zoomTo(null));
  }

  source(name, columns) {
    return new Bokeh.ColumnDataSource({ name, data: Object.fromEntries(columns.map(column => [column, []])) });
  }

  // The name of a renderer says what it holds: the run's place, the curve, which of its points.
  glyph(kind, series, part, extra) {
    const name = JSON.stringify([series.run, series.key, part]);
    return this.figure[kind]({ field: "x" }, { field: "y" }, { source: this.source(name, ["x", "y"]), name, ...extra });
  }

  drawRaw(series) {
    if (series.mark === "line") series.raw = this.glyph("line", series, "raw", { line_width: 1, line_join: "round" });
  }

  drawSeries(series) {
    const { dash, mark } = look(lookOf(series));
    if (series.mark === "line") {
      series.smooth = this.glyph("line", series, "smooth", { line_width: 2.2, line_dash: dash, line_join: "round" });
      if (series.data.y.length <= 3) series.lone = this.glyph("scatter", series, "lone", { marker: mark, size: 8 });  // a line of one point would not be seen
    } else {
      series.joined = this.glyph("line", series, "joined", { line_width: 1.2, line_dash: dash });
      const count = series.data.y.length;
      series.points = this.glyph("scatter", series, "points", { marker: mark, size: count <= 40 ? 8 : count <= 120 ? 6 : 4.5 });
    }
    if (series.data.y.every(Number.isFinite)) return;
    series.edge = this.glyph("scatter", series, "not finite", { marker: "inverted_triangle", size: 10, y_range_name: "edge", level: "overlay" });
    series.value = this.figure.text({ field: "x" }, { field: "y" }, { field: "text" }, { source: this.source("", ["x", "y", "text"]),
      y_range_name: "edge", text_font_size: "11px", text_align: "center", text_baseline: "top", y_offset: 7, level: "overlay" });
  }

  drawEvents() {
    this.events = content.runs.flatMap((run, r) => {
      const kinds = [...new Set(run.events.map(event => event.kind))];
      return kinds.map(kind => ({ run: r, key: kind, list: run.events.filter(event => event.kind === kind) }));
    });
    for (const group of this.events) {
      group.edge = this.glyph("scatter", group, "event", { marker: KINDS[group.key]?.mark ?? "circle", size: 8, y_range_name: "edge", level: "overlay" });
      if (group.list.length <= FEW && KINDS[group.key]?.line)
        group.lines = this.figure.segment({ field: "x" }, 0, { field: "x" }, 1, { source: this.source("", ["x"]), y_range_name: "edge", line_dash: { value: [3, 3] }, line_width: 1 });
    }
  }

  // ----- filling: by axis and smoothing

  fill() {
    for (const series of this.series) {
      const { data } = series, x = data.x[state.x];
      if (!x) continue;
      const y = data.y.map(value => Number.isFinite(value) ? value : NaN);  // a line has a gap there
      if (series.mark === "line") this.fillLine(series, x, y);
      else for (const part of [series.joined, series.points]) part.data_source.data = { x, y };
      if (!series.edge) continue;
      const bad = data.y.map((value, index) => Number.isFinite(value) ? -1 : index).filter(index => index >= 0);
      series.edge.data_source.data = { x: bad.map(index => x[index]), y: bad.map(() => 0.975) };
      const few = bad.length <= 6 ? bad : [];
      series.value.data_source.data = { x: few.map(index => x[index]), y: few.map(() => 0.975), text: few.map(index => spoken(data.y[index])) };
    }
    for (const group of this.events ?? []) {
      const list = group.list.filter(event => event[state.x] !== null);
      const x = list.map(event => event[state.x]);
      group.shown = list;
      group.edge.data_source.data = { x, y: x.map(() => 0.025) };
      if (group.lines) group.lines.data_source.data = { x };
    }
    this.show();
  }

  fillLine(series, x, y) {
    const { base } = series.data;
    const means = UNSMOOTHED.has(series.key) ? base.y : smoothed(base.x.step, base.y, windowOf(base.x.step));
    series.raw.data_source.data = { x, y };
    series.smooth.data_source.data = { x: base.x[state.x], y: means.map(value => Number.isFinite(value) ? value : NaN) };
    if (series.lone) series.lone.data_source.data = { x, y };
  }

  // ----- showing: which renderers, which part, which colours

  show() {
    for (const series of this.series) {
      const visible = this.visible(series), isRaw = series.smooth && (state.raw || UNSMOOTHED.has(series.key));
      for (const part of ["smooth", "lone", "joined", "points", "edge", "value"]) if (series[part]) series[part].visible = visible;
      if (series.raw) series.raw.visible = visible && isRaw;
    }
    for (const group of this.events ?? []) for (const part of [group.edge, group.lines]) if (part) part.visible = !state.hidden.has(group.run);
    this.node.hidden = !this.series.some(series => !state.hidden.has(series.run));
    this.fit();
    this.describe();
  }

  // The vertical axis always fits what is seen of the horizontal one.
  fit() {
    const [from, to] = view();
    const log = state.log && this.panel.log;
    const seen = this.series.filter(series => this.visible(series)).map(series => extent(series, from, to, log, this.first)).filter(Boolean);
    let low = Math.min(...seen.map(each => each.low)), high = Math.max(...seen.map(each => each.high));
    if (!(low <= high)) [low, high] = log ? [1, 10] : [0, 1];
    const margin = log ? (high / low) ** 0.06 : 0.06 * (high - low) || 0.06 * Math.abs(high) || 0.5;
    const [start, end] = log ? [low / Math.max(margin, 1.02), high * Math.max(margin, 1.02)] : [low >= 0 && low < margin ? low - margin * (low > 0) : low - margin, high + margin];
    const figure = this.figure, scale = log ? Bokeh.LogScale : Bokeh.LinearScale;
    const change = () => {
      figure.x_range.setv({ start: from, end: to });
      figure.y_range.setv({ start, end });
      if (!(figure.y_scale instanceof scale)) figure.y_scale = new scale();
    };
    quietly(change);
    this.above = seen.reduce((sum, each) => sum + each.outside, 0);
    this.ticks(from, to, start, end, log);
    this.note();
  }

  ticks(from, to, start, end, log) {
    const width = (this.plot.clientWidth || 400) - 72;
    const put = (axis, ticks, label) => {
      axis.formatter.doFormat = values => values.map(label);
      axis.ticker.ticks = ticks;
    };
    const count = clamp(Math.floor(width / (state.x === "time" ? 90 : 64)), 2, 12);
    put(this.figure.xaxes[0], state.x === "time" ? timeTicks(from, to, count) : evenTicks(from, to, count), tick => onAxis(state.x, tick));
    put(this.figure.yaxes[0], (log ? logTicks : evenTicks)(start, end, Math.floor(this.height / 42)), short);
  }

  note() {
    const bad = this.series.filter(series => this.visible(series)).reduce((sum, series) => sum + (series.edge?.data_source.get_length() ?? 0), 0);
    const parts = [this.above ? `${this.above.toLocaleString("en")} off scale` : "", bad ? `${bad.toLocaleString("en")} not finite` : ""];
    this.at.textContent = parts.filter(Boolean).join(", ");
  }

  describe() {
    const lasts = this.series.filter(series => this.visible(series)).slice(0, 6).map(series => `${several ? `${content.runs[series.run].name}: ` : ""}${series.label} ${spoken(series.data.base.y.at(-1))}`);
    this.plot.setAttribute("aria-label", `${this.panel.title} by ${AXES[state.x].toLowerCase()}. Last: ${lasts.join("; ")}`);
  }

  dress() {
    const { figure } = this, most = dark.matches ? 0.5 : 0.35, alpha = clamp(2 * most / (content.runs.length - state.hidden.size), 0.05, most);
    this.shade.fill_color = color("--accent");
    const [soft, grid, card] = [color("--soft"), color("--grid"), color("--card")];
    figure.setv({ background_fill_color: card, border_fill_color: card });
    for (const axis of [...figure.xaxes, ...figure.yaxes]) axis.major_label_text_color = soft;
    for (const each of [...figure.xgrids, ...figure.ygrids]) each.grid_line_color = grid;
    for (const series of this.series) {
      const own = paint(lookOf(series));
      series.raw?.glyph.setv({ line_color: own, line_alpha: alpha });
      series.smooth?.glyph.setv({ line_color: own });
      series.joined?.glyph.setv({ line_color: own, line_alpha: 0.45 });
      for (const part of [series.points, series.lone]) part?.glyph.setv({ fill_color: own, line_color: card, line_width: 1 });
      series.edge?.glyph.setv({ fill_color: own, line_color: card });
      series.value?.glyph.setv({ text_color: color("--ink") });
    }
    for (const group of this.events ?? []) {
      const own = several ? paint(group.run) : color(KINDS[group.key]?.color ?? "--soft");
      const cross = KINDS[group.key]?.mark === "x";  // a mark of lines alone
      group.edge.glyph.setv({ fill_color: own, line_color: cross ? own : card, line_width: cross ? 2 : 1 });
      if (group.lines) group.lines.glyph.setv({ line_color: own, line_alpha: 0.6 });
    }
  }

  drags() {
    this.zoom.active = state.drag === "zoom";
    this.pan.active = state.drag === "pan";
  }

  async attach() {
    this.view = await Bokeh.Plotting.show(this.figure, this.canvas);
    const { events_el } = this.view.canvas_view;  // the plot round it takes the focus
    events_el.tabIndex = -1;
    events_el.style.outline = "none";
  }

  // A picture that can stand alone: the chart below its title, and its legend below that.
  async picture() {
    const chart = await createImageBitmap(await this.view.export("png", true).to_blob());
    const scale = chart.width / this.plot.clientWidth, line = 20;
    const entries = several ? content.runs.map((run, index) => [index, run.name]).filter(([index]) => !state.hidden.has(index) && this.series.some(series => series.run === index))
      : this.panel.curves.map((curve, index) => [index, curve.label]);
    const columns = Math.max(1, Math.floor(this.plot.clientWidth / 230)), rows = Math.ceil(entries.length / columns);
    const canvas = make("canvas", { width: chart.width, height: chart.height + scale * line * (2 + rows) });
    const pen = canvas.getContext("2d");
    pen.fillStyle = color("--card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(chart, 0, scale * line * 1.5);
    pen.scale(scale, scale);
    pen.fillStyle = color("--ink");
    pen.font = "bold 14px system-ui, sans-serif";
    pen.fillText([this.panel.title, this.panel.unit && `(${this.panel.unit})`, `by ${AXES[state.x].toLowerCase()}`].filter(Boolean).join(" "), 12, line);
    pen.font = "12px system-ui, sans-serif";
    for (const [place, [index, name]] of entries.entries())
      entry(pen, index, shown(name), 12 + (place % columns) * 230, chart.height / scale + line * (2.2 + Math.floor(place / columns)));
    return new Promise(done => canvas.toBlob(done));
  }

  async save() {
    const link = make("a", { download: `${this.panel.key}.png`, href: URL.createObjectURL(await this.picture()) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}

// An entry of a picture's legend: line, mark, name.
function entry(pen, index, name, x, y) {
  const { color: own, dash, mark } = look(index);
  pen.save();
  pen.strokeStyle = own;
  pen.lineWidth = 2.2;
  pen.setLineDash(dash);
  pen.beginPath();
  pen.moveTo(x, y - 4);
  pen.lineTo(x + 34, y - 4);
  pen.stroke();
  pen.fillStyle = own;
  pen.translate(x + 17, y - 4);
  pen.fill(new Path2D(SHAPES[mark]));
  pen.restore();
  pen.fillText(name.length > 28 ? `${name.slice(0, 27)}…` : name, x + 42, y);
}

// Kinds of events: the mark on the lower edge, its colour, and a line from top to bottom for those that explain a bend.
const KINDS = {
  skipped: { mark: "x", color: "--bad" }, save_failed: { mark: "x", color: "--bad", line: true }, checkpoint: { mark: "circle" },
  removed: { mark: "circle" }, start: { mark: "triangle", color: "--accent" }, resume: { mark: "triangle", color: "--accent", line: true },
  early_stop: { mark: "square", color: "--warn", line: true }, end: { mark: "square", color: "--soft" }, gpu_cap: { mark: "diamond", color: "--warn" },
  warnings: { mark: "diamond", color: "--warn" }, data: { mark: "diamond", color: "--soft" },
};

// The values of a part of a curve that lie between two places, in order of size, and the first of them.
function between({ x, y }, from, to, log) {
  const inside = y.slice(place(x, from), place(x, to * (1 + 1e-12) + 1e-12)).filter(value => Number.isFinite(value) && (!log || value > 0));
  return { first: inside[0], sorted: inside.sort((a, b) => a - b) };
}

// The range that shows values but a few spikes, and the first value where it belongs to the picture.
function unspiked({ first, sorted }, withFirst) {
  let low = sorted[0], high = sorted.at(-1);
  if (!state.clip || sorted.length <= 50) return { low, high };
  const cut = Math.floor(sorted.length * SPIKES) + 1, inner = [sorted[cut], sorted.at(-1 - cut)], span = inner[1] - inner[0];
  if (high - inner[1] > 0.5 * span) high = Math.max(inner[1], withFirst ? first : -Infinity);
  if (inner[0] - low > 0.5 * span) low = inner[0];
  return { low, high };
}

// What of a curve lies between two places: the range of its values, and how many a picture of it leaves out.
function extent(series, from, to, log, withFirst) {
  const logged = between((series.raw ?? series.points).data_source.data, from, to, log);
  if (series.mark !== "line") return logged.sorted.length ? { low: logged.sorted[0], high: logged.sorted.at(-1), outside: 0 } : null;
  const means = between(series.smooth.data_source.data, from, to, log).sorted;
  if (!logged.sorted.length) return means.length ? { low: means[0], high: means.at(-1), outside: 0 } : null;
  let { low, high } = unspiked(logged, withFirst);
  if (!series.raw.visible && means.length) [low, high] = [Math.max(low, means[0]), Math.min(high, means.at(-1))];  // a spike's mean is one too
  const outside = series.raw.visible ? logged.sorted.filter(value => value < low || value > high).length : 0;
  return low <= high ? { low, high, outside } : null;
}

// ----- the horizontal axis, which all charts share ----------------------------------------------------------------------

let charts = [], busy = false, waiting = false;

function quietly(change) {
  busy = true;
  try { change(); } finally { busy = false; }
}

function whole() {
  const ends = content.runs.flatMap((run, index) => state.hidden.has(index) ? [] : Object.values(run.curves).flatMap(curve => curve.x[state.x]?.length ? [curve.x[state.x][0], curve.x[state.x].at(-1)] : []));
  const low = Math.min(...ends), high = Math.max(...ends);
  if (!(low <= high)) return [0, 1];
  const margin = (high - low) * 0.01 || Math.abs(high) * 0.5 || 1;
  return [low - margin, high + margin];
}

const view = () => state.from === null ? whole() : [state.from, state.to];

function zoomTo(range) {
  if (range) {
    const [low, high] = whole(), width = Math.max(range[1] - range[0], (high - low) * 1e-6);
    const start = clamp(range[0], low, high - Math.min(width, high - low));
    range = width >= (high - low) * 0.999 ? null : [start, start + width];
  }
  [state.from, state.to] = range ?? [null, null];
  leave();
  for (const chart of charts) chart.fit();
  $("reset").disabled = state.from === null;
  writeAddress();
}

function zoomBy(factor, about = null) {
  const [from, to] = view(), middle = about ?? (from + to) / 2;
  zoomTo([middle - (middle - from) * factor, middle + (to - middle) * factor]);
}

function onZoom(chart) {
  if (busy || waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    zoomTo([chart.figure.x_range.start, chart.figure.x_range.end]);
  });
}

// ----- reading values ---------------------------------------------------------------------------------------------------

let cursor = null, touched = false;
addEventListener("pointerdown", event => { touched = event.pointerType === "touch"; }, true);

function hover(chart, sx, sy) {
  const frame = chart.view?.frame;
  if (!frame || sx < frame.bbox.left - 1 || sx > frame.bbox.right + 1) return leave();
  pointAt(chart, frame.x_scale.invert(sx), sy);
}

function pointAt(chart, x, sy) {
  const rows = readings(chart, x);
  if (!rows.length) return leave();
  const at = rows.reduce((best, row) => Math.abs(row.x - x) < Math.abs(best.x - x) ? row : best);
  cursor = at.x;
  for (const each of charts) each.mark(at.x);
  showTip(chart, at, rows, sy);
}

Chart.prototype.mark = function (x) {
  const frame = this.view?.frame;
  const sx = frame?.x_scale.compute(x);
  this.cross.hidden = !frame || sx < frame.bbox.left || sx > frame.bbox.right;
  if (!this.cross.hidden) Object.assign(this.cross.style, { left: `${sx}px`, top: `${frame.bbox.top}px`, height: `${frame.bbox.height}px` });
};

// The value of each curve at a place: of a line the nearest, of single points the last one before.
function readings(chart, x) {
  const [from, to] = view(), near = (to - from) * 0.03;
  return chart.series.filter(series => chart.visible(series)).flatMap(series => {
    const { data } = series, xs = data.x[state.x];
    const index = series.mark === "line" ? nearest(xs, x) : Math.max(0, place(xs, x + near / 3) - 1);
    if (x < xs[0] - near || x > xs.at(-1) + near) return [];
    return [{ series, index, x: xs[index], value: data.y[index], smooth: series.smooth ? smoothAt(series, xs[index]) : null }];
  });
}

function smoothAt(series, x) {
  const { x: xs, y } = series.smooth.data_source.data;
  return y[nearest(xs, x)];
}

const MOST = 14;  // rows of the readings

function showTip(chart, at, rows, sy) {
  const best = rows.find(row => row.series.mark === "line" && row.x === at.x) ?? at;
  const when = Object.keys(AXES).filter(axis => best.series.data.x[axis]).map(axis => exactly(axis, best.series.data.x[axis][best.index]));
  const table = several ? tableOfRuns(chart, rows, sy) : rows.map(row => tipRow(lookOf(row.series), row.series.label, [row], at.x, row.series.mark));
  const left = new Set(rows.map(row => row.series.run)).size - table.length;
  $("tip").replaceChildren(make("div", { class: "when" }, when.join(" · ")),
    make("table", {}, several && chart.panel.curves.length > 1 ? tipHead(chart) : null, make("tbody", {}, ...table)),
    ...(several && left > 0 ? [make("div", { class: "soft" }, `and ${left} more`)] : []), ...eventsAt(chart, at.x));
  placeTip(chart, at.x, sy);
}

const tipHead = chart => make("thead", {}, make("tr", {}, make("th"), make("th"), ...chart.panel.curves.map(curve => make("th", {}, curve.label))));

// A row for each run, from high to low; of very many those nearest to the pointer.
function tableOfRuns(chart, rows, sy) {
  const byRun = new Map();
  for (const row of rows) byRun.set(row.series.run, [...byRun.get(row.series.run) ?? [], row]);
  const height = own => own[0].smooth ?? own[0].value;
  let chosen = [...byRun.values()];
  if (chosen.length > MOST && sy !== undefined) {
    const y = chart.view.frame.y_scale.invert(sy);
    chosen = chosen.sort((a, b) => Math.abs(height(a) - y) - Math.abs(height(b) - y));
  }
  chosen = chosen.slice(0, MOST).sort((a, b) => height(b) - height(a));
  return chosen.map(own => tipRow(own[0].series.run, content.runs[own[0].series.run].name,
    chart.panel.curves.map(curve => own.find(row => row.series.key === curve.key)), rows[0].x, null));
}

function tipRow(index, name, cells, x, mark) {
  return make("tr", {}, make("td", {}, swatch(index, { line: mark !== "points", mark: mark !== "line" })), make("td", { class: "cut" }, name),
    ...cells.map(row => make("td", { class: "num" }, ...(row ? reading(row, x) : []))));
}

function reading(row, x) {
  const line = row.series.mark === "line" && !UNSMOOTHED.has(row.series.key);
  const mean = line && state.smooth > 0 && Number.isFinite(row.smooth) && Number.isFinite(row.value) ? ` mean ${spoken(Number(row.smooth.toPrecision(4)))}` : "";
  const where = row.series.mark !== "line" && row.x !== x ? ` ${exactly(state.x, row.x)}` : "";
  return [make("b", {}, spoken(row.value)), make("span", { class: "soft" }, mean + where)];
}

function eventsAt(chart, x) {
  const [from, to] = view(), near = (to - from) * 0.006;
  const found = (chart.events ?? []).filter(group => !state.hidden.has(group.run)).flatMap(group => (group.shown ?? []).filter(event => Math.abs(event[state.x] - x) <= near).map(event => [group.run, event]));
  return found.slice(0, 4).map(([run, event]) => make("div", { class: "event" }, `${several ? `${content.runs[run].name}: ` : ""}${event.words}`));
}

function placeTip(chart, x, sy) {
  const tip = $("tip"), frame = chart.view.frame, box = chart.plot.getBoundingClientRect();
  tip.hidden = false;
  const sx = box.left + frame.x_scale.compute(x), right = sx + 14 + tip.offsetWidth < innerWidth;
  const left = clamp(right ? sx + 14 : sx - 14 - tip.offsetWidth, 6, Math.max(6, innerWidth - tip.offsetWidth - 6));
  const top = clamp(box.top + (sy ?? frame.bbox.top + 20) + 14, 6, Math.max(6, innerHeight - tip.offsetHeight - 6));
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

function leave() {
  cursor = null;
  $("tip").hidden = true;
  for (const chart of charts) chart.cross.hidden = true;
}

function onKey(event, chart) {
  const [from, to] = view(), move = (to - from) / (event.shiftKey ? 10 : 100);
  const acts = {
    ArrowLeft: () => pointAt(chart, stepped(chart, -1, move)), ArrowRight: () => pointAt(chart, stepped(chart, 1, move)),
    "+": () => zoomBy(0.6, cursor), "=": () => zoomBy(0.6, cursor), "-": () => zoomBy(1 / 0.6, cursor), 0: () => zoomTo(null), Escape: leave,
  };
  if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
  $("say").textContent = $("tip").hidden ? "" : $("tip").innerText;
}

// The next place to read: a hundredth of the view further, and at least one point.
function stepped(chart, way, move) {
  const [from, to] = view(), xs = chart.series.find(series => chart.visible(series))?.data.x[state.x] ?? [0];
  if (cursor === null) return (from + to) / 2;
  const next = clamp(nearest(xs, cursor) + way, 0, xs.length - 1);
  const wanted = cursor + way * move;
  return clamp(way > 0 ? Math.max(wanted, xs[next]) : Math.min(wanted, xs[next]), from, to);
}

// ----- the overview -----------------------------------------------------------------------------------------------------

function chip(status) {
  return make("span", { class: `chip ${status.state in STATES ? status.state : "unknown"}` }, STATES[status.state] ?? status.state);
}

function progress(run) {
  const { step, steps } = run.status;
  return steps > 0 ? make("progress", { max: steps, value: clamp(step ?? 0, 0, steps), "aria-label": `${step ?? 0} of ${steps} steps` }) : null;
}

const notes = run => run.notes?.length ? make("ul", { class: "notes" }, ...run.notes.map(note => make("li", {}, note))) : null;

// The summary without what the state's line says already.
const headlines = run => run.summary.filter(([, value]) => value !== run.status.words);

// A figure's number is large and what follows it small, except in times, which have several.
function figure(value) {
  const [, first, rest] = /^(\S*\d)(,?\s.*)$/.exec(value) ?? [];
  return rest && !/^\d+ (s|min|h|d)\b/.test(value) ? [first, make("small", {}, rest)] : [value];
}

function overviewOfOne(run) {
  const left = run.status.seconds_left > 0 ? `about ${duration(run.status.seconds_left)} left` : "";
  const words = [run.status.words, left].filter(Boolean).join(" · ");
  $("overview").append(make("div", { class: "card" },
    make("div", { class: "row" }, chip(run.status), make("span", {}, words), make("span", { class: "soft grow" }, `${run.path} · ${run.kind}`)),
    make("div", { style: "margin-top:.6rem" }, progress(run) ?? ""), notes(run)));
  $("overview").append(make("dl", { class: "tiles" }, ...headlines(run).map(([name, value]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, ...figure(value))))));
}

function overviewOfSeveral(runs) {
  const names = [...new Set(runs.flatMap(run => headlines(run).map(([name]) => name)))];
  const head = make("tr", {}, make("th", { scope: "col" }, "Run"), make("th", { scope: "col" }, "State"), ...names.map(name => make("th", { scope: "col" }, name)));
  const rows = runs.map((run, index) => {
    const values = new Map(headlines(run));
    const name = make("span", { class: "row" }, swatch(index), make("span", { class: "cut", title: `${run.name}\n${run.path}` }, run.name));
    return make("tr", { "data-run": index }, make("th", { scope: "row" }, name), make("td", { title: run.status.words }, chip(run.status)),
      ...names.map(each => make("td", { class: "num" }, values.get(each) ?? "")));
  });
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
  $("overview").append(make("div", { class: "card" }, make("div", { class: "scroll wide", tabindex: 0, role: "region", "aria-label": "Runs" }, table),
    ...runs.map(run => run.notes?.length ? make("div", {}, make("b", {}, run.name), notes(run)) : null)));
}

// ----- samples, events, differences, facts --------------------------------------------------------------------------------

function samples() {
  const steps = [...new Set(content.runs.flatMap(run => run.samples.map(sample => sample.step)))].sort((a, b) => a - b);
  $("samples").hidden = !steps.length;
  if (!steps.length) return;
  const slider = make("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: steps.length - 1, "aria-label": "Step of the samples", oninput: () => one() });
  const step = make("b", { class: "num" }), texts = make("div", { class: "texts" });
  const move = way => { slider.value = Number(slider.value) + way; one(); };
  const before = make("button", { type: "button", onclick: () => move(-1), "aria-label": "Earlier sample" }, "‹ Earlier");
  const after = make("button", { type: "button", onclick: () => move(1), "aria-label": "Later sample" }, "Later ›");
  const every = make("button", { type: "button", "aria-pressed": "false", onclick: () => { every.setAttribute("aria-pressed", String(every.getAttribute("aria-pressed") !== "true")); one(); } }, "All, as they improved");
  const one = () => {
    const all = every.getAttribute("aria-pressed") === "true", until = steps[Number(slider.value)];
    step.textContent = all ? `${steps.length} steps` : `Step ${until.toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", step.textContent);
    slider.disabled = all;
    before.disabled = all || Number(slider.value) === 0;
    after.disabled = all || Number(slider.value) === steps.length - 1;
    const chosen = content.runs.flatMap((run, index) => {
      if (state.hidden.has(index)) return [];
      const upTo = all ? run.samples : run.samples.filter(sample => sample.step <= until).slice(-1);
      return upTo.map(sample => sampleCard(index, sample));
    });
    texts.replaceChildren(...(chosen.length ? chosen : [make("p", { class: "soft" }, "None of the shown runs has a sample by this step.")]));
  };
  $("samples").append(make("div", { class: "row" }, before, slider, after, step, every), texts);
  samples.again = one;
  one();
}

function sampleCard(index, sample) {
  const name = several ? [swatch(index), make("span", { class: "cut" }, content.runs[index].name)] : [];
  const tokens = sample.tokens === null ? "" : ` · ${sample.tokens.toLocaleString("en")} tokens`;
  return make("article", { class: "card" }, make("div", { class: "row soft", style: "margin:0" }, ...name, `step ${sample.step.toLocaleString("en")}${tokens}`), make("pre", { dir: "auto" }, sample.text));
}

const MOST_ROWS = 200;

function events() {
  const all = content.runs.flatMap((run, index) => run.events.map(event => ({ run: index, ...event }))).sort((a, b) => a.step - b.step);
  $("events").hidden = !all.length;
  if (!all.length) return;
  const kinds = [...new Set(all.map(event => event.kind))], off = new Set();
  const body = make("tbody"), more = make("button", { type: "button", onclick: () => fill(Infinity) });
  const fill = most => {
    const chosen = all.filter(event => !off.has(event.kind) && !state.hidden.has(event.run));
    body.replaceChildren(...chosen.slice(0, most).map(eventRow));
    more.hidden = chosen.length <= most;
    more.textContent = `Show all ${chosen.length.toLocaleString("en")}`;
  };
  const filters = kinds.map(kind => {
    const count = all.filter(event => event.kind === kind).length;
    const button = make("button", { type: "button", "aria-pressed": "true", onclick: () => {
      if (!off.delete(kind)) off.add(kind);
      button.setAttribute("aria-pressed", String(!off.has(kind)));
      fill(MOST_ROWS);
    } }, `${kind.replaceAll("_", " ")} ${count.toLocaleString("en")}`);
    return button;
  });
  const columns = [...(several ? ["Run"] : []), "Step", "Time", "Kind", "Details"];
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(name => make("th", { scope: "col" }, name)))), body);
  $("events").append(...(kinds.length > 1 ? [make("div", { class: "row filters", role: "group", "aria-label": "Kinds of events" }, ...filters)] : []),
    make("div", { class: "card" }, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, table), more));
  events.again = () => fill(MOST_ROWS);
  fill(MOST_ROWS);
}

function eventRow(event) {
  const run = several ? [make("td", {}, make("span", { class: "row", style: "flex-wrap:nowrap" }, swatch(event.run), make("span", { class: "cut", style: "max-width:12rem" }, content.runs[event.run].name)))] : [];
  return make("tr", {}, ...run, make("td", { class: "num" }, event.step.toLocaleString("en")), make("td", { class: "num" }, event.time === null ? "" : duration(event.time)),
    make("td", {}, event.kind.replaceAll("_", " ")), make("td", {}, event.words));
}

function differences() {
  const found = content.differences;
  $("differences").hidden = !found;
  if (!found) return;
  const head = make("tr", {}, make("th", { scope: "col" }, "Setting"), ...found.names.map((name, index) => make("th", { scope: "col" }, make("span", { class: "row", style: "flex-wrap:nowrap" }, swatch(index), make("span", { class: "cut", title: name }, name)))));
  const rows = found.rows.map(row => make("tr", {}, make("th", { scope: "row" }, row.name, make("span", { class: "soft" }, ` ${row.group}`)), ...row.values.map(value => make("td", { class: "mono", title: value }, value))));
  $("differences").append(make("div", { class: "card" }, rows.length
    ? make("div", { class: "scroll wide", tabindex: 0, role: "region", "aria-label": "Differences" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)))
    : make("p", { class: "soft" }, "The runs have the same configuration.")));
}

function facts() {
  const table = rows => make("table", {}, make("tbody", {}, ...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "mono" }, value)))));
  for (const [index, run] of content.runs.entries()) {
    if (!run.facts.length) continue;
    $("facts").hidden = false;
    const groups = run.facts.map(([name, rows]) => make("div", {}, make("h3", {}, name), table(rows)));
    const title = make("summary", {}, several ? run.name : [...new Set(run.facts.map(([name]) => name.split(":")[0]))].join(", "));
    const find = make("input", { type: "search", class: "find", placeholder: "Find a setting", "aria-label": "Find a setting", autocomplete: "off", oninput: () => filter(groups, find.value) });
    $("facts").append(make("details", { class: "card", "data-run": index }, title, find, make("div", { class: "groups" }, ...groups)));
  }
}

function filter(groups, text) {
  const wanted = text.trim().toLowerCase();
  for (const group of groups) {
    const rows = [...group.querySelectorAll("tr")];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    group.hidden = rows.every(row => row.hidden);
  }
}

// ----- controls -----------------------------------------------------------------------------------------------------------

function segments(node, name, choices, allowed, chosen) {
  node.append(...Object.entries(choices).map(([value, label]) => {
    const input = make("input", { type: "radio", name, value, disabled: !allowed(value), onchange: () => chosen(value) });
    return make("label", { title: allowed(value) ? "" : "No run has it" }, input, label);
  }));
}

function runList() {
  $("runs").hidden = !several;
  if (!several) return;
  for (const [index, run] of content.runs.entries()) {
    const box = make("input", { type: "checkbox", "data-run": index, onchange: () => hide(index, !box.checked) });
    $("list").append(make("label", { class: "check", title: run.name }, box, swatch(index), make("span", { class: "cut" }, run.name)));
  }
  $("find").hidden = content.runs.length < 9;
  $("find").addEventListener("input", () => {
    for (const [index, node] of [...$("list").children].entries()) node.hidden = !content.runs[index].name.toLowerCase().includes($("find").value.toLowerCase());
  });
  $("all").addEventListener("click", () => hideAll(false));
  $("none").addEventListener("click", () => hideAll(true));
}

function hide(index, hidden) {
  if (hidden) state.hidden.add(index); else state.hidden.delete(index);
  afterHiding();
}

function hideAll(hidden) {
  for (const [index, node] of [...$("list").children].entries()) if (!node.hidden) state.hidden[hidden ? "add" : "delete"](index);
  afterHiding();
}

function afterHiding() {
  leave();
  showControls();
  for (const chart of charts) {
    chart.fill();
    chart.dress();  // the more runs, the fainter their values before smoothing
  }
  samples.again?.();
  events.again?.();
  writeAddress();
}

function showControls() {
  for (const [name, value] of [["axis", state.x], ["drag", state.drag]])
    for (const input of $(name).querySelectorAll("input")) input.checked = input.value === value;
  $("smooth").value = state.smooth;
  for (const name of ["log", "raw", "clip", "reload"]) $(name).checked = state[name];
  const steps = Math.round(windowSteps());
  $("window").textContent = state.smooth > 0 && steps > 1 ? `${short(steps)} steps` : "none";
  $("smooth").setAttribute("aria-valuetext", $("window").textContent);
  $("reset").disabled = state.from === null;
  $("lacking").textContent = remarks().join(" ");
  $("lacking").hidden = !$("lacking").textContent;
  for (const box of $("list").querySelectorAll("input")) box.checked = !state.hidden.has(Number(box.dataset.run));
  for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("off", state.hidden.has(Number(row.dataset.run)));
}

// What must be known of the shown runs to read the charts.
function remarks() {
  const named = which => content.runs.filter((run, index) => !state.hidden.has(index) && which(run)).map(run => run.name).join(", ");
  const lacking = named(run => !onThisAxis(run)), summed = state.x === "time" ? named(run => run.clock === "steps") : "";
  const thinned = named(run => Object.values(run.curves).some(curve => curve.count > curve.y.length));
  return [
    lacking && `Not drawn, ${AXES[state.x].toLowerCase()} unknown: ${lacking}.`,
    summed && `Time is the sum of step times, without the pauses between steps: ${summed}.`,
    thinned && `Thinned to the first, last, lowest and highest point of each stretch: ${thinned}.`,
  ].filter(Boolean);
}

// Keep the same stretch of training in view when the axis changes, by the curve with the most points.
function translated(from, to, axis) {
  const fullest = content.runs.flatMap((run, index) => state.hidden.has(index) ? [] : Object.values(run.curves)).filter(curve => curve.x[state.x] && curve.x[axis])
    .reduce((best, curve) => !best || curve.y.length > best.y.length ? curve : best, null);
  if (!fullest) return [null, null];
  const [old, now] = [fullest.x[state.x], fullest.x[axis]];
  const ends = [from, to].map(value => now[nearest(old, value)]);
  return ends[0] < ends[1] ? ends : [null, null];
}

function changeAxis(axis) {
  if (state.from !== null) [state.from, state.to] = translated(state.from, state.to, axis);
  state.x = axis;
  refresh();
}

function refresh() {
  leave();
  showControls();
  for (const chart of charts) chart.fill();
  writeAddress();
}

function controls() {
  segments($("axis"), "axis", AXES, hasAxis, changeAxis);
  segments($("drag"), "drag", DRAGS, () => true, value => {
    state.drag = value;
    for (const chart of charts) chart.drags();
    writeAddress();
  });
  let later = 0;
  $("smooth").addEventListener("input", () => {
    state.smooth = Number($("smooth").value);
    cancelAnimationFrame(later);
    later = requestAnimationFrame(refresh);
  });
  for (const name of ["log", "raw", "clip"]) $(name).addEventListener("change", () => { state[name] = $(name).checked; refresh(); });
  $("nearer").addEventListener("click", () => zoomBy(0.5));
  $("wider").addEventListener("click", () => zoomBy(2));
  $("reset").addEventListener("click", () => zoomTo(null));
  $("controls").addEventListener("submit", event => event.preventDefault());
  const logs = content.panels.filter(panel => panel.log).map(panel => panel.title);
  $("log").parentElement.hidden = !logs.length;
  $("log").parentElement.title = logs.join(", ");
  runList();
  reloading();
}

// On a narrow page the controls stand folded up above the charts.
function fold() {
  $("display").open = !narrow.matches;
}

function reloading() {
  $("again").hidden = !content.runs.some(run => run.status.state === "running");
  let timer = 0;
  const set = () => {
    clearInterval(timer);
    timer = state.reload && !$("again").hidden ? setInterval(() => location.reload(), 60000) : 0;
  };
  $("reload").addEventListener("change", () => { state.reload = $("reload").checked; writeAddress(); set(); });
  set();
}

// ----- all of it ------------------------------------------------------------------------------------------------------------

function dress() {
  for (const chart of charts) chart.dress();
  for (const old of document.querySelectorAll("svg.swatch")) old.replaceWith(swatch(...JSON.parse(old.dataset.look)));
}

async function begin() {
  document.title = content.title;
  $("title").textContent = content.title;
  $("made").textContent = `Written ${new Date(content.made * 1000).toLocaleString()} by llmc-jax ${content.version}`;
  if (several) overviewOfSeveral(content.runs); else for (const run of content.runs) overviewOfOne(run);
  fold();
  readAddress();
  controls();
  showControls();
  samples();
  events();
  differences();
  facts();
  Bokeh.logger.set_level("warn");
  charts = panels().map((panel, index) => new Chart(panel, index === 0)).filter(chart => chart.series.length);
  $("empty").hidden = charts.length > 0;
  $("panels").append(...charts.map(chart => chart.node));
  for (const chart of charts) {
    chart.fill();
    chart.dress();
    chart.drags();
  }
  await Promise.all(charts.map(chart => chart.attach()));
  for (const media of [dark, matchMedia("print")]) media.addEventListener("change", dress);
  narrow.addEventListener("change", fold);
  phone.addEventListener("change", () => { for (const chart of charts) chart.figure.height = chart.height; });
  new ResizeObserver(() => { leave(); for (const chart of charts) chart.fit(); }).observe($("panels"));
  document.addEventListener("scroll", leave, { passive: true });
  addEventListener("hashchange", () => { readAddress(); afterHiding(); for (const chart of charts) chart.drags(); });
  document.documentElement.dataset.ready = "yes";
}

begin();
