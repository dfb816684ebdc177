"""Sizes of small action policies, which are created for a run in a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from quintet.config.native.policy import PolicyConfig, VlaConfig
from quintet.errors import ConfigError, did_you_mean

KEY = "policy.preset"
MLP_KINDS, OPENVLA_KINDS = ("mlp", "mlp_policy"), ("openvla_oft", "openvla")
"""Kinds of policies, names of `policy.kind`."""


@dataclass(frozen=True, slots=True)
class VlaPreset:
    """Sizes of an OpenVLA-OFT policy with one vision tower. `policy.overrides` replaces them by name."""

    hidden: int = 64
    """Hidden size of the language model."""
    layers: int = 2
    heads: int = 4
    mlp: int = 176
    rope_theta: float = 100.0
    initializer_range: float = 0.08
    """Standard deviation of the initial weights of the language model."""
    vision_hidden: int = 64
    vision_depth: int = 1
    vision_heads: int = 4
    vision_mlp: int = 128
    patch: int = 16
    """Pixels per side of a patch."""
    merge: int = 1
    """Patches per side that become one token."""
    image: int = 32
    """Height and width of the input image, pixels."""
    image_mean: float = 0.9
    """Brightness, 0 to 1, that becomes 0: that of an empty table, so that objects stand out."""
    image_std: float = 0.25
    film: bool = True
    """Scale and shift image features depending on the instruction, without which small policies seldom learn to heed
    it."""
    bins: int = 21
    """Action bins per dimension."""
    action_range: float = 1.0
    """Largest absolute action of the robot that a bin represents."""
    action_chunk: int = 4
    qkv_bias: bool = False
    linear_bias: bool = False
    prompt_tokens: int = 12
    """Tokens of an instruction, to which shorter ones are padded."""

    @property
    def help(self) -> str:
        """Description in one line."""
        return f"sees {self.image}x{self.image} pixels, {self.layers} layers, hidden {self.hidden}, {self.bins} bins"


@dataclass(frozen=True, slots=True)
class MlpPreset:
    """Sizes of an MLP policy. `policy.overrides` replaces them by name."""

    hidden: int = 256
    action_chunk: int = 1

    @property
    def help(self) -> str:
        """Description in one line."""
        return f"reads the state, 3 layers, hidden {self.hidden}"


ActionPreset = VlaPreset | MlpPreset
ACTION_PRESETS: Mapping[str, ActionPreset] = {"arm-vla": VlaPreset(), "state-mlp": MlpPreset()}


def get_action_preset(policy: PolicyConfig) -> ActionPreset:
    """Return the preset of a policy with its sizes.

    Raises:
        ConfigError: unknown preset or size, or a preset of another kind; the hint names the valid ones.
    """
    preset = ACTION_PRESETS.get(policy.preset or "")
    kinds = MLP_KINDS if isinstance(preset, MlpPreset) else OPENVLA_KINDS
    if preset is None or policy.kind not in (None, *kinds):
        reason = "is not a policy of robots" if preset is None else f"is not of policy.kind = {policy.kind!r}"
        valid = " or ".join(f"policy.preset={name}" for name in ACTION_PRESETS)
        hint = f"set {valid}, or policy.path to a directory"
        raise ConfigError(f"{KEY} = {policy.preset!r} {reason}", key=KEY, value=policy.preset, hint=hint)
    overrides = _explicit_sizes(policy.vla, is_mlp=isinstance(preset, MlpPreset)) | policy.overrides
    sizes = [field.name for field in fields(preset)]
    for name in overrides:
        if name not in sizes:
            hint = did_you_mean(name, sizes, "policy.overrides.{}") or f"valid sizes: {', '.join(sizes)}"
            message = f"policy.overrides.{name}: the preset {policy.preset} has no such size"
            raise ConfigError(message, key="policy.overrides", hint=hint)
    return replace(preset, **overrides)


def _explicit_sizes(vla: VlaConfig | None, *, is_mlp: bool) -> dict[str, Any]:
    """Return the sizes of a preset that `policy.vla` sets.

    Raises:
        ConfigError: the preset cannot have one of them.
    """
    explicit = {} if vla is None else {field: getattr(vla, field) for field in vla.model_fields_set}
    # an MLP reads the state: it has neither words nor images, whatever a framework's defaults say
    if explicit.get("vocabulary") is not None and not is_mlp:
        raise _unsupported(explicit, "vocabulary", "that of a preset follows from its instructions", "null")
    height, width = explicit.get("image_size", (0, 0))
    if height != width and not is_mlp:
        raise _unsupported(explicit, "image_size", "a preset takes square images", f"[{height}, {height}]")
    fields_set = {"hidden_size": "hidden"} | ({} if is_mlp else {"qkv_bias": "qkv_bias", "linear_bias": "linear_bias"})
    sizes = {size: explicit[field] for field, size in fields_set.items() if explicit.get(field) is not None}
    return sizes | ({"image": height} if height and not is_mlp else {})


def _unsupported(explicit: Mapping[str, Any], field: str, reason: str, valid: str) -> ConfigError:
    key, value = f"policy.vla.{field}", explicit[field]
    shown = list(value) if isinstance(value, tuple) else value
    return ConfigError(f"{key} = {shown}: {reason}", key=key, value=value, hint=f"set {key}={valid}")
