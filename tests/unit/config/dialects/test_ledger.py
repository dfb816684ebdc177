"""If these fail, a documented key is unknown, or the ledger describes it wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from quintet.cli import explain
from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Reference
from quintet.config.dialects.ledger import KeySpec, is_effective, load_keys, unmet_condition
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.value_types import BOOLEAN, SECTION, ValueType, one_of, optional, parse_type
from quintet.config.schema import keys
from quintet.config.yaml_reader import FLOAT

DOCUMENTED = Path(__file__).parent / "keys"
REFERENCES = [reference for dialect in DIALECTS.values() for reference in dialect.references]
KEYS = [spec for reference in REFERENCES for spec in reference.load()]
POSITIVE = parse_type("int >= 1")


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            number = isinstance(value, str) and FLOAT.fullmatch(value)
            yield f"{prefix}{key}", float(value) if number else value


def test_every_reference_has_a_key_file() -> None:
    assert sorted(reference.name for reference in REFERENCES) == sorted(p.stem for p in DOCUMENTED.glob("*.yaml"))
    assert len(KEYS) == 773


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_the_ledger_has_every_documented_key_with_its_documented_default(reference: Reference) -> None:
    documented = dict(leaves(yaml.safe_load((DOCUMENTED / f"{reference.name}.yaml").read_text())))
    ledger = {spec.key: spec.default for spec in reference.load()}
    assert {k: (type(v), v) for k, v in ledger.items()} == {k: (type(v), v) for k, v in documented.items()}


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_a_key_file_mentions_the_names_by_which_its_keys_are_looked_up(reference: Reference) -> None:
    """Files that do not mention a name are not loaded."""
    for spec in reference.load():
        names = [spec.key, spec.key.rpartition(".")[2], *spec.aliases, *spec.native]
        assert all(reference.mentions([name]) for name in names), spec.key
    assert reference.text is None or not reference.mentions(["no.such.key"])


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_every_entry_is_consistent_with_itself_and_the_native_schema(reference: Reference) -> None:
    native = {key.name for key in keys()}
    for spec in reference.load():
        noop = [value for value in spec.noop if not isinstance(value, ValueType) and "${" not in str(value)]
        assert all(map(spec.value_type.accepts, noop)), spec.key
        assert set(spec.native) <= native, spec.key
        assert 20 <= len(spec.effect) <= 260, spec.key
        assert spec.effect.endswith("."), spec.key
        assert not spec.value_type.accepts(object()) or spec.value_type.description == "anything", spec.key


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_honoured_keys_set_only_native_keys_that_work_and_unsupported_ones_something_that_does_not(
    reference: Reference,
) -> None:
    working = {key.name for key in keys() if key.requires is None or key.unsupported}
    partial = {key.name for key in keys() if key.unsupported}
    for spec in reference.load():
        if spec.state == "honoured":
            assert set(spec.native) <= working, f"{spec.key} sets {set(spec.native) - working}, which waits"
        elif spec.native and not spec.computed and not spec.noop:
            assert set(spec.native) - (working - partial), f"{spec.key} sets only what works: honour it"


def test_an_illegal_default_is_refused() -> None:
    with pytest.raises(ValidationError, match="not an integer"):
        KeySpec(key="a.b", effect="Nothing.", value_type=POSITIVE, default=0, requires=Capability.POLICIES)


def test_a_condition_on_an_ineffective_key_is_unmet_too() -> None:
    first = KeySpec(key="a", effect="", value_type=BOOLEAN, default=False)
    second = KeySpec(key="b", effect="", value_type=BOOLEAN, default=True, only_if=("a", True))
    third = KeySpec(key="c", effect="", value_type=POSITIVE, default=1, only_if=("b", BOOLEAN))
    specs = {spec.key: spec for spec in (first, second, third)}
    assert unmet_condition(third, specs, {"a": False, "b": True}.__getitem__) == ("a", True)
    assert is_effective(third, specs, {"a": True, "b": True}.__getitem__)


def test_types_are_strict() -> None:
    assert not parse_type("int").accepts(True)
    assert not parse_type("int").accepts(8.0)
    assert not parse_type("int").accepts("8")
    assert not any(parse_type("number").accepts(value) for value in (10**400, float("inf"), float("nan"), True))
    assert not one_of(1).accepts(True)
    assert optional(POSITIVE).accepts(None)
    assert not optional(POSITIVE).accepts(0)


@pytest.mark.parametrize(
    ("expression", "description", "legal", "illegal"),
    [
        ("int >= -1 or null", "an integer ≥ -1 or null", [-1, None], [-2, 0.5]),
        ("int >= 4 <= 16", "an integer ≥ 4 and ≤ 16", [4, 16], [3, 17]),
        ("number > 0 < 1", "a number > 0 and < 1", [0.5], [0, 1, float("nan")]),
        ("one of '16' | 16 | fp16", "one of 16, 16, fp16", ["16", 16, "fp16"], [16.0, "fp"]),
        ("text or list of text", "text or a list, each text", ["a", ["a"], []], ["", [1]]),
        ("list of (text or int)", "a list, each text or an integer", [["a", 1]], ["a"]),
        ("named or null", "text or null", ["a", None], [1]),
        ("function", "a custom function, file.py:function", ["a.py:f"], ["f", "a.py:"]),
    ],
)
def test_a_type_expression_describes_and_accepts_the_same_values(
    expression: str, description: str, legal: list[Any], illegal: list[Any]
) -> None:
    parsed = parse_type(expression, {"named": parse_type("text")})
    assert parsed.description == description
    assert all(map(parsed.accepts, legal))
    assert not any(map(parsed.accepts, illegal))


def test_a_type_that_does_not_exist_is_refused() -> None:
    assert parse_type("section") is SECTION
    with pytest.raises(ValueError, match="no type is called 'txet'"):
        parse_type("txet")


def framework_keys(framework: str) -> list[KeySpec]:
    names = (path.name for path in (files("quintet.config.dialects") / framework / "keys").iterdir())
    return [spec for name in names for spec in load_keys(framework, name.removesuffix(".yaml"))]


def texts(value: object) -> Iterator[str]:
    """The texts in a function, with those of the constants that it names, or in a table of rules."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, FunctionType):
        yield from code_texts(value.__code__, value.__globals__)
        yield from texts((value.__defaults__, *(cell.cell_contents for cell in value.__closure__ or ())))
    elif isinstance(value, Mapping):
        yield from texts([*value.keys(), *value.values()])
    elif isinstance(value, tuple | list | set | frozenset):
        yield from (text for item in value for text in texts(item))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from texts([getattr(value, field.name) for field in fields(value)])


