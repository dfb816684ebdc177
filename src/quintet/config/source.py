"""Reading YAML and `key=value` words into a tree, each key with the place it came from.

Only plain data: text, numbers, true and false, null, lists and mappings. Dates stay text; tags and
aliases are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from quintet.config.keys import documented, keys
from quintet.errors import ConfigError, MachineError, nearest

__all__ = ["COMMAND_LINE", "FLOAT", "parse_override", "read_file", "read_text"]

FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""
COMMAND_LINE = "command line"
DEEPEST = 32
"""Sections and lists inside each other; the schema has four."""
LARGEST = 1 << 18
"""Bytes of a file; a long configuration has a tenth of that."""
PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
COLLECTIONS = {f"tag:yaml.org,2002:{name}" for name in ("seq", "map")}

Where = Callable[[yaml.Node], str]
Sources = dict[str, str]


def read_file(path: Path, sources: Sources) -> dict[str, Any]:
    """The tree of a YAML file; `sources` gets `file.yaml:LINE` for each of its keys.

    Raises:
        ConfigError: it isn't YAML, isn't a mapping, gives a key twice, or uses tags or aliases.
        MachineError: it is missing or can't be read.
    """
    shown = " ".join(str(path).splitlines())
    node = _compose(read_text(path), shown)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown} holds no keys", source=shown, hint="write `key: value` lines")
    return _mapping(node, "", lambda part: f"{shown}:{_line(part.start_mark)}", sources)


def parse_override(override: str, sources: Sources, place: str = COMMAND_LINE) -> tuple[str, Any]:
    """The dotted key and the value of a `key=value`; text that YAML can't read is taken as it stands.

    Raises:
        ConfigError: it has no key or no `=`.
    """
    dotted, sign, text = override.partition("=")
    if not sign or not re.fullmatch(r"[^\s.+~]+(\.[^\s.]+){0,30}", dotted):
        message = f"{override!r} is not an override"
        raise ConfigError(message, value=override, source=place, hint="write key=value, such as seed=1")
    for key in [key for key in sources if key.startswith(f"{dotted}.")]:
        del sources[key]
    sources[dotted] = place
    try:
        node = _compose(text, place)
    except ConfigError:
        return dotted, text
    block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    if block or (node is None and text.strip()):
        return dotted, text
    if isinstance(node, yaml.MappingNode):
        return dotted, _mapping(node, f"{dotted}.", lambda _: place, sources)
    return dotted, None if node is None else _construct(node, lambda _: place)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        _refuse_loops(text, name)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        where = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        problem = f"it holds the character U+{ord(text[error.position]):04X}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{_line(mark)}"
        problem = error.problem or str(error)
    raise ConfigError(f"{where} is not YAML: {problem}", source=where, hint="mend the line")


def _refuse_loops(text: str, name: str) -> None:
    """Aliases can hold themselves, or multiply a short file into gigabytes; so can no configuration."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        alias = f"uses an alias, *{event.anchor}" if isinstance(event, yaml.AliasEvent) else None
        if problem := alias or (depth > DEEPEST and "is nested too deeply"):
            where = f"{name}:{_line(event.start_mark)}"
            raise ConfigError(f"{where} {problem}", source=where, hint="write the values out")


def _line(mark: Any) -> int:
    """Counted from 1, as editors do."""
    return int(mark.line) + 1 if mark is not None else 1


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        MachineError: it is missing, no file, not UTF-8, longer than any configuration, or can't be read.
    """
    try:
        if path.exists() and not path.is_dir():
            _check_size(path)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise MachineError(f"{path}:{line} is not UTF-8 text", "save the file as UTF-8") from None
    except IsADirectoryError:
        raise MachineError(f"{path} is a directory", "give the YAML file in it") from None
    except FileNotFoundError:
        raise MachineError(f"no such file: {path}", _instead_of(path)) from None
    except OSError as error:
        raise MachineError(f"can't read {path}: {error.strerror}", "give a file that can be read") from None


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise MachineError(f"{path} is not a file", "pipes and devices can't be read twice: save it as a file")
    if (size := path.stat().st_size) > LARGEST:
        message = f"{path} holds {size:,} bytes, and no configuration more than {LARGEST:,}"
        raise MachineError(message, "give the file that was meant")


def _instead_of(path: Path) -> str:
    if any(key.name == str(path) for key in keys()):
        return f"to set that key, write {path}=VALUE"
    names = [other.name for other in path.parent.glob("*") if other.is_file()] if path.parent.is_dir() else []
    close = nearest(path.name, [name for name in names if name.endswith((".yaml", ".yml"))]) or nearest(
        path.name, names
    )
    return f"did you mean {path.parent / close}?" if close else "check the path"


def _mapping(node: yaml.MappingNode, prefix: str, where: Where, sources: Sources) -> dict[str, Any]:
    _refuse_tag(node, where)
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, place = _key(key_node, where), where(key_node)
        dotted = f"{prefix}{key}"
        if key in tree:
            message = f"{dotted} is given twice, at {sources[dotted]} and {place}"
            raise ConfigError(message, key=dotted, source=place, hint="keep one")
        sources[dotted] = place
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = _mapping(value_node, f"{dotted}.", where, sources)
        elif _is_blank(value_node) and any(other.is_section for other in keys() if other.name == documented(dotted)):
            tree[key] = {}
        else:
            tree[key] = _construct(value_node, where)
    return tree


def _key(node: yaml.Node, where: Where) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise ConfigError(f"{where(node)}: a key must be a word", source=where(node), hint="write `key: value`")


def _refuse_tag(node: yaml.Node, where: Where) -> None:
    """A list or a section that a tag would make something else of."""
    if isinstance(node, yaml.CollectionNode) and node.tag not in COLLECTIONS:
        source = where(node)
        raise ConfigError(f"{source}: can't read the tag {node.tag}", source=source, hint="write it plainly")


def _is_blank(node: yaml.Node) -> bool:
    """A section whose keys are all left out or commented out, as opposed to a written `null`."""
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _construct(node: yaml.Node, where: Where) -> Any:
    _refuse_tag(node, where)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, where) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_key(key, where): _construct(value, where) for key, value in node.value}
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    if isinstance(node, yaml.ScalarNode) and node.style is None and FLOAT.fullmatch(node.value):
        return float(node.value)
    try:
        if node.tag in PLAIN:
            return yaml.SafeLoader("").construct_object(node, deep=True)
        problem = f"the tag {node.tag}"
    except ValueError as error:
        problem = str(error)
    raise ConfigError(
        f"{where(node)}: can't read {node.value!r}: {problem}", source=where(node), hint="write it plainly"
    )
