"""Kinds of ROLL's runs that this version lacks."""

from collections.abc import Mapping

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.roll.kinds import Kind
from quintet.errors import ConfigError, UnsupportedRunError

MISSING: Mapping[Kind, Capability] = {
    Kind.DPO: Capability.PREFERENCES,
    Kind.REWARD_FLOW: Capability.DIFFUSION,
    Kind.ON_POLICY_DISTILLATION: Capability.ON_POLICY_DISTILLATION,
}


def refuse_unsupported_run(kind: Kind, values: ForeignValues) -> None:
    """Raise unless this version has such runs.

    Raises:
        UnsupportedRunError: it lacks them.
        ConfigError: the file only has definitions for other files.
    """
    source = next(iter(values.merged.sources.values()), "").rpartition(":")[0]
    if kind is Kind.ENVIRONMENTS:
        message = (
            f"{source} defines environments, or settings of DeepSpeed, for other files, and has no settings of a run"
        )
        raise ConfigError(message, hint="give the file that includes it by `defaults:`")
    if kind in MISSING:
        message = f"{source}: a run of ROLL's {kind} {MISSING[kind].refusal()}"
        raise UnsupportedRunError(message, source=source)
