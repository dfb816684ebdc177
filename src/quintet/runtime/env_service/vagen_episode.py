"""An env behind VAGEN's protocol: it parses responses of the policy itself, and describes their effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quintet.config.native.relations import RelationScoring
from quintet.envs.env import IMAGE, Env
from quintet.envs.service.png import encode_png
from quintet.envs.validation import relations_message
from quintet.envs.vector_env import close_env, execute_actions
from quintet.records import Observation
from quintet.reward_sum import sum_rewards
from quintet.rewards.state_reward import descriptions, score_by_rules
from quintet.rollout.chat.response_parser import ResponseFormat
from quintet.rollout.chat.thought_sections import format_instruction


class VagenEpisode:
    """Env of a client; `reset` starts further episodes in it."""

    def __init__(
        self, build_env: Callable[[], Env], responses: Mapping[str, Any], scoring: RelationScoring | None = None
    ) -> None:
        """`responses` has the fields of `VagenResponses`; `scoring` weighs the relations of the env's states."""
        self._build_env = build_env
        self._format_rewards = {True: float(responses["format_reward"]), False: float(responses["format_penalty"])}
        self._state_weights: Mapping[str, float] | None = responses["state_reward"]
        self._scoring = scoring or RelationScoring()
        self._max_actions = int(responses["max_actions"])
        self._separator = str(responses["separator"])
        self._think, self._thoughts = bool(responses["think"]), responses["thoughts"]
        self._env = build_env()
        self._last = Observation("")
        self._format = ResponseFormat(
            tuple(self._env.actions),
            think=self._think,
            separator=self._separator,
            max_actions=self._max_actions,
            ignore_case=bool(responses["ignore_case"]),
            form=responses["form"],
            special=(IMAGE,),
            thoughts=self._thoughts,
        )

    def call(self, method: str, arguments: Sequence[Any]) -> Mapping[str, Any]:
        """Return the result of a method of VAGEN's protocol; errors of the env are raised."""
        if method == "reset":
            return {"result": self._reset(*arguments)}
        if method == "step":
            return {"result": self._step(*arguments)}
        # rewards are those of the steps; VAGEN adds this one to them
        return {"result": 0.0 if method == "reward" else self._system_prompt()}

    def close(self) -> None:
        """End the episode."""
        close_env(self._env)

    def _reset(self, seed: int) -> list[Any]:
        close_env(self._env)
        self._env = self._build_env()
        self._last = self._env.reset(seed)
        return [self._observation("[Initial Observation]:"), {}]

    def _step(self, response: str) -> list[Any]:
        parsed = self._format.parse(response)
        steps = list(execute_actions(self._env, parsed.actions)) if parsed.actions else []
        is_valid = parsed.valid and bool(parsed.actions)
        is_valid = is_valid and all(step.info.get("valid_format", True) for step in steps)
        done = bool(steps) and (steps[-1].terminated or steps[-1].truncated)
        success = done and bool(steps[-1].info.get("success"))
        rewards = [*(step.reward for step in steps), self._format_rewards[is_valid]]
        executed = self._separator.join(parsed.actions[: len(steps)])
        head = f"After your answer, the executed actions are: {executed or 'none'}.\nThe observation is:"
        before, self._last = self._last, steps[-1].observation if steps else self._last
        state_rewards = self._state_rewards(parsed.sections, before) if is_valid else {}
        metrics = {
            "turn_metrics": {"action_is_valid": is_valid, "action_is_effective": bool(steps), **state_rewards},
            "traj_metrics": {"success": success},
        }
        info = {
            "metrics": metrics,
            "llm_raw_response": response,
            "actions": list(parsed.actions),
            "format_correct": is_valid,
        }
        return [self._observation(head), sum_rewards((*rewards, *state_rewards.values())), done, info]

    def _state_rewards(self, sections: Mapping[str, str], before: Observation) -> dict[str, float]:
        """Return the weighted scores of descriptions of the states before and after the last response."""
        weights = self._state_weights
        if weights is None:
            return {}
        described = descriptions(sections, before.relations, self._last.relations, self._scoring)
        return {
            f"{description.kind}_reward": weights[description.kind] * score_by_rules(description).score
            for description in described
        }

    def _observation(self, head: str) -> dict[str, Any]:
        observation = self._last
        placeholders = [IMAGE] * (len(observation.images) - observation.text.count(IMAGE))
        text = "\n".join([head, *placeholders, observation.text, "Decide your next actions.", self._reply_format()])
        message: dict[str, Any] = {"obs_str": text}
        if observation.relations is not None:
            # VAGEN's clients do not read it
            message["relations"] = relations_message(observation.relations)
        if observation.images:
            images = [{"__pil_image__": encode_png(image)} for image in observation.images]
            message["multi_modal_data"] = {IMAGE: images}
        return message

    def _reply_format(self) -> str:
        if self._thoughts is not None:
            return f"{format_instruction(self._thoughts, self._separator)}\nAt maximum {self._max_actions} actions."
        thought = "<think>…</think>" if self._think else ""
        limit = f"up to {self._max_actions} actions, separated by {self._separator!r}"
        return f"Answer with {limit}, in this format: {thought}<answer>…</answer>"

    def _system_prompt(self) -> str:
        return f"{self._env.instruction()}\n{self._reply_format()}"
