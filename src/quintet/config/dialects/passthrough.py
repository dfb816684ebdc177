"""Free-form sections, checked against their target: arguments of an engine, and overrides of a model's config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.dialect import Dialect, known_names
from quintet.config.dialects.typos import closest_keys
from quintet.config.dialects.value_types import SECTION
from quintet.config.dotted import is_inside
from quintet.config.model_locations.locations import UnreadableConfigError, config_file, read_config
from quintet.config.problems import ConfigProblem, setting_problem, source_of
from quintet.config.schema import format_value

ENGINES = ("vllm", "sglang")
ROLL_ENGINE, ROLL_OPTIONS, ROLL_STRATEGY = "actor_infer", "strategy_args.strategy_config", "strategy_args.strategy_name"
COMMON_MODEL_ENTRIES = frozenset(
    (
        *("architectures", "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
        *("id2label", "is_decoder", "is_encoder_decoder", "label2id", "num_labels", "output_attentions"),
        *("output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id"),
        *("tie_word_embeddings", "torch_dtype", "use_cache"),
    )
)
"""Entries that transformers accepts for every model, even if its `config.json` lacks them."""


@dataclass(frozen=True, slots=True)
class EngineArgument:
    """An argument that a configuration passes to an engine."""

    engine: str
    section: str
    name: str
    source_key: str
    """The key that the user set: the argument's, or one inside its value."""

    @property
    def key(self) -> str:
        """Full name of the argument's key."""
        return f"{self.section}.{self.name}"

    @property
    def is_known(self) -> bool:
        """Whether the engine has such an argument."""
        return self.name in engine_arguments(self.engine)

    @property
    def closest_keys(self) -> list[str]:
        """Keys of arguments with similar names."""
        return [f"{self.section}.{name}" for name in closest_keys(self.name, engine_arguments(self.engine), 1)]


def engine_arguments(engine: str) -> frozenset[str]:
    """Return the names of an engine's arguments in any of its releases."""
    return known_names(f"{engine}_arguments")


def engine_argument(key: str, values: ForeignValues) -> EngineArgument | None:
    """Return the engine argument that a key sets, by verl's `engine_kwargs` or by ROLL's options of a strategy."""
    for engine in ENGINES:
        section, separator, entry = key.partition(f".engine_kwargs.{engine}.")
        if separator:
            return _argument(engine, f"{section}.engine_kwargs.{engine}", entry, key, values.dialect)
    worker, _, entry = key.partition(f".{ROLL_OPTIONS}.")
    engine = str(values[f"{worker}.{ROLL_STRATEGY}"]) if entry and worker == ROLL_ENGINE else ""
    return _argument(engine, f"{worker}.{ROLL_OPTIONS}", entry, key, values.dialect) if engine in ENGINES else None


def _argument(engine: str, section: str, entry: str, key: str, dialect: Dialect) -> EngineArgument | None:
    """Return the argument, or None if the section is undocumented."""
    documented = dialect.documented(f"{section}.x").rpartition(".")[0]
    if not any(name.startswith(f"{documented}.") for name in dialect.specs()):
        return None
    return EngineArgument(engine, section, entry.partition(".")[0], key)


def unlisted_arguments(values: ForeignValues, engine: str) -> list[EngineArgument]:
    """Return arguments that the user set, that the engine has and that no reference lists, except null ones."""
    arguments: dict[str, EngineArgument] = {}
    for key in values.merged.leaves():
        argument = engine_argument(key, values)
        if argument is None or argument.engine != engine or not argument.is_known:
            continue
        if values.dialect.spec(argument.key) is None and values[argument.key] is not None:
            arguments.setdefault(argument.key, argument)
    return [*arguments.values()]


def unused_arguments(values: ForeignValues, engine: str) -> Iterator[str]:
    """Yield a remark for each argument of another engine than the one that generates."""
    for other in ENGINES:
        if other != engine:
            for argument in unlisted_arguments(values, other):
                setting = f"{argument.key} = {format_value(values[argument.key])}"
                yield f"{setting} has no effect: the engine is {engine}"


def model_config_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of overrides of a model's `config.json` that has no such entries."""
    for section, entries, path in _model_overrides(values):
        file = config_file(path)
        if file is None:
            continue
        try:
            config = read_config(file)
        except (UnreadableConfigError, OSError, ValueError, RecursionError):
            continue
        yield from _unknown_entries(section, entries, config, values.merged.sources, path)


def unchecked_model_sections(values: ForeignValues) -> Iterator[str]:
    """Yield a remark for each section of overrides whose model is not on this machine."""
    for section, _, path in _model_overrides(values):
        if config_file(path) is None:
            source = next(source for key, source in values.merged.sources.items() if is_inside(key, section))
            yield f"{section} ({source}) was not checked: there is no config.json of {path} on this machine"


def _model_overrides(values: ForeignValues) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield each free-form section that the user filled, with its entries and the path of the model."""
    dialect = values.dialect
    documented = {key for key, spec in dialect.specs().items() if spec.value_type is SECTION}
    shared = {
        f"{section}{key.removeprefix(other)}"
        for section, other in dialect.shared_sections.items()
        for key in documented
        if key.startswith(f"{other}.")
    }
    for key in sorted(key for key in documented | shared if ".override_config" in key):
        if any(is_inside(name, key) for name in values.merged.sources):
            path_key = f"{key.partition('.override_config')[0]}.path"
            entries, path = values[key], values[path_key] or values[dialect.documented(path_key)]
            if isinstance(entries, Mapping) and entries and isinstance(path, str):
                yield key, entries, path


def _unknown_entries(
    section: str, entries: Mapping[str, Any], config: Mapping[str, Any], sources: Mapping[str, str], path: str
) -> Iterator[ConfigProblem]:
    for name, value in entries.items():
        key, inner = f"{section}.{name}", config.get(name)
        if name not in config and name not in COMMON_MODEL_ENTRIES:
            closest = closest_keys(name, [*config, *COMMON_MODEL_ENTRIES], 1)
            hint = f"did you mean {section}.{closest[0]}?" if closest else "leave it out"
            yield setting_problem(key, value, source_of(key, sources), f"{path}/config.json has no {name}", hint)
        elif isinstance(value, Mapping) and isinstance(inner, Mapping):
            yield from _unknown_entries(key, value, inner, sources, path)
