"""Conversion of RAGEN's `custom_envs` and of the tags in `es_manager`: environments of training and validation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import inverted
from quintet.config.dialects.ragen.key_values import ENV_TYPES, REFERENCE_ENV, TABLES
from quintet.config.native.envs import SOKOBAN_SYMBOLS
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError, nearest

TRAIN, VALIDATION = "es_manager.train", "es_manager.val"
TAGS, N_GROUPS, GROUPS = "env_configs.tags", "env_configs.n_groups", "env_groups"
OPTIONS: Mapping[str, Mapping[str, tuple[str, Any]]] = TABLES["options"]
"""Native option and RAGEN's default by option of `env_config`, of each `env_type`."""
NEWER_FLOOR_DENSITY = 0.9
"""Default of FrozenLake's `p` in the releases since 2026, which have `success_rate`."""
RENDER_MODES = {"text": "text", "rgb_array": "vision"}
OBSERVATIONS = {"grid": "grid", "coord": "coordinates", "grid_coord": "grid_coordinates"}
COUNTDOWN_FILE, COUNTDOWN_ROWS = "data/countdown/train.parquet", 20_000
QUESTIONS, CACHE = "meta-math/MetaMathQA", "./data"
SYMBOL_NAMES = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
SUDOKU_OBSERVATIONS = {"simple": "plain", "detailed": "marked", "with_feedback": "hints"}
GRID_ENVS = ("sokoban", "frozen_lake")


@dataclass(frozen=True, slots=True)
class CustomEnv:
    """Section of one environment."""

    tag: str
    values: ForeignValues
    is_mixed: bool
    """Whether the run has several environments."""

    def key(self, option: str) -> str:
        """Return the full name of a key of the section."""
        return f"custom_envs.{self.tag}.{option}"

    def __getitem__(self, option: str) -> Any:
        return self.values[self.key(option)]

    def option(self, name: str) -> Any:
        """Return an option of the section `env_config`; None if it is not set."""
        return self[f"env_config.{name}"]

    @property
    def native(self) -> str:
        """Native key of the environment."""
        return f"envs.{self.tag}.env" if self.is_mixed else "env"


def group_counts(values: ForeignValues, side: str) -> dict[str, int]:
    """Return the groups of each tag in training or validation."""
    counts: dict[str, int] = {}
    for tag, count in zip(values[f"{side}.{TAGS}"], values[f"{side}.{N_GROUPS}"], strict=False):
        counts[tag] = counts.get(tag, 0) + count
    return counts


def custom_envs(values: ForeignValues) -> list[CustomEnv]:
    """Return the environments of training, followed by those that only validate."""
    tags = dict.fromkeys([*group_counts(values, TRAIN), *group_counts(values, VALIDATION)])
    return [CustomEnv(tag, values, len(tags) > 1) for tag in tags]


