// The page: which jobs there are, which one is shown, the events of a bus, the slider of captures.

import { age, elapsed, element, number, percent, setText } from "./format.js";
import { Pane } from "./pane.js";

const find = (id) => document.getElementById(id);
const MARKS = { running: "●", silent: "○", ended: "■" };
const PLAY_S = 30;
const RETRY_MS = 10000;

class LivePage {
  constructor() {
    this.pane = null;
    this.shown = null;
    this.overview = null;
    addEventListener("hashchange", () => this.choose());
    setInterval(() => this.pane && this.lastNow && this.pane.showAge(this.lastNow + (performance.now() - this.heardMs) / 1000), 1000);
    this.show("");
  }

  // The job in the address, else the newest one that runs.
  choose() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("job");
    const name = wanted || this.overview?.jobs[0]?.name || "";
    if (name !== this.shown) this.show(name);
    this.listJobs();
  }

  show(name) {
    this.shown = name;
    this.pane?.destroy();
    this.pane = new Pane(name);
    find("content").replaceChildren(this.pane.root);
    this.listen(name);
  }

  listen(name) {
    this.events?.close();
    this.events = new EventSource(`/api/events?job=${encodeURIComponent(name)}`);
    this.events.addEventListener("overview", (event) => this.onOverview(JSON.parse(event.data)));
    this.events.addEventListener("job", (event) => this.onJob(JSON.parse(event.data)));
    this.events.addEventListener("error", () => this.onError());
  }

  onJob(data) {
    if (data.job.name === this.shown) this.pane.update(data);
  }

  onOverview(data) {
    this.overview = data;
    this.lastNow = data.now_unix_s;
    this.heardMs = performance.now();
    document.body.classList.toggle("stale", !data.broker_connected);
    const running = data.jobs.filter((job) => job.phase === "running").length;
    const status = find("status");
    status.className = data.broker_connected ? "" : "error";
    setText(status, data.broker_connected ? `live · ${running} of ${data.jobs.length} jobs running` : "the broker is away: waiting for it to come back");
    showServices(data);
    const alarms = data.alarms.map((alarm) => ({ level: alarm.level, text: `${alarm.subject}: ${alarm.text}` }));
    showAlarms(data.broker_connected ? alarms : [{ level: "error", text: "no connection to the broker: what is shown is old" }, ...alarms]);
    this.choose();
  }

  onError() {
    document.body.classList.add("stale");
    const status = find("status");
    status.className = "error";
    setText(status, "no answer from the page's server: trying again");
    if (this.events.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    setText(status, "refused: too many readers, or the session has ended (open the printed URL again); trying again");
    const name = this.shown;
    setTimeout(() => name === this.shown && this.listen(name), RETRY_MS);
  }

  listJobs() {
    const jobs = this.overview?.jobs || [];
    find("jobs-empty").hidden = jobs.length > 0;
    const chosen = new URLSearchParams(location.hash.slice(1)).get("job");
    const rows = jobs.map((job) => {
      const about = [job.policy, `${job.num_ranks} ranks`, job.window === null ? "no window yet" : `window ${job.window}`];
      const { throughput = null, accuracy = null, held_out_accuracy: heldOut = null } = job.metrics || {};
      const shares = heldOut ?? accuracy;
      const numbers = [throughput === null ? null : `${number(throughput)}/s`, shares === null ? null : percent(shares)];
      const state = job.phase === "running" ? "running" : `${job.phase} ${age(job.heard_s_ago)} ago`;
      return { key: job.name, href: `#job=${encodeURIComponent(job.name)}`, lines: [job.name, `${MARKS[job.phase]} ${state} · ${numbers.filter(Boolean).join(" · ") || "–"}`, about.filter(Boolean).join(" · ")], current: job.name === this.shown };
    });
    const list = find("job-list");
    if (chosen) rows.unshift({ key: "", href: "#", lines: ["follow the newest job"], current: false });
    const old = new Map([...list.children].map((item) => [item.dataset.key, item]));
    rows.forEach((row, index) => {
      let item = old.get(row.key);
      old.delete(row.key);
      if (!item) {
        item = element("li", {}, element("a", { href: row.href, class: row.key ? null : "newest" }, element("b", {}), element("span", {}), element("span", {})));
        item.dataset.key = row.key;
      }
      if (list.children[index] !== item) list.insertBefore(item, list.children[index] || null);
      const link = item.firstChild;
      link.title = row.lines.filter(Boolean).join("\n");
      [...link.children].forEach((part, line) => setText(part, row.lines[line] || ""));
      link.setAttribute("aria-current", String(row.current));
    });
    old.forEach((item) => item.remove());
    setOlder(list, this.overview?.num_older_jobs || 0);
  }
}

function setOlder(list, count) {
  const text = count ? `and ${count} older jobs` : "";
  let note = find("older");
  if (!note) list.after((note = element("p", { id: "older", class: "dim" })));
  setText(note, text);
}

