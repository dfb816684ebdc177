"""Plain Python data as JSON, in a closed format: decoding creates builtin values and executes nothing.

Scalars are themselves. Everything else is a JSON array that starts with a tag. Lists, dicts, sets, deques and byte
arrays have a number by which their sender knows them, so that shared and recursive containers stay so, and changes that
the receiver makes can be sent back. What has no tag is a reference to an object of the sender, or back to one of the
receiver, see `quintet.sandbox.remote_objects`.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import re
import sys
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

MAX_JSON_INT: Final = 2**63
MAX_INT_CHARS, MAX_FRACTION_BITS, MAX_DECIMAL_CHARS, MAX_FIELDS = 1_000_000, 100_000, 10_000, 256
"""Limits of single values, with which decoding and comparing them takes little time."""
DECIMAL: Final = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:E[+-]?[0-9]{1,4})?|[+-]?Infinity|NaN")
DTYPE: Final = re.compile(r"[<>|=]?[biufcUS][0-9]{1,4}")
BUILTIN_TYPES: Final = {value: name for name, value in vars(builtins).items() if isinstance(value, type)}
MUTABLE: Final = (list, dict, set, collections.deque, bytearray)
DATA: Final = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
"""Types whose subclasses have a plain value."""


class DataError(ValueError):
    """The other side sent something that is not in the format."""


class Codec:
    """Encoder and decoder of one side of a connection."""

    def __init__(
        self,
        refer: Callable[[Any], Any],
        resolve: Callable[[Any], Any],
        is_reference: Callable[[Any], bool],
        *,
        arrays: bool = True,
    ) -> None:
        """`refer(value)` encodes an object that is no data, `resolve(item)` decodes such an item, and
        `is_reference(value)` tells which instances of subclasses of builtin types are objects, too. Arrays are decoded
        as lists without `arrays`, and where numpy has not been imported."""
        self._arrays = arrays
        self._refer, self._resolve, self._is_reference = refer, resolve, is_reference
        self._sent: dict[int, Any] = {}
        """Containers of this side by number, which is their `id`: they stay alive."""
        self._received: dict[int, Any] = {}
        """Containers of the other side by its number."""
        self._numbers: dict[int, int] = {}
        """Numbers of the other side's containers by `id`."""
        self._contents: dict[int, Any] = {}
        """Contents of the other side's containers when they were last in a message."""
        self._in_message: set[int] = set()
        self._touched: dict[int, None] = {}

    def start_message(self) -> None:
        """Forget which containers the last message had."""
        self._in_message.clear()

    def encode(self, value: Any) -> Any:
        """Return the JSON of a value."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -MAX_JSON_INT < value < MAX_JSON_INT else ["i", hex(value)]
        if kind in MUTABLE:
            return self._container(value, kind)
        if (encoder := _ENCODERS.get(kind)) is not None:
            return encoder(self.encode, value)
        return self._other(value)

    def _container(self, value: Any, kind: type) -> Any:
        if id(value) in self._numbers:
            number = self._numbers[id(value)]
            self._touched[number] = None
            return ["m", number]
        number = id(value)
        self._sent[number] = value
        if number in self._in_message:
            return ["o", number]
        self._in_message.add(number)
        return [kind.__name__, number, self._items(value)]

    def _items(self, value: Any) -> Any:
        if isinstance(value, dict):
            return [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]
        return base64.b64encode(value).decode() if isinstance(value, bytearray) else [*map(self.encode, value)]

    def _other(self, value: Any) -> Any:
        """Encode an instance of a subclass or of a type of numpy by its plain value, other objects as references."""
        if self._is_reference(value):
            return self._refer(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and DTYPE.fullmatch(value.dtype.str):
            return self.encode(value.item())
        if numpy is not None and isinstance(value, numpy.ndarray) and DTYPE.fullmatch(value.dtype.str):
            return ["np", value.dtype.str, self.encode(value.tolist())]
        if isinstance(value, type) and value in BUILTIN_TYPES:
            return ["type", BUILTIN_TYPES[value]]
        fields = getattr(type(value), "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple) and all(type(name) is str for name in fields):
            return ["nt", type(value).__name__, [*fields], [*map(self.encode, value)]]
        plain = plain_value(value)
        return self._refer(value) if plain is None else self.encode(plain)

    def decode(self, item: Any) -> Any:
        """Return the value of an item.

        Raises:
            DataError: the item is not in the format.
        """
        if not isinstance(item, list):
            if isinstance(item, dict):
                raise DataError("an object has no tag")
            return item
        try:
            tag = item[0]
            if tag in _CONTAINERS:
                return self._received_container(tag, *item[1:])
            if tag == "m":
                return self._sent[item[1]]
            if tag == "o":
                return self._received[item[1]]
            if tag == "np":
                return self._array(*item[1:])
            decoder = _DECODERS.get(tag)
            return self._resolve(item) if decoder is None else decoder(self.decode, *item[1:])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise DataError(f"not in the format: {error!r}") from error

    def _array(self, dtype: str, item: Any) -> Any:
        numpy, values = sys.modules.get("numpy"), self.decode(item)
        if numpy is None or not self._arrays:
            return values
        if not DTYPE.fullmatch(dtype):
            raise DataError("unknown dtype")
        return numpy.array(values, dtype=dtype)

    def _received_container(self, tag: str, number: int, items: Any) -> Any:
        value = self._received.get(number)
        if type(value) is not _CONTAINERS[tag]:
            value = self._received[number] = _CONTAINERS[tag]()
            self._numbers[id(value)] = number
        self._fill(value, items)
        self._contents[number] = _contents(value)
        self._touched[number] = None
        return value

    def _fill(self, value: Any, items: Any) -> None:
        if isinstance(value, bytearray):
            value[:] = base64.b64decode(items)
            return
        decoded = [(self.decode(a), self.decode(b)) for a, b in items] if isinstance(value, dict) else None
        plain: list[Any] = [*map(self.decode, items)] if decoded is None else decoded
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(plain)

    def changes(self) -> list[Any]:
        """Return the changes of the other side's containers that were in messages since the last call."""
        changes = []
        while self._touched:
            number, _ = self._touched.popitem()
            value = self._received[number]
            if not _same_contents(contents := _contents(value), self._contents[number]):
                self._contents[number] = contents
                changes.append([number, self._items(value)])
        return changes

    def apply(self, changes: Iterable[Any]) -> None:
        """Apply the other side's changes to containers of this side.

        Raises:
            DataError: there is no such container.
        """
        try:
            for number, items in changes:
                self._fill(self._sent[number], items)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not in the format: {error!r}") from error


