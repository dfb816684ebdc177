"""Use of another process's objects: calls, attributes and operators as messages of plain data.

Both sides of a connection have a `Peer`. While one waits for a result, it answers the other's requests, so that
functions can be passed as arguments. Comparisons with plain data are decided where the plain data is. A `Peer` with
`guarded=True` does not trust the other side: it only lets the other side use objects that were sent to it, in ways that
reveal nothing else.
"""

from __future__ import annotations

import builtins
import copy
import json
import operator
import reprlib
import socket
import struct
from collections.abc import Callable, Mapping
from types import CoroutineType, FunctionType, MethodType
from typing import Any, Final

from quintet.sandbox.plain_data import Codec, DataError, plain_value

MAX_MESSAGE_BYTES: Final = 64 << 20
MESSAGES: Final = (["request", 5], ["result", 4], ["error", 6])
"""Kinds of messages, with their numbers of fields."""
HEADER: Final = struct.Struct(">I")


class PeerLostError(BaseException):
    """The other process has ended, or broke the protocol. `except Exception` does not catch it."""


class RemoteObject:
    """Object of the other process: `kind` is `class`, `coroutine` or `object`.

    `origin` is `instance` for what a call of a class returned here, `operation` for what arithmetic with plain data
    returned, else empty.
    """

    __slots__ = ("_kind", "_number", "_origin", "_peer")

    def __init__(self, peer: Peer, number: int, kind: str, origin: str = "") -> None:
        for name, value in (("_peer", peer), ("_number", number), ("_kind", kind), ("_origin", origin)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delattr", self, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        result = self._peer.request("call", self, *args, **kwargs)
        is_instance = self._kind == "class" and isinstance(result, RemoteObject)
        return self._peer.remote(result, "instance") if is_instance else result

    def __bool__(self) -> bool:
        ask = self._calculate if self._origin == "operation" else self._peer.request
        return ask("bool", self) is True

    def __contains__(self, item: Any) -> bool:
        """Ask the other process only about objects of a class that this process instantiated."""
        if self._origin == "instance" and self._peer.request("has_contains", self) is True:
            return self._peer.request("contains", self, item) is True
        return any(each is item or each == item for each in iter(self))

    def __iter__(self) -> Any:
        return self._peer.request("iter", self)

    def __eq__(self, other: object) -> Any:
        return self._compare("eq", other)

    def __ne__(self, other: object) -> Any:
        equal = self._compare("eq", other)
        return equal if equal is NotImplemented else not equal

    def __lt__(self, other: object) -> Any:
        return self._compare("lt", other)

    def __le__(self, other: object) -> Any:
        return self._compare("le", other)

    def __gt__(self, other: object) -> Any:
        return self._compare("gt", other)

    def __ge__(self, other: object) -> Any:
        return self._compare("ge", other)

    def _compare(self, operation: str, other: object) -> Any:
        """Compare two objects of the other process there, but plain data with an object's plain value here."""
        if isinstance(other, RemoteObject):
            is_same = operation == "eq" and other._number == self._number
            return is_same or self._peer.request(operation, self, other) is True
        plain = self._peer.request("plain", self)
        if plain is None or isinstance(plain, RemoteObject):
            return NotImplemented
        return OPERATIONS[operation](plain, other)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, RemoteObject) and self._peer.request("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: type) -> bool:
        return isinstance(subclass, RemoteObject) and self._peer.request("issubclass", subclass, self) is True

    def __deepcopy__(self, _: Any) -> Any:
        return self._peer.request("deepcopy", self)

    def _calculate(self, operation: str, *operands: Any) -> Any:
        """Do arithmetic in the other process.

        With plain data the only plain result is the one of the object's plain value, so that an object does not decide
        whether `abs(f(3) - 9) < 1e-6`.
        """
        result = self._peer.request(operation, *operands)
        if self._origin != "operation" and all(isinstance(each, RemoteObject) for each in operands):
            return result
        if isinstance(result, RemoteObject):
            return self._peer.remote(result, "operation")
        plain = [self._peer.request("plain", each) if isinstance(each, RemoteObject) else each for each in operands]
        if any(each is None or isinstance(each, RemoteObject) for each in plain):
            raise TypeError(f"{operation} of an object of the program and plain data gives plain data")
        return OPERATIONS[operation](*plain)


def _forward(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.request(operation, self, *args)


def _forward_arithmetic(operation: str, *, reflected: bool = False) -> Callable[..., Any]:
    if reflected:
        return lambda self, other: self._calculate(operation, other, self)
    return lambda self, *others: self._calculate(operation, self, *others)


def _exit(target: Any, *_: Any) -> Any:
    return target.__exit__(None, None, None)


_BINARY: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE: Final = tuple(f"i{name}" for name in _BINARY)
_UNARY: Final = ("neg", "pos", "abs", "invert", "index")
_NUMBERS: Final = ("int", "float", "complex", "round")
_CONVERSIONS: Final = ("str", "repr", "reversed", "hash", "format")
OPERATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*_BINARY, *_IN_PLACE, *_UNARY)},
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "getitem", "setitem", "delitem")},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "delattr", "iter", "next", "len", "bool")},
    **{name: getattr(builtins, name) for name in ("divmod", *_NUMBERS, *_CONVERSIONS)},
    "isinstance": isinstance,
    "issubclass": issubclass,
    "contains": operator.contains,
    "plain": plain_value,
    "has_contains": lambda target: hasattr(type(target), "__contains__"),
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "enter": lambda target: target.__enter__(),
    "exit": _exit,
}
"""What a peer does for the other, unless it is guarded."""
GUARDED: Final = frozenset(
    {"call", "getattr", "setattr", "iter", "next", "len", "getitem", "setitem", "contains", "bool", "hash", "eq", "lt"}
)
"""What a guarded peer does for the other, with objects that were sent to it."""

