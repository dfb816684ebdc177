"""Problems of a native configuration, in the keys of the framework whose format the user wrote."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from quintet.config.dialects.conversion import NativeBuilder, converter_of, exported_values, to_foreign_value
from quintet.config.dialects.ledger import is_effective
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.synonyms import keys_by_synonym
from quintet.config.dotted import set_value
from quintet.config.native.experiment import Experiment
from quintet.config.native.section import CONFLICT
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value, is_key
from quintet.config.validation import describe_problems
from quintet.config.yaml_reader import parse_override
from quintet.errors import ConfigError

CHANGE = re.compile(r"leave ([\w.]+\.\w+) out|([a-z_]\w*(?:\.\w+)*)=(\[[^]]*\]|\{[^}]*\}|[^\s,;()]+)")
PLAIN = re.compile(r"[\w./-]+")


def foreign_problems(error: ValidationError, native: NativeBuilder) -> Iterator[ConfigProblem]:
    """Yield the problem of each error of pydantic, by the foreign keys from which the native values follow."""
    problems = describe_problems(error, native.tree, dict(native.provenance()), keys_by_synonym)
    for details, problem in zip(error.errors(), problems, strict=True):
        if details["type"] == CONFLICT:
            yield _conflict(details["msg"], problem, native)
        else:
            yield _invalid_value(problem, native)


def _conflict(text: str, problem: ConfigProblem, native: NativeBuilder) -> ConfigProblem:
    """Describe native values that contradict each other; the hint of the problem sets each of them."""
    involved = {key: _origins_to_name(native, key) for _, key, _ in CHANGE.findall(problem.hint or "")}
    for key, origins in involved.items():
        if origins:
            text = re.sub(_mention(key), origins[0], text)
    origins = tuple(dict.fromkeys(origin for names in involved.values() for origin in names))
    return _problem_of(origins, text, _translate_all(native.tree, native, problem.hint or ""), problem, native)


def _mention(key: str) -> str:
    """Return a pattern for the last parts of a native key, in backticks or before an operator."""
    parts = key.split(".")
    names = "|".join(re.escape(".".join(parts[start:])) for start in range(len(parts)))
    return rf"`(?:{names})`|(?<![\w.])(?:{names})(?= ?[=<>])"


def _invalid_value(problem: ConfigProblem, native: NativeBuilder) -> ConfigProblem:
    """Describe a native value of the wrong type or out of range."""
    origins = _origins_to_name(native, problem.key)
    text, specs = problem.message.rpartition("): ")[2], native.values.dialect.specs()
    if not all(origin in specs and specs[origin].direct for origin in origins):
        text = f"gives {problem.key} = {format_value(problem.value)}, which {text}"
    hint = "\n  ".join(f"{origin}: {specs[origin].effect}" for origin in origins if origin in specs)
    return _problem_of(origins, text, hint, problem, native)


def _origins_to_name(native: NativeBuilder, key: str) -> tuple[str, ...]:
    """Return the foreign keys of the user from which a native key follows, otherwise the first of all."""
    origins = native.origins_of(key)
    return tuple(filter(native.values.is_set, origins)) or origins[:1]


def _problem_of(
    origins: tuple[str, ...], text: str, hint: str | None, problem: ConfigProblem, native: NativeBuilder
) -> ConfigProblem:
    """Return a problem of foreign keys; of the native key if it follows from none."""
    if not origins:
        return problem
    remedy = hint or ", or ".join(f"leave {origin} out" for origin in filter(native.values.is_set, origins))
    message = f"{native.values.describe(*origins)}: {text}"
    return ConfigProblem(origins[0], native.values[origins[0]], native.values.source(origins[0]), message, remedy)


def translate_hint(experiment: Experiment, native: NativeBuilder, hint: str) -> str | None:
    """Return a hint with changes of foreign keys in place of those of native keys.

    Alternatives without a counterpart are left out; None if none has one.
    """
    return _translate_all(experiment.model_dump(), native, hint)


def _translate_all(tree: Mapping[str, Any], native: NativeBuilder, hint: str) -> str | None:
    """Translate the hint for a native configuration, valid or not."""
    parts = (_translate(tree, native, part) for part in hint.split(", or "))
    return ", or ".join(part for part in parts if part is not None) or None


def _translate(tree: Mapping[str, Any], native: NativeBuilder, part: str) -> str | None:
    """Return an alternative of a hint, None if it has no counterpart."""
    pieces: list[str] = []
    before, end = tree, 0
    for match in CHANGE.finditer(part):
        removed, key, _ = match.groups()
        if removed:
            origins = filter(native.values.is_set, native.origins_of(removed))
            changes = f"leave {' and '.join(origins)} out" if native.is_set_by_user(removed) else None
        elif is_key(key):
            _, parsed = parse_override(match[0], {})
            changed = _with_value(tree, key, parsed)
            changes = _direct_change(native, key, parsed)
            if changes is None:
                changes = _difference(tree, changed, native, key)
            tree = changed
        else:
            continue
        if not changes:
            return None
        pieces += [part[end : match.start()], changes]
        end = match.end()
    if tree is not before:
        pieces.append(_derived(before, tree, native, "".join(pieces)))
    return "".join([*pieces, part[end:]])


def _derived(before: Mapping[str, Any], after: Mapping[str, Any], native: NativeBuilder, changes: str) -> str:
    """Return further assignments to foreign keys that follow from several native ones, such as accumulation steps from
    the number of ranks, and that `changes` do not set."""
    specs = native.values.dialect.specs()
    old, new = _foreign_values(before, native) or {}, _foreign_values(after, native) or {}
    different = {name: value for name, value in new.items() if name in old and old[name] != value}
    derived = {name: value for name, value in different.items() if name in specs and specs[name].computed}
    return "".join(f" {name}={_text(value)}" for name, value in derived.items() if f"{name}=" not in changes)


def _with_value(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a configuration with another value."""
    changed = deepcopy(dict(tree))
    set_value(changed, key, value)
    return changed