def plain_value(value: Any) -> Any:
    """Return the plain value of an instance of a builtin type or of a subclass of one; None if it has none."""
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return list(value)
    for base in DATA:
        if isinstance(value, base):
            return _PLAIN[base](value)
    return None


def _contents(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]


def _same_contents(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _named_tuple(decode: Callable[[Any], Any], name: str, fields: list[str], items: list[Any]) -> Any:
    if len(fields) > MAX_FIELDS:
        raise ValueError("a tuple has too many fields")
    return collections.namedtuple(name, fields)(*map(decode, items))


def _integer(_: Any, text: str) -> int:
    if len(text) > MAX_INT_CHARS:
        raise ValueError("an integer is too long")
    return int(text, 16)


def _fraction(decode: Callable[[Any], Any], a: Any, b: Any) -> Fraction:
    numerator, denominator = decode(a), decode(b)
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError("a fraction is too long")
    return Fraction(numerator, denominator)


def _decimal(_: Any, text: str) -> Decimal:
    if len(text) > MAX_DECIMAL_CHARS or not DECIMAL.fullmatch(text):
        raise ValueError("not a number of moderate size")
    return Decimal(text)


def _builtin_type(_: Any, name: str) -> type:
    value = getattr(builtins, name)
    if value not in BUILTIN_TYPES:
        raise ValueError("not a type")
    return value  # type: ignore[no-any-return]


_PLAIN: Final[Mapping[type, Callable[[Any], Any]]] = {
    bool: bool,
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    complex: lambda value: complex(value.real, value.imag),
    str: lambda value: str.__str__(value)[:],
    bytes: lambda value: b"".join([value]),
    bytearray: bytearray,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
_CONTAINERS: Final = {kind.__name__: kind for kind in MUTABLE}

Encode = Callable[[Any], Any]
_ENCODERS: Final[Mapping[type, Callable[[Encode, Any], Any]]] = {
    tuple: lambda encode, value: ["t", [*map(encode, value)]],
    frozenset: lambda encode, value: ["fs", [*map(encode, value)]],
    bytes: lambda _, value: ["b64", base64.b64encode(value).decode()],
    complex: lambda _, value: ["c", value.real, value.imag],
    Decimal: lambda _, value: ["dec", str(value)],
    Fraction: lambda encode, value: ["fr", encode(value.numerator), encode(value.denominator)],
    range: lambda encode, value: ["range", encode(value.start), encode(value.stop), encode(value.step)],
    slice: lambda encode, value: ["slice", encode(value.start), encode(value.stop), encode(value.step)],
    datetime.datetime: lambda _, value: ["dt", value.isoformat()],
    datetime.date: lambda _, value: ["date", value.isoformat()],
    datetime.time: lambda _, value: ["time", value.isoformat()],
    datetime.timedelta: lambda _, value: ["td", value.days, value.seconds, value.microseconds],
    collections.OrderedDict: lambda encode, value: ["od", [[encode(k), encode(v)] for k, v in value.items()]],
    collections.Counter: lambda encode, value: ["ctr", [[encode(k), encode(v)] for k, v in value.items()]],
    type(...): lambda _, __: ["..."],
}
_DECODERS: Final[Mapping[str, Callable[..., Any]]] = {
    "i": _integer,
    "t": lambda decode, items: tuple(map(decode, items)),
    "fs": lambda decode, items: frozenset(map(decode, items)),
    "b64": lambda _, text: base64.b64decode(text),
    "c": lambda _, real, imag: complex(float(real), float(imag)),
    "dec": _decimal,
    "fr": _fraction,
    "range": lambda decode, *bounds: range(*map(decode, bounds)),
    "slice": lambda decode, *bounds: slice(*map(decode, bounds)),
    "dt": lambda _, text: datetime.datetime.fromisoformat(text),
    "date": lambda _, text: datetime.date.fromisoformat(text),
    "time": lambda _, text: datetime.time.fromisoformat(text),
    "td": lambda _, days, seconds, micro: datetime.timedelta(days, seconds, micro),
    "od": lambda decode, items: collections.OrderedDict((decode(k), decode(v)) for k, v in items),
    "ctr": lambda decode, items: collections.Counter({decode(k): decode(v) for k, v in items}),
    "nt": _named_tuple,
    "type": _builtin_type,
    "...": lambda _: ...,
}
