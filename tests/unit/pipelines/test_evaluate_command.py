"""If these fail, `quintet eval` shows other numbers than it found, or asks a model something else than it was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import evaluate
from quintet.cli.evaluate import run
from quintet.cli.options import EvalOptions
from quintet.config.composed import ComposedConfig
from quintet.errors import ConfigError, MachineError
from quintet.pipelines import evaluate as pipeline
from quintet.pipelines.evaluation_results import Evaluation, Statistics
from quintet.records import Failure, Response, RewardResult
from quintet.tracking.eval_statistics import Sample, estimates


class Judge:
    """Right is what equals the truth; `crash` can't be judged."""

    def __init__(self, *_: object) -> None:
        self._waiting: list[Response] = []

    def submit(self, answer: Response) -> None:
        self._waiting.append(answer)

    def ready(self) -> list[RewardResult]:
        return []

    def drain(self) -> list[RewardResult]:
        waiting, self._waiting = self._waiting, []
        return [self._judge(answer) for answer in waiting]

    def close(self) -> None:
        pass

    def _judge(self, answer: Response) -> RewardResult:
        if answer.text == "crash":
            return RewardResult(answer.id, 0.0, failure=Failure("reward", "Crashed", "signal 11"))
        return RewardResult(answer.id, float(answer.text == answer.prompt_row.ground_truth))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pipeline, "build_reward_scorer", Judge)
    monkeypatch.chdir(tmp_path)


def stored(*answers: list[str]) -> None:
    rows = [{"data_source": "s", "prompt": "?", "responses": said, "reward_model": "1"} for said in answers]
    Path("my answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_table_and_where_the_rest_lies(capsys: pytest.CaptureFixture[str]) -> None:
    stored(["1", "0"], ["1", "crash"])
    assert run(None, ["evaluation.path=my answers.jsonl"], None, "refuse", EvalOptions()) == 0
    captured = capsys.readouterr()
    assert "4 answers" in captured.out
    assert "pass@2" in captured.out
    assert "95% interval" in captured.out
    assert "s: answers that could not be scored and count as wrong: 1 × Crashed" in captured.err
    assert "runs/eval-my-answers/results.json" in captured.out


def test_names_of_sources_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"data_source": "[/red]x", "prompt": "?", "responses": ["1"], "reward_model": "1"}
    Path("odd.jsonl").write_text(json.dumps(row) + "\n")
    assert run(None, ["evaluation.path=odd.jsonl"], None, "refuse", EvalOptions()) == 0
    assert "[/red]x" in capsys.readouterr().out


def test_json_output_has_nothing_else_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    stored(["1", "0"])
    overrides = ["evaluation.path=my answers.jsonl", "name=mine", "evaluation.confidence=0.9"]
    assert run(None, overrides, None, "refuse", EvalOptions(), as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["sources"]["s"]["passed"]["2"]["mean"] == 1.0
    assert output["confidence"] == 0.9
    assert output == json.loads(Path("runs/mine/results.json").read_text())


def test_verls_own_configuration(tmp_path: Path) -> None:
    stored(["1", "1", "0"])
    (tmp_path / "evaluation.yaml").write_text(
        "data:\n  path: my answers.jsonl\n  prompt_key: prompt\n  response_key: responses\n"
        "  data_source_key: data_source\n  reward_model_key: reward_model\n"
        "custom_reward_function:\n  path: null\n  name: compute_score\n"
    )
    assert run("evaluation.yaml", [], None, "refuse", EvalOptions()) == 0
    metrics = json.loads(Path("runs/my-answers/results.json").read_text())["metrics"]
    assert metrics["test_score/s"] == pytest.approx(2 / 3)


def test_options_lie_over_the_configuration() -> None:
    stored(["1", "0"])
    asked = EvalOptions(name="mine", output_dir="there", confidence=0.5)
    assert run(None, ["evaluation.path=my answers.jsonl"], None, "refuse", asked) == 0
    assert json.loads(Path("there/mine/results.json").read_text())["confidence"] == 0.5
    assert "confidence: 0.5  # command line" in Path("there/mine/evaluation.yaml").read_text()


def test_the_exit_status_is_nonzero_if_most_scoring_fails() -> None:
    stored(["crash", "crash", "1"])
    assert run(None, ["evaluation.path=my answers.jsonl"], None, "refuse", EvalOptions()) == 1


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ComposedConfig, Statistics]]:
    """What a model would be asked."""
    seen: list[tuple[ComposedConfig, Statistics]] = []

    def fake(composed: ComposedConfig, measured: Statistics, _console: object) -> Evaluation:
        seen.append((composed, measured))
        return Evaluation(Path(), measured, {"s": estimates([Sample("s", "0", 1.0)], [1])}, {"s": {}}, {})

    monkeypatch.setattr(pipeline, "evaluate_model", fake)
    return seen


