// What changed between two validations, start state by start state.

import { get } from "view/api.js";
import { h, select } from "view/dom.js";
import { groupView, mark, startWord } from "view/episode.js";
import { number } from "view/format.js";
import { VirtualList } from "view/virtual_list.js";

/** Show the episodes of two validations from the same start states next to each other. */
export async function changesView(page) {
  const run = page.runs[0];
  const { facets } = await get("facets", { run });
  const counted = new Set();
  for (const [step] of facets.step ?? []) {
    const { total } = await get("episodes", { run, split: "validation", step, first: 0, count: 1 });
    if (total) counted.add(step);
  }
  const steps = [...counted].sort((a, b) => a - b);
  if (steps.length < 2) return h("section", { class: "empty" }, h("h2", {}, "Fewer than two validations"), h("p", {}, "Comparison needs the episodes of two; validation.every_steps sets how often they are played."));
  const [before, after] = [page.number("before", steps[0]), page.number("after", steps.at(-1))];
  const summary = h("p", { class: "note" });
  const detail = h("div", { class: "detail" }, h("p", { class: "note" }, "Choose a start state."));
  const list = new VirtualList({
    label: "Start states", rowHeight: 44, draw: row,
    load: async (first, size) => {
      const result = await get("changes", { run, before, after, first, count: size });
      const changes = result.rows[0]?.after.success_word ? `: ${result.gained} gained, ${result.lost} lost` : "";
      summary.textContent = `${result.total} start states${changes}`;
      return result;
    },
    choose: async (pair) => {
      const sides = await Promise.all([pair.before, pair.after].map(({ split, step, line }) => get("group", { run, split, step, line })));
      detail.replaceChildren(h("div", { class: "side-by-side" }, sides.map(([episode]) => groupView(page, run, [episode]))));
    },
  });
  await list.reset();
  const choice = (name, label, value) => select(label, steps.map((step) => [step, `step ${step}`]), value, (step) => page.go("changes", { [name]: step }));
  return { view: h("div", { class: "episodes" },
    h("div", { class: "toolbar" }, choice("before", "Before", before), choice("after", "After", after)), summary,
    h("div", { class: "columns" }, list.element, detail)),
  close: () => list.observer.disconnect(), focus: () => list.element.focus(), move: (by) => list.select(list.chosen + by) };
}

function row({ before, after }) {
  return [h("span", { class: "marks" }, mark(before), after.success_word ? "→" : "", mark(after)),
    h("span", { class: "reward" }, `${number(before.reward)} → ${number(after.reward)}`),
    h("span", { class: "what" }, h("span", {}, `${after.env} `, h("small", {}, `${startWord(after)} ${after.seed}${after.sample ? ` · sample ${after.sample}` : ""}`)),
      h("small", { class: "preview" }, after.preview))];
}
