"""Sections whose entries no reference lists: each is checked against what it is handed to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from quintet.config.dialects.composition.reading import Written
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.takes import FREE
from quintet.config.dialects.typos import meant
from quintet.config.faults import Fault, source_of
from quintet.config.keys import show
from quintet.config.plan.models import config_file, read_config
from quintet.config.plan.shapes import Unreadable

__all__ = [
    "Argument",
    "argument_of",
    "arguments",
    "further_arguments",
    "idle_arguments",
    "model_faults",
    "model_remarks",
]

ENGINES = ("vllm", "sglang")
OPTIONS, STRATEGY = "strategy_args.strategy_config", "strategy_args.strategy_name"
OF_EVERY_MODEL = frozenset(
    (
        *("architectures", "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
        *("id2label", "is_decoder", "is_encoder_decoder", "label2id", "num_labels", "output_attentions"),
        *("output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id"),
        *("tie_word_embeddings", "torch_dtype", "use_cache"),
    )
)
"""Entries that transformers knows of every model, whether its `config.json` writes them or not."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An entry that an engine is given."""

    engine: str
    section: str
    name: str
    given: str
    """The key by which somebody gave it, or a part of it."""

    @property
    def whole(self) -> str:
        """Its key."""
        return f"{self.section}.{self.name}"

    @property
    def known(self) -> bool:
        """Whether the engine has such an argument."""
        return self.name in arguments(self.engine)

    @property
    def nearest(self) -> list[str]:
        """The keys that somebody may have meant."""
        return [f"{self.section}.{name}" for name in meant(self.name, arguments(self.engine), 1)]


@cache
def arguments(engine: str) -> frozenset[str]:
    """The names that an engine's own arguments have, in its releases together."""
    text = (files("quintet.config.dialects") / "known" / f"{engine}_arguments.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def argument_of(key: str, written: Written, dialect: Dialect) -> Argument | None:
    """The engine's argument that a key stands for: verl's `engine_kwargs`, and ROLL's options of the strategies
    that are engines."""
    for engine in ENGINES:
        section, found, entry = key.partition(f".engine_kwargs.{engine}.")
        if found:
            return _argument(engine, f"{section}.engine_kwargs.{engine}", entry, key, dialect)
    worker, found, entry = key.partition(f".{OPTIONS}.")
    engine = str(written.value(f"{worker}.{STRATEGY}")) if found else ""
    return _argument(engine, f"{worker}.{OPTIONS}", entry, key, dialect) if engine in ENGINES else None


def _argument(engine: str, section: str, entry: str, key: str, dialect: Dialect) -> Argument | None:
    """None where the section itself is one that nobody documents."""
    inside = dialect.documented(f"{section}.x").rpartition(".")[0]
    if not any(key.startswith(f"{inside}.") for key in dialect.rows()):
        return None
    return Argument(engine, section, entry.partition(".")[0], key)


def further_arguments(written: Written, dialect: Dialect, engine: str) -> Iterator[Argument]:
    """Arguments that an engine has and no reference lists, and that somebody gave. Null hands nothing on."""
    rows = dialect.rows()
    told = set()
    for key in written.leaves():
        argument = argument_of(key, written, dialect)
        if argument is None or argument.engine != engine or not argument.known or argument.whole in told:
            continue
        documented = argument.whole in rows or dialect.documented(argument.whole) in rows
        if not documented and written.value(argument.whole) is not None:
            told.add(argument.whole)
            yield argument


def idle_arguments(written: Written, dialect: Dialect, engine: str) -> Iterator[str]:
    """Those of another engine than the one that generates, each as it is told."""
    for other in ENGINES:
        if other != engine:
            for argument in further_arguments(written, dialect, other):
                told = f"{argument.whole} = {show(written.value(argument.whole))}"
                yield f"{told} has no effect: {engine} generates"


def model_faults(written: Written, dialect: Dialect) -> Iterator[Fault]:
    """Entries that the model's own `config.json` doesn't have."""
    for section, entries, path in _given(written, dialect):
        file = config_file(path)
        if file is None:
            continue
        try:
            config = read_config(file)
        except (Unreadable, OSError, ValueError, RecursionError):
            continue
        yield from _strangers(section, entries, config, written, path)


def model_remarks(written: Written, dialect: Dialect) -> Iterator[str]:
    """Sections whose model isn't on this machine."""
    for section, _, path in _given(written, dialect):
        if config_file(path) is None:
            source = next(place for key, place in written.sources.items() if _inside(key, section))
            yield f"{section} ({source}) couldn't be checked: there is no config.json of {path} on this machine"


def _given(written: Written, dialect: Dialect) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each free-form section that somebody filled, and the path of the model that it changes."""
    free = {key for key, row in dialect.rows().items() if row.takes is FREE}
    like = {
        f"{section}{key.removeprefix(other)}"
        for section, other in dialect.alike.items()
        for key in free
        if key.startswith(f"{other}.")
    }
    for key in sorted(free | like):
        if any(_inside(given, key) for given in written.sources):
            named = f"{key.partition('.override_config')[0]}.path"
            entries, path = written.value(key), written.value(named) or written.value(dialect.documented(named))
            if isinstance(entries, Mapping) and entries and isinstance(path, str):
                yield key, entries, path


def _inside(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _strangers(
    section: str, entries: Mapping[str, Any], config: Mapping[str, Any], written: Written, path: str
) -> Iterator[Fault]:
    for name, value in entries.items():
        key, source = f"{section}.{name}", source_of(f"{section}.{name}", written.sources)
        inner = config.get(name)
        if name not in config and name not in OF_EVERY_MODEL:
            near = meant(name, [*config, *OF_EVERY_MODEL], 1)
            message = f"{key} = {show(value)} ({source}): {path}/config.json has no {name}"
            yield Fault(key, value, source, message, f"did you mean {near[0]}?" if near else "leave it out")
        elif isinstance(value, Mapping) and isinstance(inner, Mapping):
            yield from _strangers(key, value, inner, written, path)
