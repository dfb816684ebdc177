// Configuration of a run, or differences between several.

import { get } from "view/api.js";
import { h } from "view/dom.js";

/** Show the settings of one run, or those that differ between several. */
export async function configView(page) {
  const { values, differences } = await get("config", { run: page.runs });
  const isSingle = page.runs.length === 1;
  const changed = (source) => source && source !== "default";
  const rows = isSingle
    ? Object.entries(values).map(([key, { text, source }]) => [key, [text, source], changed(source)])
    : Object.entries(differences).map(([key, texts]) => [key, texts, true]);
  const onlyChanged = isSingle && page.get("all", "") !== "1";
  const shown = rows.filter(([, , isChanged]) => !onlyChanged || isChanged);
  return h("section", {},
    h("h2", {}, isSingle ? `Settings of ${page.runs[0]}` : "Settings that differ"),
    isSingle && h("label", { class: "field" }, h("input", { type: "checkbox", checked: !onlyChanged,
      onchange: (event) => page.go("config", { all: event.target.checked ? "1" : "" }) }), h("span", {}, "Defaults, too")),
    h("div", { class: "scroll" }, h("table", { class: "config" },
      h("thead", {}, h("tr", {}, h("th", {}, "Key"), (isSingle ? ["Value", "Source"] : page.runs).map((name) => h("th", {}, name)))),
      h("tbody", {}, shown.map(([key, cells]) => h("tr", {}, h("td", {}, h("code", {}, key)), cells.map((cell) => h("td", {}, cell))))))));
}
