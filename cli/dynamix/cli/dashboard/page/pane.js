// Everything of one job, live or captured: title, tiles, curves, tables.

import { Chart } from "./chart.js";
import { age, clock, elapsed, element, milliseconds, number, percent, setText, whole } from "./format.js";
import { Alarms, Bars, Decisions, Levers, Nodes } from "./tables.js";

const MAX_LINES = 8;
const MAX_NODES = 16;
const MAX_WINDOWS = 5000;
const PHASES = { running: ["● running", "good"], silent: ["○ silent, perhaps killed", "error"], ended: ["■ ended", "dim"] };
const TILES = [
  ["throughput", "samples/s", (metrics) => number(metrics.throughput)],
  ["step time", "", (metrics) => milliseconds(metrics.step_time_s)],
  ["loss", "", (metrics) => number(metrics.loss)],
  ["training accuracy", "", (metrics) => percent(metrics.accuracy)],
  ["held-out accuracy", "", (metrics) => percent(metrics.held_out_accuracy)],
  ["global batch", "samples", (_, job) => whole(job.global_batch_size)],
  ["noise scale", "samples", (metrics) => number(metrics.noise_scale)],
  ["progress", "", (metrics) => percent(metrics.progress)],
];

let panes = 0;

export class Pane {
  // startUnixS: of a capture, whose times count from there; null for a job that runs. Captures have one cursor together.
  constructor(name, startUnixS = null) {
    this.start = startUnixS;
    this.windows = new Map();
    this.moment = null;
    this.sync = startUnixS === null ? `job-${(panes += 1)}` : "captures";
    this.name = element("h2", {}, name || "no job yet");
    this.phase = element("span", {});
    this.about = element("span", { class: "dim" }, "waits for the first message");
    this.tiles = TILES.map(([label, unit]) => {
      const value = element("span", {}, "–");
      return { value, root: element("div", { class: "tile" }, element("b", {}, value, " ", element("small", {}, unit)), element("span", {}, label)) };
    });
    this.makePanels();
    this.root = element("article", { class: "pane", "aria-label": name || "no job" },
      element("div", { class: "title" }, this.name, this.phase, this.about),
      element("div", { class: "tiles" }, ...this.tiles.map((tile) => tile.root)),
      element("div", { class: "panels" }, ...this.panels.map((panel) => panel.root)));
  }

  makePanels() {
    const x = this.start === null ? { label: "time of day", time: true } : { label: "time since the start [s]", time: false };
    const chart = (title, unit, waits, more = {}) => new Chart({ title, unit, waits, x, sync: this.sync, ...more });
    const first = "waits for the first window";
    this.charts = {
      sizes: chart("Local batch size", "samples per step", first, { fromZero: true, stepped: true }),
      throughput: chart("Throughput", "samples per second", first, { fromZero: true }),
      batch: chart("Global batch and noise scale", "samples", first, { log: true }),
      loss: chart("Training loss", "loss", "waits for a loss: session.step(loss)"),
      accuracy: chart("Accuracy", "%", "waits for session.step(loss, num_correct=...) or session.evaluated(...)"),
      step: chart("Step time", "ms", first, { fromZero: true }),
      reward: chart("Reward and its terms", "reward", "waits for the reward service"),
      cpu: chart("CPU by node", "% of its processors", "waits for a collector's second window", { fromZero: true }),
      network: chart("Network of the job's ranks, by node", "MB/s", "waits for counters of sockets: see the probe of each node below", { fromZero: true }),
    };
    const atTime = (unixS) => this.atTime(unixS);
    this.bars = new Bars();
    this.decisions = new Decisions(atTime);
    this.levers = new Levers();
    this.nodes = new Nodes();
    this.alarms = new Alarms();
    const c = this.charts;
    this.panels = [c.sizes, this.bars, c.throughput, this.decisions, c.accuracy, c.loss, c.batch, c.step, c.reward, this.levers, c.cpu, c.network, this.alarms, this.nodes];
  }

  atTime(unixS) {
    if (!unixS) return "–";
    return this.start === null ? clock(unixS) : elapsed(unixS - this.start);
  }

  destroy() {
    Object.values(this.charts).forEach((chart) => chart.destroy());
    this.root.remove();
  }

  // document: {is_whole, job, windows, alarms}; the windows are those that changed, unless it is whole
  update(document) {
    if (document.is_whole) this.windows.clear();
    merge(this.windows, document.windows || []);
    this.showJob(document);
    const until = this.moment === null ? Infinity : this.start + this.moment;
    const decided = [...this.windows.values()].filter((window) => window.action && window.decided_unix_s <= until);
    this.decisions.update(decided, until, document.job.phase);
    if (document.windows) this.drawCurves();
  }

  showJob({ job, alarms }) {
    this.job = job;
    setText(this.name, job.name);
    this.root.setAttribute("aria-label", job.name);
    const [text, kind] = PHASES[job.phase];
    const reason = job.phase === "ended" && job.specification?.end_reason; // "left": the script's end, without close
    setText(this.phase, [text, reason !== "left" && reason, reason && job.summary].filter(Boolean).join(": "));
    this.phase.className = kind;
    this.tiles.forEach((tile, index) => setText(tile.value, job.metrics ? TILES[index][2](job.metrics, job) : "–"));
    this.showAge();
    this.bars.update(job);
    this.levers.update(job);
    this.nodes.update(job);
    this.alarms.update(alarms, job.events, (unixS) => this.atTime(unixS));
  }

