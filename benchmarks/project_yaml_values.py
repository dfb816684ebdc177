"""Values that ROLL and RLinf read from a composed YAML file, from their own code at that release.

ROLL's defaults are those of the dataclasses in the project's checkout, which are parsed, not executed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project_values import MISSING, Composed

MARKS = {"roll": r"^rollout_batch_size:", "rlinf": r"^runner:", "ragen": r"^es_manager:"}
"""Sections and keys at the top level that YAML files of runs have."""
RESOLVERS = {
    "multiply": lambda x, y: x * y,
    "int_div": lambda x, y: x // y,
    "subtract": lambda x, y: x - y,
    "not": lambda x: not x,
    "torch.dtype": str,
}
"""Those of `rlinf/utils/omega_resolver.py` and RAGEN's `train.py`."""


def register_resolvers() -> None:
    """Make the frameworks' resolvers known to OmegaConf."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def roll_values(config: Any, checkout: Path) -> dict[str, Any]:
    """Return what ROLL's pipelines read."""
    tree = Composed(config)
    is_agentic = tree.get("custom_envs", None) is not None
    defaults = class_defaults(checkout, "AgenticConfig" if is_agentic else "RLVRConfig")
    generating = class_defaults(checkout, "GeneratingArguments")

    def get(key: str) -> Any:
        return tree.get(key, defaults.get(key, MISSING))

    def of_generation(key: str) -> Any:
        return tree.get(f"actor_infer.generating_args.{key}", generating.get(key, MISSING))

    samples = 1 if is_agentic else get("num_return_sequences_in_group")
    sides = ["pg_clip_low", "pg_clip_high"] if get("use_pg_clip_range") is True else ["pg_clip", "pg_clip"]
    train, mapping = "actor_train.training_args", [tree.get(f"{name}.device_mapping", None) for name in ROLES]
    devices = [num_devices(each) for each in mapping if each is not None]
    values = {
        "sequences of a step": get("rollout_batch_size") * samples,
        "training.epochs": get("ppo_epochs"),
        "kl in the rewards": get("init_kl_coef") if get("add_token_level_kl") else None,
        "kl in the loss": get("kl_loss_coef") if get("use_kl_loss") is True else None,
        "algorithm.entropy_coefficient": get("entropy_loss_coef"),
        "clip": [get(side) for side in sides],
        "algorithm.loss.clip_dual": 1 + 2 * get("pg_clip") if get("dual_clip_loss") else None,
        "algorithm.aggregation": get("loss_agg_mode"),
        "rollout.temperature": of_generation("temperature"),
        "rollout.top_p": of_generation("top_p"),
        "rollout.top_k": of_generation("top_k"),
        "steps": get("max_steps"),
        "actor.optimizer.learning_rate": tree.get(f"{train}.learning_rate"),
        "devices": MISSING if MISSING in devices else max(devices, default=MISSING),
        "training.mini_batches": _roll_mini_batches(tree, get("rollout_batch_size") * samples),
    }
    if not is_agentic:
        values["rollout.max_response_tokens"] = tree.get("response_length", of_generation("max_new_tokens"))
        values["rollout.max_prompt_tokens"] = get("prompt_length")
    return values


ROLES = ("actor_train", "actor_infer", "reference", "critic")


def _roll_mini_batches(tree: Composed, sequences: int) -> Any:
    """Return the optimizer steps of a pass over a step's data, as `ActorWorker.train_step` splits it."""
    devices = num_devices(tree.get("actor_train.device_mapping", None))
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if devices is MISSING:
        return MISSING
    for size in sizes:
        devices //= tree.get(f"actor_train.strategy_args.strategy_config.{size}", 1)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows = [tree.get(f"actor_train.training_args.{name}") for name in names]
    return MISSING if MISSING in rows else max(1, sequences // (rows[0] * rows[1] * devices))


def num_devices(mapping: Any) -> Any:
    """Return the end of `list(range(0, 8))`."""
    match = re.fullmatch(r"list\(range\(\d+, *(\d+)\)\)", str(mapping).strip())
    return int(match[1]) if match else MISSING


def class_defaults(checkout: Path, name: str) -> dict[str, Any]:
    """Return the default values of a dataclass of a checkout and of its base classes."""
    for file in sorted((checkout / "roll").rglob("*.py")):
        if f"class {name}" not in (text := file.read_text()):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [class_defaults(checkout, base.id) for base in node.bases if isinstance(base, ast.Name)]
                return {key: value for base in bases for key, value in base.items()} | dict(_fields(node))
    return {}


def _fields(node: ast.ClassDef) -> Any:
    """Yield the fields of a class whose defaults are literals."""
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.value is not None:
            value: ast.expr = entry.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), value)
            try:
                yield entry.target.id, ast.literal_eval(value)
            except ValueError:
                continue


def rlinf_values(config: Any) -> dict[str, Any]:
    """Return what RLinf's embodied runner reads."""
    tree = Composed(config)
    group, epochs = tree.get("algorithm.group_size"), tree.get("algorithm.rollout_epoch", 1)
    environments = tree.get("env.train.total_num_envs", tree.get("env.train.num_envs", MISSING))
    if environments is MISSING:
        environments = tree.get("algorithm.num_group_envs") * group
    actions = tree.get("actor.model.num_action_chunks")
    steps = tree.get("env.train.max_steps_per_rollout_epoch", tree.get("env.train.max_episode_steps"))
    kl, limit, of_epochs = (
        tree.get("algorithm.kl_beta", 0),
        tree.get("runner.max_steps", -1),
        tree.get("runner.max_epochs"),
    )
    chunks = tree.get("algorithm.n_chunk_steps", steps // actions)
    values = {
        "env.environments": environments,
        "env.epochs": epochs,
        "env.max_steps": tree.get("env.train.max_episode_steps"),
        "rollout.max_actions_per_turn": actions,
        "training.samples_per_group": group,
        "training.epochs": tree.get("algorithm.update_epoch", 1),
        "training.mini_batches": environments * epochs * chunks // tree.get("actor.global_batch_size"),
        "kl in the loss": kl if kl else None,
        "algorithm.entropy_coefficient": tree.get("algorithm.entropy_bonus", 0),
        "clip": [tree.get("algorithm.clip_ratio_low"), tree.get("algorithm.clip_ratio_high")],
        "rollout.temperature": tree.get("algorithm.sampling_params.temperature_train"),
        "actor.optimizer.learning_rate": tree.get("actor.optim.lr"),
        "steps": of_epochs if limit < 0 else min(limit, of_epochs),
    }
    if "gae" in str(tree.get("algorithm.adv_type")):
        values |= {"algorithm.advantage.gamma": tree.get("algorithm.gamma")}
        values |= {"algorithm.advantage.lam": tree.get("algorithm.gae_lambda")}
    return values
