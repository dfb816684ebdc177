// The trace of a profiled step: tracks with spans, running requests and memory, drawn on a canvas.

import { get } from "view/api.js";
import { ticks } from "view/chart.js";
import { debounce, h, replace, select } from "view/dom.js";
import { count, duration, number } from "view/format.js";

const ROW = 18, GAP = 8, AXIS = 20, COUNTER = 46, REQUESTS = 96, GUTTER = 168, NARROW = 620;
const SHORTEST = 20;
const HELP = "wheel or + and − zoom · drag or ← and → move · double click fills the window · 0 whole step";

/** Show one of the traces of a run; the step, its rank and the visible part are in the page's address. */
export async function traceView(page, run, traces) {
  const steps = [...new Set(traces.map((trace) => trace.step))];
  const step = page.number("step", steps.at(-1));
  const ranks = traces.filter((trace) => trace.step === step).map((trace) => trace.rank);
  const rank = page.number("rank", ranks[0] ?? 0);
  const go = (settings) => page.go("timeline", { from: "", to: "", ...settings });
  const data = await get("trace", { run, step, rank });
  const chart = new TraceChart(data, { from: page.number("from", 0) * 1000, to: page.number("to", data.duration / 1000) * 1000, found: page.get("find", "") });
  const table = h("div", { class: "scroll" });
  chart.onchange = debounce(() => {
    const isWhole = chart.from === 0 && chart.to === data.duration;
    page.set("from", isWhole ? "" : (chart.from / 1000).toFixed(3));
    page.set("to", isWhole ? "" : (chart.to / 1000).toFixed(3));
    replace(table, longest(chart));
  }, 120);
  replace(table, longest(chart));
  const button = (label, title, action) => h("button", { title, "aria-label": title, onclick: action }, label);
  const view = h("section", { class: "trace" },
    h("h2", {}, `Trace of step ${step}: ${run}`),
    h("div", { class: "toolbar" },
      select("Step", steps.map((each) => [each, each]), step, (value) => go({ step: value, rank: "" })),
      ranks.length > 1 ? select("Rank", ranks.map((each) => [each, each]), rank, (value) => go({ rank: value })) : null,
      h("input", { type: "search", placeholder: "Find spans", "aria-label": "Find spans", value: chart.found,
        oninput: debounce((event) => { page.set("find", event.target.value); chart.find(event.target.value); }, 100) }),
      button("−", "Zoom out", () => chart.zoom(1.6)), button("+", "Zoom in", () => chart.zoom(0.6)),
      button("Whole step", "Show the whole step (0)", () => chart.show(0, data.duration))),
    chart.element, h("p", { class: "note" }, HELP), table);
  const move = (by) => steps[steps.indexOf(step) + by] !== undefined && go({ step: steps[steps.indexOf(step) + by], rank: "" });
  return { view, move, key: (event) => chart.key(event), close: () => chart.close() };
}

/** Return a table of what takes the time in the visible part. */
function longest(chart) {
  const rows = chart.totals().slice(0, 12);
  return h("table", { class: "longest" }, h("thead", {}, h("tr", {}, ["Span", "Track", "Number", "Time", "Mean", "Longest"].map((text) => h("th", {}, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.name), h("td", {}, row.track), h("td", {}, row.count.toLocaleString("en")),
      h("td", {}, time(row.total)), h("td", {}, time(row.total / row.count)), h("td", {}, time(row.longest))))));
}

/** Return microseconds as text. */
function time(microseconds) {
  if (microseconds >= 1e6) return duration(microseconds / 1e6);
  return microseconds >= 1000 ? `${number(microseconds / 1000)} ms` : `${number(microseconds)} µs`;
}

