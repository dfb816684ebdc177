// The page: navigation, selected runs, keyboard, live updates.

import { exportedHash, forget, get, isExported } from "view/api.js";
import { changesView } from "view/changes_view.js";
import { chartsView } from "view/charts_view.js";
import { configView } from "view/config_view.js";
import { h } from "view/dom.js";
import { episodesView } from "view/episodes_view.js";
import { exportView } from "view/export.js";
import { findingsView } from "view/findings_view.js";
import { runsView } from "view/runs_view.js";
import { timelineView } from "view/timeline_view.js";

const VIEWS = { runs: ["Runs", runsView], charts: ["Charts", chartsView], findings: ["Diagnosis", findingsView], episodes: ["Episodes", episodesView],
  changes: ["Changes", changesView], timeline: ["Timeline", timelineView], config: ["Settings", configView] };
const LIVE = new Set(["runs", "charts", "episodes"]);
const REFRESH_MILLISECONDS = 3000;
const HELP = "1–7 views · j and k next and previous episode · / search · e export · t dark or light";

/** State of the page, which is in its address: the view, the selected runs, and the settings of the view. */
class Page {
  constructor() {
    this.read();
  }

  read() {
    const [view, query] = (isExported && !location.hash ? exportedHash : location.hash).replace(/^#/, "").split("?");
    this.view = view in VIEWS ? view : "";
    this.parameters = new URLSearchParams(query);
    this.runs = this.parameters.getAll("run");
  }

  get(name, fallback) {
    return this.parameters.get(name) ?? fallback;
  }

  /** Return a setting that is a number; `fallback` as well if the address has text that is none. */
  number(name, fallback) {
    const value = Number.parseFloat(this.get(name, fallback));
    return Number.isFinite(value) ? value : fallback;
  }

  /** Set a setting of this view without loading it again. */
  set(name, value) {
    if (value === "" || value === null) this.parameters.delete(name);
    else this.parameters.set(name, value);
    history.replaceState(null, "", this.hash());
  }

  hash() {
    const query = this.parameters.toString();
    return query ? `#${this.view}?${query}` : `#${this.view}`;
  }

  /** Go to a view; the selected runs stay, settings of another view do not. */
  go(view, settings = {}) {
    const kept = view === this.view ? [...this.parameters].filter(([name]) => name !== "run" && !(name in settings)) : [];
    const { run = this.runs, ...others } = settings;
    this.parameters = new URLSearchParams([...run.map((name) => ["run", name]), ...kept, ...Object.entries(others).filter(([, value]) => value !== "")]);
    this.view = view;
    location.hash = this.hash();
  }

  selectRuns(runs) {
    this.runs = runs;
    this.parameters.delete("run");
    runs.forEach((run) => this.parameters.append("run", run));
    location.hash = this.hash();
  }
}

const page = new Page();
const app = document.getElementById("app");
const main = h("main", { tabindex: -1 });
let current = {};
let drawing = 0;

async function render() {
  page.read();
  const number = (drawing += 1);
  current.close?.();
  current = {};
  forget();
  try {
    if (!page.view || (!page.runs.length && page.view !== "runs")) {
      const runs = await get("runs");
      page.view ||= runs.length === 1 ? "charts" : "runs";
      if (runs.length && (page.view !== "runs" || runs.length === 1)) page.runs = [runs[0].name];
      page.runs.forEach((run) => page.parameters.append("run", run));
      if (!isExported) history.replaceState(null, "", page.hash());
    }
    header();
    if (!page.runs.length && page.view !== "runs") return main.replaceChildren(await runsView(page));
    const result = await VIEWS[page.view][1](page);
    if (number !== drawing) return result.close?.();
    current = result.view ? result : { view: result };
    main.replaceChildren(current.view);
    document.title = `${VIEWS[page.view][0]} · ${page.runs.join(", ") || "Quintet"}`;
  } catch (error) {
    if (number === drawing) main.replaceChildren(h("section", { class: "empty" }, h("h2", {}, "This cannot be shown"), h("p", { class: "failure" }, error.message)));
  }
}

function header() {
  const tabs = Object.entries(VIEWS).map(([name, [title]], index) => h("button", { "aria-current": name === page.view ? "page" : null,
    title: `${title} (${index + 1})`, onclick: () => page.go(name) }, title));
  app.replaceChildren(
    h("header", { class: "top" }, h("span", { class: "brand" }, "Quintet"),
      isExported ? h("span", { class: "note" }, "exported") : h("nav", { "aria-label": "Views" }, tabs),
      h("span", { class: "selected-runs", title: page.runs.join(", ") }, page.runs.join(", ")),
      isExported ? null : h("button", { title: "Export this view as one HTML file (e)", onclick: exportCurrent }, "Export"),
      h("button", { title: HELP, "aria-label": "Dark or light", onclick: switchTheme }, "◐")),
    main, h("footer", { class: "note" }, HELP));
}

function exportCurrent() {
  exportView(`${page.view}_${page.runs.join("_")}`, page.hash()).catch((error) => alert(error.message));
}

function switchTheme() {
  const isDark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  setTheme(isDark ? "light" : "dark");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* storage may be blocked: the choice lasts for this page */ }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  const names = Object.keys(VIEWS);
  const actions = { j: () => current.move?.(1), k: () => current.move?.(-1), e: exportCurrent, t: switchTheme,
    "/": () => { event.preventDefault(); main.querySelector("input[type=search]")?.focus(); } };
  if (names[Number(event.key) - 1] && !isExported) page.go(names[Number(event.key) - 1]);
  else if (actions[event.key]) actions[event.key]();
  else current.key?.(event);
}

async function refresh() {
  if (!document.hidden && LIVE.has(page.view)) {
    if (current.refresh) await current.refresh().catch(() => {});
    else if (page.view === "runs" && current.view) await render();
  }
  setTimeout(refresh, REFRESH_MILLISECONDS);
}

try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage may be blocked */ }
addEventListener("hashchange", render);
addEventListener("keydown", onKey);
await render();
if (!isExported) setTimeout(refresh, REFRESH_MILLISECONDS);
