"""Conversion of VAGEN's lists of environments since 2026 to the environments of a run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.vagen.agent_dialect import CLASSES, CLASSES_ELSEWHERE, class_of
from quintet.config.dialects.vagen.env_lists import list_files, num_seeds, seed_problem
from quintet.config.dialects.vagen.key_values import LISTS, TABLES
from quintet.config.dotted import is_inside
from quintet.config.problems import ConfigProblem

TRAIN, VALIDATION = LISTS
RESPONSE, BASE_SEED = "actor_rollout_ref.rollout.response_length", "data.base_seed"
SEEDS = ("n_envs", "seed", "seed_list")
OPTIONS: Mapping[str, Mapping[str, Any]] = TABLES["options"]
"""Options of each environment with the defaults of its class."""
COMMON = ("render_mode", "action_sep", "success_reward")
GYM_SOKOBAN_DEPTH = 100
"""Moves of the reverse play of gym-sokoban."""
FORMATS = {"frozenlake": ("free_think", "wm"), "sokoban": ("free_think", "wm", "free_wm")}
SHARED = ("config.prompt_format", "config.format_reward")
"""Options that all environments of a run must share."""


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """An entry of a list of environments."""

    section: str
    """Such as `train_envs.env1`."""
    values: ForeignValues

    def key(self, option: str) -> str:
        """Return the full name of a key of the entry."""
        return f"{self.section}.{option}"

    def __getitem__(self, option: str) -> Any:
        """Return the value of a key, or the default of the entry's class."""
        key = self.key(option)
        if self._is_set(key) and self.values[key] is not None:
            return self.values[key]
        defaults = OPTIONS.get(self.kind or "", {})
        if (name := option.removeprefix("config.")) in defaults and option != name:
            return defaults[name]
        spec = self.values.dialect.spec(key)
        return None if spec is None else spec.default

    def _is_set(self, key: str) -> bool:
        return any(is_inside(name, key) for name in self.values.merged.sources)

    @property
    def kind(self) -> str | None:
        """Native name of the environment; None if it does not exist here."""
        return CLASSES.get(class_of(self.values.merged.plain, self.section) or "")

    @property
    def seed(self) -> list[int]:
        """The numbers of `seed`."""
        seed = self["seed"]
        return [seed] if isinstance(seed, int) else list(seed) or [0]

    @property
    def max_response(self) -> int:
        """Maximum tokens of a response."""
        longest = int(self.values[RESPONSE])
        return min(int(self["response_length_per_turn"] or longest), longest)

    @property
    def is_training(self) -> bool:
        """Whether it is of the training list."""
        return self.section.startswith(f"{TRAIN}.")

    def start_states(self) -> int:
        """Return the number of different seeds."""
        number = self.section.rpartition("env")[2]
        place = int(number) - 1 if number.isdecimal() else 0
        base_seed = int(self.values[BASE_SEED] or 0)
        return num_seeds(self["name"], place, self["n_envs"], self.seed, self["seed_list"], base_seed)

    def settings(self) -> dict[str, Any]:
        """Return what makes two entries the same environment: its name and all options."""
        names = (*COMMON, *OPTIONS[self.kind]) if self.kind else tuple(self.values[self.key("config")] or ())
        return {"name": self["name"]} | {name: self.option(name) for name in sorted(names)}

    def option(self, name: str) -> Any:
        """Return an option of the environment."""
        return self[f"config.{name}"]


def entries(values: ForeignValues, section: str) -> list[EnvEntry]:
    """Return the entries of the training list (`train_envs`) or of the validation list (`val_envs`)."""
    parts = (key.split(".") for key in values.merged.sources if key.startswith(f"{section}."))
    return [EnvEntry(f"{section}.{name}", values) for name in dict.fromkeys(part[1] for part in parts)]


