"""Settings of a run as fields of an action policy's own configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import VlaConfig
from quintet.config.native.rollout import RolloutConfig
from quintet.errors import ConfigError, did_you_mean
from quintet.package_files import read_yaml
from quintet.policies.vla.robot_actions import robot_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from quintet.policies.vla.openvla_config import OpenVlaConfig

FIELDS: Final = read_yaml(__file__)
"""Fields of a policy's own configuration by those of `policy.vla`."""


def run_settings(config: Experiment, *, is_mlp: bool) -> dict[str, Any]:
    """Return the fields of the policy's configuration that the run sets."""
    vla, settings = config.policy.vla, {}
    for field, name in FIELDS["mlp" if is_mlp else "openvla"].items():
        if vla is not None and field in vla.model_fields_set and getattr(vla, field) is not None:
            settings[name] = getattr(vla, field)
    # a configuration from another process, or of a stored run, has all fields set
    if not is_mlp and config.rollout.max_prompt_tokens != RolloutConfig().max_prompt_tokens:
        settings["max_prompt_length"] = config.rollout.max_prompt_tokens
    if config.needs_critic and config.critic.shares_policy:
        level = "chunk" if vla is None else vla.value_level
        settings |= {"add_value_head": True, "value_type": f"{level}_level"}
    return settings


def apply_settings(model_config: PreTrainedConfig, config: Experiment, *, is_mlp: bool, is_published: bool) -> None:
    """Set what the run sets in the configuration of a directory. Actions of a published policy are those of its data
    set, and are converted to those of the simulator.

    Raises:
        ConfigError: a setting does not fit the policy.
    """
    # those of a preset were applied when it was created
    overrides = {} if config.policy.path is None else config.policy.overrides
    for name, value in overrides.items():
        if not hasattr(model_config, name):
            remove = f"remove policy.overrides.{name}"
            hint = did_you_mean(name, model_config.to_dict(), "policy.overrides.{}") or remove
            message = f"policy.overrides.{name}: the policy's configuration has no such setting"
            raise ConfigError(message, key="policy.overrides", value=value, hint=hint)
        setattr(model_config, name, value)
    for name, value in run_settings(config, is_mlp=is_mlp).items():
        setattr(model_config, name, value)
    if is_mlp:
        return
    vla = config.policy.vla or VlaConfig()
    if is_published and isinstance(config.env, SimulatorConfig):
        robot = robot_settings(config.env.simulator, vla.policy_setup, model_config.action_dim)
        for name, value in robot.items():
            setattr(model_config, name, value)
    for field, name in FIELDS["language_model"].items():
        if field in vla.model_fields_set:
            setattr(model_config.get_text_config(), name, getattr(vla, field))
    _check_sizes(model_config, vla)


def _check_sizes(model_config: OpenVlaConfig, vla: VlaConfig) -> None:
    """Raise if the run names other sizes than those of the stored weights."""
    side = model_config.towers[0].image
    sizes = {
        "hidden_size": model_config.language_size,
        "vocabulary": model_config.first_action_token + model_config.n_action_bins,
        "image_size": (side, side),
    }
    for field, size in sizes.items():
        value = getattr(vla, field)
        if field in vla.model_fields_set and value not in (None, size):
            key, shown = f"policy.vla.{field}", list(size) if isinstance(size, tuple) else size
            shown_value = list(value) if isinstance(value, tuple) else value
            raise ConfigError(
                f"{key} = {shown_value}, but the policy has {shown}", key=key, value=value, hint=f"set {key}={shown}"
            )
