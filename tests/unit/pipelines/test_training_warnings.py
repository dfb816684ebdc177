"""If these fail, a run that cannot learn says nothing, or a healthy one is warned about."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.advantages import GaeConfig
from quintet.config.native.experiment import Experiment
from quintet.config.schema import keys
from quintet.data.demonstrations import collect_demonstrations
from quintet.errors import ConfigError
from quintet.pipelines.training_warnings import TrainingWarnings
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.metrics import describe

HEALTHY = {
    "response/valid_format": 0.4,
    "response_length/clip_ratio": 0.1,
    "training/groups_with_signal": 0.5,
    "critic/score/mean": 0.3,
    "actor/grad_norm": 1.0,
}


def episode(text: str) -> Trajectory:
    turn = Turn("_ P", (1, 2), False, (3, 4), (-0.1, -0.2), 1, text, (), False, 0.0, FinishReason.STOP)
    return Trajectory("lake", 0, 0, 0, (turn,), Outcome.MAX_TURNS)


def log_steps(warnings: TrainingWarnings, steps: int = 1, without: str = "", **metrics: float) -> list[str]:
    step = {name: value for name, value in (HEALTHY | metrics).items() if name != without}
    return [text for _ in range(steps) for text in warnings.check([episode("I walk\nto the goal")], step)]


def test_a_healthy_run_gets_no_warning() -> None:
    assert log_steps(TrainingWarnings(Experiment()), steps=9) == []


def test_unparsed_responses_are_reported_once_with_an_example() -> None:
    (warning,) = log_steps(TrainingWarnings(Experiment()), steps=5, **{"response/valid_format": 0.0})
    assert warning.startswith("warning: no response of this step could be parsed")
    assert "does not know the format" in warning
    assert r"'I walk\nto the goal'" in warning
    cut = {"response/valid_format": 0.0, "response_length/clip_ratio": 1.0}
    (warning,) = log_steps(TrainingWarnings(Experiment()), **cut)
    assert "increase rollout.max_response_tokens, now 24" in warning


def test_the_example_of_unparsed_responses_shows_their_cause() -> None:
    complete, cut_off = episode("north"), episode("I think that")
    turn = dataclasses.replace(cut_off.turns[0], finish_reason=FinishReason.LENGTH)
    cut_off = dataclasses.replace(cut_off, turns=(turn,))

    def warning(share: float, *episodes: Trajectory) -> str:
        metrics = HEALTHY | {"response/valid_format": 0.0, "response_length/clip_ratio": share}
        (text,) = TrainingWarnings(Experiment()).check(episodes, metrics)
        return text

    assert warning(0.9, complete, cut_off).endswith("A response: 'I think that'")
    assert warning(0.1, cut_off, complete).endswith("A response: 'north'")
    assert "of the response below: it has no <answer>…</answer>" in warning(0.1, complete)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<think>a</think><answer>fly</answer>", "'fly' is none of the actions"),
        ("so</think><answer>fly</answer>", "'fly' is none of the actions"),
        ("<answer>Up</answer>", "it has no <think>…</think> before <answer>"),
    ],
)
def test_the_warning_of_unparsed_responses_names_the_cause_of_the_one_that_it_quotes(text: str, problem: str) -> None:
    metrics = HEALTHY | {"response/valid_format": 0.0}
    (warning,) = TrainingWarnings(Experiment()).check([episode(text)], metrics)
    assert f"(of the response below: {problem}): use a model" in warning
    assert "format_instruction" not in warning


def test_the_warning_names_the_setting_that_hides_the_form() -> None:
    config = load_experiment(None, ["rollout.format_instruction=false"]).experiment
    (warning,) = log_steps(TrainingWarnings(config), **{"response/valid_format": 0.0})
    assert "describe it in the system message (rollout.format_instruction=true), use a model" in warning


def test_a_prompt_is_not_parsed_but_has_no_format() -> None:
    prompts = load_experiment(None, ["env.name=prompts", "data.train_files=[a.jsonl]"]).experiment
    (warning,) = log_steps(TrainingWarnings(prompts), **{"response/valid_format": 0.0})
    assert warning.startswith("warning: no response of this step has the format that the reward checks")


def test_rewards_that_never_differ_are_reported_after_three_steps() -> None:
    warnings = TrainingWarnings(Experiment())
    same = {"training/groups_with_signal": 0.0}
    assert log_steps(warnings, steps=2, **same) == []
    assert log_steps(warnings) == []
    (warning,) = log_steps(warnings, steps=5, **same)
    assert warning.startswith("warning: for 3 steps the rewards have not differed within any group (mean 0.3)")


def test_estimators_that_compare_no_groups_need_no_differences() -> None:
    config = Experiment()
    algorithm = config.algorithm.model_copy(update={"advantage": GaeConfig()})
    warnings = TrainingWarnings(config.model_copy(update={"algorithm": algorithm}))
    assert log_steps(warnings, steps=5, **{"training/groups_with_signal": 0.0}) == []


def test_a_step_without_any_update_is_reported() -> None:
    (warning,) = log_steps(TrainingWarnings(Experiment()), without="actor/grad_norm")
    assert warning.startswith("warning: no token was left to train on")


class WithoutExpert:
    """An environment that nobody can solve for the policy."""

    actions = ("go",)


def test_the_hint_for_an_env_without_expert_works_when_followed(tmp_path: Path, policy_directory: Path) -> None:
    with pytest.raises(ConfigError) as error:
        collect_demonstrations(WithoutExpert, 1, max_turns=3)
    assert error.value.hint is not None
    overrides = error.value.hint.partition("warm start: ")[2].replace("DIRECTORY", str(policy_directory)).split()
    assert overrides == [f"policy.path={policy_directory}", "policy.preset=null", "warm_start=null"]
    (tmp_path / "guess.py").write_text(GUESS)
    command = [sys.executable, "-m", "quintet", "train", *SMALL]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 2
    assert error.value.hint in refused.stderr
    done = subprocess.run([*command, *overrides], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    (line,) = (tmp_path / "runs/guess/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["response/valid_format"] == 0
    assert "warning: no response of this step could be parsed" in done.stdout.replace("\n", " ")


GUESS = '''
from quintet.records import Observation, Step


class Guess:
    """Guess a number."""

    actions = ("1", "2", "3")

    def instruction(self):
        return "Guess my number, 1 to 3."

    def reset(self, seed):
        self.number = 1 + seed % 3
        return Observation("What is your guess?")

    def step(self, action):
        won = int(action) == self.number
        return Step(Observation("That is it." if won else "No."), float(won), won, not won, {"success": won})

    def close(self):
        pass
'''
SMALL = [
    *("name=guess", "env={name: custom, path: guess.py:Guess}", "rollout.max_turns=2", "validation.episodes=2"),
    *("training={steps: 1, groups_per_step: 2, samples_per_group: 2, mini_batches: 1, threads: 1}",),
    *("validation.every_steps=-1", "validation.before_training=false"),
]


def test_warnings_name_keys_and_metrics_that_exist() -> None:
    clipped = {"response/valid_format": 0.0, "response_length/clip_ratio": 1.0}
    warnings = [
        *log_steps(TrainingWarnings(Experiment()), **clipped),
        *log_steps(TrainingWarnings(Experiment()), steps=3, **{"training/groups_with_signal": 0.0}),
        *log_steps(TrainingWarnings(Experiment()), without="actor/grad_norm"),
    ]
    text = " ".join(warnings)
    named = set(re.findall(r"\b(?:rollout|training|algorithm)\.\w+", text))
    assert named == {
        *("rollout.max_response_tokens", "rollout.temperature", "training.samples_per_group"),
        *("algorithm.filter", "algorithm.correction"),
    }
    assert named <= {key.name for key in keys()}
    for metric in re.findall(r"\b[a-z]+/[a-z_]+", text):
        assert describe(metric).name