def env_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of tags, of their numbers of groups, and of options that their environments lack."""
    known = [str(tag) for tag in values["custom_envs"] or {}]
    for side in (TRAIN, VALIDATION):
        yield from _group_problems(values, side)
        for tag in values[f"{side}.{TAGS}"]:
            if values[f"custom_envs.{tag}.env_type"] is None:
                close = nearest(tag, known)
                hint = f"did you mean {close}?" if close else f"custom_envs has {', '.join(known)}"
                yield values.problem(f"{side}.{TAGS}", f"custom_envs has no {tag} with an env_type", hint)
    for env in custom_envs(values):
        yield from _option_problems(env)


def _group_problems(values: ForeignValues, side: str) -> Iterator[ConfigProblem]:
    tags, numbers, total = (values[f"{side}.{key}"] for key in (TAGS, N_GROUPS, GROUPS))
    key = f"{side}.{N_GROUPS}"
    if not tags:
        yield values.problem(f"{side}.{TAGS}", "names no environment", f"for example {side}.{TAGS}=[SimpleSokoban]")
    elif len(tags) != len(numbers) or sum(numbers) != total:
        share, rest = divmod(total, len(tags))
        equal = [share + (index < rest) for index in range(len(tags))]
        problem = f"needs one number for each of {values.describe(f'{side}.{TAGS}')}, in total {total}, from "
        hint = f"in equal parts: {key}={equal}"
        if len(tags) == len(numbers):
            hint += f", or {side}.{GROUPS}={sum(numbers)}"
        yield values.problem(key, problem + values.describe(f"{side}.{GROUPS}"), hint)


def _option_problems(env: CustomEnv) -> Iterator[ConfigProblem]:
    kind = env["env_type"]
    if kind not in ENV_TYPES:
        return
    valid = {*OPTIONS[kind], *TABLES["further_options"][kind]}
    for name, value in (env["env_config"] or {}).items():
        if name not in valid and value is not None:
            yield env.values.problem(env.key(f"env_config.{name}"), f"{kind} has no such option", "leave it out")
    if kind == "sokoban" and (lookup := env.option("grid_lookup")) is not None:
        symbols = _symbols(lookup)
        if len(symbols) != len(SOKOBAN_SYMBOLS) or len(set(symbols)) < len(symbols):
            problem = "needs a different character for each of the numbers 0 to 6"
            hint = f"for example {{{', '.join(f'{number}: {name!r}' for number, name in enumerate(SOKOBAN_SYMBOLS))}}}"
            yield env.values.problem(env.key("env_config.grid_lookup"), problem, hint)
    if env.option("render_mode") == "rgb_array" and kind not in GRID_ENVS:
        yield env.values.problem(env.key("env_config.render_mode"), f"{kind} shows text only", "leave it out")


def _symbols(lookup: Mapping[Any, Any]) -> str:
    by_number = {str(number): str(symbol) for number, symbol in lookup.items()}
    return "".join(by_number.get(str(number), "") for number in range(len(SOKOBAN_SYMBOLS)))


def envs_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's environment, or several with their shares of a step."""
    train, validation = (group_counts(values, side) for side in (TRAIN, VALIDATION))
    for env in custom_envs(values):
        kind, origins = env["env_type"], (env.key("env_type"), "es_manager.train.env_configs.tags")
        if kind in ENV_TYPES:
            native.set(env.native, {"name": ENV_TYPES[kind]}, *origins)
            _env_to_native(env, native)
        else:  # it waits
            native.set(env.native, {"name": "custom", "path": kind}, *origins)
        if env.is_mixed:
            entry, groups = f"envs.{env.tag}", "es_manager.val.env_configs.n_groups"
            native.set(
                f"{entry}.share",
                float(train.get(env.tag, 0)),
                "es_manager.train.env_configs.n_groups",
                "es_manager.train.env_configs.tags",
            )
            native.set(
                f"{entry}.validation_episodes", validation.get(env.tag, 0), groups, "es_manager.val.env_configs.tags"
            )
    native.set("validation.episodes", values["es_manager.val.env_groups"], "es_manager.val.env_groups")


def _env_to_native(env: CustomEnv, native: NativeBuilder) -> None:
    kind = env["env_type"]
    if kind == "bandit":
        native.set(f"{env.native}.arms", env.option("split") or "named", env.key("env_config.split"))
    for option, (target, default) in OPTIONS[kind].items():
        value = env.option(option)
        converted = default if value is None else value
        is_number = isinstance(default, float)
        native.set(
            f"{env.native}.{target}", float(converted) if is_number else converted, env.key(f"env_config.{option}")
        )
    actions = env["max_actions_per_traj"]
    native.set(f"{env.native}.max_actions", 10 if actions is None else actions, env.key("max_actions_per_traj"))
    origins = map(env.key, ("env_instruction", "max_tokens", "max_actions_per_traj", "env_config.grid_vocab"))
    native.set(f"{env.native}.instruction", _instruction(env), *origins)
    if kind in GRID_ENVS:
        render = RENDER_MODES[env.option("render_mode") or "text"]
        native.set(f"{env.native}.render", render, env.key("env_config.render_mode"))
        form = OBSERVATIONS[env.option("observation_format") or "grid"]
        native.set(f"{env.native}.observation", form, env.key("env_config.observation_format"))
    if kind == "sokoban":
        _sokoban_to_native(env, native)
    elif kind == "frozen_lake" and env.option("success_rate") is not None and env.option("p") is None:
        native.set(f"{env.native}.floor_density", NEWER_FLOOR_DENSITY, env.key("env_config.p"))
    elif kind == "sudoku":
        form = SUDOKU_OBSERVATIONS[env.option("render_format") or "detailed"]
        native.set(f"{env.native}.observation", form, env.key("env_config.render_format"))
    elif kind == "countdown":
        _countdown_to_native(env, native)
    elif kind == "metamathqa":
        path, origins = _questions_path(env), map(env.key, ("env_config.dataset_path", "env_config.cache_dir"))
        native.set(f"{env.native}.path", path, *origins)


