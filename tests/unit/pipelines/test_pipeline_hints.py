"""If these fail, a hint of a run, an evaluation or an export leads nowhere."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hint_cases import HintCase, case, name_of, sites_without_case
from rich.console import Console
from robot_datasets import episode as robot_episode
from safetensors.torch import load_file, save_file
from saved_checkpoints import save_checkpoint
from test_generate import Scripted, responded

from quintet.config.compose import load_experiment
from quintet.config.composed import with_value
from quintet.config.native.data import EvaluationConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.data.robot_demonstrations.expert import RecordedDataset
from quintet.embodied_records import RobotEpisode
from quintet.pipelines import drift_check, evaluate, generate, setup
from quintet.pipelines.embodied.behavior_cloning import CloningBatches
from quintet.pipelines.embodied.rollout import collect_rollout
from quintet.pipelines.evaluate import StoredResponses
from quintet.pipelines.experience import collate_rollout
from quintet.pipelines.export import export
from quintet.pipelines.model_lookup import find_configured_model, find_model
from quintet.pipelines.response_store import ResponseStore
from quintet.pipelines.resume import find_resume_checkpoint
from quintet.pipelines.rollout_step import Rollout
from quintet.pipelines.training_record import RECORD_FILE
from quintet.pipelines.warm_start import _expert_turn, response_batch, solve_episodes
from quintet.policies.lora import add_lora, save_adapters
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.records import Failure, FinishReason, Outcome, Trajectory
from quintet.tracking.progress import NullProgress
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import Checkpoint


def cloned(action_dim: int) -> None:
    """Clone actions of three dimensions by a policy with another number of them."""
    policy = SimpleNamespace(action_chunk=2, robot_action_dim=action_dim)
    CloningBatches([RecordedDataset("arm", [robot_episode(4, dim=3)])], policy, 4, 0)


def experiment(overrides: Sequence[str]) -> Experiment:
    return load_experiment(None, [*overrides]).experiment


def trajectories(problem: str | None) -> list[Trajectory]:
    """Episodes of a step: complete, failed, or too long to begin."""
    failure = Failure("reset", "ValueError", "no such level") if problem == "failed" else None
    outcome = Outcome.FAILED if failure else Outcome.SUCCESS
    turns = () if problem else (_expert_turn((1,), (2,), "Up"),)
    return [Trajectory("lake", 0, 0, 0, turns, outcome, failure)]


def collected(problem: str | None) -> None:
    collate_rollout(Rollout(trajectories(problem), {}), experiment([]))


def played(outcome: str) -> None:
    """Episodes of robots in a step."""
    failure = Failure("reset", "ValueError", "no such model")
    episode = RobotEpisode(0, 0, "reach", 0.0, 0, False, False, Outcome(outcome), failure)
    workers = SimpleNamespace(collect=lambda _: [episode])
    steps = SimpleNamespace(robots=1, passes=1, chunks=1, samples=1)
    collect_rollout(SimpleNamespace(config=experiment([]), steps=steps, workers=workers), 1)  # type: ignore[arg-type]


def checked(problem: str | None) -> None:
    """The episodes of `quintet check drift`."""
    starts = SimpleNamespace(warm_start_check_starts=range)
    envs = SimpleNamespace(collect_rollouts=lambda *_: trajectories(problem))
    components: Any = SimpleNamespace(config=experiment([]), start_states=starts, envs=envs, group_channel=None)
    drift_check._run_episodes(components, 1)


def texts(overrides: Sequence[str]) -> None:
    """Texts for the vocabulary of a preset that answers prompts."""
    drift_check._texts(
        experiment(["env.name=prompts", "warm_start=null"]).model_copy(update={"data": experiment(overrides).data})
    )


def stored(overrides: Sequence[str]) -> None:
    evaluate.evaluate_stored(load_experiment(None, [*overrides]), Console(file=io.StringIO()))


def at_an_endpoint(overrides: Sequence[str]) -> None:
    evaluate.check_for_endpoint(with_value(experiment(overrides), "rollout.max_prompt_tokens", evaluate.UNLIMITED))


def held_out(overrides: Sequence[str]) -> None:
    """An evaluation on held-out prompts."""
    tokenizer = load_tokenizer("model")
    policy: Any = SimpleNamespace(
        tokenizer=tokenizer, directory=Path("model"), open=lambda _: None, stop_token_ids=(), images=None
    )
    sampling: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "SingleTurnLoop", lambda *_, **__: None)
        evaluate._prompt_evaluator(experiment(overrides), policy, sampling)


def responses(settings: Mapping[str, str]) -> None:
    """The stored responses of a row with an answer, and a number."""
    Path("answers.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ?", "answer": ["2"], "number": 2}) + "\n")
    list(StoredResponses(EvaluationConfig(path="answers.jsonl", **settings), needs_prompts=False).read(0))


def to_generate(words: Sequence[str]) -> None:
    """A run that only generates."""
    generate._sections(experiment(["env.name=prompts", "generation.output_path=x.jsonl", *words]))


def generated(reason: FinishReason) -> None:
    responded(Scripted({0: reason}))


def continued(settings: Mapping[str, object]) -> None:
    """Continue a run that only generates; `removed` says that its responses were removed."""
    Path("store.jsonl").write_text('{"seed": 1, "files": {"rows.jsonl": [9, 9]}}\n')
    if settings.get("removed"):
        Path("store.jsonl").unlink()
    ResponseStore(Path("store.jsonl"), {"seed": 1, "files": {"rows.jsonl": [9, 9]}, **settings}).close()


def exported(source_and_target: tuple[str, str]) -> None:
    source, target = source_and_target
    export(source, Path(target))


def saved(is_safe: bool) -> None:
    """Export a model that was saved in another format, or in safetensors."""
    shutil.rmtree("other", ignore_errors=True)
    shutil.copytree("model", "other", ignore=None if is_safe else shutil.ignore_patterns("*.safetensors"))
    export("other", Path("from_other"))


OTHER_VERSION = json.dumps(
    {"experiment": {"no_such_key": 1}, "kind": "reinforcement learning", "base_model": "m", "data": [], "results": {}}
    | dict.fromkeys(("step", "steps", "seconds"), 0)
)


def recorded(record: str | None) -> None:
    """Export a model with a record of its training."""
    shutil.copytree("model", "recorded", dirs_exist_ok=True)
    file = Path("recorded") / RECORD_FILE
    file.unlink(missing_ok=True)
    if record is not None:
        file.write_text(record)
    export("recorded", Path("from_recorded"))


def converted(dtype: str) -> None:
    """Export a model with a weight that float16 cannot hold."""
    weights = load_file("model/model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1e6
    shutil.copytree("model", "large", dirs_exist_ok=True)
    save_file(weights, "large/model.safetensors", metadata={"format": "pt"})
    export("large", Path("from_large"), dtype)


def merged(base: str) -> None:
    """Export adapters whose base model is there."""
    settings = json.loads(Path("adapters/adapter_config.json").read_text())
    Path("adapters/adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    export("adapters", Path("merged"))


def found(location: str) -> None:
    find_model(location)


def configured(overrides: Sequence[str]) -> None:
    find_configured_model(experiment(overrides))


def resumed(overrides: Sequence[str]) -> None:
    config = experiment(overrides)
    find_resume_checkpoint(config, RunDirectory.from_config(config), NullProgress(), None)


def restored(contents: Sequence[str]) -> None:
    checkpoint = Checkpoint(Path("runs/good/checkpoints/global_step_1"), 1, {"contents": ["model", "optimizer"]})
    setup._policy_to_resume(experiment([f"checkpoint.load_contents=[{', '.join(contents)}]"]), checkpoint)


def warm_started(overrides: Sequence[str]) -> None:
    """Responses to start from, if there is a warm start."""
    config = experiment(["env.name=prompts", "data.train_files=[replies.jsonl]", *overrides])
    if config.warm_start:
        prompts = setup.PromptDataset.from_config(config, load_tokenizer("model"))
        response_batch(prompts, 1, load_tokenizer("model"), config)


def solved(overrides: Sequence[str]) -> None:
    solve_episodes(experiment(overrides), 1)


LIMIT = "raise rollout.max_prompt_tokens above "
PROMPTS = ["env.name=prompts", "data.train_files=[replies.jsonl]"]
STORED = ["evaluation.path=stored.jsonl", "output_dir=evaluations"]
ENDPOINT_MODEL = ["env.name=prompts", "data.train_files=[replies.jsonl]", "reward.model={}"]
BOXES = ["envs={boxes: {env: {name: sokoban, min_solution_pushes: 2}}, lake: {}}", "rollout.max_actions_per_turn=1"]
EASY = ["envs={boxes: {env: {name: sokoban}}, lake: {}}", "rollout.max_actions_per_turn=1"]
CASES = [
    # episodes
    case(collected, "failed", "fix the environment, or its options", None),
    case(collected, "too long", LIMIT, None),
    case(played, "failed", "fix the simulator, or its options", "success"),
    case(checked, "failed", "fix the environment", None),
    case(checked, "too long", LIMIT, None),
    case(texts, [], "data.train_files=[FILE]", PROMPTS),
    # evaluation
    case(stored, [], "set evaluation.path to their file, or evaluate a model: quintet eval runs/NAME, ", STORED),
    case(at_an_endpoint, ["env={name: simulator, simulator: arm}"], "leave out --endpoint", []),
    case(at_an_endpoint, ["rollout.end_token=3"], "remove rollout.end_token", []),
    case(at_an_endpoint, ["reward.model={}"], "reward.model.path=DIRECTORY", ["reward.model.path=model"]),
    case(
        held_out,
        [],
        "data.validation_files=[FILE]",
        [*PROMPTS, "data.validation_files=[replies.jsonl]", "reward.kind=exact", "data.truth_key=reply"],
    ),
    case(
        responses,
        {"response_key": "anser"},
        "did you mean answer? its columns are prompt, ",
        {"response_key": "answer"},
    ),
    case(responses, {"response_key": "number"}, "use a list of texts, or a text", {"response_key": "answer"}),
    # models
    case(exported, ("model", "runs"), "choose another directory, or remove it", ("model", "new")),
    case(exported, ("model", "replies.jsonl/new"), "choose another directory", ("model", "new")),
    case(exported, ("truncated", "new2"), "use another copy", ("model", "new2")),
    case(saved, False, "save it again with save_pretrained(safe_serialization=True)", True),
    case(recorded, "[]", "remove the file, or use another copy", None),
    case(recorded, OTHER_VERSION, f"if it is from another version of Quintet, remove {RECORD_FILE}", None),
    case(converted, "float16", "export with --dtype bfloat16", "bfloat16"),
    case(merged, "gone", "put it there, or set base_model_name_or_path in adapters/adapter_config.json", "model"),
    case(
        found,
        "nowhere",
        "use a directory with config.json and weights, a global_step_N directory, or a run directory",
        "model",
        "runs/good",
        "runs/good/checkpoints/global_step_1",
    ),
    case(found, "adapters", "merge them into their base model: quintet export adapters TARGET", "model"),
    case(found, "runs/damaged", "use another run, or a directory with config.json and weights", "runs/good", "model"),
    case(
        configured,
        ["output_dir=none"],
        "policy.path=DIRECTORY policy.preset=null, or run `quintet train` first",
        ["policy.path=model", "policy.preset=null"],
        ["output_dir=runs", "name=good"],
    ),
    case(
        configured,
        ["output_dir=runs", "name=good", "resume=never"],
        "policy.path=DIRECTORY policy.preset=null, or run `quintet train` first, and then with resume=auto",
        ["policy.path=model", "policy.preset=null"],
        ["output_dir=runs", "name=good", "resume=auto"],
    ),
    # checkpoints
    case(
        resumed,
        ["output_dir=runs", "name=damaged"],
        "restore one from a copy, or start again with resume=never",
        ["output_dir=runs", "name=good"],
        ["output_dir=runs", "name=damaged", "resume=never"],
    ),
    case(
        resumed,
        ["output_dir=runs", "name=good", "seed=7"],
        "restore the value, set another `name`, or start again with resume=never",
        ["output_dir=runs", "name=good"],
        ["output_dir=runs", "name=new", "seed=7"],
        ["output_dir=runs", "name=good", "seed=7", "resume=never"],
    ),
    case(restored, ["optimizer"], "add model or hf_model to it", ["optimizer", "model"], ["optimizer", "hf_model"]),
    # warm start
    case(
        warm_started,
        [],
        "set data.response_key to the column with responses, or warm_start=null",
        ["data.response_key=reply"],
        ["warm_start=null"],
    ),
    case(
        solved,
        [*BOXES, "rollout.max_turns=1"],
        "increase rollout.max_turns or make the environment easier",
        [*BOXES, "rollout.max_turns=30"],
        [*EASY, "rollout.max_turns=9"],
    ),
    # generation
    case(to_generate, [], "data.train_files=[FILE.parquet]"),
    case(generated, FinishReason.FAILED, "fix the engine, and rerun the same command", FinishReason.STOP),
    case(continued, {"seed": 2}, "restore the value, or remove store.jsonl", {}, {"seed": 2, "removed": True}),
    case(continued, {"files": {}}, "remove store.jsonl to start again", {"files": {}, "removed": True}),
    case(cloned, 2, "policy.vla.action_dim=3", 3),
]
EXEMPT = {
    "pipelines/model_download.py": "test_model_download.py follows them",
    "pipelines/first_prompt.py": "test_plan_prompt.py follows them",
    "pipelines/sft/": "test_sft_hints.py follows them",
    "pipelines/training_record.py checkpoint_record": "test_model_card.py raises it",
    "pipelines/export.py _merge": "another machine is needed",
}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    """Models, runs and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    shutil.copytree(policy_directory, tmp_path / "truncated")
    weights = tmp_path / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    adapted = load_model(policy_directory)
    add_lora(adapted, LoraConfig(rank=2))
    save_adapters(adapted, tmp_path / "adapters", "model")
    load_tokenizer(policy_directory).save_pretrained(tmp_path / "adapters")
    for name in ("good", "damaged"):
        config = load_experiment(None, ["output_dir=runs", f"name={name}"]).experiment.model_dump(mode="json")
        path = save_checkpoint(
            tmp_path / f"runs/{name}/checkpoints",
            1,
            {"experiment": config},
            lambda directory: shutil.copytree(policy_directory, directory / "hf") and None,
            keep=1,
        )
    (path / "hf/config.json").unlink()
    (tmp_path / "replies.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ?", "reply": "2"}) + "\n")
    row = {"prompt": "1 + 1 = ?", "responses": ["#### 2"], "data_source": "openai/gsm8k"}
    (tmp_path / "stored.jsonl").write_text(json.dumps({**row, "reward_model": {"ground_truth": "2"}}) + "\n")


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_of_a_pipeline_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_of_a_pipeline_is_followed() -> None:
    assert not sites_without_case("pipelines", CASES, EXEMPT)
