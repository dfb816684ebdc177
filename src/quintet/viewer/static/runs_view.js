// List of runs.

import { get } from "view/api.js";
import { sparkline } from "view/chart.js";
import { h } from "view/dom.js";
import { duration, number } from "view/format.js";

/** Show all runs; those selected are compared in the other views. */
export async function runsView(page) {
  const runs = await get("runs");
  if (!runs.length) {
    return h("section", { class: "empty" }, h("h2", {}, "No runs yet"),
      h("p", {}, "Start one with ", h("code", {}, "quintet train"), ": it appears here while it trains."));
  }
  const rows = runs.map((run) => row(run, page));
  return h("section", {},
    h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["", "Run", "State", "Progress", "Time", "Last value", ""].map((name) => h("th", {}, name)))),
      h("tbody", {}, rows)),
    h("p", { class: "note" }, "Select the runs that the other views show. Click a name to see that run alone."));
}

function row(run, page) {
  const index = page.runs.indexOf(run.name);
  const toggle = () => page.selectRuns(index >= 0 ? page.runs.filter((name) => name !== run.name) : [...page.runs, run.name]);
  const share = run.total ? run.done / run.total : 0;
  return h("tr", { class: index >= 0 ? "selected" : "" },
    h("td", {}, h("input", { type: "checkbox", checked: index >= 0, "aria-label": `Select ${run.name}`, onchange: toggle })),
    h("td", {}, h("button", { class: "link", onclick: () => page.go("charts", { run: [run.name] }) }, run.name),
      h("small", { title: run.path }, run.checkpoint ? `checkpoint ${run.checkpoint.split("/").at(-1)}` : "no checkpoint")),
    h("td", {}, h("span", { class: `state ${run.state}` }, run.state), run.message && h("small", {}, run.message)),
    h("td", {}, h("progress", { value: share, max: 1, "aria-label": "Progress" }),
      h("small", {}, run.phase ? `${run.phase} ${run.done} of ${run.total}` : "–")),
    h("td", {}, duration(run.seconds)),
    h("td", {}, run.values.length ? h("b", {}, number(run.values.at(-1))) : "–", h("small", {}, run.metric)),
    h("td", {}, run.values.length > 1 ? sparkline(run.values, index >= 0 ? `tone${index % 8}` : "tone-none") : null));
}
