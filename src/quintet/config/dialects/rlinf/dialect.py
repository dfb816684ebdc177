"""The configuration format of RLinf: runs on text, runs on simulators, and files of one simulator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Dialect, Reference, key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.rlinf.critic_keys import critic_reference
from quintet.config.dialects.rlinf.earlier import newer_values
from quintet.config.dialects.rlinf.key_values import COMPONENTS, TABLES, VALUE_TYPES
from quintet.config.dialects.value_types import TEXT, one_of
from quintet.config.dotted import get_value

INHERITED = ("auto_reset", "ignore_terminations", "reward_coef")
"""Keys of `env.train` and `env.eval` that older files have in the section `algorithm`."""
_OLDER = {"env.eval.rollout_epoch": ("algorithm.eval_rollout_epoch",)}
"""Names of keys of `env.train` and `env.eval` in older releases, in other sections."""
_AGENT_TASKS, DATA_TYPE = ("coding_online_rl",), "data.type"
_AGENT_DATA = ("wideseek_r1", "rstar2")
_TASKS = ("math", "reasoning", "reasoning_eval")
_PLACED = "cluster.component_placement"
CHECKPOINT_ALIAS = "actor.checkpoint_load_path"
"""In runs on text the former name of Megatron's checkpoint, in others that of the policy's directory."""
SHARDING_ALIAS = "actor.model.sharding_strategy"
"""In runs on simulators the former name of the sharding strategy; runs on text never read it."""
_ATTENTION = {"vllm": "FLASH_ATTN", "sglang": "triton"}
"""RLinf's default attention backend by engine, each of which has a section of its own for it."""
_CODE_DEFAULTS = {
    kind: {key: {"default": value} for key, value in defaults.items()}
    for kind, defaults in TABLES["code_defaults"].items()
}
"""Changes of keys to the defaults of RLinf's code, by kind of run."""
_NAMES = ("hydra.", "runner.logger.", "runner.experiment_name", "runner.output_dir", "runner.task_type", _PLACED)
"""Beginnings of keys of supervised runs that are documented; the others wait with the task."""


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    basic, math, embodied, env = dialect.references
    task = str(get_value(tree, "runner.task_type"))
    if task == "sft":
        names = basic.filtered(lambda spec: spec.key.startswith(_NAMES))
        waits = {"requires": Capability.RLINF_SFT, "noop": (), "native": ()}
        waiting = {spec.key: waits for spec in names.load() if spec.key.startswith(("runner.task_type", _PLACED))}
        return replace(dialect, references=(_changed(names, waiting),), shared_sections={})
    if "runner" not in tree and "actor" not in tree and "env_type" in tree:
        references = (env, *key_files("rlinf", ["rlinf_env_newer", "rlinf_env_earlier"]))
        return replace(
            dialect, references=references, shared_sections={}, name_lists={}, context=TABLES["env_file_context"]
        )
    if task.startswith("embodied") or "env" in tree:
        backend = math.filtered(lambda spec: spec.key.startswith("actor.fsdp_config."))
        sharding = {"actor.fsdp_config.sharding_strategy": {"aliases": (SHARDING_ALIAS,)}}
        backend = _changed(backend, sharding)
        newer = key_files("rlinf", ["rlinf_embodied_newer", "rlinf_env_newer", "rlinf_newer"])
        env_earlier, *earlier = key_files("rlinf", ["rlinf_env_earlier", "rlinf_earlier", "rlinf_embodied_earlier"])
        algorithm_newer = key_files("rlinf", ["rlinf_embodied_algorithm"])
        envs = (Reference(each.name, partial(_env_specs, each)) for each in (env, newer[1], env_earlier))
        shared_newer = newer[2].filtered(lambda spec: spec.key in TABLES["shared_newer_keys"])
        changes: dict[str, dict[str, Any]] = {
            "runner.task_type": {"default": "embodied"},
            "algorithm.loss_type": {
                "requires": Capability.ROBOT_ALGORITHMS,
                "noop": ("ppo", "actor", "actor_critic", "decoupled_actor_critic"),
            },
            "algorithm.adv_type": {
                "requires": Capability.ROBOT_ALGORITHMS,
                "noop": ("grpo", "gae", "raw", "reinpp", "reinpp_baseline"),
            },
            "reward.use_reward_model": {"requires": Capability.ROBOT_REWARDS, "noop": (False,)},
            "rollout.model.model_path": {"value_type": VALUE_TYPES["path_or_empty"]},
        }
        shared = _changed(basic, changes)
        references = (embodied, *algorithm_newer, newer[0], shared, *envs, shared_newer, backend, *earlier)
        references = tuple(_changed(reference, _CODE_DEFAULTS["robots"]) for reference in references)
        undocumented = frozenset(f"algorithm.{name}" for name in INHERITED)
        return replace(dialect, references=references, shared_sections={}, undocumented=undocumented)
    return _text_dialect(dialect, task, tree)


