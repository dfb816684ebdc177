"""If these fail, a policy is loaded, adapted or frozen otherwise than its configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import PolicyConfig
from quintet.policies import model_loading
from quintet.policies.attention_backends import attention_backend
from quintet.policies.model_loading import load_model, load_policy_tokenizer
from quintet.runtime.learners import learner_builders, local_learners
from quintet.runtime.learners.learner_backends import LearnerBackend, load_backend
from quintet.runtime.learners.local_learners import LocalLearners


def learners(directory: Path, policy: dict[str, Any], **sections: Any) -> LocalLearners:
    policy = {"preset": None, "path": str(directory), **policy}
    config = {"training": {"threads": 1}, "warm_start": None, "policy": policy, **sections}
    return LocalLearners.build(Experiment.model_validate(config), directory)


def actor_model(directory: Path, **policy: Any) -> PreTrainedModel:
    return learners(directory, policy).actor.model


def test_the_configuration_of_the_model_can_be_overridden(policy_directory: Path) -> None:
    assert actor_model(policy_directory, overrides={"rms_norm_eps": 0.25}).config.rms_norm_eps == 0.25


@pytest.mark.parametrize("backend", ["eager", None])
def test_all_layers_have_the_configured_attention(policy_directory: Path, backend: str | None) -> None:
    layers = [
        layer for layer in actor_model(policy_directory, attention=backend).modules() if hasattr(layer, "layer_idx")
    ]
    assert {attention_backend(layer) for layer in layers} == {backend}


@pytest.mark.parametrize("frozen", [True, False])
def test_routers_are_frozen_if_configured(mixture_directory: Path, *, frozen: bool) -> None:
    parameters = actor_model(mixture_directory, freeze_router=frozen).named_parameters()
    assert {parameter.requires_grad for name, parameter in parameters if ".mlp.gate." in name} == {not frozen}


def test_adapters_have_the_configured_layers(policy_directory: Path) -> None:
    model = actor_model(policy_directory, lora={"rank": 2, "target_modules": ["q_proj"]})
    adapted = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert adapted == {"q_proj"}


def test_the_critic_starts_from_the_configured_model(policy_directory: Path, deep_directory: Path) -> None:
    critic = learners(policy_directory, {}, critic={"path": str(deep_directory)}).create_critic()
    assert len(critic.model.body.layers) == 5


def test_learners_are_built_by_the_configured_backend(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def load(name: str) -> LearnerBackend:
        names.append(name)
        return load_backend(name)

    monkeypatch.setattr(local_learners, "load_backend", load)
    learners(policy_directory, {}, actor={"backend": "fsdp"}, critic={"backend": "fsdp"}).create_critic()
    assert names == ["fsdp", "fsdp"]


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_model_runs_only_if_it_is_trusted(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, *, trusted: bool
) -> None:
    asked: list[bool] = []

    def load(*arguments: Any, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
        asked.append(trust_remote_code)
        return load_model(*arguments, **options)

    monkeypatch.setattr(learner_builders, "load_model", load)
    actor_model(policy_directory, trust_remote_code=trusted)
    assert asked == [trusted]


@pytest.mark.parametrize("key", ["trust_remote_code", "trust_tokenizer_code"])
@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_tokenizer_runs_only_if_model_or_tokenizer_are_trusted(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, key: str, *, trusted: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        model_loading, "load_tokenizer", lambda path, trust_remote_code: asked.append(trust_remote_code)
    )
    load_policy_tokenizer(PolicyConfig.model_validate({key: trusted}), policy_directory)
    assert asked == [trusted]
