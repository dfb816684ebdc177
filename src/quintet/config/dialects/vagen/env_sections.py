"""Conversion of VAGEN's env_config.yaml: one section per environment, mixed in proportion to their start states."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import (
    ForeignBuilder,
    ForeignValues,
    NativeBuilder,
    to_foreign_value,
    to_native_value,
)
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.vagen.dialect import ENVS_WITH_KEYS, OTHER_ENVS, env_keys
from quintet.config.dialects.vagen.env_rows import SIZES, TEST_FILES, TRAIN_FILES, existing_files
from quintet.config.dialects.vagen.key_values import ENV, TABLES
from quintet.config.dialects.vagen.svg_env import SVG, svg_from_native, svg_to_native
from quintet.config.native.envs import ROLLOUT_OVERRIDES, EnvServiceConfig, SvgConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.native.state_reward import SECTIONS
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value
from quintet.errors import ConfigError

FILES = (TRAIN_FILES, TEST_FILES)
START_STATE_FILES = {
    TRAIN_FILES: ("training.start_state_files", "training"),
    TEST_FILES: ("validation.start_state_files", "validation"),
}
"""Native key of files that exist, and their split."""
DEFAULT_START_STATES = 10_000
"""Training start states of the reference."""
GRID_ENVS = ("frozenlake", "sokoban")
CASELESS_ENVS = ("navigation", "primitive_skill")
"""Environments whose actions may be written in any case."""
STRICT_ENVS = ("navigation",)
"""Environments that execute only responses with nothing else in them."""
SINGLE_ACTION_ENVS = ("blackjack",)
"""Environments that execute only the first action of a response."""
INVALID_PENALTIES = {"blackjack": -0.1}
"""Reward of a response without a valid action, where it is not 0."""
MAX_ACTIONS = "env_config.max_actions_per_step"
PROMPT_FORMAT, ROOM = "env_config.prompt_format", "env_config.dim_room"
RENDER_MODE, VISUAL = "env_config.render_mode", "env_config.visual_env"
USE_SERVICE = "rollout_manager.use_service"
SERVICE_URL = "rollout_manager.base_url"
SERVICE_TIMEOUT = "rollout_manager.timeout"
STATE_REWARD = "env_config.use_state_reward"
STATE_WEIGHTS = {f"env_config.{kind}_reward_weight": f"{kind}_weight" for kind in SECTIONS}
REPEATED_TEXTS = 5
"""Number of most frequent descriptions that VAGEN's Sokoban penalizes."""
THINKING_FORMATS = ("free_think", "no_think")
"""Prompt formats that each environment of a run may choose."""


@dataclass(frozen=True, slots=True)
class EnvSection:
    """Section of one environment."""

    name: str
    values: ForeignValues
    is_mixed: bool
    """Whether the run has several environments."""

    def key(self, key: str) -> str:
        """Return the full name of a key as the user set it, otherwise its name in the reference."""
        full_key = f"{self.name}.{key}"
        return full_key if self.values.is_set(full_key) else f"{ENV}.{key}"

    def __getitem__(self, key: str) -> Any:
        full_key = f"{self.name}.{key}"
        if self.values.is_set(full_key):
            return self.values[full_key]
        specs = self.values.dialect.specs()
        return specs[f"{ENV}.{key}"].default if key == "env_name" else env_specs(self["env_name"])[key].default

    @property
    def native(self) -> str:
        """Native key of the environment."""
        return f"envs.{self.name}.env" if self.is_mixed else "env"


def env_sections(values: ForeignValues) -> list[EnvSection]:
    """Return the sections of environments that the user wrote, otherwise that of the reference."""
    sections = [key.removesuffix(".env_name") for key in values.merged.sources if key.endswith(".env_name")]
    names = [name for name in sections if "." not in name] or [ENV]
    return [EnvSection(name, values, len(names) > 1) for name in names]


def env_specs(env_name: str) -> dict[str, KeySpec]:
    """Return the keys of an environment's section by their name in the section, with its own defaults."""
    prefix = f"{ENV}."
    specs = (*env_keys([env_name]), *load_keys("vagen", "vagen_env_config"))
    by_name = {spec.key.removeprefix(prefix): spec for spec in specs if spec.key.startswith(prefix)}
    defaults = TABLES["env_defaults"].get(env_name, {})
    return by_name | {key: by_name[key].model_copy(update={"default": value}) for key, value in defaults.items()}


