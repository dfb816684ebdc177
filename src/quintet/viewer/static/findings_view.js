// What the diagnosis reports about the selected runs.

import { h } from "view/dom.js";
import { findingsOf } from "view/charts_view.js";
import { count } from "view/format.js";

/** Show all findings, critical ones first. */
export async function findingsView(page) {
  const findings = await findingsOf(page.runs);
  if (!findings.length) return h("section", { class: "empty" }, h("h2", {}, "Nothing looks wrong"), h("p", {}, "No rule of quintet diagnose reports anything about these runs."));
  findings.sort((a, b) => (a.severity === "critical" ? 0 : 1) - (b.severity === "critical" ? 0 : 1));
  return h("section", { class: "findings" }, h("h2", {}, count(findings.length, "finding")),
    findings.map((finding) => h("article", { class: `finding-card ${finding.severity}` },
      h("header", {}, h("b", {}, finding.title), h("span", { class: "note" }, `${finding.run} · ${finding.severity}`)),
      h("p", {}, finding.evidence),
      finding.suggestions.length ? h("ul", {}, finding.suggestions.map((text) => h("li", {}, text))) : null,
      finding.metric && h("button", { onclick: () => page.go("charts", { metric: finding.metric }) }, `Show ${finding.metric}`))));
}
