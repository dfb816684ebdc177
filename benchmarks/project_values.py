"""Values that the trainers of verl and VAGEN read from a composed configuration, from their own code at that release.

The names are those of Quintet's native configuration, or words for values that it has at several places. A value is
left out if the tree lacks its key: it is one of another release. Nothing of the code is executed: where releases or
forks differ, the formulas look for the lines of the code that decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MISSING = object()
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Names of `core_algos.kl_penalty`; the native ones are those of Schulman's page."""


@dataclass(frozen=True)
class TrainerCode:
    """Code of the trainer that a script starts, without comments."""

    trainer: str
    """Module with the training loop."""
    actor: str
    """Actor and core algorithms; empty if the workers are not those of the old engine."""
    workers: str

    @classmethod
    def of(cls, program: Path) -> TrainerCode:
        """Read the modules that a program imports.

        Raises:
            LookupError: one is missing.
        """
        checkout = next(parent for parent in program.parents if (parent / "CHECKOUT").exists())
        trainer = next(_imported(checkout, program, r"\w*Trainer\b", "def fit("), None)
        if trainer is None:
            raise LookupError(f"{program.name} imports no trainer of the checkout")
        found = [*_imported(checkout, program, r"\w*RolloutRefWorker\b", "ppo_mini_batch_size")]
        workers = next((path for path in found if "fsdp" in path.name), next(iter(found), None))
        actor = workers and next(_imported(checkout, workers, r"\w*PPOActor\b", "class DataParallelPPOActor("), None)
        texts = [_code(path) for path in (actor, _losses_of(checkout, actor)) if path] if actor else []
        return cls(_code(trainer), "".join(texts), _code(workers) if workers else "")


def _imported(checkout: Path, program: Path, name: str, text: str) -> Iterator[Path]:
    """Yield the modules with a text among a program, the modules from which it imports a name, and so on."""
    files = [program]
    for file in files:
        if text in _code(file):
            yield file
        imports = re.findall(rf"^\s*from ([\w.]+) import (?:\([^)]*?{name}|.*{name})", file.read_text(), re.MULTILINE)
        for module in imports:
            pattern = module.strip(".").replace(".", "/")
            places = [file.parent.rglob] if module.startswith(".") else [checkout.rglob]
            paths = [path for place in places for end in (".py", "/__init__.py") for path in place(f"{pattern}{end}")]
            files += [path for path in sorted(paths, key=lambda path: len(path.parts))[:1] if path not in files]
        if file.name == "__init__.py" and (file.parent / "dp_actor.py").exists():
            files.append(file.parent / "dp_actor.py")


def _losses_of(checkout: Path, actor: Path) -> Path | None:
    """Return the core algorithms that an actor imports, which may not be in the directory of the trainer."""
    match = re.search(r"(?m)^from ([\w.]+)\.core_algos import |^from ([\w.]+) import .*\bcore_algos\b", _code(actor))
    package = "/".join(filter(None, match.groups())).replace(".", "/") if match else ""
    paths = checkout.rglob(f"{package}/core_algos.py") if package else ()
    return min(paths, key=lambda path: len(path.parts), default=None)


def _code(path: Path) -> str:
    """Return a file without comments."""
    return re.sub(r"(?m)^\s*#.*$", "", path.read_text())


class Composed:
    """A composed configuration."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, key: str, default: Any = MISSING) -> Any:
        """Return a value; `default` is that of the code for a key that the tree lacks."""
        return OmegaConf.select(self.config, key, default=default)


def expected(config: Any, code: TrainerCode) -> dict[str, Any]:
    """Return what verl's trainer reads."""
    tree = Composed(config)
    values = _sampling(tree) | _objective(tree, code) | _steps(tree, code)
    return {name: value for name, value in values.items() if not is_missing(value)}


def is_missing(value: Any) -> bool:
    return value is MISSING or (isinstance(value, list) and MISSING in value)


