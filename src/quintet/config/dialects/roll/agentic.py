"""Conversion of ROLL's runs in environments: groups of `train_env_manager` and `val_env_manager`, mixed by tag.

A step collects `rollout_batch_size` episodes in groups of `group_size` with the same start state. The groups are shared
among tags as `num_groups_partition` divides the environments; each tag is an environment of `custom_envs`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.roll.earlier import ACTIONS, SEPARATOR
from quintet.config.dialects.roll.workers import GROUP_SIZE, STEP
from quintet.config.dialects.typos import slip_of
from quintet.config.divisors import nearest_divisor, nearest_multiple
from quintet.config.native.envs import SOKOBAN_SYMBOLS
from quintet.config.native.mixed_envs import apportion
from quintet.config.problems import ConfigProblem

EPISODES, SEQUENCE, RESPONSE, PROMPT = STEP[0], "sequence_length", "response_length", "prompt_length"
MANAGERS = ("train_env_manager", "val_env_manager")
TRAINING, VALIDATION = MANAGERS
VALIDATION_EPISODES = "val_batch_size"
ENVS = {"frozen_lake": "frozenlake", "sokoban": "sokoban"}
"""Native environments by ROLL's `env_type`."""
STEP_MANAGER = "StepEnvManager"
"""End of the name of the manager that gives each turn a prompt, and a sequence in training, of its own."""
GENERATION = "actor_infer.generating_args"
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Tag:
    """Environment of a tag, with its numbers of groups in training and validation."""

    values: ForeignValues
    name: str
    groups: int
    validation_groups: int

    def key(self, option: str) -> str:
        """Return the full name of one of its keys."""
        return f"custom_envs.{self.name}.{option}"

    def __getitem__(self, option: str) -> Any:
        key = self.key(option)
        value, spec = self.values[key], self.values.dialect.spec(key)
        # a section that is set to another one replaces the defaults
        return spec.default if value is None and spec is not None and not self.values.is_set(key) else value

    @property
    def env(self) -> str | None:
        """Native name of the environment; None if there is none."""
        return ENVS.get(str(self["env_type"]))

    @property
    def window(self) -> int | None:
        """Observations in a prompt; None for the whole history."""
        is_stepwise = str(self["env_manager_cls"]).endswith(STEP_MANAGER)
        return max(1, int(self["history_length"] or 1)) if is_stepwise else None

    @property
    def thinks(self) -> bool:
        """Whether its pattern demands thoughts before the answer."""
        return str(self["env_config.action_pattern"]).startswith("<think>")


def tags(values: ForeignValues) -> list[Tag]:
    """Return the environments of a run, those of training first."""
    numbers = [(values[f"{name}.tags"], values[f"{name}.num_groups_partition"]) for name in MANAGERS]
    groups = [dict(zip(names, partition, strict=True)) for names, partition in numbers]
    return [
        Tag(values, name, groups[0].get(name, 0), groups[1].get(name, 0))
        for name in dict.fromkeys([*groups[0], *groups[1]])
    ]


FORMER_GROUPS = f"{VALIDATION}.env_groups"
"""Key of the releases that take any number of validation episodes."""


def env_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield the problems that ROLL refuses, too: groups that do not add up, and numbers of episodes."""
    for name in MANAGERS:
        yield from _group_problems(values, name)
    yield from _env_type_problems(values)
    size = values[GROUP_SIZE]
    if values[EPISODES] % size:
        problem = f"must be a multiple of the {size} episodes of a group: {values.describe(GROUP_SIZE)}"
        yield values.nearest_problem(EPISODES, problem, nearest_multiple(values[EPISODES], size))
    envs = values[f"{VALIDATION}.num_env_groups"] * values[f"{VALIDATION}.group_size"]
    is_checked = values.is_set(VALIDATION_EPISODES) and FORMER_GROUPS not in values.read_as
    if is_checked and values[VALIDATION_EPISODES] >= 0 and values[VALIDATION_EPISODES] % envs:
        source = values.describe(f"{VALIDATION}.num_env_groups", f"{VALIDATION}.group_size")
        problem = f"must be a multiple of the {envs} validation environments: {source}"
        nearest = nearest_multiple(values[VALIDATION_EPISODES], envs)
        yield values.nearest_problem(VALIDATION_EPISODES, problem, nearest)
    if values[SEQUENCE] is None and values[RESPONSE] is None:
        problem = "no key sets the maximum length of an episode"
        yield values.problem(SEQUENCE, problem, f"for example {SEQUENCE}=8192")


def _group_problems(values: ForeignValues, manager: str) -> Iterator[ConfigProblem]:
    tags_key, partition_key, total_key = (
        f"{manager}.{key}" for key in ("tags", "num_groups_partition", "num_env_groups")
    )
    names, partition, total = values[tags_key], values[partition_key], values[total_key]
    defined = [key for key in values.merged.sources if key.startswith("custom_envs.")]
    for name in names:
        if not any(key.startswith(f"custom_envs.{name}.") for key in defined):
            tags = ", ".join(dict.fromkeys(key.split(".")[1] for key in defined)) or "none"
            yield values.problem(tags_key, f"custom_envs does not define {name}", f"custom_envs defines {tags}")
    if len(partition) != len(names):
        problem = f"needs one number for each of the {len(names)} tags: {values.describe(tags_key)}"
        yield values.problem(partition_key, problem, f"{partition_key}={apportion(total, [1] * len(names))}")
    elif sum(partition) != total:
        problem = f"has {sum(partition)} groups in total: {values.describe(total_key)}"
        yield values.problem(partition_key, problem, f"{total_key}={sum(partition)}")


def _env_type_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield misspelt environments; other names may be those of environments that this version lacks."""
    for name in dict.fromkeys(tag for manager in MANAGERS for tag in values[f"{manager}.tags"]):
        key = f"custom_envs.{name}.env_type"
        if (env_type := slip_of(str(values[key]), ENVS)) is not None:
            problem = f"ROLL has no such environment; supported are {', '.join(ENVS)}; did you mean {env_type}?"
            yield values.problem(key, problem, f"set {key}={env_type}")


