"""If these fail, `quintet check drift` passes an engine that computes something else than the learner, or alarms about
one that doesn't."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.cli import main as command
from quintet.pipelines import drift_check as pipeline
from quintet.policies.tiny_models import create_preset_policy
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.runtime.components import Components
from quintet.runtime.engines.weight_sources import WeightSync

SMALL = (
    "policy.preset=null",
    "rollout.max_response_tokens=12",
    "rollout.max_turns=3",
    "env.size=3",
    "training.threads=1",
)


def check(monkeypatch: pytest.MonkeyPatch, policy: Path, output: Path, *arguments: str) -> int:
    argv = ["check", "drift", f"policy.path={policy}", *SMALL, f"output_dir={output}", "--episodes", "3", *arguments]
    monkeypatch.setattr(sys, "argv", ["quintet", *argv])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


def printed_report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def perturbed(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """From now on the engine's weights are others than the learner's, by so much of each."""
    real = WeightSync.sync

    def sync(weight_sync: WeightSync, version: int) -> None:
        real(weight_sync, version)
        generator = torch.Generator().manual_seed(3)
        own = {name: value.clone() for name, value in weight_sync._weights.tensors()}
        other = [
            (name, value * (1 + noise * torch.randn(value.shape, generator=generator))) for name, value in own.items()
        ]
        weight_sync._engines.load_weights(version, TensorWeights(other))

    monkeypatch.setattr(WeightSync, "sync", sync)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_the_drift_check_passes_if_engine_and_learner_agree(
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy_directory: Path,
    tmp_path: Path,
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    assert check(monkeypatch, policy_directory, tmp_path, "--json", f"actor.backend={backend}") == 0
    actual = printed_report(capsys)
    assert (actual["passed"], actual["limit"], actual["tolerated_share"]) == (True, 1e-4, 0.0)
    assert [each["name"] for each in actual["measurements"]] == ["as loaded", "after 1 update"]
    for measurement in actual["measurements"]:
        assert measurement["drift"]["logprobs_diff_max"] < 1e-5
        assert measurement["drift"]["tokens"] > 30
    assert (
        actual["measurements"][0]["worst_token"]["learner_logprob"]
        != actual["measurements"][1]["worst_token"]["learner_logprob"]
    )
    comparison = actual["template_comparison"]
    assert comparison["reproduced_prompts"] == comparison["num_turns"] > 0
    assert not list(tmp_path.iterdir())


def test_the_drift_check_fails_if_the_engines_weights_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy_directory: Path, tmp_path: Path
) -> None:
    bf16 = ("policy.dtype=bfloat16", "--json")
    assert check(monkeypatch, policy_directory, tmp_path, *bf16) == 0
    honest = printed_report(capsys)
    assert 0 < honest["measurements"][0]["drift"]["logprobs_diff_max"] < 0.2
    perturbed(monkeypatch, 0.5)
    assert check(monkeypatch, policy_directory, tmp_path, *bf16) == 1
    actual = printed_report(capsys)
    assert not actual["passed"]
    assert actual["measurements"][0]["drift"]["share_above_limit"] > 0.01
    assert actual["measurements"][0]["drift"]["k3_kl"] > 100 * honest["measurements"][0]["drift"]["k3_kl"]


@pytest.mark.parametrize("lora", [(), ("policy.lora={}",)])
def test_the_drift_check_fails_if_a_weight_update_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy_directory: Path,
    tmp_path: Path,
    lora: tuple[str, ...],
) -> None:
    real = WeightSync.sync

    def once(weight_sync: WeightSync, version: int) -> None:
        if version == 0:
            real(weight_sync, version)

    monkeypatch.setattr(WeightSync, "sync", once)
    overrides = ("policy.dtype=bfloat16", *lora, "--json", "--limit", "0.05", "--share", "0.02")
    assert check(monkeypatch, policy_directory, tmp_path, *overrides) == 1
    loaded, updated = printed_report(capsys)["measurements"]
    assert loaded["drift"]["share_above_limit"] <= 0.02 < updated["drift"]["share_above_limit"]
    assert check(monkeypatch, policy_directory, tmp_path, *overrides, "--updates", "0") == 0


def test_limit_and_share_are_configurable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy_directory: Path, tmp_path: Path
) -> None:
    bf16 = ("policy.dtype=bfloat16", "--updates", "0")
    assert check(monkeypatch, policy_directory, tmp_path, *bf16, "--limit", "1e-7") == 1
    shown = capsys.readouterr().out
    assert "ABOVE the limit" in shown
    assert "hf in bfloat16 against the learner in bfloat16" in shown
    assert "largest gap as loaded: token" in shown
    assert "; 3 episodes per column" in shown
    assert check(monkeypatch, policy_directory, tmp_path, *bf16, "--limit", "1e-7", "--share", "1") == 0
    assert "below the limit" in capsys.readouterr().out


def test_tokens_that_retokenization_would_change_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy_directory: Path, tmp_path: Path
) -> None:
    """A policy of random weights spells as no tokenizer would."""
    assert check(monkeypatch, policy_directory, tmp_path, "--json", "--updates", "0") == 0
    retokenization = printed_report(capsys)["retokenization"]
    assert 0 < retokenization["changed_turns"] <= retokenization["num_turns"]
    assert retokenization["changed_response_tokens"] > 0
    assert retokenization["changed_prompt_tokens"] == 0
    assert retokenization["example"]["tokens"] != retokenization["example"]["retokenized"]
    assert check(monkeypatch, policy_directory, tmp_path, "--updates", "0") == 0
    shown = capsys.readouterr().out
    assert "re-encoding the text would change response tokens in" in shown
    assert "chat template: reproduced token by token" in shown


def test_a_prompt_that_differs_from_its_messages_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy_directory: Path, tmp_path: Path
) -> None:
    """A fault in the loop: tokens of which no dialogue knows."""
    real = pipeline._run_episodes

    def spoilt(components: Components, count: int) -> list[Any]:
        from dataclasses import replace

        episodes = real(components, count)
        turn = episodes[0].turns[0]
        other = replace(turn, prompt=(*turn.prompt[:-1], turn.prompt[-1] + 1))
        return [replace(episodes[0], turns=(other, *episodes[0].turns[1:])), *episodes[1:]]

    monkeypatch.setattr(pipeline, "_run_episodes", spoilt)
    assert check(monkeypatch, policy_directory, tmp_path, "--updates", "0", "--share", "1") == 1
    assert "cannot be rebuilt from the messages" in capsys.readouterr().out


def test_a_user_error_exits_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy_directory: Path, tmp_path: Path
) -> None:
    assert check(monkeypatch, tmp_path / "nowhere", tmp_path) == 2
    assert "no such directory" in capsys.readouterr().err
    assert check(monkeypatch, policy_directory, tmp_path, "rollout.max_prompt_tokens=3") == 2
    assert "no episode could be run" in capsys.readouterr().err


def test_a_preset_can_be_checked_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = [f"output_dir={tmp_path}", "rollout.max_response_tokens=8", "training.threads=1", "--episodes", "2"]
    monkeypatch.setattr(sys, "argv", ["quintet", "check", "drift", *overrides, "--json", "--updates", "0"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert not end.value.code
    assert printed_report(capsys)["policy"] == "a new grid-1m"


def test_the_drift_check_reads_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create_preset_policy("grid-vl", tmp_path / "policy", ["system user assistant"], 0)
    assert check(monkeypatch, tmp_path / "policy", tmp_path, "env.render=vision", "env.tile_size=16", "--json") == 0
    report = printed_report(capsys)
    assert report["template_comparison"]["reproduced_prompts"] == report["template_comparison"]["num_turns"] > 0
