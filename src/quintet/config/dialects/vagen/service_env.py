"""Conversion of one environment as VAGEN's clients of an environment service name it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import to_foreign_value
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.vagen.dialect import ENVS_WITH_KEYS
from quintet.config.dialects.vagen.env_sections import THINKING_FORMATS, env_specs, section_values
from quintet.config.dialects.vagen.svg_env import svg_from_native
from quintet.config.dotted import flatten
from quintet.config.native.envs import InteractiveEnvSection, SvgConfig
from quintet.config.native.rollout import RolloutConfig
from quintet.config.native.state_reward import SECTIONS
from quintet.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class VagenResponses:
    """Parsing of responses by an environment of VAGEN."""

    think: bool
    """Thoughts precede the actions."""
    thoughts: str | None
    """Required sections of the thoughts, as `rollout.thoughts`."""
    separator: str
    max_actions: int
    """Maximum number of actions executed per response."""
    format_reward: float
    """Added to the reward of a response in the right format with valid actions."""
    state_reward: Mapping[str, float] | None
    """Weights of the scores of descriptions of states by kind, `grounding` and `worldmodeling`."""
    ignore_case: bool = False
    """Whether actions may be written in any case."""
    form: str = "whole"
    """Required form of a response, as `rollout.response_format`."""
    format_penalty: float = 0.0
    """Added to the reward of every other response."""


def env_from_vagen(name: str, env_config: Mapping[str, Any]) -> tuple[dict[str, Any], VagenResponses]:
    """Return the native configuration of an environment, and how it parses responses.

    Raises:
        ConfigError: an option is unknown, invalid or not supported.
    """
    if name not in ENVS_WITH_KEYS:
        message = f"env_name {name!r:.100} is not supported"
        raise ConfigError(message, key="env_name", value=name, hint=f"use {' or '.join(ENVS_WITH_KEYS)}")
    specs = {option: spec for option, spec in env_specs(name).items() if option.startswith("env_config.")}
    values = {option: spec.default for option, spec in env_specs(name).items()} | {"env_name": name}
    for key, value in flatten(env_config).items():
        values[f"env_config.{key}"] = _checked(f"env_config.{key}", value, specs)
    settings = {key: value for key, value, *_ in section_values(values.__getitem__, str)}
    env = {key.removeprefix("env."): value for key, value in settings.items() if key.startswith("env.")}
    weights = {kind: float(values[f"env_config.{kind}_reward_weight"]) for kind in SECTIONS}
    responses = VagenResponses(
        think=settings["rollout.think"],
        thoughts=settings["rollout.thoughts"],
        separator=values["env_config.action_sep"],
        max_actions=values["env_config.max_actions_per_step"],
        format_reward=float(values["env_config.format_reward"]),
        state_reward=weights if values["env_config.use_state_reward"] else None,
        ignore_case=settings["rollout.ignore_case"],
        form=settings["rollout.response_format"],
        format_penalty=settings["rollout.format_penalty"],
    )
    return {"name": name} | env, responses


def _checked(option: str, value: Any, specs: Mapping[str, KeySpec]) -> Any:
    spec = specs.get(option)
    if spec is None:
        close = nearest(option, specs)
        hint = f"did you mean {close}?" if close else f"valid: {', '.join(specs)}"
        raise ConfigError(f"{option:.100} is unknown", key=option, value=value, hint=hint)
    if not spec.value_type.accepts(value):
        raise ConfigError(f"{option} must be {spec.value_type.description}", key=option, value=value)
    if spec.requires is not None and value not in spec.noop:
        message = f"{option} = {value!r:.100} {spec.requires.refusal()}"
        raise ConfigError(message, key=option, value=value, hint=f"use {' or '.join(map(str, spec.noop))}")
    return value


def env_to_vagen(env: InteractiveEnvSection, rollout: RolloutConfig) -> dict[str, Any]:
    """Return the `env_config` of a native environment whose actions Quintet parses itself.

    Raises:
        ConfigError: VAGEN has no such environment.
    """
    if env.name not in ENVS_WITH_KEYS:
        message = f"VAGEN's protocol has no environment {env.name}"
        raise ConfigError(
            message, key="env.service.protocol", hint=f"use {' or '.join(ENVS_WITH_KEYS)}, or protocol=quintet"
        )
    values: dict[str, Any] = {}
    for option, spec in env_specs(env.name).items():
        if spec.direct and spec.native[0].startswith("env."):
            values[option.removeprefix("env_config.")] = to_foreign_value(
                spec, getattr(env, spec.native[0].removeprefix("env."))
            )
    if env.name == "sokoban":
        values["dim_room"] = [getattr(env, side) for side in ("height", "width")]
    if isinstance(env, SvgConfig):
        values |= {option.removeprefix("env_config."): value for option, value in svg_from_native(env)}
    return values | {
        "prompt_format": THINKING_FORMATS[0] if rollout.think else THINKING_FORMATS[1],
        "action_sep": rollout.action_separator,
        "max_actions_per_step": rollout.max_actions_per_turn,
        "format_reward": 0.0,
    }