def envs_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set environments with their shares, groups, lengths and sampling."""
    train_tags, size = tags(values), values[GROUP_SIZE]
    native.set("training.groups_per_step", values[EPISODES] // size, EPISODES, GROUP_SIZE)
    native.set("training.samples_per_group", size, GROUP_SIZE)
    native.set("warm_start", None)
    for tag in train_tags:
        section = "env" if len(train_tags) == 1 else f"envs.{tag.name}.env"
        _env_to_native(tag, section, native)
    _validation_groups_to_native(values, train_tags, native)
    _turns_to_native(values, train_tags, native)
    _lengths_to_native(values, train_tags[0], native)
    _sampling_to_native(values, native)


def _env_to_native(tag: Tag, section: str, native: NativeBuilder) -> None:
    """Set an environment; one that does not exist here is named as ROLL names it."""
    name, origin = tag.env, tag.key("env_type")
    if name is None:
        native.set(section, {"name": "custom", "path": str(tag["env_type"])}, origin)
        return
    native.set(section, {"name": name, "observation": "grid"}, origin)
    for option, (key, value) in _env_options(tag).items():
        native.set(f"{section}.{option}", value, tag.key(key))
    _symbols_to_native(tag, section, native)
    limit = ACTIONS if tag[ACTIONS] else "max_steps"
    steps = min(tag["env_config.max_steps"], tag[limit])
    native.set(f"{section}.max_steps", steps, tag.key("env_config.max_steps"), tag.key(limit))
    if section != "env":
        overrides = section.removesuffix(".env")
        native.set(f"{overrides}.format_penalty", *_penalty(tag))
        native.set(f"{overrides}.think", tag.thinks, tag.key("env_config.action_pattern"))


def _symbols_to_native(tag: Tag, section: str, native: NativeBuilder) -> None:
    """Set the symbols of Sokoban's cells; those of other environments wait."""
    key, lookup = tag.key("env_config.grid_lookup"), tag["env_config.grid_lookup"]
    if lookup is None:
        return
    by_number = {str(number): str(symbol) for number, symbol in lookup.items()}
    symbols = [by_number.get(str(number), "") for number in range(len(SOKOBAN_SYMBOLS))]
    is_complete = all(len(symbol.strip()) == 1 for symbol in symbols) and len(set(symbols)) == len(symbols)
    if tag.env == "sokoban" and is_complete:
        native.set(f"{section}.symbols", "".join(symbols), key)
    else:
        native.require(key, Capability.GRID_SYMBOLS)


def _penalty(tag: Tag) -> tuple[float, str]:
    key = "env_config.format_penalty"
    return float(tag[key] or 0.0), tag.key(key)


def _env_options(tag: Tag) -> Mapping[str, tuple[str, Any]]:
    """Return ROLL's key and the value of each native option of an environment."""
    images = {"text": "text", "rgb_array": "vision"}[tag["env_config.render_mode"]]
    common = {"render": ("env_config.render_mode", images)}
    if tag.env == "frozenlake":
        return common | {
            "size": ("env_config.size", tag["env_config.size"]),
            "floor_density": ("env_config.p", float(tag["env_config.p"])),
            "slippery": ("env_config.is_slippery", tag["env_config.is_slippery"]),
        }
    height, width = tag["env_config.dim_room"]
    sides = tag["env_config.dim_x"] or height, tag["env_config.dim_y"] or width
    names = ("dim_x" if tag["env_config.dim_x"] else "dim_room", "dim_y" if tag["env_config.dim_y"] else "dim_room")
    return common | {
        "height": (f"env_config.{names[0]}", sides[0]),
        "width": (f"env_config.{names[1]}", sides[1]),
        "boxes": ("env_config.num_boxes", tag["env_config.num_boxes"]),
        "pull_steps": ("env_config.search_depth", tag["env_config.search_depth"]),
    }


