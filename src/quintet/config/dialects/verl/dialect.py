"""The configuration format of verl."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.dialect import Dialect, Reference, key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dotted import get_value

CRITIC_SECTIONS = {
    "critic.model.fsdp_config": "actor_rollout_ref.actor.fsdp_config",
    "critic.model": "actor_rollout_ref.model",
    "critic": "actor_rollout_ref.actor",
}
"""verl documents the critic's keys by reference to those of the actor."""
_ACTOR = "actor_rollout_ref.actor"
_SFT_KEYS = frozenset(
    (
        *(f"data.{key}" for key in ("train_files", "val_files", "prompt_key", "image_key", "train_batch_size")),
        "data.truncation",
        *("data.custom_cls.path", "data.custom_cls.name", "trainer.total_epochs", "trainer.project_name"),
        *("trainer.experiment_name", "trainer.logger", "trainer.nnodes", "trainer.n_gpus_per_node"),
        *("trainer.save_freq", "trainer.test_freq", "trainer.default_hdfs_dir", "trainer.default_local_dir"),
        *("trainer.resume_mode", "trainer.resume_from_path"),
    )
)
"""Keys of `ppo_trainer.yaml` that fine-tuning has too; `verl_sft_run.yaml` replaces some of them."""


def references_for(dialect: Dialect, tree: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the references of verl by which a file with these sections is written."""
    ppo, newer = dialect.reference("verl_ppo_trainer"), key_files("verl", ["verl_newer"])
    if "actor_rollout_ref" not in tree:
        if "model" in tree or "optim" in tree:
            return (dialect.reference("verl_sft_trainer"), *_sft_run(ppo))
        data = tree.get("data")
        if isinstance(data, Mapping) and ("path" in data or "response_key" in data):
            return (dialect.reference("verl_evaluation"),)
    if get_value(tree, f"{_ACTOR}.strategy") == "megatron":
        return (*_with_megatron_optimizer(ppo, dialect.reference("verl_megatron_optim")), *newer)
    return (ppo, *newer)


def _sft_run(ppo: Reference) -> tuple[Reference, Reference]:
    """Return the keys of fine-tuning that its reference omits: those that it shares, then its own."""
    (run,) = key_files("verl", ["verl_sft_run"])

    def replaced(spec: KeySpec) -> KeySpec:
        return next((other for other in run.load() if other.key == spec.key), spec)

    return ppo.filtered(lambda spec: spec.key in _SFT_KEYS).mapped(replaced), run


def _with_megatron_optimizer(ppo: Reference, megatron: Reference) -> tuple[Reference, Reference]:
    """Replace the keys of the FSDP optimizer by those of Megatron."""

    def moved(spec: KeySpec) -> KeySpec:
        condition = spec.only_if and (_in_actor(spec.only_if[0]), spec.only_if[1])
        aliases = tuple(map(_in_actor, spec.aliases))
        return spec.model_copy(update={"key": _in_actor(spec.key), "aliases": aliases, "only_if": condition})

    return megatron.mapped(moved), ppo.filtered(lambda spec: not spec.key.startswith(f"{_ACTOR}.optim."))


def _in_actor(key: str) -> str:
    return f"{_ACTOR}.{key}" if key.startswith("optim.") else key


VERL = Dialect(
    "verl",
    key_files("verl", ["verl_ppo_trainer", "verl_megatron_optim", "verl_sft_trainer", "verl_evaluation"]),
    marks=("actor_rollout_ref", "model.partial_pretrain", "custom_reward_function"),
    shared_sections=CRITIC_SECTIONS,
    trainers=("verl.trainer.main_ppo", "verl.trainer.main_eval", "verl.trainer.fsdp_sft_trainer"),
    framework_files={
        "ppo_trainer": {},
        "sft_trainer": {},
        "evaluation": {},
        "ppo_megatron_trainer": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
    },
    narrow=lambda dialect, tree: dialect.with_references(*references_for(dialect, tree)),
)
