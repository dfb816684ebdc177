"""If these fail, a learner of a configuration computes in another type, or otherwise, than that says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_grid import near_batch, ragged_batch
from torch import Tensor, nn

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import CriticConfig
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.records import Batch
from quintet.runtime.dtypes import with_dtypes
from quintet.runtime.engines.engine_builders import policy_dtype
from quintet.runtime.learners import learner_builders
from quintet.runtime.learners.learner_builders import build_reference
from quintet.runtime.learners.local_learners import LocalLearners
from quintet.training.checkpoint.state_dict import optimizer_state_dict
from quintet.training.offload import Offload

LEARNING: dict[str, Any] = {"training": {"threads": 1}, "warm_start": None}


def experiment(directory: Path, **sections: Any) -> Experiment:
    policy = {"preset": None, "path": str(directory), **sections.pop("policy", {})}
    return Experiment.model_validate({**LEARNING, "policy": policy, **sections})


def build_test_learners(directory: Path, **sections: Any) -> LocalLearners:
    return LocalLearners.build(experiment(directory, **sections), directory)


def named_type(directory: Path, root: Path, name: str) -> Path:
    """The same model, whose own configuration names that type."""
    shutil.copytree(directory, root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"dtype": name}))
    return root


def multiplied_in(module: nn.Module) -> list[torch.dtype]:
    """Filled with the type of what a linear layer gives."""
    seen: list[torch.dtype] = []
    layer = next(part for part in module.modules() if isinstance(part, nn.Linear))
    layer.register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
    return seen


def test_liger_gets_a_tuned_model_where_it_will_learn(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels refuse a model on the CPU, where every model is loaded; another kind of device stands for a GPU."""

    class Asked(Exception):
        """Far enough."""

    def ask(model: nn.Module, key: str) -> None:
        raise Asked(key, next(model.parameters()).device.type)

    monkeypatch.setattr(learner_builders, "apply_liger_kernels", ask)
    monkeypatch.setattr(learner_builders, "compute_device", lambda: torch.device("meta"))
    with pytest.raises(Asked) as asked:
        LocalLearners.build(experiment(policy_directory, sft={"liger": True}), policy_directory, sft=True)
    assert asked.value.args == ("sft.liger", "meta")


@pytest.mark.proves("verl", "model.fsdp_config.model_dtype")
@pytest.mark.proves("rlinf", "actor.model.precision")
@pytest.mark.proves("roll", "actor_train.model_args.dtype")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_policy_multiplies_in_its_type(policy_directory: Path, name: str) -> None:
    own = build_test_learners(policy_directory, policy={"dtype": name})
    plain = build_test_learners(policy_directory).actor.scorer.compute_log_probs(ragged_batch())
    torch.testing.assert_close(own.actor.scorer.compute_log_probs(ragged_batch()), plain, atol=0.3, rtol=0)
    seen = multiplied_in(own.actor.model)
    metrics = own.actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    assert set(seen) == {getattr(torch, name)}
    assert metrics["skipped"] == 0.0
    tensors = {
        *(p.dtype for p in own.actor.model.parameters()),
        *(t.dtype for t in optimizer_state_dict(own.actor.strategy.module, own.actor.optimizer).values()),
    }
    assert tensors == {torch.float32}


@pytest.mark.proves("rlinf", "actor.model.precision")
def test_auto_is_the_type_that_the_models_own_configuration_names(policy_directory: Path, tmp_path: Path) -> None:
    stored = named_type(policy_directory, tmp_path / "half", "bfloat16")
    config = experiment(stored, policy={"dtype": "auto"}, critic={"dtype": "auto"}, reference={"dtype": "auto"})
    assert policy_dtype(config) is torch.bfloat16
    actual = with_dtypes(config)
    assert (actual.policy.dtype, actual.critic.dtype, actual.reference.dtype) == ("bfloat16",) * 3
    other = with_dtypes(experiment(stored, reference={"dtype": "auto", "path": str(policy_directory)}))
    assert (other.policy.dtype, other.reference.dtype) == ("float32", "float32")
    odd = named_type(policy_directory, tmp_path / "odd", "float8_e4m3fn")
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        with_dtypes(experiment(odd, policy={"dtype": "auto"}))


@pytest.mark.proves("roll", "reference.model_args.dtype")
def test_a_reference_of_another_type_is_half_as_large(policy_directory: Path) -> None:
    own = build_test_learners(policy_directory, reference={"dtype": "bfloat16"}, algorithm={"kl": {"coefficient": 0.1}})
    reference = own.snapshot_reference()
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    assert reference.model.model.rotary_emb.inv_freq.dtype is torch.float32
    actual, exact = reference.compute_log_probs(ragged_batch()), own.actor.scorer.compute_log_probs(ragged_batch())
    gap = float((actual - exact).abs().max())
    assert 0 < gap < 0.3


