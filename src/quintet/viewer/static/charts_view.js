// Curves of the selected runs, side by side.

import { get } from "view/api.js";
import { drawChart } from "view/chart.js";
import { debounce, h, once, select } from "view/dom.js";

const FIRST = [/^val\/.*success_rate$/, /^trajectory\/success_rate$/, /^env\/success/, /^val\/[^/]+\/reward$/,
  /^critic\/score\/mean$/, /^val\/loss$/, /^train\/loss$/, /^train\/grad_norm$/, /^train\/lr$/, /^actor\/entropy$/, /^actor\/ppo_kl$/,
  /^response_length\/mean$/, /^training\/groups_with_signal$/, /^training\/rollout_probs_diff_mean$/,
  /^actor\/grad_norm$/, /^perf\/throughput$/, /^timing_s\/step$/, /^sft\/loss$/];
const TITLES = { "": "Most watched", val: "Validation", actor: "Policy", critic: "Rewards and critic", timing_s: "Seconds by phase",
  perf: "Throughput and memory", response_length: "Responses", rollout_corr: "Engine and learner" };

const POINTS = 800, WIDE_POINTS = 2000;

/** Show the charts of all metrics of the selected runs; data of a chart are requested when it becomes visible. */
export async function chartsView(page) {
  const definitions = await get("metrics", { run: page.runs });
  let findings = [];
  const cards = new Map();
  const visible = new Set();
  const load = debounce(() => refresh(), 30);
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) visible.add(entry.target.dataset.metric);
      else visible.delete(entry.target.dataset.metric);
    }
    load();
  }, { rootMargin: "200px" });

  const settings = () => ({
    axis: page.get("axis", "steps"), smoothing: page.number("smoothing", 0), log: page.get("log", "") === "1",
  });
  const data = {};
  const draw = (name) => drawChart(cards.get(name).plot, {
    curves: page.runs.filter((run) => data[run]?.[name]).map((run, index) => ({ run, tone: `tone${index % 8}`, ...data[run][name] })),
    settings: settings(), bounds: cards.get(name).definition.bounds,
    findings: findings.filter((finding) => finding.metric === name), height: cards.get(name).wide ? 320 : 190,
  });
  // the diagnosis would take the server's time from the first curves
  const mark = once(async () => { findings = findingsOf(await diagnosesOf(page.runs).catch(() => [])); redraw(); });
  async function refresh() {
    const names = [...visible].filter((name) => cards.has(name)).sort();
    if (!names.length || !page.runs.length) return;
    const wide = names.filter((name) => cards.get(name).wide), others = names.filter((name) => !cards.get(name).wide);
    const groups = [[others, POINTS], [wide, WIDE_POINTS]].filter(([group]) => group.length);
    const received = await Promise.all(groups.map(([metric, points]) => get("curves", { run: page.runs, metric, points })));
    for (const [run, curves] of received.flatMap(Object.entries)) data[run] = { ...data[run], ...curves };
    names.forEach(draw);
    mark();
  }
  const change = (name, value) => { page.set(name, value); visible.forEach(draw); };

  const search = h("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", value: page.get("metric", ""),
    oninput: debounce((event) => { page.set("metric", event.target.value); filter(); }, 150) });
  const sections = groups(definitions).map(([title, members]) => h("section", { class: "charts" }, h("h2", {}, title),
    h("div", { class: "cards" }, members.map((definition) => {
      const entry = card(definition, () => { draw(definition.name); load(); });
      cards.set(definition.name, entry);
      return entry.element;
    }))));
  function filter() {
    const words = page.get("metric", "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const [name, entry] of cards) {
      const text = `${name} ${entry.definition.meaning ?? ""}`.toLowerCase();
      entry.element.hidden = !words.every((word) => text.includes(word));
    }
    sections.forEach((section) => { section.hidden = ![...section.querySelectorAll(".card")].some((each) => !each.hidden); });
  }
  filter();
  cards.forEach((entry) => watcher.observe(entry.element));
  const redraw = debounce(() => visible.forEach(draw), 100);
  addEventListener("resize", redraw);
  const view = h("div", {},
    h("div", { class: "toolbar" }, search,
      select("Axis", [["steps", "steps"], ["seconds", "time"]], page.get("axis", "steps"), (value) => change("axis", value)),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), h("input", { type: "range", min: 0, max: 0.98, step: 0.02,
        value: page.get("smoothing", 0), oninput: (event) => change("smoothing", event.target.value) })),
      h("label", { class: "field" }, h("input", { type: "checkbox", checked: page.get("log", "") === "1",
        onchange: (event) => change("log", event.target.checked ? "1" : "") }), h("span", {}, "Logarithmic"))),
    legend(page), await configDifferences(page.runs), definitions.length ? sections : h("p", { class: "note" }, "No metrics were logged yet."));
  return { view, refresh, close: () => { watcher.disconnect(); removeEventListener("resize", redraw); } };
}

/** Return the diagnosis of each run: its findings, what is true without one, and what is not judged yet. */
export const diagnosesOf = (runs) => Promise.all(runs.map(async (run) => ({ run, ...(await get("findings", { run })) })));

/** Return the findings of diagnoses, each with its run. */
export const findingsOf = (diagnoses) => diagnoses.flatMap(({ run, findings }) => findings.map((finding) => ({ run, ...finding })));

function groups(definitions) {
  const first = FIRST.flatMap((pattern) => definitions.filter((definition) => pattern.test(definition.name)));
  const sections = new Map([["", first]]);
  for (const definition of definitions) {
    if (first.includes(definition)) continue;
    const prefix = definition.name.split("/")[0];
    sections.set(prefix, [...(sections.get(prefix) ?? []), definition]);
  }
  return [...sections].filter(([, members]) => members.length).map(([prefix, members]) => [TITLES[prefix] ?? prefix, members]);
}

function card(definition, draw) {
  const entry = { definition, wide: false, plot: h("div", { class: "plot" }) };
  entry.element = h("figure", { class: "card", "data-metric": definition.name },
    h("figcaption", {}, h("button", { class: "link", "aria-expanded": "false", onclick: (event) => {
      entry.wide = entry.element.classList.toggle("wide");
      event.currentTarget.setAttribute("aria-expanded", String(entry.wide));
      draw();
    } }, definition.name), h("span", {}, definition.unit ?? "")),
    entry.plot,
    h("p", { class: "meaning" }, definition.meaning ?? "No definition.",
      definition.healthy && h("span", { class: "healthy-text" }, ` Healthy: ${definition.healthy}.`)));
  return entry;
}

function legend(page) {
  return h("ul", { class: "legend" }, page.runs.map((run, index) => h("li", { class: `tone${index % 8}` }, run)));
}

async function configDifferences(runs) {
  if (runs.length < 2) return null;
  const { differences } = await get("config", { run: runs });
  const keys = Object.keys(differences).filter((key) => key !== "name");
  return h("details", { class: "differences" }, h("summary", {}, keys.length === 1 ? "1 setting differs" : `${keys.length} settings differ`),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Key"), runs.map((run) => h("th", {}, run)))),
      h("tbody", {}, keys.map((key) => h("tr", {}, h("td", {}, h("code", {}, key)), differences[key].map((value) => h("td", {}, value))))))));
}
