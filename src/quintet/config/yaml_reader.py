"""Reader of YAML files and `key=value` overrides that records the source of each key.

Only plain data: text, numbers, true and false, null, lists and mappings. Dates stay text; tags are refused.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from quintet.config.schema import documented_key, keys
from quintet.errors import ConfigError, MachineError, nearest

FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""Numbers such as 1e-4, which are text in YAML 1.1."""
COMMAND_LINE = "command line"
MAX_DEPTH = 32
"""Nested sections and lists; the schema has four."""
MAX_FILE_BYTES = 1 << 18
"""A long configuration has a tenth of that."""
MAX_VALUES = 10_000
"""Keys and values in a file or an override. Composition takes up to 0.4 ms for each, and a long configuration has a
tenth of that."""
SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
MERGE_TAG = "tag:yaml.org,2002:merge"
COLLECTION_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("seq", "map")}

SourceOf = Callable[[yaml.Node], str]
"""Returns the source of a node, `file.yaml:LINE`."""
Sources = dict[str, str]


def read_file(path: Path, sources: Sources) -> dict[str, Any]:
    """Return the tree of a YAML file, and add `file.yaml:LINE` for each of its keys to `sources`.

    Raises:
        ConfigError: it is not YAML or not a mapping, has a key twice, or uses tags.
        MachineError: it is missing or cannot be read.
    """
    tree, lines = _parse_file(read_text(path), " ".join(str(path).splitlines()))
    sources |= lines
    return {key: _copied(value) for key, value in tree.items()}


@lru_cache(maxsize=64)
def _parse_file(text: str, shown: str) -> tuple[dict[str, Any], Sources]:
    """Return the tree of a file's text, and the source of each key; a command reads each file several times."""
    node, sources = compose_limited(text, shown), Sources()
    if node is None:
        return {}, sources
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown} has no keys", source=shown, hint="write `key: value` lines")
    return _mapping(node, "", lambda part: f"{shown}:{_line(part.start_mark)}", sources), sources


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def parse_override(override: str, sources: Sources, source: str = COMMAND_LINE) -> tuple[str, Any]:
    """Return the dotted key and the value of `key=value`; a value that is not YAML is taken as text.

    Raises:
        ConfigError: it has no key or no `=`.
    """
    dotted, sign, text = override.partition("=")
    if not sign or not re.fullmatch(r"[^\s.+~]+(\.[^\s.]+){0,30}", dotted):
        message = f"{override!r} is not an override"
        quoted = "; quote a value with spaces: 'key={a: 1, b: 2}'" if override[-1:] in ("}", "]", ",") else ""
        raise ConfigError(message, value=override, source=source, hint=f"write key=value, such as seed=1{quoted}")
    sources[dotted] = source
    try:
        node = compose_limited(text, f"{dotted} ({source})")
    except _LimitError:
        raise
    except ConfigError:
        return dotted, text
    block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    if block or (node is None and text.strip()):
        return dotted, text
    if isinstance(node, yaml.MappingNode):
        return dotted, _mapping(node, f"{dotted}.", lambda _: source, sources)
    return dotted, None if node is None else _construct(node, lambda _: source)


class _LimitError(ConfigError):
    """More values than a configuration may have."""


def compose_limited(text: str, name: str) -> yaml.Node | None:
    """Return the node of a YAML text, whose nesting and number of values are limited; None if it is empty.

    Raises:
        ConfigError: it is not YAML, or exceeds a limit; the message begins with `name`.
    """
    try:
        return _Loader(text, name).get_single_node()
    except yaml.reader.ReaderError as error:
        where = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        problem = f"it contains the character U+{ord(text[error.position]):04X}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{_line(mark)}"
        problem = error.problem or str(error)
    raise ConfigError(f"{where} is not YAML: {problem}", source=where, hint="correct the line")


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting and many values, those of aliases included: a short file could expand to gigabytes or refer
    to itself."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._name = name
        self._depth = 0
        self._count = 0
        self._heights: list[int] = []
        """Levels below each node that is being composed."""
        self._extents: dict[int, tuple[int, int]] = {}
        """Number of values and of levels of each complete node, by `id`."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"{self._name}:{_line(event.start_mark)}"
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(super().compose_node(parent, index), where, str(event.anchor))
        before, self._depth = self._count, self._depth + 1
        self._add(1, where)
        if self._depth > MAX_DEPTH and isinstance(event, yaml.CollectionStartEvent):
            raise ConfigError(f"{where} is nested too deeply", source=where, hint="write the values out")
        self._heights.append(0)
        node = super().compose_node(parent, index)
        height = self._heights.pop() + 1
        self._extents[id(node)] = self._count - before, height
        self._grow(height)
        self._depth -= 1
        return node

    def _aliased(self, node: yaml.Node | None, where: str, anchor: str) -> yaml.Node | None:
        """Return the node of an alias, with its values and levels counted once more."""
        count, height = self._extents.get(id(node), (0, 0))
        if not count:
            message = f"{where}: the alias *{anchor} stands inside of its anchor, and refers to itself"
            raise ConfigError(message, source=where, hint="write the values out")
        if self._depth + height > MAX_DEPTH:
            raise ConfigError(f"{where} is nested too deeply", source=where, hint="write the values out")
        self._add(count, where)
        self._grow(height)
        return node

    def _add(self, count: int, where: str) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            message = f"{self._name} has more than {MAX_VALUES:,} values, at line {where.rpartition(':')[2]}"
            raise _LimitError(message, source=self._name, hint="shorten its lists")

    def _grow(self, height: int) -> None:
        if self._heights:
            self._heights[-1] = max(self._heights[-1], height)


def _line(mark: Any) -> int:
    """Return the line number, from 1."""
    return int(mark.line) + 1 if mark is not None else 1


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        MachineError: it is missing, not a regular file, not UTF-8, too large, or cannot be read.
    """
    try:
        if path.exists() and not path.is_dir():
            _check_size(path)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise MachineError(f"{path}:{line} is not UTF-8 text", "save the file as UTF-8") from None
    except IsADirectoryError:
        raise MachineError(f"{path} is a directory", _configurations_in(path)) from None
    except FileNotFoundError:
        raise MachineError(f"no such file: {path}", _similar_path(path)) from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}", "name a readable file") from None


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise MachineError(f"{path} is not a file", "pipes and devices cannot be read twice: save it as a file")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        message = f"{path} has {size:,} bytes, and a configuration at most {MAX_FILE_BYTES:,}"
        raise MachineError(message, "check the path")


