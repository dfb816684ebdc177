"""Build action policies from configurations and directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quintet.config.native.envs import EnvSection, SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.envs.simulators.registry import build_simulator
from quintet.errors import ConfigError, MachineError, did_you_mean
from quintet.loading_lock import LOADING_LOCK
from quintet.policies.attention_backends import EAGER
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_tokenizer
from quintet.policies.vla.action_normalization import check_action_statistics
from quintet.policies.vla.action_presets import MlpPreset, get_action_preset
from quintet.policies.vla.mlp_policy import MlpPolicy
from quintet.policies.vla.openvla import OpenVlaPolicy
from quintet.policies.vla.openvla_base import PREPROCESSOR_FILE, RESIZE_STRATEGY, OpenVlaBase
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.openvla_oft import OpenVlaOftPolicy
from quintet.policies.vla.policy_directory import read_json, read_statistics
from quintet.policies.vla.policy_settings import apply_settings, run_settings
from quintet.policies.vla.preset_policies import RobotSpec, build_preset
from quintet.policies.vla.vision_tower import TIMM_SHAPES
from quintet.seeds import derive_seed

KINDS: Mapping[str, type[PreTrainedModel]] = {
    "openvla": OpenVlaPolicy,
    "openvla_oft": OpenVlaOftPolicy,
    "mlp": MlpPolicy,
    "mlp_policy": MlpPolicy,
}
"""Class of each `policy.kind`."""
SAMPLED_ROBOTS = 32
"""Robots whose instructions a preset's tokenizer is trained on."""
TRAINED_PARTS = ("value_head.", "action_head.log_std")
"""Beginnings of the names of parameters that are trained beside adapters."""


def create_action_preset(directory: Path, config: Experiment, seed: int) -> None:
    """Create the policy of `policy.preset` with random weights for the robot of `env`, and save it.

    Raises:
        ConfigError: the preset is unknown, or the simulator cannot be built.
    """
    _build_preset(config, seed).save_pretrained(directory)


def _build_preset(config: Experiment, seed: int) -> PreTrainedModel:
    preset = get_action_preset(config.policy)
    robot = _robot_spec(config.env, seed)
    settings = run_settings(config, is_mlp=isinstance(preset, MlpPreset))
    return build_preset(preset, robot, settings, seed, is_autoregressive=config.policy.kind == "openvla")