def _sokoban_to_native(env: CustomEnv, native: NativeBuilder) -> None:
    sides = [env.option("dim_x"), env.option("dim_y")]
    if None in sides:
        sides = env.option("dim_room") or [6, 6]
    for target, value, option in zip(("height", "width"), sides, ("dim_x", "dim_y"), strict=True):
        native.set(f"{env.native}.{target}", value, *map(env.key, (f"env_config.{option}", "env_config.dim_room")))
    lookup = env.option("grid_lookup")
    symbols = SOKOBAN_SYMBOLS if lookup is None else _symbols(lookup)
    native.set(f"{env.native}.symbols", symbols, env.key("env_config.grid_lookup"))


def _countdown_to_native(env: CustomEnv, native: NativeBuilder) -> None:
    """Set the file of problems; without RAGEN's default file, problems are drawn."""
    key, path = env.key("env_config.train_path"), env.option("train_path")
    if path is None and not Path(COUNTDOWN_FILE).is_file():
        native.remarks.append(f"{key}: RAGEN's default {COUNTDOWN_FILE} does not exist; problems are drawn instead")
        native.set(f"{env.native}.path", None, key)
        return
    native.set(f"{env.native}.path", path or COUNTDOWN_FILE, key)
    rows = env.option("max_instances") or COUNTDOWN_ROWS
    native.set(f"{env.native}.max_rows", rows, env.key("env_config.max_instances"))


def _questions_path(env: CustomEnv) -> str:
    """Return the path of the questions if it exists, otherwise that in the cache."""
    path = str(env.option("dataset_path") or QUESTIONS)
    if Path(path).exists() or PurePath(path).suffix:
        return path
    return str(PurePath(env.option("cache_dir") or CACHE, PurePath(path).name))


def _instruction(env: CustomEnv) -> str | None:
    """Return the system message: the user's text, the legend, the actions and the length of responses; None if the user
    wrote no text."""
    text, kind = str(env["env_instruction"] or "").strip(), env["env_type"]
    if not text:
        return None
    lines = [text]
    if kind in GRID_ENVS:
        symbol_names = env.option("grid_vocab") if kind == "sokoban" else None
        legend = symbol_names or (dict(zip(SOKOBAN_SYMBOLS, SYMBOL_NAMES, strict=True)) if kind == "sokoban" else {})
        is_text, form = env.option("render_mode") != "rgb_array", env.option("observation_format")
        if is_text and form == "coord":
            lines.append("Coordinates: (row, column), from (0, 0) at the top left")
        elif is_text and legend:
            lines.append("Symbols: " + ", ".join(f"{symbol} {word}" for symbol, word in legend.items()))
    if actions := TABLES["actions"].get(kind):
        limit = env.values["agent_proxy.max_actions_per_turn"]
        separator = env.values["agent_proxy.action_sep"]
        lines.append(f"Actions: {actions}; up to {limit} in an answer, separated by {separator}")
    if env["max_actions_per_traj"] is not None:
        lines.append(f"Actions in all: at most {env['max_actions_per_traj']}")
    if env["max_tokens"] is not None:
        lines.append(f"Length of a response: at most {env['max_tokens']} words")
    return "\n".join(lines)