def env_list_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the lists: missing files, unknown names and options, seeds that VAGEN refuses."""
    for section, key in LISTS.items():
        missing = [path for path in list_files(values[key]) if not path.is_file()]
        if missing:
            hint = "it is relative to the current directory; start quintet where you start VAGEN"
            yield values.problem(key, f"{missing[0]} does not exist", hint)
        elif not entries(values, section):
            yield values.problem(key, "names no list of environments", f"for example {key}=envs.yaml")
        for entry in entries(values, section):
            yield from entry_problems(entry)


def entry_problems(entry: EnvEntry) -> Iterator[ConfigProblem]:
    """Yield problems of an entry: unknown names and options, and seeds that VAGEN refuses."""
    values, name = entry.values, entry["name"]
    if class_of(values.merged.plain, entry.section) is None:
        valid = ", ".join(values["env_registry"])
        yield values.problem(entry.key("name"), f"env_registry has no {name}", f"it has {valid}")
    if (problem := seed_problem(entry["n_envs"], entry.seed, entry["seed_list"])) is not None:
        key = entry.key(problem[0])
        hint = "leave it out" if problem[0] == "seed_list" else f"for example {key}=[1,{entry['n_envs']}]"
        yield values.problem(key, problem[1], hint)
    if entry.kind is None:
        return
    valid_options = {*COMMON, *OPTIONS[entry.kind], *TABLES["options_without_effect"][entry.kind]}
    for option, value in (values[entry.key("config")] or {}).items():
        if option not in valid_options and value is not None:
            yield values.problem(entry.key(f"config.{option}"), f"{name} has no such option", "leave it out")
    form = entry.option("prompt_format")
    if form not in FORMATS[entry.kind]:
        key = entry.key("config.prompt_format")
        hint = ", or ".join(f"{key}={valid}" for valid in FORMATS[entry.kind])
        yield values.problem(key, f"{name} has no such format", hint)
    bounds = entry.option("min_solution_steps") if entry.kind == "sokoban" else None
    if bounds is not None and bounds[1] < bounds[0]:
        key = entry.key("config.min_solution_steps")
        yield values.problem(key, "the maximum is below the minimum", f"for example {key}=[{bounds[1]},{bounds[0]}]")


def envs_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's environment, or several with their shares; entries of both lists with the same options are one."""
    envs = distinct_envs(values)
    for name, members in envs.items():
        section = f"envs.{name}.env" if len(envs) > 1 else "env"
        env_to_native(members[0], section, native)
        trained = [entry for entry in members if entry.is_training]
        validated = [entry for entry in members if not entry.is_training]
        start_states_to_native(name, trained, validated, native, is_mixed=len(envs) > 1)
    _shared_to_native(values, [members[0] for members in envs.values()], native)
    validation = entries(values, VALIDATION)
    episodes = sum(entry["n_envs"] for entry in validation)
    native.set("validation.episodes", episodes, *(entry.key("n_envs") for entry in validation))
    native.remarks.extend(_describe(entry) for section in LISTS for entry in entries(values, section))


def distinct_envs(values: ForeignValues, naming: str = "data_source") -> dict[str, list[EnvEntry]]:
    """Return the entries by the name of their environment, from the option `naming`; those with the same options share
    one."""
    groups: list[list[EnvEntry]] = []
    for section in LISTS:
        for entry in entries(values, section):
            same = next((group for group in groups if group[0].settings() == entry.settings()), None)
            if same is None:
                groups.append([entry])
            else:
                same.append(entry)
    named: dict[str, list[EnvEntry]] = {}
    for group in groups:
        source = re.sub(r"[^\w-]+", "_", str(group[0][naming]))
        suffix = "" if group[0].is_training or naming == "tag_id" else "_validation"
        name, number = f"{source}{suffix}", 2
        while name in named:
            name, number = f"{source}{suffix}_{number}", number + 1
        named[name] = group
    return named


def env_to_native(entry: EnvEntry, section: str, native: NativeBuilder) -> None:
    """Set the configuration of an environment; those that do not exist here wait."""
    kind, origins = entry.kind, (entry.key("name"), "env_registry", *LISTS.values())
    if kind is None:
        native.set(section, {"name": "custom", "path": str(entry["name"])}, *origins)
        name = class_of(entry.values.merged.plain, entry.section) or ""
        native.require(entry.key("name"), CLASSES_ELSEWHERE.get(name, Capability.TEXT_ENVS))
        return
    native.set(section, {"name": kind, "observation": "grid"}, *origins)
    actions = entry["max_turns"] * entry.option("max_actions_per_step")
    native.set(f"{section}.max_steps", actions, entry.key("max_turns"), entry.key("config.max_actions_per_step"))
    options = _frozenlake_options if kind == "frozenlake" else _sokoban_options
    for target, value, *names in (*_common_options(entry), *options(entry, native)):
        native.set(f"{section}.{target}", value, *(entry.key(f"config.{name}") for name in names))


def _common_options(entry: EnvEntry) -> Iterator[tuple[Any, ...]]:
    reward = "goal_reward" if entry.kind == "frozenlake" else "solved_reward"
    yield "render", entry.option("render_mode"), "render_mode"
    yield reward, float(entry.option("success_reward")), "success_reward"


