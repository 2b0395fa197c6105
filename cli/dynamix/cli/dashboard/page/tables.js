// The panels that are no curves: bars by rank, decisions, levers, nodes.

import { element, milliseconds, number, percent, setText, signed, whole } from "./format.js";

const PARTS = [
  ["data", "data_time_s", "data"],
  ["compute", "compute_time_s", "compute"],
  ["communication", "communication_time_s", "communication"],
  ["wait", "wait_time_s", "wait for slower ranks"],
  ["update", "update_time_s", "update"],
];

const sum = (values) => values.reduce((a, b) => a + b, 0);

function panel(title, unit, waits, kind = "") {
  const body = element("div", { class: "body scroll", tabindex: "0", role: "region", "aria-label": title });
  const note = element("span", {}, unit);
  const empty = element("p", { class: "empty" }, waits);
  const root = element("section", { class: `panel ${kind}` }, element("h3", {}, title, note), body, empty);
  return { root, body, note, empty };
}

export class Bars {
  constructor() {
    Object.assign(this, panel("Where a step's time goes, by rank", "newest window", "waits for the first window"));
    this.rows = new Map();
    this.list = element("div", { class: "bars", role: "list" });
    this.ticks = [0, 1, 2].map(() => element("span", {}));
    const key = element("div", { class: "key" },
      ...PARTS.map(([kind, , label]) => element("span", {}, element("i", { class: kind }), label)));
    this.key = key;
    this.axis = element("div", { class: "scale" }, element("span", {}, "rank: batch"), element("div", {}, ...this.ticks, element("em", {}, "time of one step [ms]")));
    this.body.before(key);
    this.body.classList.add("stacked");  // the axis in it: as wide as the bars, beside a scroll bar too
    this.body.append(this.list, this.axis);
  }

  update(job) {
    const ranks = job.ranks.map((rank) => ({ ...rank.training, ...rank, isBehind: rank.window < job.window }));
    this.empty.hidden = ranks.length > 0;
    const total = (rank) => sum(PARTS.map(([, field]) => rank[field] || 0));
    const full = Math.max(1e-9, ...ranks.map((rank) => Math.max(rank.step_time_s, total(rank))));
    this.ticks.forEach((tick, index) => setText(tick, ranks.length ? number((full * 1000 * index) / 2) : ""));
    setText(this.note, ranks.length < job.num_ranks_known ? `slowest ${ranks.length} of ${job.num_ranks_known} ranks` : "newest window");
    for (const rank of ranks) this.row(rank, full);
    for (const [rank, row] of this.rows) {
      if (!ranks.some((one) => one.rank === rank)) { row.root.remove(); this.rows.delete(rank); }
    }
  }

  row(rank, full) {
    let row = this.rows.get(rank.rank);
    if (!row) {
      const parts = [...PARTS.map(([kind]) => element("i", { class: kind })), element("i", { class: "unknown" })];
      row = { parts, name: element("span", {}), time: element("span", {}) };
      row.root = element("div", { class: "bar", role: "listitem" }, row.name, element("div", { class: "track" }, ...parts), row.time);
      this.rows.set(rank.rank, row);
      const next = [...this.rows.entries()].filter(([other]) => other > rank.rank).sort((a, b) => a[0] - b[0])[0];
      this.list.insertBefore(row.root, next ? next[1].root : null);
    }
    const known = PARTS.map(([, field]) => rank[field] || 0);
    const rest = rank.compute_time_s === null ? Math.max(0, rank.step_time_s - sum(known)) : 0;
    [...known, rest].forEach((seconds, index) => { row.parts[index].style.width = `${(100 * seconds) / full}%`; });
    const pending = rank.pending_local_batch_size === rank.local_batch_size ? "" : `→${rank.pending_local_batch_size}`;
    setText(row.name, `${rank.rank}: ${rank.local_batch_size}${pending}`);
    setText(row.time, milliseconds(rank.step_time_s));
    row.root.classList.toggle("behind", rank.isBehind);
    const text = PARTS.map(([, field, label]) => `${label} ${milliseconds(rank[field])}`).join(", ");
    const title = `rank ${rank.rank} on ${rank.node}, ${rank.local_batch_size} samples: ${rest ? `compute and wait ${milliseconds(rest)}` : text}`;
    if (row.root.title !== title) { row.root.title = title; row.root.setAttribute("aria-label", title); }
  }
}

