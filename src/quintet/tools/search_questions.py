"""Questions that are answered by searching in a retrieval service, scored as in RAGEN and HotpotQA."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from quintet.config.native.text_envs import SearchQuestionsConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import TEXT, Env
from quintet.envs.question_files import cell_text, check_file, row_of
from quintet.errors import ConfigError
from quintet.records import Observation, Step
from quintet.rewards.chat_endpoint import JsonEndpoint
from quintet.rewards.score import accepted_answers
from quintet.rewards.verifiers.text_match import same_words, words
from quintet.tools.tool import result_text

MAX_PASSAGE: Final = 800
"""Characters of a passage, after which it is cut."""
CLOSED_ANSWERS: Final = (["yes"], ["no"], ["noanswer"])
"""Answers that only count as a whole."""
CALL: Final = re.compile(r"(search|finish)\[(.*)\]", re.DOTALL)


class SearchQuestions(Env):
    """Question from a file. `search[…]` shows passages, `finish[…]` or any other text is the answer and ends the
    episode."""

    actions = (TEXT,)

    def __init__(self, config: SearchQuestionsConfig) -> None:
        self._config = config
        self._endpoint = JsonEndpoint.at_url(f"{config.url.rstrip('/')}/retrieve", config.timeout_seconds)

    @staticmethod
    def check_config(config: SearchQuestionsConfig) -> None:
        """Check the URL of the service, and that the file of questions can be read.

        Raises:
            ConfigError: it is no URL, the file cannot be read, or it lacks a column.
        """
        if urlsplit(config.url).scheme not in ("http", "https"):
            message, hint = f"env.url = {config.url}: it is no URL of a web server", "for example http://127.0.0.1:8000"
            raise ConfigError(message, key="env.url", value=config.url, hint=hint)
        check_file(config.path, (config.question_key, config.answer_key))

    def instruction(self) -> str:
        return (
            "Answer the question. search[query] shows passages that may help, and can be used several times;"
            " finish[answer] gives the answer."
        )

    def reset(self, seed: int) -> Observation:
        config = self._config
        question, self._truth = row_of(config.path, (config.question_key, config.answer_key), seed, config.max_rows)
        self._steps, self._text = 0, f"Question: {cell_text(question, config.question_key, config.path)}"
        return Observation(self._text)

    def step(self, action: str) -> Step:
        """See `Env.step`.

        Raises:
            EndpointError: the retrieval service cannot be reached, or refuses the query.
        """
        self._steps += 1
        call = CALL.fullmatch(action.strip())
        if call is None and action.strip():
            return self._answered(action)
        if call is not None and call[1] == "finish":
            return self._answered(call[2])
        passages = None if call is None else self._search(call[2])
        self._text = "The answer is empty: use search[…] or finish[…]." if passages is None else passages
        return Step(Observation(self._text), 0.0, False, self._steps >= self._config.max_steps, {"success": False})

    def _answered(self, answer: str) -> Step:
        """Score the answer by the most similar right one: exact, or by F1 from `min_f1`."""
        config = self._config
        score = max((similarity(answer, right) for right in accepted_answers(self._truth)), default=0.0)
        reward = config.correct_reward * score if score >= config.min_f1 else config.wrong_reward
        self._text = f"Your answer: {answer}"
        return Step(Observation(self._text), reward, True, False, {"success": score == 1.0 or reward > 0})

    def _search(self, query: str) -> str:
        """Return the passages that the service finds."""
        reply = json.loads(self._endpoint.post({"query": query, "top_k": self._config.passages}))
        passages = reply.get("results") or []
        text = passages_text(passages[: self._config.passages]) or "No passages were found."
        limit = self._config.max_characters
        return f"{text[:limit]}..." if len(text) > limit else text

    def render(self) -> np.ndarray:
        return text_image(self._text)


def passages_text(passages: Sequence[Mapping[str, Any]]) -> str:
    """Return the passages of a reply as text, as RAGEN shows them."""
    parts = []
    for number, passage in enumerate(passages, 1):
        content = result_text(passage.get("content"))
        shown = f"{content[:MAX_PASSAGE]}..." if len(content) > MAX_PASSAGE else content
        name, score = passage.get("id", f"doc_{number}"), float(passage.get("score") or 0.0)
        parts.append(f"[Document {number}] (ID: {name}, Score: {score:.3f})\n{shown}")
    return "\n\n".join(parts)


def similarity(answer: str, right: str) -> float:
    """Return 1 for the same words in this order, otherwise the F1 of the words, 2 PR / (P + R) = 2 s / (a + r) with s
    shared words; 0 if one of them is yes, no or noanswer (HotpotQA; Yang et al. 2018, arXiv:1809.09600).

    >>> similarity("the River Seine", "Seine river")
    1.0
    >>> similarity("Seine in Paris", "Seine river")
    0.4
    """
    if same_words(answer, right):
        return 1.0
    answer_words, right_words = words(answer), words(right)
    if answer_words in CLOSED_ANSWERS or right_words in CLOSED_ANSWERS:
        return 0.0
    shared = sum((Counter(answer_words) & Counter(right_words)).values())
    return 2.0 * shared / (len(answer_words) + len(right_words)) if shared else 0.0