for _name in (*_BINARY, "divmod", *_IN_PLACE, *_UNARY, *_NUMBERS):
    setattr(RemoteObject, f"__{_name}__", _forward_arithmetic(_name))
for _name in (*_BINARY, "divmod"):
    setattr(RemoteObject, f"__r{_name}__", _forward_arithmetic(_name, reflected=True))
for _name in (*_CONVERSIONS, "next", "len", "getitem", "setitem", "delitem", "copy", "enter", "exit"):
    setattr(RemoteObject, f"__{_name}__", _forward(_name))


class Peer:
    """This process's end of a connection."""

    def __init__(
        self, connection: socket.socket, *, guarded: bool = False, operations: Mapping[str, Callable[..., Any]] = {}
    ) -> None:
        """`operations` are requests of the other side beside `OPERATIONS`; their first argument need not be an object.

        A guarded peer lets the other use attributes of instances of classes whose module is `tests` only.
        """
        self._connection, self._guarded, self._own_operations = connection, guarded, operations
        self._exported: dict[int, Any] = {}
        self._remote: dict[tuple[int, str, str], RemoteObject] = {}
        """Objects of the other process, so that the same one is identical each time."""
        self._error_classes: dict[int, type[BaseException]] = {}
        self._codec = Codec(self._refer, self._resolve, self._is_reference)
        self.lost = False
        """The other process has ended, or broke the protocol."""
        self.printed: Callable[[], str] = str
        """Returns what this process has printed since the last call."""
        self.on_printed: Callable[[str], Any] = len
        """Called with what the other process printed."""

    def request(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation in the other process and return its result.

        Raises:
            BaseException: what the operation raised there.
            PeerLostError: the other process has ended.
        """
        self._codec.start_message()
        encoded = [[*map(self._codec.encode, args)], {name: self._codec.encode(item) for name, item in kwargs.items()}]
        self._send(["request", operation, *encoded, self._codec.changes()])
        while True:
            kind, *fields = self._receive()
            if kind == "request":
                self._answer(*fields)
            elif kind == "result":
                return self._trusted(self._finish, *fields)
            else:
                error = self._trusted(self._error, *fields)
                if isinstance(error, StopIteration) and operation == "call":
                    # it would end the loops of the tests
                    raise RuntimeError("the program raised StopIteration") from error
                raise error

    def serve(self) -> None:
        """Answer requests until the other process ends."""
        try:
            while True:
                kind, *fields = self._receive()
                if kind == "request":
                    self._answer(*fields)
        except PeerLostError:
            return

    def _answer(self, operation: str, args: Any, kwargs: Any, changes: Any) -> None:
        self._trusted(self._codec.apply, changes)
        self._codec.start_message()
        self._send([*self._reply(operation, args, kwargs), self._codec.changes(), self.printed()])

    def _reply(self, operation: str, args: Any, kwargs: Any) -> list[Any]:
        try:
            result = self._perform(operation, args, kwargs)
            self._codec.start_message()
            return ["result", self._encode_result(operation, args, result)]
        except PeerLostError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the other process
            self._codec.start_message()
            return ["error", *self._encode_error(error)]

    def _perform(self, operation: str, args: Any, kwargs: Any) -> Any:
        values = self._trusted(lambda: [*map(self._codec.decode, args)])
        named = self._trusted(lambda: {name: self._codec.decode(item) for name, item in kwargs.items()})
        if self._guarded:
            self._check(operation, args, values)
        return {**OPERATIONS, **self._own_operations}[operation](*values, **named)

    def _check(self, operation: str, args: Any, values: Any) -> None:
        """Raise an error unless a request is allowed: only with exported objects, and attributes of test objects."""
        is_exported = bool(args) and isinstance(args[0], list) and args[0][0] == "back"
        if operation not in GUARDED or not is_exported:
            raise TypeError(f"{operation} is not available for objects of tests")
        if operation in ("getattr", "setattr"):
            _check_attribute(values[0], values[1], writes=operation == "setattr")

    def _encode_result(self, operation: str, args: Any, result: Any) -> Any:
        """Encode a result; a new instance of a class stays an object, even of a subclass of a builtin type."""
        is_new = operation == "call" and self._is_class_call(args)
        is_builtin = type(result).__module__ == "builtins"
        return self._refer(result) if is_new and not is_builtin else self._codec.encode(result)

    def _is_class_call(self, args: Any) -> bool:
        is_own = isinstance(args[0], list) and args[0][0] == "back"
        return is_own and isinstance(self._exported.get(args[0][1]), type)

    def _finish(self, item: Any, changes: Any, printed: str) -> Any:
        value = self._codec.decode(item)
        self._codec.apply(changes)
        if printed:
            self.on_printed(printed)
        return value

    def _encode_error(self, error: BaseException) -> list[Any]:
        kind = type(error)
        args = [arg if type(arg) in (str, int, float, bool) else reprlib.repr(arg) for arg in error.args]
        number = None if kind.__module__ == "builtins" else self._export(error)
        return [self._class_chain(kind), [*map(self._codec.encode, args)], number]

    def _class_chain(self, kind: type) -> list[Any]:
        """Return the builtin base of an exception class, and the numbers and names of the classes between them."""
        own = [each for each in kind.__mro__ if each.__module__ != "builtins"]
        base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
        return [base.__name__, *([self._export(each), each.__name__] for each in reversed(own))]

    def _error(self, chain: Any, args: Any, number: Any, changes: Any, printed: str) -> BaseException:
        self._finish(None, changes, printed)
        kind = self._error_class(*chain)
        values = [self._codec.decode(arg) for arg in args]
        try:
            error = kind(*values)
        except TypeError:
            error = kind.__new__(kind, *values)
        if number is not None:
            error.remote = RemoteObject(self, int(number), "object")  # type: ignore[attr-defined]
        return error

    def _error_class(self, base: str, *classes: Any) -> type[BaseException]:
        """Return the class that stands here for an exception class of the other process."""
        kind = getattr(builtins, base)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise DataError(f"{base} is no exception")
        for number, name in classes:
            if number not in self._error_classes:
                attributes = {"__init__": BaseException.__init__, "__getattr__": _remote_attribute}
                self._error_classes[int(number)] = type(str(name), (kind,), {**attributes, "__module__": "remote"})
            kind = self._error_classes[number]
        return kind

    def _refer(self, value: Any) -> Any:
        if isinstance(value, RemoteObject):
            return ["back", value._number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error class", *self._class_chain(value)]
        kind = "class" if isinstance(value, type) else "coroutine" if isinstance(value, CoroutineType) else "object"
        return ["object", self._export(value), kind]

    def _export(self, value: Any) -> int:
        self._exported[id(value)] = value
        return id(value)

    def _resolve(self, item: Any) -> Any:
        if item[0] == "back":
            return self._exported[item[1]]
        if item[0] == "error class":
            return self._error_class(*item[1:])
        if item[0] != "object" or type(item[1]) is not int:
            raise DataError(f"unknown tag {item[0]!r}")
        remote = self.remote(RemoteObject(self, item[1], str(item[2])))
        return self._await(remote) if item[2] == "coroutine" else remote

    def remote(self, remote: RemoteObject, origin: str = "") -> RemoteObject:
        """Return the only object for one of the other process and its origin."""
        key = (remote._number, remote._kind, origin)
        return self._remote.setdefault(key, RemoteObject(self, remote._number, remote._kind, origin))

    async def _await(self, coroutine: RemoteObject) -> Any:
        return self.request("await", coroutine)

    def _is_reference(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) or (self._guarded and _is_of_tests(value))

    def _trusted(self, decode: Callable[..., Any], *args: Any) -> Any:
        """Call a function that decodes; lose the other process if it broke the protocol."""
        try:
            return decode(*args)
        except (DataError, RecursionError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._lose(f"the other process broke the protocol: {error!r}") from error

    def _send(self, message: Any) -> None:
        payload = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._connection.sendall(HEADER.pack(len(payload)) + payload)
        except OSError as error:
            raise self._lose("the other process has ended") from error

    def _receive(self) -> list[Any]:
        (length,) = HEADER.unpack(self._read(HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise self._lose("a message is too long")
        message = self._trusted(json.loads, self._read(length))
        if not isinstance(message, list) or [*map(str, message[:1]), len(message)] not in MESSAGES:
            raise self._lose("no message")
        return message

    def _read(self, length: int) -> bytes:
        chunks = []
        while length:
            try:
                chunk = self._connection.recv(min(length, 1 << 20))
            except OSError as error:
                raise self._lose("the other process has ended") from error
            if not chunk:
                raise self._lose("the other process has ended")
            chunks.append(chunk)
            length -= len(chunk)
        return b"".join(chunks)

    def _lose(self, reason: str) -> PeerLostError:
        self.lost = True
        return PeerLostError(reason)


def _is_of_tests(value: Any) -> bool:
    """Return whether a value is an instance of a class of the tests, or such a class."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == "tests"


def _check_attribute(target: Any, name: Any, *, writes: bool) -> None:
    """Raise an error unless the other process may use an attribute: public ones of test objects, methods not to write.

    Attributes of other objects, such as frames of generators, lead to everything that this process knows.
    """
    if type(name) is not str or name.startswith("_") or not _is_of_tests(target):
        raise AttributeError(f"no attribute {name!r} is available")
    value = getattr(target, name, None)
    is_shareable = isinstance(value, RemoteObject | MethodType | FunctionType) or _is_of_tests(value)
    if value is not None and not is_shareable and plain_value(value) is None:
        raise AttributeError(f"no attribute {name!r} is available")
    if writes and isinstance(getattr(type(target), name, None), FunctionType):
        raise AttributeError(f"{name!r} is a method")


def _remote_attribute(error: BaseException, name: str) -> Any:
    """Read an attribute of an exception of the other process."""
    if name == "remote" or name.startswith("__"):
        raise AttributeError(name)
    return getattr(error.__dict__["remote"], name)