def test_a_bare_model_gets_room_for_answers(policy_directory: Path, asked_for: Any) -> None:
    stored(["1"])
    asked = EvalOptions(data="my answers.jsonl", samples=6, limit=3, max_tokens=77)
    run(str(policy_directory), ["seed=5"], None, "refuse", asked)
    (composed, measured), config = asked_for[0], asked_for[0][0].experiment
    assert (config.env.name, config.seed, config.name) == ("prompts", 5, f"eval-{policy_directory.name}-my-answers")
    assert (config.data.validation_files, config.data.validation_rows) == (("my answers.jsonl",), 3)
    assert config.policy.path == str(policy_directory)
    assert (config.rollout.max_response_tokens, config.rollout.max_prompt_tokens) == (77, 8192)
    sampling = config.validation.sampling
    assert (sampling.samples, sampling.do_sample, sampling.temperature) == (6, True, 1.0)
    assert measured.samples == (1, 2, 4, 6)
    assert composed.provenance["policy.path"] == "command line"


def test_one_sample_is_greedy(policy_directory: Path, asked_for: Any) -> None:
    run(
        str(policy_directory),
        ["size=3", "rollout.max_turns=2"],
        None,
        "refuse",
        EvalOptions(env="frozenlake", episodes=9),
    )
    config = asked_for[0][0].experiment
    assert (config.env.name, config.env.size, config.validation.episodes) == ("frozenlake", 3, 9)
    assert config.rollout.max_turns == 2
    assert not config.validation.sampling.do_sample


def stored_run(policy_directory: Path, config: str) -> None:
    import shutil

    from saved_checkpoints import save_checkpoint

    def write(there: Path) -> None:
        shutil.copytree(policy_directory, there / "hf")

    save_checkpoint(Path("runs") / "r" / "checkpoints", 7, {}, write, keep=1)
    Path("runs/r/config.yaml").write_text(config)


def test_a_run_is_asked_as_it_was_trained(policy_directory: Path, asked_for: Any) -> None:
    played = "name: r\nrollout: {think: false, max_turns: 3}\nenv: {name: frozenlake, size: 5}\n"
    stored_run(policy_directory, played)
    run("runs/r", [], None, "refuse", EvalOptions(env="frozenlake"))
    config = asked_for[0][0].experiment
    assert (config.rollout.think, config.rollout.max_turns, config.env.size) == (False, 3, 5)
    assert config.policy.path.endswith("global_step_7/hf")
    assert config.name == "eval-r-frozenlake"
    run("runs/r", ["height=5"], None, "refuse", EvalOptions(env="sokoban"))
    assert asked_for[1][0].experiment.env.height == 5
    assert asked_for[1][0].experiment.name == "eval-r-sokoban"


@pytest.mark.parametrize("place", ["runs/r", "runs/r/checkpoints/global_step_7"])
def test_a_run_knows_what_it_is_to_be_asked(policy_directory: Path, asked_for: Any, place: str) -> None:
    """Neither --data nor --env: its own env, on as many starts as it validated on."""
    stored_run(policy_directory, "env: {name: frozenlake, size: 5}\nvalidation: {episodes: 33}\n")
    run(place, ["seed=4"], None, "refuse", EvalOptions())
    run(place, [], None, "refuse", EvalOptions(episodes=9))
    first, second = (composed.experiment for composed, _ in asked_for)
    assert (first.env.name, first.env.size, first.validation.episodes, first.seed) == ("frozenlake", 5, 33, 4)
    assert first.policy.path.endswith("global_step_7/hf")
    assert second.validation.episodes == 9
    with pytest.raises(ConfigError, match="--limit has no effect here"):
        run(place, [], None, "refuse", EvalOptions(limit=3))