export class Decisions {
  constructor(atTime) {
    Object.assign(this, panel("Decisions", "one per window, newest first", "waits for the first decision of the arbitrator", "wide"));
    this.atTime = atTime;
    const headings = [["window", "number"], ["decided"], ["global batch", "number"], ["changes by rank"], ["split"], ["exchange"], ["why", "why"], ["in effect from"]];
    this.rows = element("tbody", {});
    this.body.append(element("table", {}, element("thead", {}, element("tr", {},
      ...headings.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)))), this.rows));
  }

  // windows with their decisions, newest last; what was adopted after `until` is not shown yet
  update(windows, until, phase) {
    this.until = until;
    this.notAdopted = phase === "ended" ? "never" : "not yet";
    this.empty.hidden = windows.length > 0;
    const kept = this.body.scrollTop;
    this.rows.replaceChildren(...windows.slice(-100).reverse().map((one) => this.row(one)));
    this.body.scrollTop = kept;
  }

  row({ generation, window, action: one, decided_unix_s: decided, applied, applied_unix_s: appliedAt }) {
    const restart = generation ? `${generation}:` : "";
    const change = one.global_batch_size_change ? ` (${signed(one.global_batch_size_change)})` : "";
    const adopted = applied && appliedAt <= this.until ? `window ${applied.effective_window}` : this.notAdopted;
    const why = one.reason || `${one.policy} gives no reason`;
    return element("tr", {},
      element("td", { class: "number" }, `${restart}${window}`),
      element("td", { class: "nowrap" }, this.atTime(decided)),
      element("td", { class: "number" }, `${whole(one.global_batch_size)}${change}`),
      element("td", { class: "nowrap" }, changes(one)),
      element("td", {}, one.split),
      element("td", {}, one.exchange.label),
      element("td", { class: one.reason ? null : "dim" }, one.gap ? `${why}; inputs were missing` : why),
      element("td", { class: "nowrap" }, adopted));
  }
}

function changes({ deltas, num_ranks_more: more, num_ranks_less: less }) {
  if (!more && !less) return "none";
  if (deltas && deltas.length <= 8) return deltas.map((delta) => (delta ? signed(delta) : "·")).join(" ");
  return `${more} ranks more, ${less} less`;
}

export class Levers {
  constructor() {
    Object.assign(this, panel("Levers", "what decisions set", "waits for the job's specification"));
    this.list = element("dl", {});
    this.body.append(this.list);
  }

  update(job) {
    const given = job.specification;
    this.empty.hidden = given !== null;
    if (!given) return this.list.replaceChildren();
    const split = job.action?.split ?? given.initial_split;
    const steps = Math.max(0, ...job.nodes.map((node) => node.num_steps)) || given.window_steps;
    const options = Object.entries(given.policy_options).map(([name, value]) => `${name}=${value}`).join(", ");
    const splits = { tracking: "by the ranks, after every step, by measured speed", fixed: "as decided, once per window",
                     traces: "by the traces of the nodes' agents, once per window" };
    const rows = {
      policy: `${given.policy}${options ? ` (${options})` : ""}`,
      "global batch": `${whole(job.global_batch_size)} samples, ${given.global_batch}; began with ${whole(sum(given.initial_local_batch_sizes))}`,
      "per rank": `${whole(given.min_local_batch_size)} to ${whole(Math.max(...given.max_local_batch_sizes))} samples`,
      split: `${split}: ${splits[split]}`,
      exchange: `${job.exchange.label}; permitted: ${given.exchange}, began: ${given.initial_exchange.label}`,
      "learning rate": { none: "as the script sets it", linear: "in proportion to the global batch", sqrt: "by the square root of the global batch" }[given.learning_rate_rule],
      window: `${whole(steps)} steps`,
      refused: Object.entries(job.applied?.num_refused || {}).filter(([, count]) => count).map(([why, count]) => `${count} ${why}`).join(", ") || "no decision",
    };
    this.list.replaceChildren(...Object.entries(rows).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  }
}

export class Nodes {
  constructor() {
    Object.assign(this, panel("Nodes", "newest window, all jobs of a node together", "waits for the first window of a collector", "wide low"));
    const headings = [["node"], ["ranks", "number"], ["CPU busy", "number"], ["load per CPU", "number"], ["memory", "number"],
      ["sent [MB/s]", "number"], ["received [MB/s]", "number"], ["retransmitted", "number"], ["probe"]];
    this.rows = element("tbody", {});
    this.body.append(element("table", {}, element("thead", {}, element("tr", {},
      ...headings.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)))), this.rows));
  }

  update(job) {
    this.empty.hidden = job.nodes.length > 0;
    this.rows.replaceChildren(...job.nodes.map((node) => element("tr", {},
      element("th", { scope: "row", class: "nowrap" }, node.node),
      ...[whole(node.num_ranks), percent(node.node_metrics.cpu_time_ratio), number(node.node_metrics.load_per_cpu),
        percent(node.node_metrics.memory_used_ratio), megabytes(node.node_metrics, "tx_bytes"), megabytes(node.node_metrics, "rx_bytes"),
        whole(node.node_metrics.retransmits)].map((text) => element("td", { class: "number" }, text)),
      element("td", {}, node.probe_note ? `${node.probe}: ${node.probe_note}` : node.probe))));
  }
}

// Megabytes per second over the node's interval.
function megabytes({ interval_s: seconds, ...counted }, name) {
  if (counted[name] === null || !seconds) return number(null);
  const bytes = counted[name] / seconds;
  return bytes > 0 && bytes < 1000 ? "< 0.001" : number(bytes / 1e6);
}

export class Alarms {
  constructor() {
    Object.assign(this, panel("Alarms and failure signatures", "of this job", "none so far"));
    this.list = element("div", {});
    this.body.append(this.list);
  }

  update(alarms, events, atTime) {
    this.empty.hidden = alarms.length + events.length > 0;
    this.list.replaceChildren(
      ...alarms.map((alarm) => element("p", { class: alarm.level }, `${alarm.level}: ${alarm.text}`)),
      ...events.map((event) => element("p", { class: "dim" }, `${atTime(event.time_unix_s)} window ${event.window}: ${event.signature}, ${event.explanation}`)));
  }
}