def code_texts(code: CodeType, constants: Mapping[str, Any]) -> Iterator[str]:
    for item in code.co_consts:
        yield from code_texts(item, constants) if isinstance(item, CodeType) else texts(item)
    named = (constants.get(name) for name in code.co_names)
    yield from texts([value for value in named if not isinstance(value, FunctionType | ModuleType | type)])


def reads(spec: KeySpec, framework: str) -> bool:
    """Whether the function of a key has the last part of its name whole, or its module has the name.

    Otherwise the default of a key that it reads refers to this one.
    """
    assert spec.computed_by is not None
    last = re.compile(rf"(?<!\w){re.escape(spec.key.rpartition('.')[2])}(?!\w)")
    if any(map(last.search, texts(resolve_name(spec.computed_by)))):
        return True
    module = resolve_name(spec.computed_by.rpartition(".")[0])
    constants = [value for value in vars(module).values() if not isinstance(value, FunctionType | ModuleType | type)]
    if spec.key in texts([value for value in constants if not isinstance(value, dict)]):
        return True
    followers = (other for other in framework_keys(framework) if other.default == f"${{{spec.key}}}")
    return any(other.direct or (other.computed and reads(other, framework)) for other in followers)


@pytest.mark.parametrize("framework", DIALECTS)
def test_a_computed_key_names_the_function_that_computes_it(framework: str) -> None:
    specs = framework_keys(framework)
    assert [spec.key for spec in specs if spec.computed != (spec.computed_by is not None)] == []
    assert [(spec.key, spec.computed_by) for spec in specs if spec.computed and not reads(spec, framework)] == []


def test_explain_prints_the_function_that_computes_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    explain.run(["actor_rollout_ref.actor.use_dynamic_bsz"], "verl", every=False, metrics=False, as_json=False)
    assert "computed by quintet.config.dialects.verl.batches.budgets_to_native" in capsys.readouterr().out