class TraceChart {
  constructor(data, { from, to, found }) {
    this.data = data;
    [this.found, this.hovered, this.frame, this.onchange] = [found, null, 0, () => {}];
    this.clamp(from, to);
    this.tones = tonesOf(data);
    this.canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `Timeline of ${count(data.tracks.length, "track")}; the table below has the longest spans` });
    this.details = h("div", { class: "span-details", hidden: true });
    this.element = h("div", { class: "trace-chart" }, this.canvas, this.details);
    this.listen();
    this.watcher = new ResizeObserver(() => this.redraw());
    this.watcher.observe(this.element);
    this.themes = new MutationObserver(() => this.redraw());
    this.themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.onchange = () => this.redraw();
  }

  close() {
    this.watcher.disconnect();
    this.themes.disconnect();
    this.scheme.onchange = null;
    cancelAnimationFrame(this.frame);
  }

  listen() {
    const on = (name, action, options) => this.canvas.addEventListener(name, (event) => {
      if (!this.lanes) this.layout(); // an event before the first frame
      action(event);
    }, options);
    let grip = null;
    on("wheel", (event) => {
      event.preventDefault();
      const across = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (across) this.pan((event.deltaX || event.deltaY) / this.inner);
      else this.zoom(Math.exp(event.deltaY * 0.0015), this.invert(event.offsetX));
    }, { passive: false });
    on("pointerdown", (event) => { grip = event.offsetX; this.canvas.setPointerCapture(event.pointerId); });
    on("pointerup", () => { grip = null; });
    on("pointermove", (event) => {
      if (grip !== null) {
        this.pan((grip - event.offsetX) / this.inner);
        grip = event.offsetX;
      }
      this.hover(event.offsetX, event.offsetY);
    });
    on("pointerleave", () => this.hover(-1, -1));
    on("dblclick", () => this.hovered?.span && this.show(this.hovered.span[0], this.hovered.span[0] + this.hovered.span[1]));
  }

  key(event) {
    const actions = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6),
      "-": () => this.zoom(1.6), 0: () => this.show(0, this.data.duration) };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  clamp(from, to) {
    const end = Math.max(this.data.duration, SHORTEST);
    const length = Math.min(Math.max(to - from, SHORTEST), end);
    this.from = Math.min(Math.max(from, 0), end - length);
    this.to = this.from + length;
  }

  show(from, to) {
    this.clamp(from, to);
    this.redraw();
    this.onchange();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const length = Math.min(Math.max((this.to - this.from) * factor, SHORTEST), this.data.duration);
    const from = at - ((at - this.from) * length) / (this.to - this.from);
    this.show(from, from + length);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  find(text) {
    this.found = text;
    this.redraw();
  }

  x(at) { return this.gutter + ((at - this.from) / (this.to - this.from)) * this.inner; }

  invert(pixel) { return this.from + ((pixel - this.gutter) / this.inner) * (this.to - this.from); }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  layout() {
    this.width = Math.max(this.element.clientWidth, 240);
    this.gutter = this.width < NARROW ? 0 : GUTTER;
    this.inner = this.width - this.gutter - 2;
    const titled = this.gutter ? 0 : 16;
    let top = AXIS;
    this.lanes = [...this.data.tracks, ...this.data.counters].map((source) => {
      const rows = source.spans ? 1 + Math.max(...source.spans.map((span) => span[2])) : 1;
      const full = source.spans ? rows * ROW : COUNTER;
      const lane = { source, top: top + titled, height: source.spans && rows * ROW > REQUESTS * 2 ? REQUESTS : full };
      lane.row = lane.height / rows;
      top = lane.top + Math.max(lane.height, this.gutter ? 30 : 0) + GAP;
      return lane;
    });
    this.height = top;
  }

  draw() {
    this.layout();
    const scale = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: this.width * scale, height: this.height * scale });
    this.canvas.style.height = `${this.height}px`;
    const style = getComputedStyle(this.canvas);
    this.colors = Object.fromEntries(["ink", "soft", "faint", "card", "rule", "wash"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    this.colors.tones = Array.from({ length: 8 }, (_, index) => style.getPropertyValue(`--tone${index}`));
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = `11px ${style.fontFamily}`;
    this.drawAxis(pen);
    for (const lane of this.lanes) {
      this.drawTitle(pen, lane);
      pen.save();
      pen.beginPath();
      pen.rect(this.gutter, lane.top - 1, this.inner, lane.height + 2);
      pen.clip();
      if (lane.source.spans) this.drawSpans(pen, lane);
      else this.drawCounter(pen, lane);
      pen.restore();
    }
  }

  drawAxis(pen) {
    const marks = ticks(this.from, this.to, Math.max(Math.floor(this.inner / 100), 2));
    const [size, unit] = [[1e6, "s"], [1e3, "ms"], [1, "µs"]].find(([each]) => this.to >= each) ?? [1, "µs"];
    const digits = Math.max(Math.ceil(-Math.log10((marks[1] - marks[0]) / size) - 1e-9), 0) || 0;
    for (const tick of marks) {
      const x = Math.round(this.x(tick)) + 0.5;
      pen.strokeStyle = this.colors.faint;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, this.height);
      pen.stroke();
      pen.fillStyle = this.colors.soft;
      pen.textAlign = x > this.width - 50 ? "right" : x < this.gutter + 30 ? "left" : "center";
      pen.fillText(`${(tick / size).toFixed(digits)} ${unit}`, x, 11);
    }
    pen.textAlign = "left";
  }

  drawTitle(pen, lane) {
    const note = lane.source.spans ? this.use(lane) : `at most ${number(Math.max(...Object.values(lane.source.values).flat()))}`;
    pen.fillStyle = this.colors.ink;
    pen.fillText(shorten(lane.source.name, this.gutter ? GUTTER - 14 : this.width - 90), 2, this.gutter ? lane.top + 12 : lane.top - 4);
    pen.fillStyle = this.colors.soft;
    if (this.gutter) return pen.fillText(note, 2, lane.top + 26);
    pen.textAlign = "right";
    pen.fillText(note, this.width - 4, lane.top - 4);
    pen.textAlign = "left";
  }

  /** Return how much of the visible part a track has spans; of requests, how many run on average. */
  use(lane) {
    const isRequests = lane.row < ROW || lane.source.name.startsWith("requests of ");
    const spans = isRequests ? lane.source.spans : lane.source.spans.filter((span) => span[2] === 0);
    const busy = spans.reduce((sum, span) => sum + this.visible(span), 0) / (this.to - this.from);
    return isRequests ? `${number(busy)} on average` : `${number(100 * busy)} % busy`;
  }

  visible(span) {
    return Math.max(Math.min(span[0] + span[1], this.to) - Math.max(span[0], this.from), 0);
  }

  matches(name) {
    return !this.found || name.toLowerCase().includes(this.found.toLowerCase());
  }

  drawSpans(pen, lane) {
    const drawn = [];
    for (const span of lane.source.spans) {
      const [begin, length, row, index] = span;
      if (begin > this.to || begin + length < this.from) continue;
      const left = this.x(begin), right = Math.max(this.x(begin + length), left + 0.7);
      if (right < (drawn[row] ?? -1) + 0.35) continue;
      drawn[row] = right;
      const name = this.data.names[index], top = lane.top + row * lane.row;
      pen.fillStyle = this.colors.tones[this.tones[index]];
      pen.globalAlpha = this.matches(name) ? 0.5 : 0.08;
      pen.fillRect(left, top, right - left - (right - left > 3 ? 0.6 : 0), lane.row - (lane.row > 4 ? 1 : 0));
      pen.globalAlpha = 1;
      if (right - left > 26 && lane.row >= 12) {
        pen.fillStyle = this.colors.ink;
        const from = Math.max(left, this.gutter);
        pen.fillText(shorten(name, Math.min(right, this.width) - from - 6), from + 3, top + 13);
      }
      if (this.hovered?.span === span) {
        pen.strokeStyle = this.colors.ink;
        pen.strokeRect(left + 0.5, top + 0.5, Math.max(right - left - 1, 1), Math.max(lane.row - 2, 1));
      }
    }
  }

  drawCounter(pen, lane) {
    const { times, values } = lane.source;
    const highest = Math.max(...Object.values(values).flat(), 1e-9);
    Object.values(values).forEach((series, index) => {
      pen.strokeStyle = this.colors.tones[index % 8];
      pen.lineWidth = 1.4;
      pen.beginPath();
      series.forEach((value, at) => pen.lineTo(this.x(times[at]), lane.top + lane.height - (value / highest) * (lane.height - 2)));
      pen.stroke();
      pen.lineWidth = 1;
    });
  }

  hover(x, y) {
    const lane = this.lanes?.find((each) => y >= each.top && y < each.top + each.height);
    const at = this.invert(x);
    this.hovered = lane && x >= this.gutter ? { lane, at, span: lane.source.spans ? this.spanAt(lane, at, y) : null } : null;
    const shown = this.hovered && (this.hovered.span || !lane.source.spans) ? this.describe() : null;
    this.details.hidden = !shown;
    if (shown) {
      replace(this.details, shown);
      const left = Math.min(x + 14, this.width - this.details.offsetWidth - 4);
      Object.assign(this.details.style, { left: `${Math.max(left, 0)}px`, top: `${y + 18}px` });
    }
    this.redraw();
  }

  spanAt(lane, at, y) {
    const row = Math.floor((y - lane.top) / lane.row), near = (1.5 / this.inner) * (this.to - this.from);
    const candidates = lane.source.spans.filter((span) => span[2] === row && span[0] - near <= at && span[0] + span[1] + near >= at);
    const distance = (span) => Math.max(span[0] - at, at - span[0] - span[1], 0);
    return candidates.sort((a, b) => distance(a) - distance(b))[0] ?? null;
  }

  describe() {
    const { lane, at, span } = this.hovered;
    const facts = (entries) => entries.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, typeof value === "number" ? number(value) : String(value))));
    if (span) {
      return [h("b", {}, this.data.names[span[3]]), h("span", {}, `${time(span[1])}, from ${time(span[0])}`), h("span", { class: "note" }, lane.source.name), facts(Object.entries(span[4]))];
    }
    const { times, values } = lane.source;
    const next = times.findIndex((each) => each >= at), index = next < 0 ? times.length - 1 : next;
    return [h("b", {}, lane.source.name), h("span", {}, `at ${time(times[index])}`), facts(Object.entries(values).map(([name, series]) => [name, series[index]]))];
  }

  /** Return number, time and longest of the visible spans of each name and track, those with most time first. */
  totals() {
    const totals = new Map();
    for (const { name: track, spans } of this.data.tracks) {
      for (const span of spans) {
        const inside = this.visible(span);
        if (!inside) continue;
        const name = this.data.names[span[3]], key = `${track}\n${name}`;
        const row = totals.get(key) ?? { name, track, count: 0, total: 0, longest: 0 };
        totals.set(key, { ...row, count: row.count + 1, total: row.total + inside, longest: Math.max(row.longest, span[1]) });
      }
    }
    return [...totals.values()].sort((a, b) => b.total - a.total);
  }
}

function tonesOf(data) {
  const sums = data.names.map(() => 0);
  data.tracks.forEach(({ spans }) => spans.forEach((span) => { sums[span[3]] += span[1]; }));
  const order = sums.map((_, index) => index).sort((a, b) => sums[b] - sums[a]);
  return data.names.map((_, index) => order.indexOf(index) % 8);
}

/** Return the beginning of a text that fits into so many pixels of the canvas's font. */
function shorten(text, pixels) {
  const letters = Math.floor(pixels / 6.5);
  return text.length <= letters ? text : letters > 2 ? `${text.slice(0, letters - 1)}…` : "";
}