def _sampling(tree: Composed) -> dict[str, Any]:
    top_k = tree.get(f"{ROLLOUT}.top_k")
    values = {
        "rollout.temperature": tree.get(f"{ROLLOUT}.temperature"),
        "rollout.top_p": tree.get(f"{ROLLOUT}.top_p"),
        "rollout.top_k": top_k if top_k is MISSING else max(top_k, 0),
    }
    if tree.get("rollout_manager", None) is None:  # VAGEN's limits are those of whole episodes
        values["rollout.max_prompt_tokens"] = tree.get("data.max_prompt_length")
        values["rollout.max_response_tokens"] = tree.get("data.max_response_length")
    return values


def _objective(tree: Composed, code: TrainerCode) -> dict[str, Any]:
    loss_kl = bool(tree.get(f"{ACTOR}.use_kl_loss", False)) and (not code.actor or "use_kl_loss" in code.actor)
    in_reward = _has_reward_kl(tree, code, loss_kl=loss_kl)
    values = {
        "kl in the rewards": (tree.get("algorithm.kl_ctrl.kl_coef") or None) if in_reward else None,
        "kl in the loss": tree.get(f"{ACTOR}.kl_loss_coef") if loss_kl else None,
        "algorithm.entropy_coefficient": tree.get(f"{ACTOR}.entropy_coeff", 0),
        "clip": _clip(tree, code),
        "algorithm.loss.clip_dual": _dual_clip(tree, code),
        "algorithm.aggregation": _aggregation(tree, code),
        "algorithm.advantage.name": _estimator(tree),
        "actor.optimizer.learning_rate": tree.get(f"{ACTOR}.optim.lr"),
    }
    if loss_kl:
        values["kl estimator"] = ESTIMATORS.get(tree.get(f"{ACTOR}.kl_loss_type"), MISSING)
    if values["algorithm.advantage.name"] == "gae":
        values |= {f"algorithm.advantage.{name}": tree.get(f"algorithm.{name}") for name in ("gamma", "lam")}
        values["critic.optimizer.learning_rate"] = tree.get("critic.optim.lr")
    return values


def _has_reward_kl(tree: Composed, code: TrainerCode, *, loss_kl: bool) -> bool:
    """Whether the trainer subtracts a KL from the rewards: until 0.3 unless the loss has one, if its code calls it."""
    if "use_kl_in_reward" in code.trainer:
        return bool(tree.get("algorithm.use_kl_in_reward", False))
    called = re.search(r"(?<!def )\bapply_kl_penalty\(", code.trainer)
    return called is not None and not ("use_kl_loss" in code.trainer and loss_kl)


def _clip(tree: Composed, code: TrainerCode) -> list[Any]:
    """Return the clip range: low and high count where the code reads them, unless null, or, in forks, -1. Newer workers
    all read them."""
    both = tree.get(f"{ACTOR}.clip_ratio")
    sides = [tree.get(f"{ACTOR}.clip_ratio_{side}", None) for side in ("low", "high")]
    reads_sides = not code.actor or "clip_ratio_low" in code.actor
    return [side if reads_sides and side not in (None, -1) else both for side in sides]


def _estimator(tree: Composed) -> Any:
    """Return the estimator; the advantage of a single response is its reward in GRPO and RLOO, natively `arpo`."""
    name = tree.get("algorithm.adv_estimator")
    has_groups = tree.get("rollout_manager.n_trajectory", tree.get(f"{ROLLOUT}.n", 1)) > 1
    return "arpo" if name in ("grpo", "rloo") and not has_groups else name


def _dual_clip(tree: Composed, code: TrainerCode) -> Any:
    """Return the bound for negative advantages, which verl has since 2025-04-02."""
    has_bound = not code.actor or re.search("clip_ratio_c|cliprange_c", code.actor)
    return tree.get(f"{ACTOR}.clip_ratio_c", 3.0) if has_bound else None


def _aggregation(tree: Composed, code: TrainerCode) -> Any:
    """Return over what the loss is a mean: until 0.3 over all tokens of a micro-batch."""
    if not code.actor or "loss_agg_mode" in code.actor:
        return tree.get(f"{ACTOR}.loss_agg_mode", "token-mean")
    return "token-mean" if tree.get(f"{ACTOR}.use_token_level_loss", True) else MISSING


