"""If these fail, an option of a learner's configuration doesn't reach what learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import load_config
from quintet.config.dialects.registry import DIALECTS
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_model
from quintet.records import Batch
from quintet.runtime.learners import learner_builders
from quintet.runtime.learners.learner_builders import build_actor, build_critic, build_reference
from quintet.training.packing import iter_micro_batches
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ReplicatedStrategy


def experiment(**sharding: Any) -> Experiment:
    return Experiment.model_validate({name: {"sharding": sharding} for name in ("actor", "critic", "reference")})


def batch() -> Batch:
    tokens = torch.arange(40) % 30
    mask = torch.arange(40) % 20 > 9
    zeros = torch.zeros(40)
    return Batch(
        tokens=tokens,
        positions=torch.arange(40) % 20,
        lengths=torch.tensor([20, 20]),
        loss_mask=mask,
        turn=torch.zeros(40, dtype=torch.long),
        turn_end=torch.arange(40) % 20 == 19,
        trajectory=torch.tensor([0, 1]),
        group=torch.tensor([0, 0]),
        logprobs=zeros,
        rewards=zeros,
        advantages=zeros,
        values=zeros,
        returns=zeros,
    )


def logprobs(directory: Path, **sharding: Any) -> torch.Tensor:
    config = experiment(**sharding)
    return build_actor(config, load_model(directory), config.actor.optimizer).scorer.compute_log_probs(batch())


@pytest.mark.proves("rlinf", "actor.fsdp_config.amp_autocast.enabled", "actor.fsdp_config.amp_autocast.precision")
@pytest.mark.parametrize("option", ["autocast", "parameter_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_is_the_type_of_products(policy_directory: Path, option: str, dtype: str) -> None:
    exact = logprobs(policy_directory)
    narrow = logprobs(policy_directory, **{option: dtype})
    model = load_model(policy_directory)
    config = experiment()
    plain = build_actor(config, model, config.actor.optimizer)
    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        expected = plain.scorer.compute_log_probs(batch())
    torch.testing.assert_close(narrow, expected, rtol=0, atol=0)
    assert 0 < float((narrow - exact).abs().max()) < 0.1


def test_float64_holds_for_the_weights(policy_directory: Path) -> None:
    config = experiment(parameter_dtype="float64")
    actor = build_actor(config, load_model(policy_directory), config.actor.optimizer)
    assert {weight.dtype for _, weight in actor.weights()} == {torch.float64}
    torch.testing.assert_close(actor.scorer.compute_log_probs(batch()), logprobs(policy_directory), rtol=0, atol=1e-5)


def test_critic_and_reference_begin_as_the_policy(policy_directory: Path) -> None:
    config = experiment()
    actor = build_actor(config, load_model(policy_directory), config.actor.optimizer)
    reference = build_reference(config, actor, policy_directory)
    critic = build_critic(config, actor, policy_directory)
    assert torch.equal(reference.compute_log_probs(batch()), actor.scorer.compute_log_probs(batch()))
    assert isinstance(critic.strategy, ReplicatedStrategy)
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(2.0)
    assert not torch.equal(reference.compute_log_probs(batch()), actor.scorer.compute_log_probs(batch()))
    body = dict(critic.weights())["body.embed_tokens.weight"]
    assert not torch.equal(body, actor.model.lm_head.weight)


@pytest.mark.parametrize("way", ["tensor", "ulysses", "context"])
def test_a_full_divergence_wants_policy_and_reference_shared_out_alike(policy_directory: Path, way: str) -> None:
    """Else a rank would hold other tokens, or another part of the vocabulary, of one than of the other."""
    kl = {"estimator": "full", "coefficient": 0.1}
    config = Experiment.model_validate({"algorithm": {"kl": kl}, "actor": {"parallel": {way: 2}}})
    actor = build_actor(config, load_model(policy_directory), config.actor.optimizer)
    with pytest.raises(ConfigError, match=rf"reference\.parallel\.{way}=2, or"):
        build_reference(config, actor, policy_directory, RankGroup(0, 2))


@pytest.mark.proves("rlinf", "actor.enable_dp_load_balance")
def test_ranks_that_are_to_be_even_have_as_many_tokens(
    policy_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From RLinf's key to the passes that two ranks are dealt."""
    monkeypatch.setattr(
        learner_builders, "build_device_mesh", lambda config, name, ranks: LearnerMesh(data=RankGroup(0, 2))
    )
    size = torch.tensor([10, 9, 11, 10, 12, 8])
    mask = torch.ones(60, dtype=torch.bool)
    mask[size.cumsum(0) - size] = False
    episodes = replace(
        batch(),
        lengths=size,
        loss_mask=mask,
        tokens=torch.arange(60),
        positions=torch.cat([torch.arange(n) for n in size.tolist()]),
        trajectory=torch.arange(6),
    )

    def dealt(*, even: bool) -> list[int]:
        path = tmp_path / "rlinf.yaml"
        path.write_text(f"actor: {{enable_dp_load_balance: {str(even).lower()}}}")
        foreign = compose_config(path, ["algorithm.training_batch_size_per_gpu=6"])
        config = load_config(foreign, DIALECTS["rlinf"]).experiment
        actor = build_actor(config, load_model(policy_directory), config.actor.optimizer)
        micro_batches = list(iter_micro_batches(episodes, actor.setup.budget))
        return [sum(len(m.index) for m in micro_batches[rank::2]) for rank in range(2)]

    assert dealt(even=False) == [54, 0]
    assert dealt(even=True) == [27, 27]


def test_what_a_plan_refuses_isnt_laid_out_either(policy_directory: Path) -> None:
    """Whoever opens learners without the checks of a start is told the same."""
    config = Experiment.model_validate({"actor": {"backend": "fsdp2", "sharding": {"backward_prefetch": "post"}}})
    with pytest.raises(ConfigError, match="FSDP2 prefetches weights before") as refused:
        build_actor(config, load_model(policy_directory), config.actor.optimizer, ranks=RankGroup(0, 2))
    assert refused.value.key == "actor.sharding.backward_prefetch"
    split = Experiment.model_validate({"actor": {"backend": "fsdp", "parallel": {"tensor": 2}}})
    with pytest.raises(ConfigError, match="only fsdp2 and megatron can split a model so"):
        build_actor(split, load_model(policy_directory), split.actor.optimizer, ranks=RankGroup(0, 2))


def test_a_reference_that_is_the_policy_says_whose_memory_counts(
    policy_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Experiment.model_validate({"reference": {"memory": {"offload_parameters": True}}})
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=2))
    actor = build_actor(config, model, config.actor.optimizer)
    build_reference(config, actor, policy_directory)
    assert "see actor.memory" in caplog.text