@pytest.mark.proves("vagen", "critic.model.enable_gradient_checkpointing")
def test_a_critic_has_a_type_and_recomputation_of_its_own(policy_directory: Path) -> None:
    results: dict[str, tuple[Tensor, set[torch.dtype], bool]] = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "as actor": {"actor": {"gradient_checkpointing": True}},
        "own": {"critic": {"gradient_checkpointing": True}},
        "not": {"actor": {"gradient_checkpointing": True}, "critic": {"gradient_checkpointing": False}},
        "half": {"critic": {"dtype": "bfloat16"}},
        "other": {"critic": {"gradient_checkpointing": True, "path": str(policy_directory)}},
    }
    for name, sections in ways.items():
        critic = build_test_learners(policy_directory, **sections).create_critic()
        seen = multiplied_in(critic.model)
        critic.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 1e-3)
        assert {parameter.dtype for parameter in critic.model.parameters()} == {torch.float32}
        results[name] = critic.compute_values(ragged_batch()), set(seen), critic.model.body.is_gradient_checkpointing
    assert {name: recomputed for name, (_, _, recomputed) in results.items()} == {
        "plain": False, "as actor": True, "own": True, "not": False, "half": False, "other": True,
    }  # fmt: skip
    for name in ("as actor", "own", "not", "other"):
        torch.testing.assert_close(results[name][0], results["plain"][0], atol=1e-6, rtol=0)
    assert results["half"][1] == {torch.bfloat16}


@pytest.mark.proves("verl", "actor_rollout_ref.actor.use_torch_compile")
def test_compiled_measures_are_the_same(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times, since a pass has another number of places each time; with gradients and a divergence."""
    calls = []
    compiled = learner_builders.compiled_token_statistics()

    def counted(*value: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append(value[0].shape)
        return compiled(*value, **options)

    monkeypatch.setattr(learner_builders, "compiled_token_statistics", lambda: counted)
    kl = {"kl": {"coefficient": 0.1, "apply_to": "loss", "estimator": "full"}}
    results = []
    for compiling in (False, True):
        own = build_test_learners(policy_directory, actor={"memory": {"torch_compile": compiling}}, algorithm=kl)
        batch, reference = near_batch(own.actor.scorer), own.snapshot_reference()
        goal = PolicyObjective(own.experiment.algorithm)
        steps = [own.actor.update(batch, goal, "token-mean", 1e-3, reference=reference) for _ in range(2)]
        results.append((steps, own.actor.scorer.compute_log_probs(batch)))
    assert len({shape[0] for shape in calls}) > 0
    for plain, other in zip(results[0][0], results[1][0], strict=True):
        assert other == pytest.approx(plain, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-5, rtol=0)


def test_without_a_compiler_measures_are_made_as_they_are(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner_builders, "find_compiler", lambda: None)
    own = build_test_learners(policy_directory, actor={"memory": {"torch_compile": True}})
    assert own.actor.strategy.module.statistics_fn is None
    assert "without a C++ compiler" in caplog.text


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_ligers_kernels_need_a_gpu(policy_directory: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    sections = {part: {"memory": {"liger": True}}}
    with pytest.raises(ConfigError, match="requires liger-kernel"):
        build_test_learners(policy_directory, **sections).create_critic()
    monkeypatch.setattr("quintet.policies.liger.importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=rf"{part}.memory.liger = true: Liger's kernels require a GPU"):
        build_test_learners(policy_directory, **sections).create_critic()


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_the_configured_learner_gets_ligers_kernels(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(learner_builders, "apply_liger_kernels", lambda model, key: keys.append(key))
    build_test_learners(policy_directory, **{part: {"memory": {"liger": True}}}).create_critic()
    assert keys == [f"{part}.memory.liger"]


@pytest.mark.parametrize(
    ("contents", "files"),
    [(["model"], {"model"}), (["optimizer"], {"optim"}), (["model", "optimizer", "extra"], {"model", "optim"})],
)
def test_a_checkpoint_has_the_configured_parts_of_the_actor(
    policy_directory: Path, tmp_path: Path, contents: list[str], files: set[str]
) -> None:
    own = build_test_learners(policy_directory, checkpoint={"contents": contents})
    own.actor.update(ragged_batch(), PolicyObjective(AlgorithmConfig()), "token-mean", 1e-3)
    own.save(tmp_path)(tmp_path)
    assert {path.name.partition("_")[0] for path in tmp_path.glob("actor/*")} == files


@pytest.mark.proves("verl", "actor_rollout_ref.ref.fsdp_config.param_offload")
def test_each_learner_is_moved_as_its_own_section_says(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, tuple[Any, bool]] = {}

    def of(memory: Any, module: nn.Module, name: str, *, shared_with_engine: bool = False) -> Offload:
        asked[name] = memory, shared_with_engine
        return Offload()

    monkeypatch.setattr(Offload, "from_config", of)
    memory = {"offload_parameters": True}
    sections = {"actor": {"memory": memory}, "reference": {"memory": memory}, "algorithm": {"kl": {}}}
    for tokenizer, played in (
        ({}, True),
        ({"policy": {"dtype": "bfloat16"}}, False),
        ({"rollout": {"engine": "vllm"}}, False),
    ):
        own = build_test_learners(policy_directory, **sections, **tokenizer)
        own.create_critic()
        own.snapshot_reference()
        # the embedded engine plays with float32 weights of the learner's
        assert {name: (one.offload_parameters, by) for name, (one, by) in asked.items()} == {
            "actor": (True, played), "critic": (False, False), "reference": (True, False),
        }  # fmt: skip


def test_a_policy_without_reference_section_has_one_that_is_as_it_was(policy_directory: Path) -> None:
    own = build_test_learners(policy_directory, algorithm={"kl": {"coefficient": 0.1}})
    reference = build_reference(own.experiment, own.actor, policy_directory)
    before: Batch = ragged_batch()
    first = reference.compute_log_probs(before)
    own.actor.update(before, PolicyObjective(AlgorithmConfig()), "token-mean", 1e-2)
    assert torch.equal(reference.compute_log_probs(before), first)
    assert load_model(policy_directory) is not reference.model