def _direct_change(native: NativeBuilder, key: str, value: Any) -> str | None:
    """Return the assignment to the foreign key from which a native key takes its value, None if there is none."""
    specs = native.values.dialect.specs()
    for spec in specs.values():
        if spec.direct and key in spec.native and is_effective(spec, specs, native.values.__getitem__):
            foreign = to_foreign_value(spec, value)
            return f"{spec.key}={_text(foreign)}" if spec.value_type.accepts(foreign) else None
    return None


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], native: NativeBuilder, key: str) -> str | None:
    """Return assignments to the foreign keys in which two native configurations differ.

    If possible only those for a native key. An invalid configuration has the values that the user wrote.
    """
    specs = native.values.dialect.specs()
    old, new = _foreign_values(before, native), _foreign_values(after, native)
    if new is None:
        return None
    of_key = {name: value for name, value in new.items() if name in specs and key in specs[name].native}
    if old is None:
        old, new = {name: native.values[name] for name in of_key}, of_key
    different = {name: value for name, value in new.items() if name not in old or old[name] != value}
    preferred = {name: value for name, value in different.items() if name in of_key} or different
    return " ".join(f"{name}={_text(value)}" for name, value in preferred.items())


def _foreign_values(tree: Mapping[str, Any], native: NativeBuilder) -> dict[str, Any] | None:
    """Return the foreign keys of a native configuration, None if it is invalid or has no counterpart."""
    try:
        experiment, dialect = Experiment.model_validate(tree), DIALECTS[native.values.dialect.name]
        return exported_values(experiment, dialect.narrowed(converter_of(dialect).base_tree(experiment)))
    except (ValidationError, ConfigError):
        return None


def _text(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if is_plain else format_value(value)