def env_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of environments: unsupported ones, unknown options, and settings that cannot be mixed."""
    sections = env_sections(values)
    for section in sections:
        if section["env_name"] in SINGLE_ACTION_ENVS and section[MAX_ACTIONS] != 1:
            key = section.key(MAX_ACTIONS)
            yield values.problem(key, f"{section['env_name']} executes one action per response", f"{key}=1")
        if section["env_name"] == SVG and section[RENDER_MODE] != "vision":
            hint = f"{section.key(RENDER_MODE)}=vision"
            yield values.problem(section.key(RENDER_MODE), "the environment svg shows images", hint)
        if section[STATE_REWARD] and section[PROMPT_FORMAT] in THINKING_FORMATS:
            key, form = section.key(STATE_REWARD), section.key(PROMPT_FORMAT)
            problem = f"needs responses that describe the state, and {values.describe(form)}"
            yield values.problem(key, problem, f"{form}=grounding_worldmodeling, or {key}=false")
    if not any(values.is_set(f"{section.name}.env_name") for section in sections):
        for key in filter(values.is_set, FILES):
            problem = "the file does not exist, and no section with an env_name says what its rows would name"
            hint = f"put its env_config.yaml beside the overrides, or name the environment: {ENV}.env_name=frozenlake"
            yield values.problem(key, problem, hint)
    for size, purpose in (("train_size", "training"), ("test_size", "validation")):
        if not any(section[size] for section in sections):
            key = sections[0].key(size)
            yield values.problem(key, f"no environment has start states for {purpose}", f"at least: {key}=1")
    if len(sections) > 1:
        yield from _differing_settings(values, sections)


def _differing_settings(values: ForeignValues, sections: list[EnvSection]) -> Iterator[ConfigProblem]:
    """Yield a problem for settings of the whole run that differ between environments."""
    keys = ["env_config.format_reward", PROMPT_FORMAT, STATE_REWARD]
    if any(section[STATE_REWARD] for section in sections):
        keys += STATE_WEIGHTS
    for key in keys:
        by_value = {_shared_setting(key, section[key]): section for section in sections}
        if len(by_value) > 1:
            settings = ", ".join(f"{section.name}.{key} = {section[key]}" for section in by_value.values())
            problem = f"must be the same for all environments of a run: {settings}"
            hint = " ".join(f"{section.name}.{key}={format_value(sections[0][key])}" for section in sections)
            yield values.problem(sections[-1].key(key), problem, hint)


def _shared_setting(key: str, value: Any) -> Any:
    return THINKING_FORMATS if key == PROMPT_FORMAT and value in THINKING_FORMATS else value


def envs_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's environment, or several with their shares of the start states."""
    sections = env_sections(values)
    rollout_values: dict[str, dict[str, tuple[Any, ...]]] = {}
    for section in sections:
        name, is_missing = section["env_name"], section["env_name"] in OTHER_ENVS
        env = {"name": "custom", "path": name} if is_missing else {"name": name}
        native.set(section.native, env, section.key("env_name"), *FILES)
        if is_missing:
            native.require(section.key("env_name"), Capability.TEXT_ENVS)
        native.remarks.extend(_remarks_of_options(section))
        if values[USE_SERVICE]:
            _service_to_native(section, values, native)
        for key, value, *origins in section_values(section.__getitem__, section.key):
            if key.startswith("env."):
                if is_missing:
                    continue
                native.set(section.native + key.removeprefix("env"), value, *origins)
            else:
                rollout_values.setdefault(key, {})[section.name] = (value, *origins)
    _files_to_native(values, sections, native)
    for key, by_section in rollout_values.items():
        _rollout_to_native(key, by_section, native)
    penalized = [section for section in sections if section[STATE_REWARD] and section["env_name"] == "sokoban"]
    if penalized:
        native.set("rollout.state_reward.repeated_texts", REPEATED_TEXTS, penalized[0].key("env_name"))
    sizes = {section.name: section["train_size"] for section in sections}
    unit = math.gcd(*sizes.values()) or 1
    for section in sections if len(sections) > 1 else ():
        name, test_size = section.name, section["test_size"]
        native.set(f"envs.{name}.share", float(sizes[name] // unit), section.key("train_size"))
        native.set(f"envs.{name}.validation_episodes", test_size, section.key("test_size"))
    episodes = sum(section["test_size"] for section in sections)
    native.set("validation.episodes", episodes, *(section.key("test_size") for section in sections))
    native.set_constants({"rollout.strip_special_tokens": True})


def _remarks_of_options(section: EnvSection) -> Iterator[str]:
    """Yield a remark for each option that only another environment has; VAGEN refuses them."""
    if section["env_name"] in OTHER_ENVS:
        return
    options = env_specs(section["env_name"])
    valid = options.keys() | {option.rpartition(".")[0] for option in options}
    for key in section.values.merged.sources:
        name, _, option = key.partition(".")
        if name == section.name and option.startswith("env_config.") and option not in valid:
            yield f"{section.values.describe(key)} has no effect: {section['env_name']} has no such option"


def _files_to_native(values: ForeignValues, sections: list[EnvSection], native: NativeBuilder) -> None:
    """Set the files of start states that exist; in place of others, the run chooses seeds."""
    for key, (target, split) in START_STATE_FILES.items():
        if files := existing_files(values[key]):
            native.set(target, [str(path) for path in files], key)
        elif values.is_set(key):
            sizes = values.describe(sections[0].key(SIZES[key]))
            native.remarks.append(f"{values.describe(key)} does not exist: {split} start states by {sizes}")


def _service_to_native(section: EnvSection, values: ForeignValues, native: NativeBuilder) -> None:
    """Set the service of an environment; all environments of a run have the same one."""
    native.set(f"{section.native}.service.protocol", "vagen", USE_SERVICE)
    native.set(f"{section.native}.service.urls", [values[SERVICE_URL]], SERVICE_URL, USE_SERVICE)
    native.set(
        f"{section.native}.service.timeout_seconds", float(values[SERVICE_TIMEOUT]), SERVICE_TIMEOUT, USE_SERVICE
    )


def _service_from_native(foreign: ForeignBuilder) -> None:
    """Set the service of all environments, if they have the same one, with one server."""
    services = [getattr(env.config, "service", None) for env in foreign.experiment.run_envs]
    service = services[0]
    if isinstance(service, EnvServiceConfig) and all(each == service for each in services):
        foreign.set(USE_SERVICE, True)
        foreign.set(SERVICE_URL, service.urls[0])
        foreign.set(SERVICE_TIMEOUT, service.timeout_seconds)


def section_values(option: Callable[[str], Any], key: Callable[[str], str]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of `env` and `rollout` that a section sets, with value and foreign keys.

    `option` returns the value of a key in the section, and `key` its full name.
    """
    env_name = option("env_name")
    for name, spec in env_specs(env_name).items():
        if spec.direct:
            yield spec.native[0], to_native_value(spec, option(name)), key(name)
    if option(STATE_REWARD):
        for name, weight in STATE_WEIGHTS.items():
            yield f"rollout.state_reward.{weight}", float(option(name)), key(name), key(STATE_REWARD)
    if (shows_images := option(VISUAL)) is not None:
        yield "env.render", "vision" if shows_images else "text", key(VISUAL)
    form, origin = option(PROMPT_FORMAT), key(PROMPT_FORMAT)
    in_turns = [key("env_config.turn_wise_update")] if env_name == "sokoban" else []
    yield "rollout.think", form != "no_think", origin, *in_turns
    yield "rollout.thoughts", None if form in THINKING_FORMATS else form, origin
    if env_name == "sokoban":
        height, width = option(ROOM)
        yield "env.height", height, key(ROOM)
        yield "env.width", width, key(ROOM)
    if env_name in GRID_ENVS:
        yield "env.observation", "grid"
    if env_name == SVG:
        for name, value, options in svg_to_native(option):
            yield name, value, *map(key, options)
    origin = key("env_name")
    yield "rollout.ignore_case", env_name in CASELESS_ENVS, origin
    yield "rollout.response_format", "strict" if env_name in STRICT_ENVS else "whole", origin
    yield "rollout.format_penalty", INVALID_PENALTIES.get(env_name, 0.0), origin


def _rollout_to_native(key: str, by_section: Mapping[str, tuple[Any, ...]], native: NativeBuilder) -> None:
    """Set a `rollout` key for the run if all environments have the same value, otherwise for each of them.

    Values come with the foreign keys that they follow from.
    """
    option, (value, *_) = key.removeprefix("rollout."), next(iter(by_section.values()))
    if option not in ROLLOUT_OVERRIDES or all(other == value for other, *_ in by_section.values()):
        native.set(key, value, *dict.fromkeys(origin for _, *origins in by_section.values() for origin in origins))
        return
    for name, (value, *origins) in by_section.items():
        native.set(f"envs.{name}.{option}", value, *origins)


def envs_tree(experiment: Experiment, reserved: Collection[str]) -> dict[str, Any]:
    """Return a section with the name of each environment; `reserved` are names of other sections.

    Raises:
        ConfigError: VAGEN has no such environment, or its name is reserved.
    """
    for env in experiment.run_envs:
        if env.config.name not in ENVS_WITH_KEYS:
            message = f"VAGEN has no environment {env.config.name}"
            raise ConfigError(message, key=f"{env.key}.name", hint=f"it has {', '.join(ENVS_WITH_KEYS)}")
        if experiment.envs and env.name in reserved:
            message = f"envs.{env.name}: VAGEN has another section of that name"
            raise ConfigError(message, key="envs", value=env.name, hint="give the environment another name")
    return {_section_name(env, experiment): {"env_name": env.config.name} for env in experiment.run_envs}


def _section_name(env: RunEnv, experiment: Experiment) -> str:
    return env.name if experiment.envs else ENV


def envs_from_native(foreign: ForeignBuilder) -> None:
    """Set the section of every environment."""
    run = foreign.experiment
    _service_from_native(foreign)
    for key, files in (
        (TRAIN_FILES, run.training.start_state_files),
        (TEST_FILES, run.validation.start_state_files),
    ):
        if files:
            foreign.set(key, list(files))
    for key in [key for key in foreign.values if key.startswith(f"{ENV}.")]:
        del foreign.values[key]
    for env, size in zip(run.run_envs, _train_sizes(run), strict=True):
        name = _section_name(env, run)
        for option, value in _direct_options(env):
            foreign.set(f"{name}.{option}", value)
        form = env.rollout.thoughts or ("free_think" if env.rollout.think else "no_think")
        foreign.set(f"{name}.{PROMPT_FORMAT}", form)
        foreign.set(f"{name}.{STATE_REWARD}", run.rollout.state_reward is not None)
        for key, weight in STATE_WEIGHTS.items() if run.rollout.state_reward is not None else ():
            foreign.set(f"{name}.{key}", getattr(run.rollout.state_reward, weight))
        if env.config.name == "sokoban":
            foreign.set(f"{name}.{ROOM}", [getattr(env.config, side) for side in ("height", "width")])
        for option, value in svg_from_native(env.config) if isinstance(env.config, SvgConfig) else ():
            foreign.set(f"{name}.{option}", value)
        foreign.set(f"{name}.train_size", size)
        foreign.set(f"{name}.test_size", env.validation_episodes)


def _direct_options(env: RunEnv) -> Iterator[tuple[str, Any]]:
    """Yield the options that take the value of a native key."""
    for option, spec in env_specs(env.config.name).items():
        if spec.direct:
            section, _, field = spec.native[0].partition(".")
            value = to_foreign_value(spec, getattr(env.config if section == "env" else env.rollout, field, None))
            if spec.value_type.accepts(value):
                yield option, value


def _train_sizes(run: Experiment) -> list[int]:
    """Return each environment's start states: its own number, or by share as many as the run draws.

    In total they are at least as many as in the reference.
    """
    shares = [Fraction(env.share).limit_denominator(DEFAULT_START_STATES) for env in run.run_envs]
    numerators, denominators = zip(*(share.as_integer_ratio() for share in shares), strict=True)
    unit = Fraction(math.gcd(*numerators), math.lcm(*denominators))
    parts = [int(share / unit) for share in shares]
    total = max(DEFAULT_START_STATES, run.training.steps * run.training.groups_per_step)
    repeats = -(-total // sum(parts))
    return [env.start_states or part * repeats for env, part in zip(run.run_envs, parts, strict=True)]