def envs_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the sections that select RAGEN's keys of the run's environments.

    Raises:
        ConfigError: RAGEN has no such environment.
    """
    types = {native: foreign for foreign, native in ENV_TYPES.items()}
    for env in experiment.run_envs:
        if env.config.name not in types:
            message = f"RAGEN has no environment {env.config.name}"
            raise ConfigError(message, key=f"{env.key}.name", hint=f"it has {', '.join(types)}")
    return {"custom_envs": {_tag(env, experiment): {"env_type": types[env.config.name]} for env in experiment.run_envs}}


def _tag(env: RunEnv, experiment: Experiment) -> str:
    return env.name if experiment.envs else TABLES["reference_tags"][env.config.name]


def envs_from_native(foreign: ForeignBuilder) -> None:
    """Set the section of every environment, and the tags of training and validation."""
    run = foreign.experiment
    for key in [key for key in foreign.values if key.startswith(f"{REFERENCE_ENV}.")]:
        del foreign.values[key]
    types = {native: kind for kind, native in ENV_TYPES.items()}
    for env in run.run_envs:
        section, kind = f"custom_envs.{_tag(env, run)}", types.get(env.config.name)
        if kind is None:
            return
        foreign.set(f"{section}.env_type", kind)
        foreign.set(
            f"{section}.max_actions_per_traj", getattr(env.config, "max_actions", None) or run.rollout.max_turns
        )
        foreign.set(f"{section}.env_instruction", getattr(env.config, "instruction", None))
        for option, value in _options_from_native(kind, env.config):
            foreign.set(f"{section}.env_config.{option}", value)
    _tags_from_native(foreign)


def _options_from_native(kind: str, config: Any) -> Iterator[tuple[str, Any]]:
    yield from ((option, getattr(config, target)) for option, (target, _) in OPTIONS[kind].items())
    if kind in GRID_ENVS and config.render == "vision":
        yield "render_mode", "rgb_array"
    if kind in GRID_ENVS and config.observation.endswith("coordinates"):
        yield "observation_format", inverted(OBSERVATIONS)[config.observation]
    if kind == "bandit" and config.arms != "named":
        yield "split", config.arms
    if kind == "sokoban":
        yield from (("dim_x", config.height), ("dim_y", config.width))
        if config.symbols != SOKOBAN_SYMBOLS:
            yield "grid_lookup", dict(enumerate(config.symbols))
    elif kind == "countdown" and config.path is not None:
        yield from (("train_path", config.path), ("max_instances", config.max_rows))
    elif kind == "metamathqa":
        yield "dataset_path", config.path
    elif kind == "sudoku":
        yield "render_format", inverted(SUDOKU_OBSERVATIONS)[config.observation]


def _tags_from_native(foreign: ForeignBuilder) -> None:
    """Set the tags with their groups: of training by share, of validation by start states."""
    run = foreign.experiment
    tags = [_tag(env, run) for env in run.run_envs]
    total = run.training.groups_per_step
    shares = sum(env.share for env in run.run_envs) or 1.0
    trained = [
        (tag, round(total * env.share / shares)) for tag, env in zip(tags, run.run_envs, strict=True) if env.share
    ]
    if trained:
        foreign.set("es_manager.train.env_configs.tags", [tag for tag, _ in trained])
        foreign.set("es_manager.train.env_configs.n_groups", [count for _, count in trained])
    validated = [(tag, env.validation_episodes) for tag, env in zip(tags, run.run_envs, strict=True)]
    validated = [(tag, count) for tag, count in validated if count]
    foreign.set("es_manager.val.env_configs.tags", [tag for tag, _ in validated])
    foreign.set("es_manager.val.env_configs.n_groups", [count for _, count in validated])
    foreign.set("es_manager.val.env_groups", sum(count for _, count in validated))