def _validation_groups_to_native(values: ForeignValues, train_tags: list[Tag], native: NativeBuilder) -> None:
    """Set shares of training, and the start states and samples of validation."""
    size, total = values[f"{VALIDATION}.group_size"], values[f"{VALIDATION}.num_env_groups"]
    episodes = values[VALIDATION_EPISODES] if values[VALIDATION_EPISODES] >= 0 else total * size
    starts = max(1, episodes // size)
    origins = (VALIDATION_EPISODES, f"{VALIDATION}.num_env_groups", f"{VALIDATION}.group_size")
    native.set("validation.episodes", starts, *origins)
    native.set("validation.sampling.samples", size, f"{VALIDATION}.group_size")
    if len(train_tags) == 1:
        return
    parts = apportion(starts, [tag.validation_groups for tag in train_tags])
    for tag, part in zip(train_tags, parts, strict=True):
        native.set(f"envs.{tag.name}.share", float(tag.groups), "train_env_manager.num_groups_partition")
        native.set(f"envs.{tag.name}.validation_episodes", part, f"{VALIDATION}.num_groups_partition", *origins)


def _turns_to_native(values: ForeignValues, train_tags: list[Tag], native: NativeBuilder) -> None:
    """Set turns, context and form of responses, which all environments of a run share here."""
    first = train_tags[0]
    native.set(
        "rollout.max_turns", max(tag["max_steps"] for tag in train_tags), *(tag.key("max_steps") for tag in train_tags)
    )
    native.set("rollout.window_size", first.window, first.key("env_manager_cls"), first.key("history_length"))
    native.set("rollout.think", first.thinks, first.key("env_config.action_pattern"))
    form = "anywhere" if first.thinks else "answer"
    native.set("rollout.response_format", form, first.key("env_config.action_pattern"))
    native.set("rollout.format_penalty", *_penalty(first))
    native.set("rollout.max_actions_per_turn", first[ACTIONS] or 1, first.key(ACTIONS))
    if first[ACTIONS] and values[SEPARATOR]:
        native.set("rollout.action_separator", values[SEPARATOR], SEPARATOR)
    native.set_constants({"rollout.format_reward": 0.0})
    tokens = first.key("env_config.special_token_list")
    native.set("rollout.strip_special_tokens", bool(first["env_config.special_token_list"]), tokens)
    by_turn = first.window is not None or native.get("algorithm.advantage.name") == "step_reinforce"
    native.set("algorithm.turn_rewards", by_turn, first.key("env_manager_cls"))
    for tag in train_tags[1:]:
        for option in ("max_steps", "max_tokens_per_step", "env_manager_cls", "env_config.action_pattern"):
            if tag[option] != first[option]:
                native.require(tag.key(option), Capability.ENV_SETTINGS)


def _generation(values: ForeignValues, manager: str) -> str:
    """Return the section with a manager's sampling: that of the engine, if the file has one."""
    has_engine_sampling = any(key.startswith(f"{GENERATION}.") for key in values.merged.sources)
    return GENERATION if has_engine_sampling else f"{manager}.generating_args"


def _lengths_to_native(values: ForeignValues, tag: Tag, native: NativeBuilder) -> None:
    """Set the maximum tokens of a response and of the context, which together have ROLL's `sequence_length`."""
    limit, turn_limit = f"{_generation(values, TRAINING)}.max_new_tokens", tag.key("max_tokens_per_step")
    response = min(length for length in (values[limit], tag["max_tokens_per_step"]) if length is not None)
    native.set("rollout.max_response_tokens", response, turn_limit, limit)
    lengths = (RESPONSE, PROMPT) if values[SEQUENCE] is None else (SEQUENCE,)
    total = sum(values[key] for key in lengths)
    native.set("rollout.max_prompt_tokens", max(1, total - response), *lengths, turn_limit)


def _sampling_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set sampling in training and validation, which ROLL's reference documents for the engine."""
    for manager, target in ((TRAINING, "rollout"), (VALIDATION, "validation.sampling")):
        section = _generation(values, manager)
        for name in SAMPLING:
            key = f"{section}.{name}"
            value = values[key] if values[key] is not None else values[f"{GENERATION}.{name}"]
            native.set(f"{target}.{name}", max(0, value) if name == "top_k" else value, key)


def num_updates(values: ForeignValues, native: NativeBuilder, update: int) -> int:
    """Return the number of optimizer steps for updates of so many sequences.

    Where each turn is a sequence, ROLL's number varies with the turns; here it is that of episodes with all turns.
    """
    episodes, turns = values[EPISODES], 1
    if native.get("rollout.window_size") is not None:
        turns = native.get("rollout.max_turns")
    number = nearest_divisor(episodes, max(1, -(-episodes * turns // update)))
    if episodes * turns != number * update:
        unit = f"{episodes} episodes of {turns} turns" if turns > 1 else f"{episodes} episodes"
        native.remarks.append(
            f"ROLL fills the {unit} up to optimizer steps of {update} sequences: here a step has {number} of"
            f" {episodes // number} episodes"
        )
    return number