def _text_dialect(dialect: Dialect, task: str, tree: Mapping[str, Any]) -> Dialect:
    """Return the dialect of runs on text; of agents, the data and the task wait."""
    basic, math, embodied, _ = dialect.references
    types = [spec.value_type for spec in math.load() if spec.key == DATA_TYPE]
    kinds = tuple(types[0].choices)
    agents = {"requires": Capability.RLINF_AGENTS}
    data = {**agents, "noop": kinds, "value_type": one_of(*kinds, *_AGENT_DATA)}
    changes: dict[str, dict[str, Any]] = {"actor.model.megatron_checkpoint": {"aliases": (CHECKPOINT_ALIAS,)}}
    if task in _AGENT_TASKS:
        changes["runner.task_type"] = {**agents, "noop": _TASKS}
    engine = embodied.filtered(lambda spec: spec.key.startswith("rollout.backend"))
    newer = key_files("rlinf", ["rlinf_newer", "rlinf_text", "rlinf_agents", "rlinf_earlier"])
    math_changes: dict[str, dict[str, Any]] = {DATA_TYPE: data}
    if unused := _unused_engine(tree):
        newer += (Reference("other engine", partial(_unused_attention, unused)),)
        used = next(name for name in _ATTENTION if name != unused)
        math_changes["rollout.attention_backend"] = {"aliases": (f"rollout.{used}.attention_backend",)}
    references = (_changed(math, math_changes), _changed(basic, changes), engine, *newer)
    references = tuple(_changed(reference, _CODE_DEFAULTS["text"]) for reference in references)
    return replace(dialect, references=(*references, critic_reference((math, basic, newer[1]))), shared_sections={})


def _unused_engine(tree: Mapping[str, Any]) -> str | None:
    """Return which of the two engines a run does not use; None if it names neither."""
    names = (get_value(tree, f"rollout.{key}") for key in ("rollout_backend", "generation_backend", "backend"))
    engine = next((name for name in names if name is not None), None)
    return next((name for name in _ATTENTION if name != engine), None) if engine in _ATTENTION else None


def _unused_attention(engine: str) -> tuple[KeySpec, ...]:
    key, effect = f"rollout.{engine}.attention_backend", f"Attention backend of {engine}."
    condition = ("rollout.backend", engine)
    return (KeySpec(key=key, effect=effect, value_type=TEXT, default=_ATTENTION[engine], only_if=condition),)


def _changed(reference: Reference, changes: Mapping[str, Mapping[str, Any]]) -> Reference:
    """Return a reference with other fields of some keys."""
    return reference.mapped(lambda spec: spec.model_copy(update=changes.get(spec.key)))


def _env_specs(reference: Reference) -> tuple[KeySpec, ...]:
    """Return the keys of a simulator's own file as keys of both sections of a run."""
    specs = [_in_env(spec, side) for side in ("train", "eval") for spec in reference.load()]
    # training has the older key beside its alias
    return tuple(spec for spec in specs if spec.key != "env.train.rollout_epoch")


def _in_env(spec: KeySpec, side: str) -> KeySpec:
    """Return a key of a simulator's own file as a key of a run's section `env.train` or `env.eval`."""
    section = f"env.{side}"
    native = spec.native if side == "train" else tuple(map(_validation_key, spec.native))
    return spec.model_copy(
        update={
            "key": f"{section}.{spec.key}",
            "native": native,
            "aliases": (*(f"{section}.{alias}" for alias in spec.aliases), *_OLDER.get(f"{section}.{spec.key}", ())),
            "only_if": spec.only_if and (f"{section}.{spec.only_if[0]}", spec.only_if[1]),
        }
    )


def _validation_key(key: str) -> str:
    keys = TABLES["validation_keys"]
    training = next(name for name in keys if key == name or key.startswith(f"{name}."))
    return str(keys[training]) + key.removeprefix(training)


_OWNERS: Mapping[str, Sequence[str]] = TABLES["owners"]
"""By the first parts of a key: the keys of the policy, the simulator or the algorithm to which it belongs."""
_ALL_OWNERS = tuple(dict.fromkeys(owner for owners in _OWNERS.values() for owner in owners))


def _waits_for(dialect: Dialect, value: Callable[[str], Any], key: str) -> Capability | None:
    """Return the capability that a key waits for because of the policy, the simulator, the algorithm or the reward
    model to which it belongs; any other key, if the run waits for something, waits with it."""
    if ".data_collection." in key:
        return Capability.ROBOT_RECORDINGS
    owners = next((names for prefix, names in _OWNERS.items() if key.startswith(prefix)), ())
    for owner in (*owners, *_ALL_OWNERS):
        spec = dialect.specs().get(owner)
        if spec is not None and spec.requires is not None and value(owner) not in spec.noop:
            return spec.requires
    return None


RLINF = Dialect(
    "rlinf",
    key_files("rlinf", ["rlinf_basic", "rlinf_math", "rlinf_embodied", "rlinf_env"]),
    name_lists={"cluster.component_placement": tuple(COMPONENTS)},
    newer_values=newer_values,
    narrow=_narrow,
    waits_for=_waits_for,
    **TABLES["dialect"],
)
