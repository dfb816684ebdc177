"""Reconstruction of an image as SVG code, as VAGEN's environment `svg`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quintet.config.native.envs import SvgConfig
from quintet.envs.env import IMAGE, TEXT, Env
from quintet.envs.start_states import Split
from quintet.envs.svg.document_check import InvalidSvgError
from quintet.envs.svg.image_scores import (
    SAME_LENGTH,
    canny_edges,
    code_score,
    color_score,
    pixel_score,
    structural_score,
)
from quintet.envs.svg.model_scores import MODELS, load_scorer
from quintet.envs.svg.renderer import render_svgs
from quintet.envs.svg.targets import target_code
from quintet.errors import ConfigError
from quintet.records import Observation, Step

INSTRUCTION = (
    "Write SVG code that reproduces the picture as precisely as possible. Answer with one <svg> element with a viewBox."
    " After each answer you see your own picture and its scores, and may revise the code."
)
WHITE = 255
MAX_UNREADABLE = 100
"""Consecutive targets that cannot be rendered, after which the data set is considered unusable."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Image to reproduce, RGB `uint8[size, size, 3]`, with its edges and code."""

    code: str
    image: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True, slots=True)
class Attempt:
    """Rendered SVG code of a response and its scores by name, or the error of the rendering."""

    image: np.ndarray | None
    scores: Mapping[str, float]
    reason: str = ""


@lru_cache(maxsize=256)
def find_target(config: SvgConfig, seed: int) -> Target:
    """Return the target of a seed, rendered once for all samples of a group; code that cannot be rendered is skipped.

    Raises:
        ConfigError: the data set cannot be read or rendered.
    """
    reason: object = ""
    for number in range(MAX_UNREADABLE):
        code = target_code(config, seed + number * len(Split))
        (image,) = render_svgs([code], config.image_size)
        if not isinstance(image, InvalidSvgError):
            return Target(code, image, canny_edges(image))
        reason = image
    problem = f"none of {MAX_UNREADABLE} targets can be rendered; the last one: {reason}"
    raise ConfigError(f"env.dataset = {config.dataset}: {problem}", key="env.dataset", value=config.dataset)


def score_attempts(config: SvgConfig, attempts: Sequence[tuple[Target, str]]) -> list[Attempt]:
    """Render the code of each attempt, and compare all images with their targets, in one batch per model.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    images = render_svgs([code for _, code in attempts], config.image_size)
    rendered = [
        (target, code, image)
        for (target, code), image in zip(attempts, images, strict=True)
        if not isinstance(image, InvalidSvgError)
    ]
    scores = iter(_scores(config, rendered))
    return [
        Attempt(None, {}, str(image)) if isinstance(image, InvalidSvgError) else Attempt(image, next(scores))
        for image in images
    ]


def _scores(config: SvgConfig, rendered: Sequence[tuple[Target, str, np.ndarray]]) -> list[dict[str, float]]:
    functions: dict[str, Any] = {
        "pixel": lambda target, code, image: pixel_score(target.image, image),
        "structural": lambda target, code, image: structural_score(target.edges, image),
        "color": lambda target, code, image: color_score(target.image, image),
        "code": lambda target, code, image: code_score(target.code, code),
    }
    scores: list[dict[str, float]] = [{} for _ in rendered]
    for name in config.weights if rendered else ():
        if name in MODELS:
            path, device = getattr(config, f"{name}_path"), getattr(config, f"{name}_device")
            scorer = load_scorer(name, path or "", device)
            values = scorer.scores([target.image for target, _, _ in rendered], [image for _, _, image in rendered])
        else:
            values = [functions[name](*pair) for pair in rendered]
        for result, value in zip(scores, values, strict=True):
            result[name] = value
    return scores


class SvgEnv(Env):
    """Env with an image as start state. An action is SVG code, rewarded by the similarity of its rendered image."""

    actions = (f"<svg{TEXT}</svg>",)

    def __init__(self, config: SvgConfig) -> None:
        self._config = config
        self._best = sum(weight * (SAME_LENGTH if name == "code" else 1) for name, weight in config.weights.items())
        self._prepared: dict[str, Attempt] = {}

    def instruction(self) -> str:
        return INSTRUCTION

    def reset(self, seed: int) -> Observation:
        self._target = find_target(self._config, seed)
        self._image = self._target.image
        self._score = 0.0
        return Observation(f"{IMAGE}\nReproduce this picture.", (self._target.image,))

    def step(self, action: str) -> Step:
        """See `Env.step`; an empty action is a response without SVG code."""
        if action not in self._prepared:
            self.prepare_steps([(self, action)])
        attempt = self._prepared.pop(action)
        if attempt.image is None:
            return self._invalid(attempt.reason)
        score = sum(weight * attempt.scores[name] for name, weight in self._config.weights.items())
        reward = score if self._config.accumulate_scores else score - self._score
        success = score >= self._config.success_score * self._best
        self._score, self._image = score, attempt.image
        shown = ", ".join(f"{name} {attempt.scores[name]:.3f}" for name in self._config.weights)
        text = f"Your picture:\n{IMAGE}\nscores: {shown}\nRevise the code to make it more similar to the first picture."
        info = {"success": success, "valid_format": True, "scores": dict(attempt.scores)}
        terminated = success and not self._config.accumulate_scores
        return Step(Observation(text, (attempt.image,)), reward, terminated, False, info)

    def render(self) -> np.ndarray:
        """See `Env.render`: the target, then the last valid attempt."""
        return self._image

    def expert_action(self) -> str:
        """Return the code of the target."""
        return self._target.code

    def expert_thought(self) -> str:
        """Return the names of the elements."""
        return " ".join(part.split(maxsplit=1)[0] for part in self._target.code.split("<")[2:] if part[0].isalpha())

    @staticmethod
    def prepare_steps(actions: Sequence[tuple[SvgEnv, str]]) -> None:
        """Render and score the actions of several envs of one configuration together; `step` uses the results."""
        attempts = score_attempts(actions[0][0]._config, [(env._target, action) for env, action in actions])
        for (env, action), attempt in zip(actions, attempts, strict=True):
            env._prepared = {action: attempt}

    def _invalid(self, reason: str) -> Step:
        size = self._config.image_size
        image = np.full((size, size, 3), WHITE, np.uint8)
        text = f"Your SVG code is invalid: {reason}\n{IMAGE}\nRevise the code."
        info = {"success": False, "valid_format": False, "scores": dict.fromkeys(self._config.weights, 0.0)}
        return Step(Observation(text, (image,)), self._config.format_penalty, False, False, info)
