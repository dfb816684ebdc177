// Where the time of each step went.

import { get } from "view/api.js";
import { h, select } from "view/dom.js";
import { duration, number } from "view/format.js";
import { traceView } from "view/trace_view.js";

const STEPS = 200;

/** Show the trace of a profiled step, if there is one, and the phases of all steps. */
export async function timelineView(page) {
  const run = page.runs[0];
  const traces = await get("traces", { run });
  const trace = traces.length ? await traceView(page, run, traces) : { view: h("p", { class: "note" },
    "What engines, environments and learners do meanwhile is in a trace of a step: ", h("code", {}, "tracking.profile={steps: [3]}"), " records it in the run directory.") };
  return { ...trace, view: h("div", {}, traces.length ? trace.view : null, await phases(page, run, traces), traces.length ? null : trace.view) };
}

/** Show the phases of steps as bars: nested phases below each other, to scale. */
async function phases(page, run, traces) {
  const { rows } = await get("timeline", { run, first: 0, count: 1 });
  const pages = Math.max(Math.ceil(rows / STEPS), 1);
  const chosen = Math.min(page.number("page", pages - 1), pages - 1);
  const { steps } = await get("timeline", { run, first: chosen * STEPS, count: STEPS });
  if (!steps.length) return h("section", { class: "empty" }, h("h2", {}, "No steps yet"));
  const longest = Math.max(...steps.map((step) => step.phase.seconds));
  const names = new Map();
  steps.forEach((step) => collect(step.phase, names));
  const tones = new Map([...names].sort((a, b) => b[1] - a[1]).map(([name], index) => [name, `tone${index % 8}`]));
  return h("section", { class: "timeline" },
    h("h2", {}, `Time by phase: ${run}`),
    h("div", { class: "toolbar" }, pages > 1 ? select("Steps", Array.from({ length: pages }, (_, index) =>
      [index, `part ${index + 1} of ${pages}`]), chosen, (value) => page.go("timeline", { page: value })) : null),
    h("ul", { class: "legend" }, [...tones].filter(([name]) => names.get(name) >= 0.001 * total(steps)).map(([name, tone]) => h("li", { class: tone }, `${name} ${number(100 * names.get(name) / total(steps))} %`))),
    h("ol", { class: "steps" }, steps.map((step) => h("li", {}, stepName(page, step.step, traces),
      h("div", { class: "bars", style: `width:${(100 * step.phase.seconds) / longest}%` }, bar(step.phase, tones)),
      h("span", { class: "note" }, duration(step.phase.seconds))))));
}

function stepName(page, step, traces) {
  if (!traces.some((trace) => trace.step === step)) return h("span", { class: "step-name" }, `step ${step}`);
  const show = () => { page.go("timeline", { step, rank: "", from: "", to: "" }); scrollTo(0, 0); };
  return h("button", { class: "link step-name", title: "Show its trace", onclick: show }, `step ${step}`);
}

function total(steps) {
  return steps.reduce((sum, step) => sum + step.phase.seconds, 0);
}

function collect(phase, names) {
  for (const part of phase.parts) {
    if (!part.parts.length) names.set(part.name, (names.get(part.name) ?? 0) + part.seconds);
    collect(part, names);
  }
}

function bar(phase, tones) {
  return h("div", { class: "bar" }, phase.parts.map((part) =>
    h("div", { class: `segment ${tones.get(part.name) ?? "whole"}`, style: `flex-grow:${part.seconds}`, title: `${part.name}: ${duration(part.seconds)}` },
      h("span", {}, part.name), part.parts.length ? bar(part, tones) : null)));
}
