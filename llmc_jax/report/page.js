"use strict";
// Draws the charts with Bokeh's models from the JSON beside it, and makes the controls work; html.py made all the rest.
// Texts of runs are untrusted: they reach the page as textContent alone, and Bokeh's texts through `plain`.

const $ = id => document.getElementById(id);
const all = selector => [...document.querySelectorAll(selector)];
const content = JSON.parse($("content").textContent);
const several = content.runs.length > 1;
const [narrow, dark, coarse] = ["max-width: 67.99rem", "prefers-color-scheme: dark", "pointer: coarse"]
  .map(words => matchMedia(`(${words})`));
const UNSMOOTHED = ["lr", "loss_scale"];  // they have corners, and no noise

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const finite = value => Number.isFinite(value) ? value : NaN;
const number = value => typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = index => color(`--color-${content.looks[index].color}`);
const plain = text => text.replace(/[$\\]/g, "$&\u200b");  // Bokeh reads mathematics between these

// The first place of a sorted array whose value is not less, and that of the nearest value.
function place(values, value) {
  const found = values.findIndex(each => each >= value);
  return found < 0 ? values.length : found;
}

function nearest(values, value) {
  const after = place(values, value);
  const isBefore = after === values.length || after > 0 && value - values[after - 1] <= values[after] - value;
  return isBefore ? after - 1 : after;
}

// ----- numbers in words -----------------------------------------------------------------------------------------------

const [usual, large, tiny] = [{}, { notation: "compact" }, { notation: "scientific" }]
  .map(form => new Intl.NumberFormat("en", { maximumSignificantDigits: 5, ...form }));

function short(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const form = size >= 1e4 ? large : size < 1e-3 && size > 0 ? tiny : usual;
  return form.format(value).replace("E", "e").replaceAll("-", "−");
}

function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const total = Math.round(seconds), units = [["min", 60, "s", 1], ["h", 3600, "min", 60], ["d", 86400, "h", 3600]];
  const [unit, size, next, part] = units.findLast(([, size]) => total >= size);
  const rest = Math.floor(total % size / part);
  return `${Math.floor(total / size)} ${unit}${rest ? ` ${rest} ${next}` : ""}`;
}

const inSteps = value => `step ${value.toLocaleString("en")}`;
const EXACTLY = { step: inSteps, tokens: value => `${short(value)} tokens`, time: duration };

// ----- what is shown: the form says it, and the address too, so that a link or a reload keeps it ----------------------

const form = $("controls"), fields = [...form.elements].filter(field => field.name);
const is = name => form.elements[name]?.checked ?? true;
const isHidden = run => !is(`run${run}`);
const smoothing = () => Number(form.elements.smooth.value);
let axis = "step", whole = [0, 1];
const range = new Bokeh.Range1d({ start: 0, end: 1 });  // of the horizontal axis, which all charts share
const isZoomed = () => range.start !== whole[0] || range.end !== whole[1];

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  form.reset();
  for (const field of fields.filter(field => given.has(field.name))) {
    const value = given.get(field.name);
    if (field.type === "checkbox") field.checked = value === "1";
    else if (field.type === "range") field.value = value;
    else if (field.value === value) field.checked = true;
  }
  const ends = ["start", "end"].map(name => Number.parseFloat(given.get(name)));
  refresh(ends[0] < ends[1] ? ends : null);
}

function writeAddress() {
  const kept = new URLSearchParams();
  for (const { name, type, value, defaultValue, checked, defaultChecked } of fields) {
    if (type === "checkbox" && checked !== defaultChecked) kept.set(name, Number(checked));
    if (type === "radio" ? checked && !defaultChecked : type === "range" && value !== defaultValue) kept.set(name, value);
  }
  if (isZoomed()) for (const end of ["start", "end"]) kept.set(end, Number(range[end].toPrecision(8)));
  try {
    history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname + location.search);
  } catch {
    location.hash = kept;  // some browsers: not for files
  }
}

