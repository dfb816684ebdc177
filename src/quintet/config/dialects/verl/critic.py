"""verl's critic: documented by the actor's keys, with defaults of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.conversion import Native, Values, foreign_word, native_word
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.verl.batches import ACTOR, MODEL
from quintet.config.faults import Fault
from quintet.config.native import CriticConfig

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["critic", "critic_defaults", "critic_faults", "express_critic"]

OWN = {f"{ACTOR}.optim.lr": 1e-5}
"""What verl's critic has otherwise than its actor where nothing is said."""
PLACES = {"critic.model.fsdp_config": f"{ACTOR}.fsdp_config", "critic.model": MODEL, "critic": ACTOR}
"""Sections of the critic, the longest first, and those whose keys they take."""
APART = (
    *("optim.", "fsdp_config.", "model.fsdp_config.", "grad_clip", "strategy", "use_torch_compile"),
    *("ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size"),
    *("model.path", "model.enable_", "model.use_remove_padding"),
)
"""Beginnings of the keys in which critic and actor may differ."""


def critic_defaults(values: Values, native: Native) -> None:
    """The critic's optimizer and constants where nobody says anything of them."""
    native.put("critic.value_clip", 0.5)
    native.put("critic.optimizer.betas", [0.9, 0.999])
    native.put("critic.optimizer.weight_decay", 0.01)
    for row in _optimizer_rows(values.dialect.rows()):
        native.put(_ours(row), native_word(row, OWN.get(row.key, row.default)))


def _optimizer_rows(rows: Mapping[str, Row]) -> Iterator[Row]:
    for row in rows.values():
        if row.direct and row.key.startswith(f"{ACTOR}.") and row.native[0].startswith("actor.optimizer."):
            yield row


def _ours(row: Row) -> str:
    """The critic's native key in place of the actor's."""
    return "critic." + row.native[0].removeprefix("actor.")


def critic(values: Values, native: Native) -> None:
    """The critic's keys that somebody gave, over what it shares with the actor."""
    rows = [row for row in values.dialect.rows().values() if not row.native[:1] or "actor.shuffle" not in row.native[0]]
    for here, there in reversed(PLACES.items()):
        native.take_given(rows, here, there, {"actor": "critic"})
    together = "critic.ulysses_sequence_parallel_size"
    together = together if values[together] else f"{ACTOR}.ulysses_sequence_parallel_size"
    native.put("critic.parallel.ulysses", values[together], together)
    strategy = "critic.strategy" if values["critic.strategy"] else f"{ACTOR}.strategy"
    native.put("critic.backend", values[strategy], strategy)
    padding = "critic.model.use_remove_padding"
    native.put("critic.memory.remove_padding", bool(values[padding]), padding)
    path = "critic.model.path"
    if values.given(path) and values[path] != values[f"{MODEL}.path"]:
        native.put("critic.path", values[path], path)
    checkpointing = "critic.model.enable_gradient_checkpointing"
    differs = values.given(checkpointing) and values[checkpointing] != values[f"{MODEL}.enable_gradient_checkpointing"]
    native.put("critic.gradient_checkpointing", values[checkpointing] if differs else None, checkpointing)


def critic_faults(values: Values) -> Iterator[Fault]:
    """What the critic can't have otherwise than the actor, and what it needs by itself."""
    rows = values.dialect.rows()
    for key in values.written.sources:
        twin = _twin(key)
        if twin is None or key in rows or twin not in rows or key.removeprefix("critic.").startswith(APART):
            continue
        if values[key] != values[twin]:
            problem = f"critic and policy have it together, and {values.told(twin)}"
            yield values.fault(key, problem, f"leave {key} out, or give both the same value")
    strategy = values["critic.strategy"]
    if strategy and ("megatron" in (strategy, values[f"{ACTOR}.strategy"])) and strategy != values[f"{ACTOR}.strategy"]:
        problem = f"must be the policy's where one of them is megatron: {values.told(f'{ACTOR}.strategy')}"
        yield values.fault("critic.strategy", problem, "leave it out")
    steps = "critic.optim.total_training_steps"
    if (values[steps] or -1) > 0 and values[steps] != values[f"{ACTOR}.optim.total_training_steps"]:
        yield values.fault(steps, "critic and policy take the same steps", f"leave {steps} out")
    together, padding = "critic.ulysses_sequence_parallel_size", "critic.model.use_remove_padding"
    if (values[together] or 1) > 1 and not values[padding]:
        yield values.fault(together, f"needs {padding}", f"set {padding}=true")


def _twin(key: str) -> str | None:
    """The actor's key that a critic's stands for."""
    for here, there in PLACES.items():
        if key.startswith(f"{here}."):
            return there + key.removeprefix(here)
    return None


def express_critic(foreign: Foreign, rows: Mapping[str, Row]) -> None:
    """What the critic has otherwise than verl's critic would by itself."""
    learner = foreign.experiment.critic
    plain = CriticConfig()
    optimizer = {row.key for row in _optimizer_rows(rows)}
    for row in rows.values():
        if not row.direct or not row.native[0].startswith("actor.") or not row.key.startswith("actor_rollout_ref."):
            continue
        ours = _ours(row)
        said = row.key in optimizer
        usual = native_word(row, OWN.get(row.key, row.default)) if said else _inside(plain, ours)
        value = foreign.native(ours)
        if _has(plain, ours) and ours != "critic.gradient_checkpointing" and value != usual:
            word = foreign_word(row, value)
            if row.takes.accepts(word):
                foreign.put(_theirs(row.key), word)
    if learner.backend != foreign.experiment.actor.backend:
        foreign.put("critic.strategy", learner.backend)
    padding = "critic.model.use_remove_padding"
    if learner.memory.remove_padding or padding in rows:
        foreign.put(padding, learner.memory.remove_padding)
    if learner.path is not None:
        foreign.put("critic.model.path", learner.path)
    if learner.gradient_checkpointing is not None:
        foreign.put("critic.model.enable_gradient_checkpointing", learner.gradient_checkpointing)


def _theirs(key: str) -> str:
    """The critic's key that takes an actor's."""
    here, there = next((here, there) for here, there in PLACES.items() if key.startswith(f"{there}."))
    return here + key.removeprefix(there)


def _has(section: CriticConfig, native: str) -> bool:
    return _inside(section, native, missing=_has) is not _has


def _inside(section: CriticConfig, native: str, missing: Any = None) -> Any:
    place: Any = section
    for part in native.split(".")[1:]:
        place = getattr(place, part, missing)
        if place is missing:
            return missing
    return place
