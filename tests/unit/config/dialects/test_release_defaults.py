"""Defaults of keys that a file leaves out: those of its release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import converted, natively

from quintet.cli.configuration import inspect_config
from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_defaults import spec_of_release
from quintet.config.dialects.release_tables import ReleaseEvidence
from quintet.config.dialects.value_types import parse_type
from quintet.config.dotted import unflatten
from quintet.errors import ConfigError

GRPO = {"actor_rollout_ref.model.path": "model", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
TUNING = {"model.partial_pretrain": "model"}
DEFAULTS = [
    ("verl", GRPO | {"algorithm.use_kl_in_reward": True}, "algorithm.kl_ctrl.kl_coef", 0.001),
    ("verl", GRPO, "trainer.test_freq", -1),
    ("verl", GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio_low", 0.2),
    ("verl", GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio_high", 0.2),
    ("verl", TUNING, "trainer.total_epochs", 4),
    ("verl", TUNING, "data.train_batch_size", 256),
    ("verl", TUNING, "data.prompt_key", "question"),
    ("verl", TUNING, "data.response_key", "answer"),
]
"""Values in the framework's own files at the newest release with these keys."""


def default(framework: str, keys: dict[str, Any], key: str, release: str | None = None) -> Any:
    """The value of a key that a file with these keys leaves out."""
    config = config_from_tree(unflatten(keys), "given.yaml:1")
    object.__setattr__(config, "evidence", ReleaseEvidence(named=release))
    return merge_with_reference(config, DIALECTS[framework])[0][key]


@pytest.mark.parametrize(("framework", "keys", "key", "value"), DEFAULTS)
def test_a_key_that_is_left_out_has_another_value_than_in_the_framework(
    framework: str, keys: dict[str, Any], key: str, value: Any
) -> None:
    assert default(framework, keys, key) == value


@pytest.mark.parametrize(
    ("release", "key", "value"),
    [
        ("0.1", "actor_rollout_ref.actor.entropy_coeff", 0.001),
        ("0.3.0", "actor_rollout_ref.actor.entropy_coeff", 0.001),
        ("0.4", "actor_rollout_ref.actor.entropy_coeff", 0),
        ("0.1", "trainer.test_freq", 2),
        ("0.3.0", "actor_rollout_ref.actor.clip_ratio_low", "${actor_rollout_ref.actor.clip_ratio}"),
    ],
)
def test_a_named_release_does_not_decide_the_defaults(release: str, key: str, value: Any) -> None:
    expected = 0.3 if isinstance(value, str) else value
    keys = GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}
    assert default("verl", keys, key, release) == expected


def test_early_files_without_a_kl_loss_have_no_kl_in_the_rewards(tmp_path: Path) -> None:
    """Until 0.3.0, verl subtracts KL × `kl_coef` from the rewards unless `use_kl_loss` is true."""
    early = {"actor_rollout_ref.actor.fsdp_config.grad_offload": False}
    found = converted(tmp_path, "verl", unflatten(GRPO | early))
    assert (natively(found, "algorithm.kl.apply_to"), natively(found, "algorithm.kl.coefficient")) == ("reward", 0.001)
    in_loss = converted(tmp_path, "verl", unflatten(GRPO | early | {"actor_rollout_ref.actor.use_kl_loss": True}))
    assert natively(in_loss, "algorithm.kl.apply_to") == "loss"
    newer = converted(tmp_path, "verl", unflatten(GRPO))
    assert newer.composed.experiment.algorithm.kl is None


def test_early_releases_have_a_dual_clip(tmp_path: Path) -> None:
    """verl has `clip_ratio_c`, and the bound, since 2025-04-02."""
    assert default("verl", GRPO, "actor_rollout_ref.actor.clip_ratio_c", "0.3") is None
    assert default("verl", GRPO, "actor_rollout_ref.actor.clip_ratio_c", "0.4") == 3.0


@pytest.mark.parametrize(
    ("release", "prompts", "changes", "batches"),
    [
        ("0.2", 64, {}, (1, None)),
        ("0.6", 64, {"actor_rollout_ref.actor.use_dynamic_bsz": True}, (1, None)),
        # 256 × 4 sequences, then the other 128 × 4
        ("0.6", 384, {}, (1, 1024)),
        ("0.6", 512, {}, (2, None)),
    ],
)
def test_mini_batches_that_a_release_takes_are_refused(
    tmp_path: Path, release: str, prompts: int, changes: dict[str, Any], batches: tuple[int, int | None]
) -> None:
    keys = GRPO | {"data.train_batch_size": prompts, "actor_rollout_ref.actor.ppo_mini_batch_size": 256} | changes
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(unflatten(keys)))

    def training(named: str) -> Any:
        config = compose_config(path, [], evidence=ReleaseEvidence(named=named))
        return convert(config, DIALECTS["verl"]).composed.experiment.training

    found = training(release)
    assert (found.mini_batches, found.mini_batch_sequences) == batches
    if prompts % 256:
        with pytest.raises(ConfigError, match="ppo_mini_batch_size = 256"):
            training("0.9")


def spec(key: str, value_type: str, default_value: Any, *aliases: str) -> KeySpec:
    return KeySpec(key=key, effect="", value_type=parse_type(value_type), default=default_value, aliases=aliases)


def test_a_default_refers_to_a_key_that_the_references_lack() -> None:
    table = {"a.size": "${.total}", "a.total": "${oc.select:b.rest,3}", "a.text": "${a.size}-x", "a.c": "${b.d}"}
    documented = {"a.size": "a.size", "b.d": "c.d"}
    assert spec_of_release(spec("a.size", "int", 1), table, documented).default == 3
    assert spec_of_release(spec("a.c", "int", 1), table, documented).default == "${c.d}"
    assert spec_of_release(spec("a.text", "text", "y"), table, documented).default == "${a.size}-x"


def test_null_under_the_documented_name_hides_the_value_under_the_releases_own() -> None:
    table = {"style": None, "type": "cosine"}
    key = spec("style", "text", "constant", "type")
    assert spec_of_release(key, table, {"style": "style", "type": "style"}).default == "cosine"


def test_a_default_of_another_type_replaces_the_documented_one() -> None:
    assert spec_of_release(spec("size", "int >= 1", 4), {"size": None}, {}).default == 4


def test_a_script_of_vagen_has_the_defaults_of_its_reference_document(tmp_path: Path) -> None:
    """`vagen/trainer/config/ppo_trainer.yaml` of 2025 has other values than VAGEN's page."""
    (tmp_path / "env_config.yaml").write_text("env1: {env_name: frozenlake, train_size: 256, test_size: 8}\n")
    script = tmp_path / "run.sh"
    words = "data.train_batch_size=256 rollout_manager.max_turns=3 actor_rollout_ref.model.path=model"
    script.write_text(f"python3 -m vagen.trainer.main_ppo {words} trainer.nnodes=1 trainer.n_gpus_per_node=8\n")
    found = inspect_config(str(script), [], None, "refuse").composed.experiment
    assert (found.rollout.temperature, found.rollout.top_p, found.algorithm.entropy_coefficient) == (1.0, 1.0, 0.001)
    assert found.algorithm.loss.model_dump()["clip_dual"] is None
    assert found.training.samples_per_group == 1