// ----- curves ---------------------------------------------------------------------------------------------------------

// The mean of the values within half a window; it narrows towards the start, where losses fall fastest.
function smoothed(steps, values, window) {
  if (!(window > 0) || values.length < 3) return values;
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const bound = 1e6 * Math.max(1, sizes[sizes.length >> 1] ?? 1);  // larger values would spoil the running sums
  let low = 0, high = 0, sum = 0, count = 0;
  const add = (value, sign) => {
    if (!Number.isFinite(value)) return;
    sum += sign * clamp(value, -bound, bound);
    count += sign;
  };
  return values.map((_, index) => {
    const half = Math.min(window / 2, steps[index] - steps[0]);
    while (high < values.length && steps[high] <= steps[index] + half) add(values[high++], 1);
    while (steps[low] < steps[index] - half) add(values[low++], -1);
    return count ? sum / count : NaN;
  });
}

function means({ x, y }, key) {
  if (UNSMOOTHED.includes(key)) return y.map(finite);
  // of a run that is far shorter than the longest, no more than a part of its own
  const part = (x.step.at(-1) - x.step[0]) * Math.max(smoothing(), 5) / 100;
  return smoothed(x.step, y, Math.min(windowSteps(), part)).map(finite);
}

// The points of a curve as Bokeh's columns; a line has a gap where a value is not finite.
function columns({ x, y }, isWanted = () => true) {
  const chosen = Object.entries({ ...x, y: y.map(finite) }).filter(([, values]) => values);
  return Object.fromEntries(chosen.map(([name, values]) => [name, values.filter((_, index) => isWanted(y[index]))]));
}

const shownCurves = () => content.runs.flatMap((run, index) => isHidden(index) ? [] : Object.values(run.curves));
const windowSteps = () => Math.max(1, ...shownCurves().map(curve => curve.x.step.at(-1) ?? 0)) * smoothing() / 100;

// ----- a chart --------------------------------------------------------------------------------------------------------

const cross = new Bokeh.Span({ dimension: "height", line_dash: [4, 3], level: "overlay" });  // where all charts are read
const EDGE = { y_range_name: "edge", level: "overlay" };  // from 0 below to 1 above
const LABELS = {
  axis_line_color: null, minor_tick_line_color: null, major_tick_line_color: null,
  major_label_text_font_size: "12px", major_label_text_font: "system-ui, sans-serif",
};
const PARTS = ["raw", "smooth", "joined", "points", "bad"];
const POWERS = Array.from({ length: 40 }, (_, index) => 10 ** (index - 20));
const TICKERS = {
  even: count => new Bokeh.BasicTicker({ mantissas: [1, 2, 2.5, 5], desired_num_ticks: count }),
  whole: () => new Bokeh.BasicTicker({ min_interval: 1 }),
  time: () => new Bokeh.AdaptiveTicker({ base: 60, mantissas: [1, 2, 5, 10, 15, 30] }),
  log: () => new Bokeh.FixedTicker({ ticks: POWERS.flatMap(power => [1, 1.5, 2, 3, 5, 7].map(each => each * power)) }),
};

class Chart {
  constructor(panel, node, isFirst) {
    Object.assign(this, { panel, node, isFirst });
    this.series = panel.curves.flatMap((curve, index) => content.runs.map((run, r) => (
      { ...curve, run: r, data: run.curves[curve.key], look: several ? r : index }))).filter(each => each.data);
    this.plot = node.querySelector(".plot");
    this.draw();
    this.plot.addEventListener("keydown", event => this.press(event));
    this.plot.addEventListener("blur", leave);
  }