def _configurations_in(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if path.suffix in (".yaml", ".yml", ".sh", ".txt"))
    return f"name a file in it: {', '.join(names[:8])}" if names else "name a YAML file or run script"


def _similar_path(path: Path) -> str:
    if any(key.name == str(path) for key in keys()):
        return f"to set that key, write {path}=VALUE"
    names = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
    close = nearest(path.name, [name for name in names if name.endswith((".yaml", ".yml"))]) or nearest(
        path.name, names
    )
    if close:
        return f"did you mean {path.parent / close}?"
    return "check the path" if path.is_absolute() else f"check the path; the current directory is {Path.cwd()}"


def _mapping(node: yaml.MappingNode, prefix: str, where: SourceOf, sources: Sources) -> dict[str, Any]:
    _refuse_tag(node, where)
    tree: dict[str, Any] = {}
    for key_node, value_node in _pairs(node, where):
        key, source = _key(key_node, where), where(key_node)
        dotted = f"{prefix}{key}"
        if key in tree:
            message = f"{dotted} is set twice, at {sources[dotted]} and {source}"
            raise ConfigError(message, key=dotted, source=source, hint="keep one")
        sources[dotted] = source
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = _mapping(value_node, f"{dotted}.", where, sources)
        elif _is_blank(value_node) and any(
            other.is_section for other in keys() if other.name == documented_key(dotted)
        ):
            tree[key] = {}
        else:
            tree[key] = _construct(value_node, where)
    return tree


def _pairs(node: yaml.MappingNode, where: SourceOf) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a mapping, first those that `<<` merges and its own keys do not replace."""
    own = [pair for pair in node.value if pair[0].tag != MERGE_TAG]
    if len(own) == len(node.value):
        return own
    names = {_key(key, where) for key, _ in own}
    merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for value in (value for key, value in node.value if key.tag == MERGE_TAG):
        for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(part, yaml.MappingNode):
                raise ConfigError(f"{where(part)}: << merges sections only", source=where(part), hint="<<: *ANCHOR")
            for pair in _pairs(part, where):
                merged.setdefault(_key(pair[0], where), pair)
    return [*(pair for name, pair in merged.items() if name not in names), *own]


def _key(node: yaml.Node, where: SourceOf) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise ConfigError(f"{where(node)}: a key must be text", source=where(node), hint="write `key: value`")


def _refuse_tag(node: yaml.Node, where: SourceOf) -> None:
    """Refuse a tag on a list or a section."""
    if isinstance(node, yaml.CollectionNode) and node.tag not in COLLECTION_TAGS:
        source = where(node)
        raise ConfigError(f"{source}: cannot read the tag {node.tag}", source=source, hint="write it plainly")


def _is_blank(node: yaml.Node) -> bool:
    """Return whether a section has no keys, or only commented ones, as opposed to an explicit `null`."""
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _construct(node: yaml.Node, where: SourceOf) -> Any:
    _refuse_tag(node, where)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, where) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_key(key, where): _construct(value, where) for key, value in _pairs(node, where)}
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    if isinstance(node, yaml.ScalarNode) and node.style is None and FLOAT.fullmatch(node.value):
        return float(node.value)
    try:
        if node.tag in SCALAR_TAGS:
            return yaml.SafeLoader("").construct_object(node, deep=True)
        problem = f"the tag {node.tag}"
    except ValueError as error:
        problem = str(error)
    raise ConfigError(
        f"{where(node)}: cannot read {node.value!r}: {problem}", source=where(node), hint="write it plainly"
    )