function showServices({ services, services_missing: missing, broker_connected: connected }) {
  const chip = (good, text, title) => element("span", { class: good ? "" : "error", title }, `${good ? "●" : "○"} ${text}`);
  const absent = missing.filter((name) => !services.some((one) => one.service === name));
  find("services").replaceChildren(
    chip(connected, connected ? "broker" : "broker: no connection", "the connection of this page's server"),
    ...services.map((one) => chip(!one.late, `${one.service}${one.service === "collector" && one.node ? ` ${one.node}` : ""}${one.late ? `: no heartbeat for ${age(one.heard_s_ago)}` : ""}`,
      `${one.instance}, up ${age(one.uptime_s)}; ${Object.entries(one.counters).map(([name, count]) => `${name} ${count}`).join(", ")}`)),
    ...absent.map((name) => chip(false, `${name}: not heard`, "no heartbeat")));
}

function showAlarms(alarms) {
  const rows = alarms.map((alarm) => element("p", { class: alarm.level }, `${alarm.level === "error" ? "✖" : "▲"} ${alarm.level}: ${alarm.text}`));
  find("alarms").replaceChildren(...(rows.length ? rows : [element("p", { class: "dim" }, "no alarms")]));
}

class CapturePage {
  constructor(captures) {
    this.captures = captures;
    this.duration = Math.max(...captures.map((one) => one.duration_s), 0.001);
    this.panes = captures.map((one) => new Pane(one.job, one.start_unix_s));
    this.busy = false;
    this.wanted = null;
    find("jobs").hidden = true;
    find("layout").classList.add("captures");
    find("content").classList.toggle("two", captures.length === 2);
    find("content").replaceChildren(...this.panes.map((pane) => pane.root));
    find("slider").hidden = false;
    this.time = find("time");
    Object.assign(this.time, { max: this.duration, step: this.duration / 200 });
    this.time.value = this.duration;
    this.time.addEventListener("input", () => this.moveTo(Number(this.time.value)));
    find("play").addEventListener("click", () => this.play(!this.playing));
    setText(find("status"), captures.map((one) => one.file).join(" and "));
    this.moveTo(this.duration, true);
  }

  // One request at a time: while it runs only the newest moment is kept.
  async moveTo(seconds, withWindows = false) {
    setText(find("moment"), `${elapsed(seconds)} of ${elapsed(this.duration)}`);
    this.wanted = seconds;
    if (this.busy) return;
    this.busy = true;
    try {
      while (this.wanted !== null) {
        const at = this.wanted;
        this.wanted = null;
        await Promise.all(this.panes.map((pane, index) => this.load(pane, index, at, withWindows)));
        if (withWindows) this.shareAxes();
        withWindows = false;
      }
    } catch (error) {
      find("status").className = "error";
      setText(find("status"), `no answer from the page's server: ${error.message}`);
    } finally {
      this.busy = false;
    }
  }

  async load(pane, index, seconds, withWindows) {
    const { duration_s: duration } = this.captures[index];
    const at = Math.min(seconds, duration);
    const answer = await fetch(`/api/captures/${index}?elapsed_s=${at}${withWindows ? "&windows=1" : ""}`);
    if (!answer.ok) throw new Error(await answer.text());
    const data = await answer.json();
    pane.setMoment(at);
    pane.update(data);
    if (index === 0 || data.notes.length || data.alarms.length) this.notes = { ...(this.notes || {}), [index]: data };
    this.showNotes();
  }

  shareAxes() {
    for (const name of Object.keys(this.panes[0].charts)) {
      const same = this.panes.map((pane) => pane.charts[name]);
      const extents = same.map((chart) => chart.extent());
      same.forEach((chart) => chart.share(extents));
    }
  }

  showNotes() {
    showAlarms(Object.values(this.notes || {}).flatMap((data) => [
      ...data.notes.map((text) => ({ level: "warning", text: `${data.file}: ${text}` })),
      ...data.alarms.map((alarm) => ({ level: alarm.level, text: `${data.job.name}: ${alarm.text}` }))]));
  }

  play(on) {
    this.playing = on;
    const button = find("play");
    button.setAttribute("aria-pressed", String(on));
    setText(button, on ? "Pause" : "Play");
    clearInterval(this.timer);
    if (!on) return;
    if (Number(this.time.value) >= this.duration) this.time.value = 0;
    this.timer = setInterval(() => {
      this.time.value = Number(this.time.value) + this.duration / PLAY_S / 5;
      this.moveTo(Number(this.time.value));
      if (Number(this.time.value) >= this.duration) this.play(false);
    }, 200);
  }
}

const source = await (await fetch("/api/source")).json();
window.page = source.kind === "bus" ? new LivePage() : new CapturePage(source.captures);
