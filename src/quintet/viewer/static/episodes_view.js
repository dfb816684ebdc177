// Stored episodes of a run: filters, list, and the chosen one turn by turn.

import { get, videoUrl } from "view/api.js";
import { debounce, h, select } from "view/dom.js";
import { groupView, mark, startWord } from "view/episode.js";
import { count, number } from "view/format.js";
import { VirtualList } from "view/virtual_list.js";

const FILTERS = ["split", "step", "env", "outcome", "stop_reason", "failure", "success", "text", "min_reward", "max_reward",
  "min_tokens", "max_tokens", "seed", "group", "sort", "descending"];
const MENUS = [["split", "Split"], ["step", "Step"], ["env", "Environment"], ["outcome", "Outcome"], ["stop_reason", "Stop reason"], ["failure", "Failure"]];
const ORDERS = [["", "newest first"], ["reward:", "lowest reward"], ["reward:1", "highest reward"], ["response_tokens:1", "longest"],
  ["response_tokens:", "shortest"], ["turns:1", "most turns"], ["seed:", "seed"], ["group:", "group"]];

/** Show the episodes of the first selected run. */
export async function episodesView(page) {
  const run = page.runs[0];
  const detail = h("div", { class: "detail" }, h("p", { class: "note" }, "Choose an episode: click, or ↓ and ↑ in the list."));
  const summary = h("p", { class: "note", role: "status" });
  let complete = true;
  const list = new VirtualList({
    label: "Episodes", rowHeight: 44, draw: row,
    load: async (first, size) => {
      const result = await get("episodes", { run, first, count: size, ...filters(page) });
      if (first === 0) {
        complete = result.complete;
        const word = result.rows[0]?.success_word;
        const share = result.total && word ? ` · ${number((100 * result.solved) / result.total)} % ${word}` : "";
        const damage = result.damage.length ? ` · left out as damaged: ${result.damage.join("; ")}` : "";
        summary.textContent = `${count(result.total, "episode")}${share}${complete ? "" : " · reading more…"}${damage}`;
      }
      return result;
    },
    choose: (episode) => show(episode),
  });
  async function show(episode) {
    page.set("at", `${episode.split}:${episode.step}:${episode.line}`);
    const samples = await get("group", { run, split: episode.split, step: episode.step, line: episode.line });
    detail.replaceChildren(groupView(page, run, samples));
    detail.scrollTop = 0;
    if (matchMedia("(max-width: 52rem)").matches) detail.scrollIntoView();
  }
  const bar = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() });
  const change = (name, value) => { page.set(name, value); list.reset(); };
  let shownMenus = "";
  async function menus() {
    const found = await get("facets", { run });
    if (JSON.stringify(found) === shownMenus) return;
    shownMenus = JSON.stringify(found);
    bar.replaceChildren(...filterFields(page, found, change).filter(Boolean));
  }
  await Promise.all([list.reset(), menus()]);
  if (!list.total && !Object.keys(filters(page)).length) {
    return h("section", { class: "empty" }, h("h2", {}, "No episodes yet"),
      h("p", {}, "Episodes of every validation are stored, and those of every tenth training step; tracking.trajectories_every_steps changes that."));
  }
  const [split, step, line] = page.get("at", "").split(":");
  if (line) show({ split, step, line }).catch(() => {});
  const refresh = async () => {
    await Promise.all(complete ? [menus()] : [list.reset(), menus()]);
  };
  let timer = 0;
  const readOn = () => { timer = setTimeout(() => refresh().finally(() => { if (!complete) readOn(); }), 300); };
  if (!complete) readOn();
  return { view: h("div", { class: "episodes" }, bar, summary, h("div", { class: "columns" }, list.element, detail), await videos(run)), refresh,
    close: () => { clearTimeout(timer); list.observer.disconnect(); }, focus: () => list.element.focus(), move: (by) => list.select(list.chosen + by) };
}

async function videos(run) {
  const names = await get("videos", { run });
  if (!names.length) return null;
  return h("section", {}, h("h2", {}, "Videos"), h("div", { class: "cards" }, names.slice(-24).reverse().map((name) => h("figure", { class: "card" },
    name.endsWith(".gif") ? h("img", { src: videoUrl(run, name), alt: name, loading: "lazy" }) : h("video", { src: videoUrl(run, name), controls: true, preload: "metadata" }),
    h("figcaption", {}, name)))));
}

function filters(page) {
  return Object.fromEntries(FILTERS.map((name) => [name, page.get(name, "")]).filter(([, value]) => value !== ""));
}

function filterFields(page, { facets, outcomes, success_word: word }, change) {
  const menus = MENUS.filter(([name]) => (facets[name] ?? []).length > (name === "failure" ? 0 : 1)).map(([name, label]) =>
    select(label, [["", "all"], ...facets[name].map(([value, size]) => [value, `${outcomes[value] ?? value} (${size.toLocaleString("en")})`])],
      page.get(name, ""), (value) => change(name, value)));
  const bound = (name, label, placeholder) => h("input", { type: "number", step: "any", "aria-label": label, placeholder, value: page.get(name, ""),
    oninput: debounce((event) => change(name, event.target.value), 300) });
  const range = (name, label) => h("span", { class: "field" }, label,
    bound(`min_${name}`, `${label} from`, "from"), bound(`max_${name}`, `${label} to`, "to"));
  const order = `${page.get("sort", "")}${page.get("sort", "") ? ":" : ""}${page.get("descending", "")}`;
  return [
    h("input", { type: "search", placeholder: "Search observations and responses", "aria-label": "Search observations and responses",
      value: page.get("text", ""), oninput: debounce((event) => change("text", event.target.value), 250) }),
    ...menus,
    word ? select("Result", [["", "all"], ["true", word], ["false", `not ${word}`]], page.get("success", ""), (value) => change("success", value)) : null,
    range("reward", "Reward"), range("tokens", "Tokens"), h("label", { class: "field" }, "Seed", bound("seed", "Seed", "")),
    select("Order", ORDERS, order, (value) => {
      const [key, descending] = value.split(":");
      page.set("descending", descending ?? "");
      change("sort", key);
    }),
  ];
}

function row(episode) {
  return [mark(episode), h("span", { class: "reward" }, number(episode.reward)),
    h("span", { class: "what" }, h("span", {}, `${episode.env} `, h("small", {}, `${episode.split} ${episode.step} · ${startWord(episode)} ${episode.seed} · ${count(episode.turns, "turn")} · ${count(episode.response_tokens, "token")}`)),
      h("small", { class: "preview" }, episode.failure ?? episode.preview))];
}
