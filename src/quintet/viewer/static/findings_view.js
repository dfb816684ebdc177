// What the diagnosis reports about the selected runs, and what it could not judge yet.

import { h } from "view/dom.js";
import { diagnosesOf, findingsOf } from "view/charts_view.js";
import { count } from "view/format.js";

/** Show all findings, critical ones first, and the rules that need more steps. */
export async function findingsView(page) {
  const diagnoses = await diagnosesOf(page.runs);
  const findings = findingsOf(diagnoses);
  findings.sort((a, b) => (a.severity === "critical" ? 0 : 1) - (b.severity === "critical" ? 0 : 1));
  return h("section", { class: "findings" },
    findings.length ? h("h2", {}, count(findings.length, "finding")) : null,
    findings.map((finding) => h("article", { class: `finding-card ${finding.severity}` },
      h("header", {}, h("b", {}, finding.title), h("span", { class: "note" }, `${finding.run} · ${finding.severity}`)),
      h("p", {}, finding.evidence),
      finding.suggestions.length ? h("ul", {}, finding.suggestions.map((text) => h("li", {}, text))) : null,
      finding.metric && h("button", { onclick: () => page.go("charts", { metric: finding.metric }) }, `Show ${finding.metric}`))),
    diagnoses.map(coverage));
}

function coverage({ run, findings, verdict, waiting }) {
  return h("section", {},
    findings.length ? null : h("p", {}, h("b", {}, run), `: ${verdict}.`),
    waiting.length ? [h("h3", {}, `Not judged yet: ${run}`), h("ul", { class: "note" }, waiting.map((line) => h("li", {}, line)))] : null);
}
