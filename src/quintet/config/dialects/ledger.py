"""The ledger: every key that a dialect's reference documents, what it takes and what becomes of it here.

A key is either `honoured`, and a test shows it, or `pending`, and names the capability that it waits
for. There is no third state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.config.dialects.takes import Takes

__all__ = ["Capability", "Row", "by_key", "row"]


class Capability(StrEnum):
    """What a pending key waits for, as it is told to people."""

    CONVERSION = "the conversion of this dialect"
    ALGORITHMS = "KL terms, further advantage estimators, losses and filters"
    REWARDS = "verified rewards and reward models"
    DATA = "prompts from data files"
    SFT = "supervised fine-tuning from a configuration of its own"
    EVALUATION = "evaluation of stored answers"
    LORA = "LoRA adapters"
    ENGINES = "the vLLM and SGLang engines"
    SAMPLING = "further sampling options"
    SHARDING = "sharded learners (FSDP, FSDP2) and their options"
    MEMORY = "offloading and memory options of learners"
    BATCHING = "micro-batches by sequence or token budget over several ranks"
    SCHEDULES = "further optimizers and learning-rate schedules"
    MEGATRON = "the Megatron learner"
    CHECKPOINTS = "checkpoints of sharded learners, chosen contents, other stores"
    CLUSTER = "Ray, several processes and placement on devices"
    LOGGERS = "further loggers and stored pictures"
    VISION = "images in turns and vision-language policies"
    EMBODIED = "vision-language-action policies and simulators"
    WORLDS = "the environment service and further worlds"


@dataclass(frozen=True, slots=True)
class Row:
    """One documented key.

    >>> row("training.max_turns", POSITIVE, 5, "Replies of the policy in one game.",
    ...     native="rollout.max_turns", proof="tests/unit/config/dialects/test_ragen.py::test_turns")
    """

    key: str
    takes: Takes
    default: Any
    """The value that the reference shows; text with `${…}` where it follows another key."""
    effect: str
    """One sentence: what the run does because of it, with the unit where it has one."""
    native: tuple[str, ...] = ()
    """Keys of the native schema that it feeds."""
    pending: Capability | None = None
    noop: tuple[Any, ...] = ()
    """Values of a pending key that ask for nothing which isn't there."""
    proof: str | None = None
    """The test that shows a honoured key at work."""
    aliases: tuple[str, ...] = ()
    """Other spellings that the framework's source takes or took for it."""
    only_if: tuple[str, Any] | None = None
    """`("logging.log_images", True)`: it asks for something only where that key has that value."""

    @property
    def state(self) -> str:
        return "honoured" if self.pending is None else "pending"


def row(
    key: str,
    takes: Takes,
    default: Any,
    effect: str,
    *,
    native: str | Iterable[str] = (),
    pending: Capability | None = None,
    noop: Iterable[Any] = (),
    proof: str | None = None,
    aliases: Iterable[str] = (),
    only_if: tuple[str, Any] | None = None,
) -> Row:
    """A `Row`, written short.

    Raises:
        ValueError: it is neither honoured with a proof nor pending, or its own default is illegal.
    """
    if (proof is None) == (pending is None):
        raise ValueError(f"{key}: a key is honoured, with a proof, or pending, with a capability")
    if not (isinstance(default, str) and "${" in default) and not takes.accepts(default):
        raise ValueError(f"{key}: its default {default!r} is not {takes.words}")
    fields = (native,) if isinstance(native, str) else tuple(native)
    return Row(key, takes, default, effect, fields, pending, tuple(noop), proof, tuple(aliases), only_if)


def by_key(rows: Iterable[Row]) -> Mapping[str, Row]:
    """Rows by their key.

    Raises:
        ValueError: a key is there twice.
    """
    table: dict[str, Row] = {}
    for one in rows:
        if one.key in table:
            raise ValueError(f"{one.key} is twice in the ledger")
        table[one.key] = one
    return table