  draw() {
    const { Range1d, LinearScale, NoOverlap, HoverTool, CrosshairTool } = Bokeh, { key, title, unit } = this.panel;
    this.zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    this.pan = new Bokeh.PanTool({ dimensions: "width" });
    this.saver = new Bokeh.SaveTool();
    const figure = this.figure = new Bokeh.Plotting.Figure({
      name: key, height: this.isFirst ? 380 : 225, sizing_mode: "stretch_width", toolbar_location: null,
      tools: [this.zoom, this.pan, this.saver, new Bokeh.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } })],
      active_drag: null, outline_line_color: null, min_border_left: 58, min_border_right: 14,
      x_range: range, y_range: new Range1d({ start: 0, end: 1 }),
      extra_y_ranges: { edge: new Range1d({ start: 0, end: 1 }) }, extra_y_scales: { edge: new LinearScale() },
    });
    for (const [axis, room] of [[figure.xaxes[0], 14], [figure.yaxes[0], 8]])
      axis.setv({ ...LABELS, major_label_policy: new NoOverlap({ min_distance: room }) });
    figure.xaxes[0].formatter.doFormat = ticks => ticks.map(axis === "time" ? duration : short);
    figure.yaxes[0].formatter.doFormat = ticks => ticks.map(short);
    this.title = new Bokeh.Title({ text: unit ? `${title} (${unit})` : title, visible: false });  // in pictures alone
    this.legend = new Bokeh.Legend({ visible: false, location: "top_left", background_fill_alpha: 0 });
    figure.add_layout(this.title, "above");
    figure.add_layout(this.legend, "below");
    this.probe = this.add({}, "probe", "line", { step: [], y: [] }, { ...EDGE, line_color: null });  // finds the pointer
    figure.add_tools(new CrosshairTool({ dimensions: "height", overlay: cross }), new HoverTool({
      mode: "vline", renderers: [this.probe], point_policy: "follow_mouse", show_arrow: false,
      tooltips: (_, { x }) => this.reading(x),
    }));
    if (this.isFirst) this.drawOnce();
    for (const series of this.series) if (series.mark === "line") this.add(series, "raw", "line", columns(series.data));
    for (const series of this.series) this.drawSeries(series);
    figure.on_event("doubletap", () => zoomTo(whole));
    // a finger leaves where it taps, and would take the reading with it
    figure.on_event("tap", ({ x }) => { if (coarse.matches) setTimeout(() => this.point(x), 100); });
  }

  // Adds a part of a series. Its name says what it holds: the run's place, the curve, which of its points.
  add(series, part, kind, data, extra = {}) {
    const given = { name: JSON.stringify([series.run, series.key, part]), source: new Bokeh.ColumnDataSource({ data }) };
    return series[part] = this.figure[kind]({ field: "step" }, { field: "y" }, { ...given, ...extra });
  }

  drawSeries(series) {
    const { data } = series, { dash, mark } = content.looks[series.look], count = data.y.length, all = columns(data);
    if (series.mark === "line") {
      const style = { line_width: 2.2, line_dash: dash, line_join: "round" };
      this.add(series, "smooth", "line", columns(data.mean ?? data), style);
      if (count <= 3) this.add(series, "points", "scatter", all, { marker: mark, size: 8 });  // else it would not be seen
    } else {
      this.add(series, "joined", "line", all, { line_width: 1.2, line_dash: dash });
      this.add(series, "points", "scatter", all, { marker: mark, size: count <= 40 ? 8 : count <= 120 ? 6 : 4.5 });
    }
    const odd = columns(data, value => !Number.isFinite(value));
    const edge = { ...odd, y: odd.y.map(() => 0.975) };
    if (odd.y.length) this.add(series, "bad", "scatter", edge, { ...EDGE, marker: "inverted_triangle", size: 10 });
  }

  // On the chart of the loss alone: events on the lower edge with lines up from some, and the baselines.
  drawOnce() {
    const [step, y, top, mark, own] = ["step", "y", "top", "mark", "own"].map(field => ({ field }));
    const marks = { ...EDGE, marker: mark, fill_color: own, line_color: own, size: 8 };
    const lines = { ...EDGE, line_color: own, line_dash: { value: [3, 3] }, line_alpha: 0.6 };
    this.events = content.runs.map(({ events }, run) => {
      const names = ["step", "tokens", "time", "mark", "color", "top"];
      const data = Object.fromEntries(names.map(name => [name, events.map(event => event[name] ?? NaN)]));
      const scatter = this.add({ run }, "events", "scatter", { ...data, own: [], y: events.map(() => 0.025) }, marks);
      return [scatter, this.figure.segment(step, y, step, top, { ...lines, source: scatter.data_source })];
    });
    this.baselines = Object.entries(content.baselines).flatMap(([text, y]) => [
      new Bokeh.Span({ dimension: "width", location: y, line_dash: [5, 3] }),
      new Bokeh.Label({ x: Bokeh.Node.frame.right, y, padding: 3, text, text_align: "right", text_font_size: "11px" }),
    ]);
    for (const model of this.baselines) this.figure.add_layout(model);
  }

  visible(series) {
    return !isHidden(series.run) && is(`${this.panel.key} ${series.key}`) && Boolean(series.data.x[axis]);
  }

  // Puts in place what the form asks for.
  fill() {
    for (const series of this.series) {
      const visible = this.visible(series), { data, key, smooth } = series;
      for (const part of PARTS) if (series[part]) {
        series[part].visible = visible && (part !== "raw" || is("raw") || UNSMOOTHED.includes(key));
        if (visible) series[part].glyph.x = { field: axis };
      }
      if (smooth) smooth.data_source.data = { ...smooth.data_source.data, y: means(data.mean ?? data, key) };
    }
    for (const [run, [marks, lines]] of (this.events ?? []).entries()) {
      marks.visible = lines.visible = !isHidden(run);
      marks.glyph.x = lines.glyph.x0 = lines.glyph.x1 = { field: axis };
    }
    this.log = this.panel.log && is("log");
    this.probe.data_source.data = { step: whole, y: [0.5, 0.5] };
    this.figure.y_scale = this.log ? new Bokeh.LogScale() : new Bokeh.LinearScale();
    this.figure.xaxes[0].ticker = this.figure.xgrids[0].ticker = TICKERS[axis === "time" ? "time" : "whole"]();
    this.zoom.active = form.elements.drag.value === "zoom";
    this.pan.active = form.elements.drag.value === "pan";
    this.node.hidden = this.series.every(series => isHidden(series.run));
    this.dress();
  }

  // The vertical axis fits what is seen of the horizontal one.
  fit() {
    const shown = this.series.filter(series => this.visible(series));
    const seen = shown.flatMap(series => this.seen(series));
    if (this.isFirst && !isZoomed()) seen.push(...Object.values(content.baselines));
    let [low, high] = [Math.min, Math.max].map(most => seen.reduce((one, other) => most(one, other), seen[0]));
    if (!seen.length) [low, high] = this.log ? [1, 10] : [0, 1];
    const factor = Math.max((high / low) ** 0.06, 1.02), margin = 0.06 * (high - low) || 0.06 * Math.abs(high) || 0.5;
    const start = this.log ? low / factor : low > 0 && low < margin ? 0 : low - margin;
    const end = this.log ? high * factor : high + margin;
    this.figure.y_range.setv({ start, end });
    const ticker = TICKERS[this.log && end > 5 * start ? "log" : "even"](this.isFirst ? 9 : 5);
    this.figure.yaxes[0].ticker = this.figure.ygrids[0].ticker = ticker;
    const spikes = ({ data: { y, usual }, raw }) => (
      usual && raw.visible && is("clip") ? y.filter(value => value < usual[0] || value > usual[1]) : []);
    const counts = [["off scale", shown.flatMap(spikes)],
      ["not finite", shown.flatMap(({ data }) => data.y.filter(value => !Number.isFinite(value)))]];
    const words = counts.filter(([, { length }]) => length).map(([name, { length }]) => `${length} ${name}`);
    this.node.querySelector(".at").textContent = words.join(", ");
  }

  // What is seen of a curve but a few spikes.
  seen({ data: { usual }, mark, raw, smooth, points }) {
    const { [axis]: x, y } = (mark !== "line" ? points : raw.visible ? raw : smooth).data_source.data;
    const [low, high] = is("clip") && usual ? usual : [-Infinity, Infinity];
    return y.filter((value, index) => x[index] >= range.start && x[index] <= range.end
      && value >= low && value <= high && (value > 0 || !this.log));
  }

  dress() {
    const { figure } = this, [soft, grid, card, accent] = ["--soft", "--grid", "--card", "--accent"].map(color);
    const runs = content.runs.filter((_, index) => !isHidden(index)).length, most = dark.matches ? 0.5 : 0.35;
    const alpha = clamp(2 * most / runs, 0.05, most);  // the more runs, the fainter their values before smoothing
    figure.setv({ background_fill_color: card, border_fill_color: card });
    for (const each of [...figure.xaxes, ...figure.yaxes]) each.major_label_text_color = soft;
    for (const each of [...figure.xgrids, ...figure.ygrids]) each.grid_line_color = grid;
    for (const { look, raw, smooth, joined, points, bad } of this.series) {
      const own = paint(look);
      raw?.glyph.setv({ line_color: own, line_alpha: alpha });
      smooth?.glyph.setv({ line_color: own });
      joined?.glyph.setv({ line_color: own, line_alpha: 0.45 });
      for (const part of [points, bad]) part?.glyph.setv({ fill_color: own, line_color: card });
    }
    for (const [run, [{ data_source }]] of (this.events ?? []).entries()) {
      const own = data_source.data.color.map(name => several ? paint(run) : color(name));
      data_source.data = { ...data_source.data, own };
    }
    for (const model of this.baselines ?? []) model[model instanceof Bokeh.Label ? "text_color" : "line_color"] = soft;
    this.zoom.overlay.setv({ fill_color: accent, fill_alpha: 0.15, line_color: null });
    cross.line_color = soft;
  }

  // ----- reading values

  // Of a line the nearest value, of single points the last one before.
  valueAt(series, x) {
    const xs = series.data.x[axis], near = (range.end - range.start) * 0.03;
    if (x < xs[0] - near || x > xs.at(-1) + near) return null;
    const index = series.mark === "line" ? nearest(xs, x) : Math.max(0, place(xs, x + near / 3) - 1);
    const smooth = series.smooth?.data_source.data, mean = smooth?.y[nearest(smooth[axis], xs[index])];
    return { series, index, x: xs[index], value: series.data.y[index], mean };
  }

  // What the box at the pointer says: a row for each run, from high to low, or for each curve of a single one.
  reading(x) {
    const rows = this.series.filter(each => this.visible(each)).map(each => this.valueAt(each, x)).filter(Boolean);
    if (!rows.length) return null;
    const at = rows.reduce((best, row) => Math.abs(row.x - x) < Math.abs(best.x - x) ? row : best);
    const { curves } = this.panel, places = at.series.data.x, near = (range.end - range.start) * 0.006;
    const height = ([{ mean, value }]) => mean ?? value;
    const groups = [...Map.groupBy(rows, row => row.series.look)];
    if (several) groups.sort(([, a], [, b]) => height(b) - height(a));
    const lines = groups.map(([look, own]) => {
      const name = several ? content.runs[look].name : own[0].series.label;
      const cells = several ? curves.map(({ key }) => own.find(row => row.series.key === key)) : own;
      const swatch = (several ? $("list") : this.node).querySelector(`[data-look="${look}"] svg`)?.cloneNode(true) ?? "";
      return make("tr", {}, make("td", {}, swatch), make("td", { class: "cut" }, name),
        ...cells.map(row => make("td", {}, ...(row ? this.words(row, at.x) : []))));
    });
    const heads = several && curves.length > 1 ? ["", "", ...curves.map(each => each.label)] : [];
    const head = make("tr", {}, ...heads.map(each => make("th", {}, each)));
    const when = Object.keys(EXACTLY).filter(each => places[each]).map(each => EXACTLY[each](places[each][at.index]));
    const happened = !this.isFirst ? [] : content.runs.flatMap(({ name, events }, run) => isHidden(run) ? [] : events
      .filter(event => event[axis] !== null && Math.abs(event[axis] - at.x) <= near)
      .map(({ words }) => several ? `${name}: ${words}` : words)).slice(0, 4);
    this.cursor = at.x;
    const spoken = lines.map(line => [...line.cells].map(cell => cell.textContent).join(" "));
    this.said = [when.join(", "), ...spoken, ...happened].join("; ");
    return make("div", { class: "tip" }, $("tip").cloneNode(true), make("div", { class: "when" }, when.join(" · ")),
      make("table", {}, head, ...lines), ...happened.map(words => make("div", { class: "event" }, words)));
  }

  // A value and its mean, or where it is when that is elsewhere.
  words({ series: { key }, value, mean, x }, at) {
    const isSmooth = smoothing() > 0 && !UNSMOOTHED.includes(key) && Number.isFinite(mean + value);
    const more = isSmooth ? `mean ${short(Number(mean.toPrecision(4)))}` : x !== at ? EXACTLY[axis](x) : "";
    return [make("b", {}, short(value)), make("span", { class: "soft" }, ` ${more}`)];
  }

  // The keyboard moves a pointer that is not there, and Bokeh's tools follow it.
  point(x) {
    const { frame, canvas_view } = this.view;
    canvas_view.ui_event_bus.on_move(moved("move", frame.x_scale.compute(x), frame.bbox.top + 20));
  }

  // Reads the value a part of the points further on.
  move(part) {
    const xs = this.series.find(series => this.visible(series))?.data.x[axis] ?? [0];
    const here = nearest(xs, this.cursor ?? (range.start + range.end) / 2), far = Math.ceil(Math.abs(part) * xs.length);
    this.point(xs[clamp(here + Math.sign(part) * far, 0, xs.length - 1)]);
    $("say").textContent = this.said ?? "";
  }

  press(event) {
    const part = event.shiftKey ? 0.1 : 0.01, nearer = () => zoomBy(0.6, this.cursor);
    const acts = {
      ArrowLeft: () => this.move(-part), ArrowRight: () => this.move(part), Escape: leave,
      "+": nearer, "=": nearer, "-": () => zoomBy(1 / 0.6, this.cursor), 0: () => zoomTo(whole),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // Saves a picture that can stand alone: with a title and a legend.
  async save() {
    const names = several ? content.runs.map(run => run.name) : this.panel.curves.map(curve => curve.label);
    const drawn = look => this.series.filter(series => series.look === look && this.visible(series));
    const items = names.map((name, look) => new Bokeh.LegendItem({
      label: { value: plain(name) }, renderers: drawn(look).map(series => series.smooth ?? series.points),
    })).filter(item => item.renderers.length);
    const ncols = Math.max(1, Math.floor(this.plot.clientWidth / 230)), ink = color("--ink");
    this.legend.setv({ items, ncols, label_text_color: ink, border_line_color: null, visible: true });
    this.title.setv({ text_color: ink, visible: true });
    await new Promise(done => setTimeout(done, 100));  // until Bokeh has laid them out
    await this.view.tool_views.get(this.saver).save(`${this.panel.key}.png`);
    this.legend.visible = this.title.visible = false;
  }
}

// ----- all charts -----------------------------------------------------------------------------------------------------

let charts = [];

// What Bokeh is told of a pointer.
const moved = (type, sx, sy) => (
  { type, sx, sy, modifiers: { shift: false, ctrl: false, alt: false }, native: new PointerEvent(`pointer${type}`) });

function leave() {
  for (const { view } of charts) view?.canvas_view.ui_event_bus.on_leave(moved("leave", -1, -1));
}

function zoomTo([from, to]) {
  range.setv({ start: Math.max(from, whole[0]), end: Math.min(to, whole[1]) });
}

function zoomBy(factor, about = (range.start + range.end) / 2) {
  zoomTo([about - (about - range.start) * factor, about + (range.end - about) * factor]);
}

function fit() {
  for (const chart of charts) chart.fit();
  $("unzoom").disabled = !isZoomed();
  writeAddress();
}

// The same stretch of training by another axis, by the curve with the most points.
function translated(ends, next) {
  const [fullest] = shownCurves().filter(curve => curve.x[axis] && curve.x[next]).sort((a, b) => b.y.length - a.y.length);
  return fullest ? ends.map(value => fullest.x[next][nearest(fullest.x[axis], value)]) : null;
}

// Shows what the form says, of the horizontal axis the given part.
function refresh(ends) {
  axis = form.elements.x.value;
  const xs = shownCurves().map(curve => curve.x[axis] ?? []).filter(x => x.length);
  const low = Math.min(...xs.map(x => x[0])), high = Math.max(...xs.map(x => x.at(-1)));
  const margin = (high - low) * 0.01 || Math.abs(high) * 0.5 || 1;
  whole = low <= high ? [low - margin, high + margin] : [0, 1];
  range.setv({ bounds: whole, min_interval: (whole[1] - whole[0]) * 1e-6 });
  for (const node of all("[data-run]")) node.classList.toggle("off", isHidden(node.dataset.run));
  for (const row of all("#events tr[data-kind]")) row.hidden = !is(`kind ${row.dataset.kind}`);
  for (const node of all("[data-axis]")) node.hidden = node.dataset.axis !== axis;
  const steps = Math.round(windowSteps());
  $("window").textContent = smoothing() > 0 && steps > 1 ? `${short(steps)} steps` : "none";
  for (const chart of charts) chart.fill();
  zoomTo(ends ?? whole);
  fit();
}

// ----- controls -------------------------------------------------------------------------------------------------------

function changed(name) {
  const ends = isZoomed() ? [range.start, range.end] : null;
  refresh(ends && name === "x" ? translated(ends, form.elements.x.value) : ends);
}

// What a button does is said by its data.
function onClick({ target }) {
  const { zoom, shows, act } = target.closest("button")?.dataset ?? {};
  if (zoom) zoomBy(Number(zoom));
  if (act === "reset") zoomTo(whole);
  if (act === "save") charts.find(chart => chart.node.contains(target)).save();
  if (!shows) return;
  for (const { control } of $("list").children) control.checked = shows === "all";
  changed();
}

async function begin() {
  Bokeh.logger.set_level("warn");
  const curves = content.runs.flatMap(run => Object.values(run.curves));
  for (const part of curves.flatMap(curve => [curve, curve.mean ?? []]).flat()) part.y = part.y.map(number);
  if (coarse.matches) document.querySelector("[name=drag][value=none]").defaultChecked = true;
  const fold = () => { $("display").open = !narrow.matches; };  // on a narrow page the controls stand above the charts
  fold();
  charts = content.panels.map((panel, index) => new Chart(panel, all(".panel")[index], index === 0));
  readAddress();
  const together = new Bokeh.Document();  // whose charts share their range, and where they are read
  for (const chart of charts) together.add_root(chart.figure);
  const views = await Bokeh.embed.add_document_standalone(together, document.body, charts.map(chart => chart.plot));
  for (const chart of charts) {
    chart.view = views.get(chart.figure);
    chart.view.canvas_view.events_el.removeAttribute("tabindex");  // the plot round it takes the focus
  }
  document.addEventListener("input", ({ target }) => { if (target.form === form) changed(target.name); });
  document.addEventListener("click", onClick);
  document.addEventListener("pointerdown", leave, true);
  form.addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", readAddress);
  range.change.connect(() => requestAnimationFrame(fit));  // after Bokeh's tools have set the vertical ranges too
  narrow.addEventListener("change", fold);
  for (const media of [dark, matchMedia("print")]) media.addEventListener("change", () => changed());
  setInterval(() => { if (form.elements.reload.checked) location.reload(); }, 60000);
  document.documentElement.dataset.ready = "yes";
}

begin();
