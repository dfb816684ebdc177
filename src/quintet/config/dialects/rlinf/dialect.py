"""The configuration format of RLinf: runs on text, runs on simulators, and files of one simulator."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quintet.config.dialects.dialect import Dialect, Reference, key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.rlinf.key_values import COMPONENTS
from quintet.config.dotted import get_value

_ENV_FILE_CONTEXT = {
    "algorithm": {"auto_reset": False, "ignore_terminations": False, "group_size": 1},
    "runner": {"logger": {"log_path": "logs"}},
}
"""Values of the run to which a simulator's own file refers."""
_VALIDATION_KEYS = {
    "env": "validation.simulator",
    "tracking.video": "tracking.validation_video",
    "training.groups_per_step": "validation.episodes",
    "training.samples_per_group": "validation.sampling.samples",
}
"""Native keys of `env.eval` by those of `env.train`."""


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    basic, math, embodied, env = dialect.references
    if "runner" not in tree and "actor" not in tree and "env_type" in tree:
        return replace(dialect, references=(env,), shared_sections={}, name_lists={}, context=_ENV_FILE_CONTEXT)
    if str(get_value(tree, "runner.task_type")).startswith("embodied") or "env" in tree:
        backend = math.filtered(lambda spec: spec.key.startswith("actor.fsdp_config."))
        envs = Reference(
            env.name, lambda: tuple(_in_env(spec, side) for side in ("train", "eval") for spec in env.load())
        )
        task = {"default": "embodied"}
        shared = basic.mapped(lambda spec: spec.model_copy(update=task) if spec.key == "runner.task_type" else spec)
        references = (embodied, shared, envs, backend)
        undocumented = frozenset(["algorithm.auto_reset", "algorithm.ignore_terminations"])
        return replace(dialect, references=references, shared_sections={}, undocumented=undocumented)
    engine = embodied.filtered(lambda spec: spec.key.startswith("rollout.backend"))
    return replace(dialect, references=(math, basic, engine, *key_files("rlinf", ["rlinf_newer"])), shared_sections={})


def _in_env(spec: KeySpec, side: str) -> KeySpec:
    """Return a key of a simulator's own file as a key of a run's section `env.train` or `env.eval`."""
    section = f"env.{side}"
    native = spec.native if side == "train" else tuple(map(_validation_key, spec.native))
    return spec.model_copy(
        update={
            "key": f"{section}.{spec.key}",
            "native": native,
            "aliases": tuple(f"{section}.{alias}" for alias in spec.aliases),
            "only_if": spec.only_if and (f"{section}.{spec.only_if[0]}", spec.only_if[1]),
        }
    )


def _validation_key(key: str) -> str:
    training = next(name for name in _VALIDATION_KEYS if key == name or key.startswith(f"{name}."))
    return _VALIDATION_KEYS[training] + key.removeprefix(training)


RLINF = Dialect(
    "rlinf",
    key_files("rlinf", ["rlinf_basic", "rlinf_math", "rlinf_embodied", "rlinf_env"]),
    marks=("cluster", "runner", "env_type", "actor.group_name"),
    shared_sections={"env.train": "", "env.eval": ""},
    name_lists={"cluster.component_placement": tuple(COMPONENTS)},
    programs=r"train_embodied_agent|train_async|main_grpo",
    narrow=_narrow,
)
