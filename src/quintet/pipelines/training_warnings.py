"""Warnings about runs that cannot learn, with the likely cause, as soon as their first steps show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten

from quintet.config.native.experiment import Experiment
from quintet.records import Trajectory, Turn, with_opened_thought
from quintet.rollout.chat.response_parser import ResponseFormat

STEPS_WITHOUT_SIGNAL = 3
"""Consecutive steps without any difference of rewards within a group, after which a warning is due."""
SHOWN_CHARACTERS = 100


class TrainingWarnings:
    """Warnings about a run, each given once, and the reason to end it early."""

    def __init__(self, config: Experiment) -> None:
        self._config = config
        self._steps_without_signal = 0
        self._empty_steps = 0
        self._shown_kinds: set[str] = set()

    def check(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield new warnings about a step from its episodes and metrics."""
        has_signal = metrics.get("training/groups_with_signal", 1.0) > 0
        self._steps_without_signal = 0 if has_signal else self._steps_without_signal + 1
        problems = {
            "format": self._unparsed_responses(trajectories, metrics),
            "signal": self._equal_rewards(metrics),
            "update": self._skipped_update(metrics),
        }
        for kind, warning in problems.items():
            if warning is not None and kind not in self._shown_kinds:
                self._shown_kinds.add(kind)
                yield f"warning: {warning}"

    def reason_to_end(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return why training ends after a step with these metrics: `algorithm.filter.stop_after_empty_steps`."""
        self._empty_steps = self._empty_steps + 1 if metrics.get("training/groups_kept") == 0 else 0
        if not 0 < self._config.algorithm.filter.stop_after_empty_steps <= self._empty_steps:
            return None
        return (
            f"training ended after step {step}: in {self._empty_steps} steps in a row algorithm.filter has kept no"
            " group (algorithm.filter.stop_after_empty_steps)"
        )

    def _unparsed_responses(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> str | None:
        if metrics.get("response/valid_format", 1.0) > 0:
            return None
        turns = [(turn, episode.env) for episode in trajectories for turn in episode.turns]
        if not turns:
            return None
        is_cut_off = metrics.get("response_length/clip_ratio", 0.0) > 0.5
        # the example shows the cause
        shown = (each for each in turns if each[0].finish_reason.truncated is is_cut_off)
        turn, env = next(shown, turns[0])
        cause = self._cause(turn, env, is_cut_off=is_cut_off)
        example = shorten(repr(turn.text), SHOWN_CHARACTERS, placeholder=" …")
        if self._config.env.reads_prompts:
            problem = "no response of this step has the format that the reward checks"
        else:
            problem = "no response of this step could be parsed"
        return f"{problem} (response/valid_format is 0); {cause}. A response: {example}"

    def _cause(self, turn: Turn, env: str, *, is_cut_off: bool) -> str:
        if is_cut_off:
            limit = self._config.rollout.max_response_tokens
            return f"most are cut off: increase rollout.max_response_tokens, now {limit}"
        cause = "the policy does not know the format"
        if not self._config.env.reads_prompts:
            cause += f" (of the response below: {self._problem(turn, env)})"
        is_untold = not self._config.env.reads_prompts and self._config.rollout.format_instruction is False
        told = "describe it in the system message (rollout.format_instruction=true), " * is_untold
        return (
            f"{cause}: {told}use a model that follows instructions, a warm start with demonstrations, or fine-tune it"
            " first (quintet sft)"
        )

    def _problem(self, turn: Turn, env: str) -> str:
        """Return what is wrong with the response of a turn in the env of that name."""
        rollouts = {each.name: each.rollout for each in self._config.run_envs}
        response_format = ResponseFormat.from_config(rollouts.get(env, self._config.rollout), turn.actions)
        return response_format.problem(with_opened_thought(turn.text))

    def _equal_rewards(self, metrics: Mapping[str, float]) -> str | None:
        compares_groups = self._config.algorithm.advantage.needs_several_samples
        if self._steps_without_signal < STEPS_WITHOUT_SIGNAL or not compares_groups:
            return None
        mean = metrics.get("critic/score/mean", 0.0)
        return (
            f"for {self._steps_without_signal} steps the rewards have not differed within any group (mean {mean:.3g}),"
            " so there is no gradient: the task is too hard or too easy for the policy, the samples are all alike"
            " (rollout.temperature), or the reward is constant. Try another difficulty, a warm start, or more"
            " training.samples_per_group"
        )

    def _skipped_update(self, metrics: Mapping[str, float]) -> str | None:
        if any(name in metrics for name in ("actor/grad_norm", "critic/grad_norm")):
            return None
        return (
            "no token was left to train on: the engine returned no tokens, all episodes failed, or algorithm.filter and"
            " algorithm.correction reject all of them (see trajectory/failed, training/groups_kept and rollout_corr/ in"
            " metrics.jsonl)"
        )