def test_a_run_on_questions_is_asked_those_that_it_held_out(policy_directory: Path, asked_for: Any) -> None:
    stored(["1"])
    files = "train_files: [other.jsonl], validation_files: [my answers.jsonl]"
    stored_run(policy_directory, f"env: {{name: prompts}}\ndata: {{{files}}}\n")
    run("runs/r", [], None, "refuse", EvalOptions(limit=2, samples=4))
    config = asked_for[0][0].experiment
    assert (config.data.validation_files, config.data.validation_rows) == (("my answers.jsonl",), 2)
    assert config.validation.sampling.samples == 4


@pytest.mark.parametrize("config", ["sft: {}\ndata: {train_files: [chats.jsonl]}\n", None])
def test_a_run_that_names_no_questions_has_to_be_told(policy_directory: Path, config: str | None) -> None:
    stored_run(policy_directory, config or "")
    if config is None:
        Path("runs/r/config.yaml").unlink()
    with pytest.raises(ConfigError, match="neither --data nor --env is given"):
        run("runs/r", [], None, "refuse", EvalOptions())


def test_a_configuration_that_only_validates_asks_its_own_model(policy_directory: Path, asked_for: Any) -> None:
    overrides = ["validation.only=true", f"policy.path={policy_directory}", "policy.preset=null", "name=mine"]
    drawn = "validation.sampling={do_sample: true, temperature: 0.7, samples: 3}"
    run(None, [*overrides, drawn], None, "refuse", EvalOptions(confidence=0.9))
    (composed, measured), config = asked_for[0], asked_for[0][0].experiment
    assert (config.policy.path, config.name, config.output_dir) == (str(policy_directory), "mine", "runs")
    assert (config.validation.sampling.samples, config.validation.sampling.temperature) == (3, 0.7)
    assert measured == Statistics((1, 2, 3), confidence=0.9)
    assert composed.provenance["policy.path"] == "command line"
    with pytest.raises(ConfigError, match="--samples is only valid with a model"):
        run(None, overrides, None, "refuse", EvalOptions(samples=4))


@pytest.mark.parametrize(
    ("what", "asked", "message"),
    [
        (None, EvalOptions(data="q.jsonl"), "the model is missing"),
        ("m", EvalOptions(data="q.jsonl", env="frozenlake"), "mutually exclusive"),
        ("m", EvalOptions(data="q.jsonl", samples=4, temperature=0.0), "identical"),
        (".", EvalOptions(), "is a model directory"),
        ("m", EvalOptions(data="q.jsonl", episodes=4), "--episodes has no effect here"),
        ("m", EvalOptions(env="frozenlake", limit=4), "--limit has no effect here"),
        (None, EvalOptions(max_tokens=4), "--max-tokens is only valid with a model"),
        (None, EvalOptions(name="a/b"), "invalid run name"),
        (None, EvalOptions(), "no stored responses"),
    ],
)
def test_what_contradicts_itself_is_refused(what: str | None, asked: EvalOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(what, [], None, "refuse", asked)


def test_unknown_models_and_envs_are_refused(policy_directory: Path) -> None:
    with pytest.raises(MachineError, match="no model at nowhere"):
        run("nowhere", [], None, "refuse", EvalOptions(data="q.jsonl"))
    with pytest.raises(ConfigError, match="frozenlak"):
        run(str(policy_directory), [], None, "refuse", EvalOptions(env="frozenlak"))


def test_options_of_the_env_are_known_by_their_short_names() -> None:
    overrides = list(evaluate._env_overrides(["size=3", "seed=1", "sized=2"], EvalOptions(env="frozenlake")))
    assert overrides == ["env.size=3", "seed=1", "sized=2"]
