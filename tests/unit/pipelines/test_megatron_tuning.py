"""If these fail, `quintet sft` on Megatron learns, measures or stores something else than on one plain process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config.compose import load_experiment
from quintet.errors import InterruptedRun
from quintet.pipelines.rl import train
from quintet.pipelines.sft.stage import SftStage
from quintet.runtime.learners.local_learners import LocalLearners

Run = Callable[..., Path]
COMMON = (
    "sft.batch=8",
    "sft.epochs=2",
    "sft.optimizer={learning_rate: 0.01, weight_decay: 0.0}",
    "tracking.loggers=[jsonl]",
    "training.threads=1",
)
MEGATRON = "actor.backend=megatron"


pytestmark = pytest.mark.usefixtures("megatron_alone")


def losses(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name.startswith(("train/", "val/"))} for line in lines]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def same_losses(one: Path, other: Path) -> None:
    for ours, theirs in zip(losses(one), losses(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("train/loss", "val/loss", "train/lr", "train/likely_tokens"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


@pytest.mark.parametrize("word", ["sft.sequences_per_pass=3", "sft.gradient_checkpointing=true"])
def test_losses_and_final_weights_are_the_plain_learners(tune: Run, word: str) -> None:
    ours, theirs = tune(MEGATRON, word), tune(word, name="plain")
    same_losses(ours, theirs)
    actual, expected = weights(ours / "model"), weights(theirs / "model")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-4, rtol=1e-3)
    assert equal(ours / "model", ours / "checkpoints/global_step_4/hf")
    assert AutoModelForCausalLM.from_pretrained(ours / "model")
    assert AutoTokenizer.from_pretrained(ours / "model")


def test_the_temperature_of_play_doesnt_divide_what_is_learnt(tune: Run) -> None:
    same_losses(tune(MEGATRON, "rollout.temperature=0.5"), tune(name="plain"))


@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_a_run_that_was_stopped_goes_on_where_it_was_on_either_backend(
    tune: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    overrides = ("sft.final_weights=best", "sft.epochs=3")
    whole = tune(MEGATRON, *overrides, name="whole")
    real = SftStage.update

    def until_then(stage: SftStage, batch: Any, step: int, steps: int) -> dict[str, float]:
        if step == 4:
            raise InterruptedRun("pulled the plug")
        return real(stage, batch, step, steps)

    monkeypatch.setattr(SftStage, "update", until_then)
    with pytest.raises(InterruptedRun):
        tune(MEGATRON, *overrides)
    monkeypatch.undo()
    run = tune(f"actor.backend={backend}", *overrides)
    assert "resuming from" in (run / "said").read_text()
    same_losses(run, whole)
    if backend == "megatron":
        assert equal(run / "model", whole / "model")
        assert losses(run) == losses(whole)


def test_the_scale_of_float16_losses_goes_on_with_the_run(tune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (MEGATRON, "policy.dtype=float16", "actor.megatron={fp16: true, loss_scale_window: 1}", "sft.epochs=1")
    run = tune(*overrides)
    (state,) = [json.loads(path.read_text()) for path in run.glob("checkpoints/global_step_2/state.json")]
    assert state["actor_scale"]["scale"] > 2.0**16  # it has grown
    taken: list[Any] = []
    monkeypatch.setattr(LocalLearners, "load_actor", lambda learners, directory, contents, extra: taken.append(extra))
    tune(*overrides, "sft.epochs=2")
    assert taken == [{"actor_scale": state["actor_scale"]}]


def test_weights_of_megatrons_own_are_the_stages_alone(tmp_path: Path, policy_directory: Path) -> None:
    """Reinforcement learning afterwards begins with what the stage left, not with what it began with."""
    from quintet.training.megatron.shard_files import ConversionJob, convert

    convert(ConversionJob(policy_directory, tmp_path / "converted"))
    converted = (MEGATRON, f"actor.megatron.checkpoint={tmp_path / 'converted'}", "sft.then_reinforce=true")
    config = load_experiment(None, [*converted, "policy.preset=null", f"policy.path={policy_directory}"]).experiment
    model = AutoModelForCausalLM.from_pretrained(policy_directory)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    model.save_pretrained(tmp_path / "tuned")
    for sft, expected in ((True, 1.0), (False, 3.0)):
        actual = dict(LocalLearners.build(config, tmp_path / "tuned", sft=sft).actor.weights())["model.norm.weight"]
        assert actual.unique().tolist() == [expected]


def test_reinforcement_follows_on_the_same_backend(tmp_path: Path) -> None:
    overrides = (
        *(
            "sft={episodes: {episodes: 12, validation_episodes: 4}, batch: 8, max_tokens: 400, then_reinforce: true}",
            MEGATRON,
        ),
        f"sft.episodes.directory={tmp_path}/episodes",
        *("training.steps=1", "training.groups_per_step=2", "training.samples_per_group=2", "training.mini_batches=1"),
        *("training.threads=1", "warm_start=null", "rollout.max_turns=2", "policy.preset=grid-1m"),
        *("validation.episodes=2", "tracking.loggers=[jsonl]", f"output_dir={tmp_path}", "name=run"),
    )
    train(load_experiment(None, overrides), Console(file=io.StringIO()))
    run = tmp_path / "run"
    measured = [line["val/loss"] for line in losses(run / "sft") if "val/loss" in line]
    assert measured[-1] < measured[0]
    assert equal(run / "sft/model", run / "checkpoints/global_step_0/hf")
    assert (run / "checkpoints/global_step_1/hf/model.safetensors").is_file()