  showAge(nowUnixS = this.now) {
    this.now = nowUnixS;
    const job = this.job;
    if (!job) return;
    const nodes = (job.specification || job).nodes.length;
    const parts = [job.specification?.policy, `${job.num_ranks} ranks on ${nodes} ${nodes === 1 ? "node" : "nodes"}`,
      job.window === null ? "no window yet" : `window ${job.window}`];
    if (job.generation) parts.push(`restart ${job.generation}`);
    if (this.start === null && job.updated_unix_s && nowUnixS) parts.push(`${age(nowUnixS - job.updated_unix_s)} ago`);
    setText(this.about, parts.filter(Boolean).join(" · "));
  }

  setMoment(seconds) {
    this.moment = seconds;
    Object.values(this.charts).forEach((chart) => chart.setMoment(seconds));
  }

  drawCurves() {
    const points = [...this.windows.values()].filter((point) => point.measured_unix_s && point.metrics);
    const xs = points.map((point) => point.measured_unix_s - (this.start || 0));
    for (let index = 1; index < xs.length; index += 1) xs[index] = Math.max(xs[index], xs[index - 1] + 1e-3);
    const of = (key, label, colour, value) => ({ key, label, colour, dash: colour, values: points.map(value) });
    const metric = (name, label, colour, factor = 1) => of(name, label, colour, (point) => scaled(point.metrics[name], factor));
    const c = this.charts;
    c.sizes.update(xs, sizeLines(points));
    c.throughput.update(xs, [metric("throughput", "throughput", 0)]);
    c.step.update(xs, [metric("step_time_s", "step time", 0, 1000)]);
    c.loss.update(xs, [metric("loss", "loss", 1)]);
    c.accuracy.update(xs, [metric("accuracy", "training", 0, 100), metric("held_out_accuracy", "held out", 1, 100)]);
    c.batch.update(xs, [metric("global_batch_size", "global batch", 0), of("noise", "noise scale", 1, (point) => (point.metrics.noise_scale > 0 ? point.metrics.noise_scale : null))]);
    const terms = [...new Set(points.flatMap((point) => Object.keys(point.reward_terms)))];
    c.reward.update(xs, [of("reward", "reward", 6, (point) => point.reward),
      ...terms.map((term, index) => of(`term ${term}`, term.replaceAll("_", " "), index, (point) => point.reward_terms[term] ?? null))]);
    const nodes = [...new Set(points.flatMap((point) => Object.keys(point.nodes)))].sort().slice(0, MAX_NODES);
    const node = (name, colour, key, label, read) => ({ key: `${key} ${name}`, label, colour, dash: key === "received" ? 2 : 0,
      values: points.map((point) => read(point.nodes[name] || {})) });
    c.cpu.update(xs, nodes.map((name, index) => ({ ...node(name, index, "cpu", name, (one) => scaled(one.cpu_time_ratio, 100)), dash: index })));
    const place = (name, what) => (nodes.length > 1 ? `${name} ${what}` : what);
    c.network.update(xs, nodes.slice(0, MAX_LINES).flatMap((name, index) => [
      node(name, index, "sent", place(name, "sent"), (one) => scaled(one.tx_bytes_per_s, 1e-6)),
      node(name, index, "received", place(name, "received"), (one) => scaled(one.rx_bytes_per_s, 1e-6))]));
  }
}

const scaled = (value, factor) => (value === null || value === undefined ? null : value * factor);

function merge(map, entries) {
  let last = null;
  for (const key of map.keys()) last = key;
  let sorted = true;
  for (const entry of entries) {
    const key = entry.generation * 1e9 + entry.window;
    if (!map.has(key) && last !== null && key < last) sorted = false;
    if (last === null || key > last) last = key;
    map.set(key, entry);
  }
  if (!sorted) {
    const inOrder = [...map.entries()].sort((a, b) => a[0] - b[0]);
    map.clear();
    inOrder.forEach(([key, entry]) => map.set(key, entry));
  }
  for (const key of map.keys()) {
    if (map.size <= MAX_WINDOWS) break;
    map.delete(key);
  }
}

// A line for each rank where they are few; else all ranks faintly, and minimum, median and maximum.
function sizeLines(points) {
  const names = [...new Set(points.flatMap((point) => Object.keys(point.local_batch_sizes)))];
  const lines = names.map((name, index) => ({
    key: name, label: Number.isNaN(Number(name)) ? name : `rank ${name}`, colour: index, dash: index,
    values: points.map((point) => point.local_batch_sizes[name] ?? null),
  }));
  if (names.length <= MAX_LINES) return lines;
  const sorted = points.map((point) => Object.values(point.local_batch_sizes).sort((a, b) => a - b));
  const spread = [["largest", (sizes) => sizes[sizes.length - 1]], ["median", (sizes) => sizes[Math.floor(sizes.length / 2)]], ["smallest", (sizes) => sizes[0]]];
  return [...lines.map((line) => ({ ...line, colour: 7, dash: 0, faint: true })),
    ...spread.map(([label, of], index) => ({ key: label, label, colour: index, dash: index, values: sorted.map((sizes) => of(sizes) ?? null) }))];
}
