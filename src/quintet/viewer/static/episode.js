// One episode, turn by turn, and the samples of its group.

import { imageUrl } from "view/api.js";
import { fromHtml, h, replace, select } from "view/dom.js";
import { count, number } from "view/format.js";

const COLOURINGS = [["", "plain"], ["logprobs", "log-prob"], ["advantages", "advantage"], ["gap", "engine–learner gap"], ["entropies", "entropy"]];

/** Return ✓ or ✗ for an episode; nothing if the goal is the reward. */
export function mark(episode) {
  if (!episode.success_word) return "";
  return h("b", { class: episode.success ? "won" : "lost", title: episode.outcome_text }, episode.success ? "✓" : "✗");
}

/** Return what numbers the start of an episode. */
export const startWord = (episode) => (episode.answers_prompt ? "row" : "seed");

/** Show the episodes of a group; `samples` has the chosen one first. */
export function groupView(page, run, samples) {
  const body = h("div", { class: "group" });
  const draw = () => {
    const sideBySide = page.get("compare", "") === "1" && samples.length > 1;
    const ordered = [...samples].sort((a, b) => a.sample - b.sample);
    replace(body,
      h("header", { class: "episode-header" },
        h("h2", {}, `${samples[0].env} `, h("span", { class: "note" }, `${samples[0].split}, step ${samples[0].step}, ${startWord(samples[0])} ${samples[0].seed}`)),
        select("Tokens", COLOURINGS.filter(([key]) => !key || hasTokens(samples, key)), page.get("colour", ""),
          (value) => { page.set("colour", value); draw(); }),
        samples.length > 1 && h("label", { class: "field" }, h("input", { type: "checkbox", checked: sideBySide,
          onchange: (event) => { page.set("compare", event.target.checked ? "1" : ""); draw(); } }), h("span", {}, "Samples side by side"))),
      samples.length > 1 && !sideBySide ? h("nav", { class: "samples", "aria-label": "Samples of the group" }, ordered.map((sample) =>
        h("button", { "aria-pressed": String(sample === shown), onclick: () => { shown = sample; draw(); } },
          mark(sample), ` ${number(sample.reward)}`))) : null,
      h("div", { class: sideBySide ? "side-by-side" : "" }, (sideBySide ? ordered : [shown]).map((sample) => episodeView(page, run, sample))));
  };
  let shown = samples[0];
  draw();
  return body;
}

function hasTokens(samples, key) {
  return samples.some((sample) => sample.turns.some((turn) => turn.token_texts && tokenValues(turn, key)));
}

function episodeView(page, run, episode) {
  const facts = [episode.outcome_text, `reward ${number(episode.reward)}`,
    count(episode.turns.length, "turn"), count(episode.response_tokens, "token")];
  const parts = Object.entries(episode.reward_components ?? {}).map(([name, value]) => `${name} ${number(value)}`);
  return h("article", { class: "episode" },
    h("p", { class: "outcome" }, mark(episode), ` sample ${episode.sample} · ${[...facts, ...parts].join(" · ")}`),
    episode.ground_truth && h("p", { class: "note" }, `ground truth: ${episode.ground_truth}`),
    episode.failure && h("p", { class: "failure" }, typeof episode.failure === "string" ? episode.failure
      : `${episode.failure.where}: ${episode.failure.error_type}: ${episode.failure.message}`),
    episode.turns.map((turn, index) => turnView(page, run, episode, turn, index)));
}

function turnView(page, run, episode, turn, index) {
  const images = (names) => (names ?? []).map((name) => h("img", { class: "board", alt: "observation", src: imageUrl(run, episode.split, name) }));
  const before = turn.image_files ? images(turn.image_files) : [board(turn.grid, turn.observation)];
  const after = turn.image_files_after ? images(turn.image_files_after) : turn.frames.map((frame, at) => board(turn.frame_grids[at], frame));
  const shown = after.length ? [...before, h("i", { class: "then", "aria-hidden": "true" }, "→"), ...after] : before;
  return h("section", { class: "turn" },
    h("h3", {}, `Turn ${index + 1}`),
    h("div", { class: "turn-body" },
      h("div", { class: "boards" }, shown),
      h("div", {}, response(turn, page.get("colour", "")), turnFacts(turn, episode), asSeen(turn))));
}

/** Return the prompt with the texts of the chat template, and the response, folded. */
function asSeen(turn) {
  if (!turn.prompt_text) return null;
  return h("details", { class: "as-seen" }, h("summary", {}, "As the model saw it"), h("pre", {}, turn.prompt_text, h("mark", {}, turn.text)));
}

function board(grid, text) {
  return grid ? fromHtml(grid) : h("pre", { class: "board" }, text);
}

function turnFacts(turn, episode) {
  const actions = turn.actions.map((action) => h("kbd", {}, typeof action === "string" ? action : JSON.stringify(action)));
  const noAction = episode.answers_prompt ? null : h("span", { class: "lost" }, "no action");
  const format = h("span", { class: turn.valid_format ? "" : "lost" }, turn.valid_format ? "valid format" : "format not valid");
  return h("p", { class: "facts" }, actions.length ? actions : noAction,
    h("span", {}, `reward ${number(turn.reward)}`), episode.checks_format ? format : null,
    h("span", {}, turn.finish_reason), h("span", {}, count(turn.response_tokens ?? 0, "token")));
}

function response(turn, colouring) {
  const values = colouring && turn.token_texts ? tokenValues(turn, colouring) : null;
  if (!values) return h("blockquote", {}, turn.text || h("span", { class: "note" }, "(empty)"));
  const largest = Math.max(...values.map(Math.abs), 1e-9);
  return h("blockquote", { class: "tokens" }, turn.token_texts.map((text, index) =>
    h("span", { style: tokenStyle(values[index], largest, colouring), title: `${JSON.stringify(text)}: ${colouring} ${number(values[index])}` }, text)));
}

/** Return one value per token: log-probs (nats), advantages, entropies (nats), or the learner's log-prob minus the engine's. */
function tokenValues(turn, key) {
  if (key !== "gap") return turn[key] ?? null;
  return turn.learner_logprobs && turn.logprobs ? turn.learner_logprobs.map((value, index) => value - turn.logprobs[index]) : null;
}

function tokenStyle(value, largest, colouring) {
  if (colouring === "logprobs") return `background:color-mix(in srgb, var(--lost) ${Math.round(70 * (1 - Math.exp(value)))}%, transparent)`;
  const strength = Math.round((70 * Math.abs(value)) / largest);
  return `background:color-mix(in srgb, var(${value < 0 ? "--lost" : "--won"}) ${strength}%, transparent)`;
}
