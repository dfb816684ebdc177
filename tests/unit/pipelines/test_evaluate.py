"""If these fail, an evaluation says something about answers that it didn't judge, or loses some that it did."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from saved_checkpoints import save_checkpoint

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError
from quintet.pipelines import evaluate
from quintet.pipelines.evaluate import evaluate_model, evaluate_stored
from quintet.pipelines.evaluation_results import Evaluation, Statistics
from quintet.pipelines.model_lookup import find_configured_model, find_model
from quintet.policies.lora import add_lora, merge_adapters, save_adapters
from quintet.policies.model_loading import load_model
from quintet.records import Failure, Response, RewardResult

ROWS = [
    {"data_source": "a/b", "prompt": "2 + 2", "responses": ["4", "5", "4", "4"], "reward_model": {"ground_truth": "4"}},
    {"data_source": "a/b", "prompt": "2 + 3", "responses": ["4", "5", "6", "7"], "reward_model": {"ground_truth": "5"}},
    {"data_source": "c", "prompt": "1 + 1", "responses": "crash", "reward_model": {"ground_truth": "2"}},
]


class Judge:
    """Right is what equals the truth; verdicts come late and the wrong way round."""

    opened: ClassVar[list[Judge]] = []

    def __init__(self, config: Experiment, policy: Path) -> None:
        self.config, self.policy, self.closed = config, policy, False
        self.most = 0
        self._waiting: list[Response] = []
        Judge.opened.append(self)

    def submit(self, answer: Response) -> None:
        self._waiting.append(answer)
        self.most = max(self.most, len(self._waiting))

    def ready(self) -> Iterator[RewardResult]:
        if len(self._waiting) > 2:
            yield self._judge(self._waiting.pop())

    def drain(self) -> Iterator[RewardResult]:
        while self._waiting:
            yield self._judge(self._waiting.pop())

    def close(self) -> None:
        self.closed = True

    def _judge(self, answer: Response) -> RewardResult:
        text = answer.text.strip()
        if text == "crash":
            return RewardResult(answer.id, 0.0, failure=Failure("reward", "Crashed", "signal 11"))
        right = float(text == str(answer.prompt_row.ground_truth))
        return RewardResult(answer.id, right, {"acc": right, "chars": float("inf")}, text)


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Judge.opened.clear()
    monkeypatch.setattr(evaluate, "build_reward_scorer", Judge)
    monkeypatch.chdir(tmp_path)


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stored(rows: list[Any], *overrides: str) -> Evaluation:
    written(Path("answers.jsonl"), rows)
    composed = load_experiment(None, ["evaluation.path=answers.jsonl", "name=e", *overrides])
    return evaluate_stored(composed, Console(file=io.StringIO()))


def lines(actual: Evaluation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (actual.directory / "answers.jsonl").read_text().splitlines()]


def test_stored_responses_are_scored_and_counted() -> None:
    actual = stored(ROWS)
    assert (actual.answers, actual.failed) == (9, 1)
    assert actual.failures == {"a/b": {}, "c": {"Crashed": 1}}
    both = actual.sources["a/b"]
    assert (both.prompts, both.score.mean) == (2, 0.5)
    assert {k: one.mean for k, one in both.passed.items()} == {1: 0.5, 2: 0.75, 4: 1.0}
    assert {k: one.mean for k, one in both.majority.items()} == pytest.approx({1: 0.5, 2: 0.5, 4: 0.625})
    assert actual.metrics["test_score/a/b"] == 0.5
    assert actual.metrics["test_score/c"] == 0.0
    assert actual.metrics["val-core/a/b/acc/mean@4"] == 0.5
    assert Judge.opened[0].closed


def test_results_lie_in_the_runs_directory_in_the_order_of_the_file() -> None:
    actual = stored(ROWS)
    assert actual.directory == Path("runs/e")
    records = lines(actual)
    assert [line["response"] for line in records] == ["4", "5", "4", "4", "4", "5", "6", "7", "crash"]
    assert records[0]["reward_components"] == {"acc": 1.0, "chars": None}, "JSON knows no infinity"
    assert records[8]["failure"] == {"where": "reward", "error_type": "Crashed", "message": "signal 11"}
    assert json.loads((actual.directory / "results.json").read_text()) == json.loads(json.dumps(actual.as_json()))
    assert sorted(path.name for path in actual.directory.iterdir()) == [
        ".lock",
        "answers.jsonl",
        "evaluation.yaml",
        "keys.json",
        "results.json",
    ]


def test_answers_have_question_and_ground_truth_and_earlier_results_are_not_replaced_silently() -> None:
    row = {"prompt": "What is 2 + 2?", "responses": ["4"], "reward_model": {"ground_truth": "4"}}
    (line,) = lines(stored([row]))
    assert (line["question"], line["ground_truth"], line["response"]) == ("user: What is 2 + 2?", "4", "4")
    out = io.StringIO()
    composed = load_experiment(None, ["evaluation.path=answers.jsonl", "name=e"])
    evaluate_stored(composed, Console(file=out, width=200))
    assert out.getvalue().startswith("runs/e/results.json of an earlier evaluation is replaced; name=NAME keeps it\n")


def test_the_number_of_pending_responses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MAX_CONCURRENT", 5)
    monkeypatch.setattr(Judge, "ready", lambda _self: [])
    actual = stored(ROWS[:2] * 10)
    assert actual.answers == 80
    assert Judge.opened[0].most <= 8


def test_stored_responses_with_other_columns_and_a_custom_function() -> None:
    rows = [{"src": "s", "question": "?", "out": ["9"], "right": "9"}]
    keys = {"source_key": "src", "prompt_key": "question", "response_key": "out", "truth_key": "right"}
    overrides = [f"evaluation.{key}={column}" for key, column in keys.items()]
    actual = stored(rows, *overrides, "evaluation.function=mine.py:score", "evaluation.samples=[1]")
    assert actual.sources["s"].score.mean == 1.0
    assert lines(actual)[0]["question"] == "user: ?"
    judging = Judge.opened[0].config.reward
    assert judging is not None
    assert judging.function == "mine.py:score"


def test_statistics_are_those_that_the_configuration_names() -> None:
    """Three and one of four responses are right: pass@3 is 1 and 1 − C(3, 3) / C(4, 3) = 3/4."""
    actual = stored(ROWS, "evaluation.samples=[3]", "evaluation.confidence=0.5").sources["a/b"]
    assert {k: estimate.mean for k, estimate in actual.passed.items()} == {3: 0.875}
    usual = stored(ROWS).sources["a/b"].score
    assert None not in (actual.score.low, usual.low)
    assert actual.score.high - actual.score.low < usual.high - usual.low
    lenient = stored(ROWS, "evaluation.pass_threshold=0.0")
    assert lenient.sources["a/b"].passed[1].mean == lenient.sources["c"].passed[1].mean == 1.0


def test_a_custom_function_scores_stored_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.runtime.reward_scorer import build_reward_scorer

    monkeypatch.setattr(evaluate, "build_reward_scorer", build_reward_scorer)
    Path("mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'crash':\n        raise ValueError('no')\n"
        "    return {'score': float(solution_str == ground_truth), 'length': len(solution_str)}\n"
    )
    actual = stored(ROWS, "evaluation.function=mine.py:score")
    assert actual.sources["a/b"].score.mean == 0.5
    assert actual.sources["a/b"].passed[2].mean == 0.75
    assert actual.metrics["val-aux/a/b/length/mean@4"] == 1.0
    assert actual.failures["c"] == {"ValueError": 1}


def test_a_prompt_is_needed_only_where_a_model_judges() -> None:
    row = [{"data_source": "s", "responses": ["9"], "reward_model": {"ground_truth": "9"}}]
    assert stored(row).sources["s"].score.mean == 1.0
    with pytest.raises(ConfigError, match="prompt"):
        stored(row, "reward.model.path=nowhere")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "respones": ["1"]}, "did you mean respones"),
        ({"prompt": "?", "responses": []}, "use a list of texts"),
        ({"prompt": "?", "responses": [1]}, "use a list of texts"),
    ],
)
def test_rows_without_responses_are_an_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stored([row])
    assert not list(Path("runs/e").glob("*answers*")), "nothing half made stays"
    assert Judge.opened[0].closed


def test_evaluation_without_responses_or_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no stored responses"):
        evaluate_stored(load_experiment(None, []), Console(file=io.StringIO()))


def playing(policy: Path, *overrides: str, samples: int = 2) -> Evaluation:
    defaults = [
        "name=p",
        "policy.preset=null",
        f"policy.path={policy}",
        "warm_start=null",
        f"validation.sampling.samples={samples}",
        "validation.sampling.do_sample=true",
        "validation.sampling.temperature=1.0",
        "rollout.max_response_tokens=4",
        "rollout.max_prompt_tokens=200",
    ]
    return evaluate_model(
        load_experiment(None, [*defaults, *overrides]), Statistics((1, 2)), Console(file=io.StringIO())
    )


def test_a_model_is_evaluated_on_held_out_prompts(policy_directory: Path) -> None:
    written(Path("questions.jsonl"), ROWS)
    overrides = [
        "env.name=prompts",
        "data.train_files=[questions.jsonl]",
        "data.validation_rows=2",
        "reward.kind=exact",
    ]
    actual = playing(policy_directory, *overrides)
    assert actual.sources["a/b"].prompts == 2
    assert actual.answers == 4
    records = lines(actual)
    assert [(line["prompt"], line["sample"]) for line in records] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert all(0 < line["tokens"] <= 4 for line in records)
    assert Judge.opened[0].closed
    again = playing(policy_directory, *overrides)
    assert lines(again) == records, "the same seed draws the same answers"


def test_a_row_whose_ground_truth_fits_no_verifier_is_named_before_the_evaluation(policy_directory: Path) -> None:
    written(Path("questions.jsonl"), ROWS)
    with pytest.raises(ConfigError, match=r"questions.jsonl, row 0 has the ground truth '4'.*'choice'"):
        playing(policy_directory, "env.name=prompts", "data.train_files=[questions.jsonl]", "reward.kind=choice")
    assert not Judge.opened


def test_a_model_is_evaluated_on_held_out_episodes(policy_directory: Path) -> None:
    actual = playing(policy_directory, "env.size=3", "validation.episodes=3", "rollout.max_turns=2")
    lake = actual.sources["frozenlake"]
    assert (lake.prompts, lake.answers) == (3, 6)
    assert lake.accuracy is not None
    assert all(seed % 3 == 1 for seed in {int(line["prompt"]) for line in lines(actual)}), "validation's seeds"
    episodes = [json.loads(line) for line in (actual.directory / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 6
    assert actual.metrics["test_score/frozenlake"] == lake.score.mean


def test_a_model_is_evaluated_with_its_adapters(policy_directory: Path, tmp_path: Path) -> None:
    """As the same model does into which they were merged."""
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=2, alpha=8.0))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapters(model, tmp_path / "adapters", policy_directory)
    shutil.copytree(policy_directory, tmp_path / "merged")
    merge_adapters(model)
    model.save_pretrained(tmp_path / "merged")
    overrides = ["env.size=3", "validation.episodes=3", "rollout.max_turns=2"]
    plain, merged = (lines(playing(policy, *overrides)) for policy in (policy_directory, tmp_path / "merged"))
    adapted = lines(
        playing(policy_directory, *overrides, f"policy.lora={{rank: 2, alpha: 8, path: {tmp_path}/adapters}}")
    )
    assert adapted == merged != plain


def test_an_env_error_fails_only_its_own_episode(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.envs.frozenlake import FrozenLake

    reset: Callable[..., Any] = FrozenLake.reset

    def broken(self: FrozenLake, seed: int) -> Any:
        if seed == 1:
            raise RuntimeError("no ice")
        return reset(self, seed)

    monkeypatch.setattr(FrozenLake, "reset", broken)
    actual = playing(policy_directory, "validation.episodes=2", "rollout.max_turns=1", samples=1)
    assert actual.failures == {"frozenlake": {"RuntimeError": 1}}
    assert actual.answers == 2


def test_models_are_found_in_runs_checkpoints_and_directories(policy_directory: Path, tmp_path: Path) -> None:
    import shutil

    assert find_model(str(policy_directory)).policy == policy_directory
    run = tmp_path / "runs" / "r"
    for step in (1, 2):
        save_checkpoint(
            run / "checkpoints", step, {}, lambda there: shutil.copytree(policy_directory, there / "hf"), keep=5
        )
    (run / "config.yaml").write_text("name: r\n")
    last = run / "checkpoints" / "global_step_2"
    assert find_model(str(last.with_name("global_step_1"))).policy.parent.name == "global_step_1"
    actual = find_model(str(run))
    assert (actual.policy, actual.config) == (last / "hf", run / "config.yaml")
    assert find_model(str(last)).config == (run / "config.yaml").resolve()
    (last / "hf" / "config.json").write_text("{}")
    assert find_model(str(run)).policy.parent.name == "global_step_1", "the last whole one"
    with pytest.raises(MachineError, match="damaged"):
        find_model(str(last))


def test_the_configured_model_is_its_checkpoint_path_or_last_checkpoint(policy_directory: Path, tmp_path: Path) -> None:
    import shutil

    def of(*overrides: str) -> Path:
        return find_configured_model(load_experiment(None, [f"output_dir={tmp_path}", "name=r", *overrides]).experiment)

    path = ("policy.preset=null", f"policy.path={policy_directory}")
    with pytest.raises(ConfigError, match=r"policy\.path is null, and there is no checkpoint in .*r/checkpoints"):
        of()
    for step in (1, 2):
        save_checkpoint(
            tmp_path / "r/checkpoints", step, {}, lambda there: shutil.copytree(policy_directory, there / "hf"), keep=5
        )
    assert of().parent.name == "global_step_2"
    assert of(*path) == policy_directory
    assert of(*path, f"resume={tmp_path / 'r/checkpoints/global_step_1'}").parent.name == "global_step_1"
    with pytest.raises(ConfigError, match="no model to evaluate"):
        of("resume=never")


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(MachineError, match="there is none yet"):
        find_model(str(tmp_path / "run"))
    with pytest.raises(MachineError, match="no model at"):
        find_model("Qwen/Qwen2.5-0.5B")


def test_an_invalid_ground_truth_is_named_by_the_keys_of_the_users_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.cli.configuration import load_config
    from quintet.runtime.reward_scorer import build_reward_scorer

    monkeypatch.setattr(evaluate, "build_reward_scorer", build_reward_scorer)
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "four"}, "responses": ["#### 4"]}
    Path("answers.jsonl").write_text(json.dumps({"prompt": "?", **row}))
    Path("evaluation.yaml").write_text("data: {path: answers.jsonl, reward_model_key: reward_model}\n")
    for config, options, key in (
        (None, ["evaluation.path=answers.jsonl"], "evaluation.truth_key"),
        ("evaluation.yaml", [], "data.reward_model_key"),
    ):
        with pytest.raises(ConfigError) as error:
            evaluate.evaluate_stored(load_config(config, options, None, "refuse"), Console())
        assert "answers.jsonl, row 0 has the ground truth 'four'" in error.value.message
        assert f"{key}=COLUMN" in str(error.value.hint)


def test_the_configured_libraries_are_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registered_by_a_run.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="no stored responses"):
        evaluate_stored(load_experiment(None, ["external_libs=[registered_by_a_run]"]), Console(file=io.StringIO()))
    assert sys.modules.pop("registered_by_a_run")
