// One chart with its legend: uPlot underneath, our own legend, colours from the style sheet. Charts of one `sync` have
// one cursor and one part of the time: arrow keys, Home and End move the cursor, + and - enlarge, Escape shows all.

import { element, number, setText } from "./format.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2, 1, 2], [1, 2], [8, 2, 8, 6]];
const charts = new Set();

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.restyle()));

export class Chart {
  // options: {title, unit, waits, x: {label, time}, sync, fromZero, log, stepped, format}
  constructor(options) {
    this.options = options;
    this.keys = "";
    this.moment = null;
    this.zoom = null;  // the part of the x axis that is enlarged
    this.shared = null;  // {x, y}: what other charts show, of two captures beside each other
    this.hidden = new Set();
    this.legend = element("div", { class: "legend", role: "group", "aria-label": `Lines of ${options.title}` });
    this.body = element("div", { class: "body", tabindex: "0", role: "img", "aria-label": `${options.title}: no data yet` });
    this.empty = element("p", { class: "empty" }, options.waits);
    this.root = element("section", { class: "panel" },
      element("h3", {}, options.title, element("span", {}, options.unit)), this.legend, this.body, this.empty);
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.body);
    charts.add(this);
  }

  // xs: rising numbers; lines: [{key, label, colour, dash, values, faint}]
  update(xs, lines) {
    const known = lines.filter((line) => line.values.some((value) => value !== null));
    this.empty.hidden = known.length > 0 && xs.length > 0;
    this.data = [xs, ...known.map((line) => line.values)];
    const keys = known.map((line) => line.key).join("\n");
    if (keys !== this.keys || (!this.plot && known.length)) {
      this.keys = keys;
      this.lines = known;
      this.build();
    } else if (this.plot) {
      this.lines = known;
      this.plot.setData(this.data, false);
      this.fitTime();
    }
    this.showValues();
    const values = known.filter((line) => !line.faint).map((line) => `${line.label} ${this.format(last(line.values))}`);
    if (known.length) {
      this.body.setAttribute("aria-label",
        `${this.options.title} in ${this.options.unit} over ${xs.length} windows; newest: ${values.join(", ")}`);
    }
  }

  setMoment(x) {
    this.moment = x;
    if (this.plot) this.plot.redraw(false);
  }

  // The least and the largest of all x and of all y, null without data.
  extent() {
    const [xs, ...lines] = this.data || [[]];
    const known = lines.flat().filter((value) => value !== null);
    const ends = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    return known.length ? { x: [xs[0], xs[xs.length - 1]], y: ends(known) } : null;
  }

  // Show at least what another chart shows, so that two runs can be compared by eye.
  share(extents) {
    const known = extents.filter((one) => one !== null);
    const union = (axis) => [Math.min(...known.map((one) => one[axis][0])), Math.max(...known.map((one) => one[axis][1]))];
    this.shared = known.length > 1 ? { x: union("x"), y: union("y") } : null;
    this.fitTime();
  }

  // Enlarge a part of the x axis in all charts of one cursor; null shows all.
  enlarge(part) {
    for (const chart of charts) {
      if (chart.options.sync !== this.options.sync) continue;
      chart.zoom = part;
      chart.fitTime();
    }
  }

  fitTime() {
    if (!this.plot || !this.data[0].length) return;
    const [min, max] = this.zoom || this.allTime();
    this.plot.setScale("x", min < max ? { min, max } : { min: min - 1, max: max + 1 });
  }

  destroy() {
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
    charts.delete(this);
  }

  restyle() {
    if (!this.plot) return;
    this.build();
    this.showValues();
  }

  format(value) {
    return (this.options.format || number)(value);
  }

  build() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.makeLegend();
    if (!this.lines.length) return;
    const colours = { text: style("--dim"), grid: style("--grid") };
    const axis = { stroke: colours.text, font: "11px system-ui", labelFont: "11px system-ui", labelGap: 0,
      grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, width: 1, size: 4 } };
    const { log, fromZero, x, stepped, sync } = this.options;
    const seen = (range) => (plot, low, high) => (this.shared && !this.zoom && low !== null
      ? range(plot, Math.min(low, this.shared.y[0]), Math.max(high, this.shared.y[1])) : range(plot, low, high));
    const y = log ? { distr: 3, log: 2, range: seen(powers) } : { range: seen((_, low, high) => range(low, high, fromZero)) };
    this.plot = new uPlot({
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: sync, setSeries: false }, points: { size: 5 }, drag: { setScale: false, x: true, y: false },
        bind: { dblclick: () => () => this.enlarge(null) } },
      scales: { x: { time: x.time, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y },
      axes: [
        { ...axis, label: x.label, labelSize: 15, size: 28, space: 64, ...(x.time ? { values: clockLabels } : {}) },
        { ...axis, label: this.options.unit, labelSize: 15, size: 48, space: 34, values: (_, splits) => splits.map((value) => (value === null ? null : number(value))) },
      ],
      series: [{}, ...this.lines.map((line) => ({
        show: !this.hidden.has(line.key),
        stroke: style(`--s${line.colour % 8}`) + (line.faint ? "66" : ""),
        width: line.faint ? 1 : 1.8,
        dash: DASHES[line.dash % DASHES.length],
        paths: stepped ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear(),
        points: { show: (plot) => plot.data[0].length < 3 },
        spanGaps: true,
      }))],
      hooks: { setCursor: [() => this.showValues()], setSelect: [(plot) => this.onSelect(plot)], draw: [(plot) => this.drawMoment(plot)] },
    }, this.data, this.body);
    this.fitTime();
  }

  onSelect(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.enlarge([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  makeLegend() {
    this.values = [];
    const buttons = this.lines.filter((line) => !line.faint).map((line) => {
      const value = element("b", {});
      this.values.push({ line: line.key, value });
      const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(line.key)), title: `show or hide ${line.label}` },
        sample(line), line.label, value);
      button.addEventListener("click", () => this.toggle(line.key, button));
      return button;
    });
    this.legend.replaceChildren(...buttons);
  }

  toggle(key, button) {
    const shown = this.hidden.delete(key) || !this.hidden.add(key);
    button.setAttribute("aria-pressed", String(shown));
    this.plot.setSeries(1 + this.lines.findIndex((line) => line.key === key), { show: shown });
  }

  // The values under the cursor, without one the newest.
  showValues() {
    const index = this.plot ? this.plot.cursor.idx : null;
    for (const { line, value } of this.values || []) {
      const values = this.lines.find((one) => one.key === line)?.values || [];
      setText(value, this.format(index === null || index === undefined ? last(values) : values[index]));
    }
  }

  onKey(event) {
    if (!this.plot || event.ctrlKey || event.altKey || event.metaKey) return;
    const xs = this.plot.data[0];
    const newest = xs.length - 1;
    const index = this.plot.cursor.idx ?? newest + 1;
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: newest };
    const factors = { "+": 0.5, "=": 0.5, "-": 2 };
    if (event.key in moves) this.moveCursor(Math.min(newest, Math.max(0, moves[event.key])));
    else if (event.key in factors) this.scaleTime(Math.min(index, newest), factors[event.key]);
    else if (event.key === "Escape") this.enlarge(null);
    else return;
    event.preventDefault();
  }

  moveCursor(index) {
    const x = this.plot.data[0][index];
    const { min, max } = this.plot.scales.x;
    if (this.zoom && (x < min || x > max)) this.enlarge(this.around(x, max - min));
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: this.plot.bbox.height / 2 / devicePixelRatio });
  }

  // Enlarge by a factor around a window; all where that is no part any more.
  scaleTime(index, factor) {
    const { min, max } = this.plot.scales.x;
    const x = this.plot.data[0][index];
    const [first, newest] = this.allTime();
    const width = (max - min) * factor;
    this.enlarge(width < newest - first ? this.around(x, width) : null);
    queueMicrotask(() => this.plot && this.moveCursor(index));  // once uPlot has drawn the new scale
  }

  // A part of that width with a point in its middle, as far as there is something on both sides.
  around(x, width) {
    const [first, newest] = this.allTime();
    const begin = Math.max(first, Math.min(newest - width, x - width / 2));
    return [begin, begin + width];
  }

  allTime() {
    const xs = this.data[0];
    return this.shared?.x || [xs[0], xs[xs.length - 1]];
  }

  size() {
    return { width: Math.max(80, this.body.clientWidth), height: Math.max(60, this.body.clientHeight) };
  }

  resize() {
    if (this.plot) this.plot.setSize(this.size());
  }

  drawMoment(plot) {
    if (this.moment === null) return;
    const x = Math.round(plot.valToPos(this.moment, "x", true));
    const { left, top, width, height } = plot.bbox;
    if (x < left || x > left + width) return;
    plot.ctx.save();
    plot.ctx.setLineDash([]);
    plot.ctx.strokeStyle = style("--text");
    plot.ctx.lineWidth = devicePixelRatio;
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
    plot.ctx.restore();
  }
}

function sample(line) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const stroke = document.createElementNS(space, "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 20, y1: 5, y2: 5, "stroke-width": 2,
    stroke: `var(--s${line.colour % 8})`, "stroke-dasharray": DASHES[line.dash % DASHES.length].join(" ") })) {
    stroke.setAttribute(name, value);
  }
  svg.setAttribute("aria-hidden", "true");
  svg.append(stroke);
  return svg;
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

function range(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  const bottom = fromZero ? Math.min(0, low) : low;
  const room = (high - bottom || Math.abs(high) || 1) * 0.06;
  return [fromZero && bottom === 0 ? 0 : bottom - room, high + room];
}

// The powers of two around the values.
function powers(_, low, high) {
  if (!(low > 0)) return [1, 2];
  return [2 ** Math.floor(Math.log2(low)), 2 ** Math.ceil(Math.log2(high * 1.0001))];
}

function clockLabels(_, splits) {
  return splits.map((at) => {
    const text = new Date(at * 1000).toLocaleTimeString("en-GB");
    return at % 60 === 0 && splits.length > 1 && splits[1] - splits[0] >= 60 ? text.slice(0, 5) : text;
  });
}