def _steps(tree: Composed, code: TrainerCode) -> dict[str, Any]:
    prompts, steps = tree.get("data.train_batch_size"), tree.get("trainer.total_training_steps", None)
    samples = tree.get(f"{ROLLOUT}.n")
    if tree.get("rollout_manager", None) is not None:
        samples = tree.get("rollout_manager.n_trajectory")
    dynamic = tree.get(f"{ACTOR}.use_dynamic_bsz", False)
    devices = tree.get("trainer.nnodes") * tree.get("trainer.n_gpus_per_node")
    return {
        "training.groups_per_step": prompts,
        "training.samples_per_group": samples,
        "training.mini_batches": _mini_batches(tree, code, devices, samples),
        "training.epochs": tree.get(f"{ACTOR}.ppo_epochs"),
        "actor.budget.tokens": tree.get(f"{ACTOR}.ppo_max_token_len_per_gpu") if dynamic else None,
        "steps" if steps else "epochs over the data": steps or tree.get("trainer.total_epochs"),
        "devices": devices,
        "rollout.engine_options.tensor_parallel": tree.get(f"{ROLLOUT}.tensor_model_parallel_size"),
    }


def _mini_batches(tree: Composed, code: TrainerCode, devices: int, samples: Any) -> Any:
    """Return the optimizer steps of a pass over a step's data, from the sizes on one GPU in `fsdp_workers.py` and the
    split of `dp_actor.py`."""
    has_prompts = isinstance(tree.get("data.train_batch_size"), int)
    if samples is MISSING or not has_prompts or tree.get(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        return MISSING
    replicas = devices // tree.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    mini = tree.get(f"{ACTOR}.ppo_mini_batch_size")
    multiplies = not code.workers or re.search(r"ppo_mini_batch_size \*= ", code.workers)
    per_prompt = tree.get(f"{ROLLOUT}.n", 1) if multiplies else 1
    local = tree.get("data.train_batch_size") * samples // replicas
    return -(-local // max(1, mini * per_prompt // replicas))


def ragen_values(config: Any, code: TrainerCode) -> dict[str, Any]:
    """Return what RAGEN's trainer reads: the groups of episodes are those of its environments."""
    tree = Composed(config)
    values = expected(config, code)
    groups, size = (tree.get(f"es_manager.train.{name}") for name in ("env_groups", "group_size"))
    for name in ("rollout.max_prompt_tokens", "rollout.max_response_tokens", "epochs over the data"):
        values.pop(name, None)  # those of prompts from files
    values |= {"training.groups_per_step": groups, "training.samples_per_group": size}
    mini = tree.get(f"{ACTOR}.ppo_mini_batch_size")
    values["training.mini_batches"] = -(-groups * size // mini)
    return {name: value for name, value in values.items() if not is_missing(value)}


def planned(native: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the same of a native configuration."""
    algorithm, placement = native["algorithm"], native["placement"]
    kl, loss = algorithm.get("kl") or {}, algorithm["loss"]
    coefficients = {kl.get("apply_to"): kl.get("coefficient")}
    derived = {
        "kl in the rewards": (algorithm.get("reward_kl") or {}).get("coefficient", coefficients.get("reward")),
        "kl in the loss": coefficients.get("loss"),
        "kl estimator": kl.get("estimator"),
        "clip": [loss.get("clip_low"), loss.get("clip_high")],
        "sequences of a step": native["training"]["groups_per_step"] * native["training"]["samples_per_group"],
        "devices": placement["nodes"] * placement["devices_per_node"],
        "steps": (native.get("data") or {}).get("max_steps") or native["training"]["steps"],
        "epochs over the data": (native.get("data") or {}).get("epochs"),
    }
    return {name: derived[name] if name in derived else _select(native, name) for name in names}


def _select(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, numbers up to rounding."""
    if isinstance(one, Sequence) and not isinstance(one, str):
        return isinstance(other, Sequence) and len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)