def _robot_spec(env: EnvSection, seed: int) -> RobotSpec:
    if not isinstance(env, SimulatorConfig):
        raise TypeError(f"{env.name} is not a simulator")
    with ExitStack() as resources:
        simulator = build_simulator(env, SAMPLED_ROBOTS, seed)
        resources.callback(simulator.close)
        robots = np.arange(SAMPLED_ROBOTS)
        simulator.reset(
            robots, robots * max(1, simulator.num_start_states // SAMPLED_ROBOTS) % simulator.num_start_states
        )
        observation = simulator.observe(robots)
        return RobotSpec(simulator.action_dim, observation.state.shape[1], observation.instructions)


def load_action_policy(directory: Path, config: Experiment) -> PreTrainedModel:
    """Load an action policy in float32: a directory that `save_pretrained` wrote, or a published one.

    Settings of `policy.vla` that the configuration names replace those of the directory. New heads are initialized.

    Raises:
        ConfigError: `policy.kind` does not fit the directory, or a setting does not fit the policy.
        MachineError: the directory cannot be read.
    """
    stored = read_json(directory / "config.json")
    kind = _policy_class(directory, stored, config)
    model_config = _load_config(directory, kind, stored, config)
    policy = _load_weights(directory, kind, model_config, derive_seed(config.seed, "policy", "heads"))
    if isinstance(policy, OpenVlaBase):
        with _quiet_loading():
            tokenizer = load_tokenizer(config.policy.tokenizer or directory)
        extra = 0 if config.policy.vla is None else config.policy.vla.extra_vocabulary
        tokenizer.add_tokens([f"<extra_{number}>" for number in range(extra)])
        policy.set_tokenizer(tokenizer)
    return prepare_for_training(policy, config)


def prepare_for_training(policy: PreTrainedModel, config: Experiment) -> PreTrainedModel:
    """Insert adapters, and set what is trained. The value head has no adapters: it starts untrained."""
    policy.eval()
    if config.policy.lora is not None:
        add_lora(policy, config.policy.lora, seed=derive_seed(config.seed, "lora"))
        for name, parameter in policy.named_parameters():
            if name.startswith(TRAINED_PARTS):
                parameter.requires_grad_(requires_grad=True)
    if isinstance(policy, OpenVlaBase):
        policy.freeze_unused()
        if config.policy.vision.freeze:
            policy.vision_backbone.requires_grad_(requires_grad=False)
        if config.policy.attention == EAGER:
            policy.language_model.set_attn_implementation(EAGER)
    return policy


def _policy_class(directory: Path, stored: Mapping[str, Any], config: Experiment) -> type[PreTrainedModel]:
    """Return the class of the policy: of `policy.kind`, or the one that wrote the directory."""
    kind, model_type = config.policy.kind, stored.get("model_type")
    if kind is not None and kind not in KINDS:
        raise ConfigError(
            f"policy.kind = {kind!r} is not a policy of robots that this version has",
            key="policy.kind",
            value=kind,
            hint=f"{did_you_mean(kind, KINDS)} known: {', '.join(sorted(KINDS))}".lstrip(),
        )
    written_by = [each for each in KINDS.values() if each.__name__ in (stored.get("architectures") or ())]
    candidates = [KINDS[kind]] if kind else written_by
    for candidate in candidates:
        if candidate.config_class.model_type == model_type:
            return candidate
    matching = sorted(name for name, each in KINDS.items() if each.config_class.model_type == model_type)
    message = f"{directory / 'config.json'} has model_type {model_type!r}"
    if not matching:
        raise MachineError(f"{message}, which is no policy of robots", "use a directory of OpenVLA-OFT or OpenVLA")
    reason = "to which policy.kind does not belong" if kind else "which several kinds of policies have"
    raise ConfigError(
        f"{message}, {reason}", key="policy.kind", value=kind, hint=f"set policy.kind to one of {', '.join(matching)}"
    )


def _load_config(
    directory: Path, kind: type[PreTrainedModel], stored: Mapping[str, Any], config: Experiment
) -> PreTrainedConfig:
    try:
        model_config: PreTrainedConfig = kind.config_class.from_pretrained(directory, local_files_only=True)
    except KeyError as error:
        message = f"{directory / 'config.json'} names the vision tower {error}, which this version does not have"
        raise MachineError(message, f"use a policy with {' and '.join(TIMM_SHAPES)}") from error
    if isinstance(model_config, OpenVlaConfig):
        model_config.norm_stats = read_statistics(directory, stored) or None
    if (directory / PREPROCESSOR_FILE).is_file():
        colors = read_json(directory / PREPROCESSOR_FILE)
        model_config.image_means, model_config.image_stds = colors["means"], colors["stds"]
        strategy = colors.get("image_resize_strategy", RESIZE_STRATEGY)
        if strategy != RESIZE_STRATEGY:
            message = f"{directory / PREPROCESSOR_FILE} has image_resize_strategy {strategy!r}, which is not supported"
            raise MachineError(message, f"use a policy that was trained with {RESIZE_STRATEGY}")
    is_published = kind.__name__ not in (stored.get("architectures") or ())
    apply_settings(model_config, config, is_mlp=kind is MlpPolicy, is_published=is_published)
    if isinstance(model_config, OpenVlaConfig):
        check_action_statistics(model_config.norm_stats, model_config.unnorm_key, model_config.action_dim)
    return model_config


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Suppress transformers' warnings of heads that are initialized, and of its own lack of the model type."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_weights(directory: Path, kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    try:
        with LOADING_LOCK, torch.random.fork_rng(devices=[]), _quiet_loading():
            torch.manual_seed(seed)
            policy, report = kind.from_pretrained(
                directory, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        hint = "copy the files of the policy again"
        raise MachineError(f"cannot load an action policy from {directory}: {error}", hint) from error
    missing = load_separate_parts(policy, directory, set(report["missing_keys"]))
    if missing:
        raise MachineError(
            f"{directory} lacks {len(missing)} weights of {kind.__name__}, such as {min(missing)}",
            "use the directory of a policy of this kind, or another policy.kind",
        )
    return policy


PARTS = {"proprio_projector": "proprio_projector--*.pt", "action_head": "action_head--*.pt"}
"""Pattern of the file by the name of the module."""
INITIALIZED = ("value_head.", "slot_embeddings", "action_head.log_std")
"""Weights that published policies do not have; they are initialized."""


def load_separate_parts(policy: nn.Module, directory: Path, missing: set[str]) -> set[str]:
    """Load the parts among the `missing` weights from their files, and return the weights that are still missing.

    Raises:
        MachineError: a file cannot be read, or its weights do not fit.
    """
    for part, pattern in PARTS.items():
        names = {name for name in missing if name.startswith(f"{part}.")}
        files = sorted(directory.glob(pattern))
        if names and files:
            _load_part(policy.get_submodule(part), files[-1])
            missing = missing - names
    return {name for name in missing if not name.startswith(INITIALIZED) and not _is_new_bias(name)}


def _is_new_bias(name: str) -> bool:
    """Return whether a weight is a bias that `policy.vla` adds to the language model."""
    return name.startswith("language_model.") and name.endswith(".bias")


def _load_part(module: nn.Module, path: Path) -> None:
    try:
        weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        result = module.load_state_dict(
            {name.removeprefix("module."): tensor for name, tensor in weights.items()}, strict=False
        )
    except Exception as error:
        raise MachineError(f"cannot load {path}: {error}", "use the file of the published policy") from error
    if wrong := [*result.unexpected_keys, *(name for name in result.missing_keys if name != "log_std")]:
        raise MachineError(f"{path} does not fit the policy: {wrong[0]}", "use the file of the published policy")