def _frozenlake_options(entry: EnvEntry, native: NativeBuilder) -> Iterator[tuple[Any, ...]]:
    yield "size", entry.option("size"), "size"
    yield "floor_density", float(entry.option("p")), "p"
    slips, slippery = float(entry.option("slip_prob")), entry.option("is_slippery")
    # a slip goes to either side with equal probability, as on gymnasium's ice
    yield "slippery", bool(slippery or slips), "is_slippery", "slip_prob"
    yield "success_rate", 1.0 / 3.0 if slippery or slips in (0, 1) else 1.0 - slips, "slip_prob", "is_slippery"
    if (slips and slippery) or slips == 1:
        native.require(entry.key("config.slip_prob"), Capability.ENV_VARIANTS)


def _sokoban_options(entry: EnvEntry, native: NativeBuilder) -> Iterator[tuple[Any, ...]]:
    height, width = entry.option("dim_room")
    yield "height", height, "dim_room"
    yield "width", width, "dim_room"
    yield "boxes", entry.option("num_boxes"), "num_boxes"
    yield "pull_steps", GYM_SOKOBAN_DEPTH
    yield "step_reward", 0.0
    yield "box_reward", 0.0
    shortest, longest = entry.option("min_solution_steps") or (None, None)
    yield "min_solution_steps", shortest, "min_solution_steps"
    yield "max_solution_steps", longest, "min_solution_steps"


def start_states_to_native(
    name: str, trained: list[EnvEntry], validated: list[EnvEntry], native: NativeBuilder, *, is_mixed: bool
) -> None:
    """Set the distinct start states of an environment, its share of training, and its episodes of validation."""
    states = sum(entry.start_states() for entry in trained)
    key = f"envs.{name}.start_states" if is_mixed else "training.start_states"
    origins = [entry.key(option) for entry in trained for option in SEEDS]
    if states:
        native.set(key, states, *origins, BASE_SEED)
    if is_mixed:
        size = sum(entry["n_envs"] for entry in trained)
        native.set(f"envs.{name}.share", float(size), *(entry.key("n_envs") for entry in trained))
        episodes = sum(entry["n_envs"] for entry in validated)
        native.set(f"envs.{name}.validation_episodes", episodes, *(entry.key("n_envs") for entry in validated))


def _shared_to_native(values: ForeignValues, envs: list[EnvEntry], native: NativeBuilder) -> None:
    """Set the limits and forms of responses; settings of the whole run that differ between environments wait."""
    first = next((env for env in envs if env.kind is not None), envs[0])
    known = [env for env in envs if env.kind is not None] or envs
    everywhere = [entry for section in LISTS for entry in entries(values, section)]
    limits = {
        "max_turns": [entry["max_turns"] for entry in everywhere],
        "response_length_per_turn": [entry.max_response for entry in everywhere],
        **{key: [env[key] for env in known] for key in SHARED},
    }
    for option, differing in limits.items():
        if len({str(value) for value in differing}) > 1:
            native.require(first.key(option), Capability.ENV_SETTINGS)
    native.set("rollout.max_turns", max(limits["max_turns"]), *(entry.key("max_turns") for entry in everywhere))
    native.set("rollout.max_response_tokens", max(limits["response_length_per_turn"]), *_response_keys(everywhere))
    if first.kind is None:
        return
    form = first["config.prompt_format"]
    native.set("rollout.think", True)
    native.set("rollout.thoughts", None if form == "free_think" else form, first.key("config.prompt_format"))
    native.set("rollout.format_reward", float(first["config.format_reward"]), first.key("config.format_reward"))
    for option, target in (("max_actions_per_step", "max_actions_per_turn"), ("action_sep", "action_separator")):
        _rollout_option(known, f"config.{option}", target, native)


def _response_keys(everywhere: list[EnvEntry]) -> tuple[str, ...]:
    return (*(entry.key("response_length_per_turn") for entry in everywhere), RESPONSE)


def _rollout_option(envs: list[EnvEntry], option: str, target: str, native: NativeBuilder) -> None:
    """Set a key of `rollout` for the run if all environments have the same value, otherwise for each of them."""
    values = {str(env[option]) for env in envs}
    native.set(f"rollout.{target}", envs[0][option], *(env.key(option) for env in envs))
    if len(values) > 1:
        names = {entry.section: name for name, members in distinct_envs(envs[0].values).items() for entry in members}
        for env in envs:
            native.set(f"envs.{names[env.section]}.{target}", env[option], env.key(option))


def _describe(entry: EnvEntry) -> str:
    """Return a remark about the size and the seeds of an entry."""
    seed, split = entry.seed, "training" if entry.is_training else "validation"
    drawn = entry.values.describe(entry.key("n_envs"))
    if entry["seed_list"] is not None:
        seeds = "seeds of a list"
    else:
        seeds = "any seeds" if len(seed) == 1 else f"seeds {seed[0]} to {seed[1]}"
    return f"{drawn} of {entry['name']} with {seeds}: {entry.start_states()} {split} start states, numbered here anew"
