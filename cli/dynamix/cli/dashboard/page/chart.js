// One chart with its legend: uPlot underneath, our own legend, arrow keys for the cursor, colours from the style sheet.

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
      this.plot.setData(this.data);
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
    const y = log ? { distr: 3, log: 2, range: powers } : { range: (_, low, high) => range(low, high, fromZero) };
    this.plot = new uPlot({
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: sync, setSeries: false }, points: { size: 5 }, drag: { setScale: true, x: true, y: false } },
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
      hooks: { setCursor: [() => this.showValues()], draw: [(plot) => this.drawMoment(plot)] },
    }, this.data, this.body);
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
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in steps) || !this.plot) return;
    event.preventDefault();
    const xs = this.plot.data[0];
    const index = Math.min(xs.length - 1, Math.max(0, (this.plot.cursor.idx ?? xs.length) + steps[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: this.plot.bbox.height / 2 / devicePixelRatio });
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
