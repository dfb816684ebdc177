"""Processes that run a model's programs and the tests of data rows, forked by `quintet.sandbox.forkserver`.

Each process confines itself before it runs anything, and is one of:

- `script`: a program as `__main__` with standard input and output;
- `call`: a program whose function is called once; it sends the result as plain data;
- `program`: a program whose objects the tests in another process use;
- `tests`: these tests. Their process alone has the connection over which it reports that they have passed.

No process has descriptors of another one, and none can read the memory or descriptors of another one.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import builtins
import importlib
import io
import json
import linecache
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, NoReturn

from quintet.sandbox import landlock, seccomp
from quintet.sandbox.plain_data import Codec, DataError
from quintet.sandbox.remote_objects import Peer, RemoteObject
from quintet.sandbox.seccomp import ConfinementError

OUTPUT_LOST: Final = 120
"""Exit status of a program whose output cannot be written, as in the interpreter."""
FILE: Final = "program.py"
STAR_IMPORTS: Final = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PRELUDE: Final = "\n".join(
    [
        *(f"from {name} import *" for name in STAR_IMPORTS),
        *(f"import {name}" for name in STAR_IMPORTS[:-2]),
        "from math import inf",
    ]
)
"""Names that every program has, in the order in which they hide each other: the names of verl's `prime_code`, ROLL
and LiveCodeBench."""
NODES: Final = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""
COMPARISONS: Final = frozenset(
    {
        "isclose",
        "fabs",
        "floor",
        "ceil",
        "trunc",
        "Counter",
        "OrderedDict",
        "defaultdict",
        "deque",
        "reduce",
        "deepcopy",
    }
)
"""Common names by which tests compare results: a program that defines them as well does not decide."""
COMPARING_BUILTINS: Final = frozenset(
    {"abs", "round", "len", "sorted", "all", "any", "isinstance", "type", "list", "set", "tuple", "dict", "str", "int"}
    | {"float", "bool", "range", "zip", "map", "enumerate", "repr", "print", "True", "False", "None"}
)
MODULES: Final = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
"""Modules beside Python's own that tests may use without importing them."""
RECURSION_LIMIT: Final = 600_000

_prelude: dict[str, Any] = {}
_rulesets: list[int] = []
"""Descriptor of the ruleset of all processes, if the kernel has Landlock."""
_has_own_users = False
"""Each process changes to a user of its own."""


def preload() -> None:
    """Prepare the fork server, whose environment has no secrets. Programs have these names."""
    global _has_own_users
    seccomp.die_first_without_memory()
    if (ruleset := landlock.read_ruleset(landlock.python_paths())) is not None:
        _rulesets.append(ruleset)
        _has_own_users = seccomp.unused_user_reads(filter(os.path.isdir, _installed_paths()))
    _execute(PRELUDE, _prelude)
    for name in [name for name in _prelude if name.startswith("__")]:
        del _prelude[name]


def work(connection: socket.socket, setup: Mapping[str, Any]) -> None:
    """Run what `connection` delivers, one line of JSON with descriptors; `setup` has the limits."""
    message, descriptors = _receive(connection)
    role = message["role"]
    channel = socket.socket(fileno=descriptors.pop()) if role in ("program", "tests") else None
    _replace_streams(descriptors, with_errors=bool(message.get("with_errors")))
    if role in ("script", "program"):
        connection.close()
    kept = [each.fileno() for each in (connection, channel) if each is not None and each.fileno() >= 0]
    _close_all_but([*kept, *_rulesets])
    _confine(setup)
    if role == "script":
        _end(_run_script(message["source"]))
    if role == "call":
        _run_call(connection, message)
    elif role == "program" and channel is not None:
        _serve_program(channel, message)
    elif channel is not None:
        _run_tests(connection, channel, message)
    _end(0)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    chunks = [data]
    while not chunks[-1].endswith(b"\n"):
        chunk = connection.recv(1 << 20)
        if not chunk:
            _end(1)
        chunks.append(chunk)
    return json.loads(b"".join(chunks)), list(descriptors)


def _replace_streams(descriptors: Sequence[int], with_errors: bool) -> None:
    """Make the given descriptors standard input and output, or else the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    stdin, stdout = descriptors if descriptors else (null, null)
    for target, source in ((0, stdin), (1, stdout), (2, stdout if with_errors else null)):
        os.dup2(source, target)
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        mode, buffering = "w" if descriptor else "r", 1 if name == "stderr" else -1
        stream = os.fdopen(descriptor, mode, buffering, "utf-8", "surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _close_all_but(kept: Sequence[int]) -> None:
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _confine(setup: Mapping[str, Any]) -> None:
    os.chdir("/")
    sys.path[:] = _installed_paths()
    sys.argv[:] = [FILE]
    os.environ.pop("PYTHONPATH", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION_LIMIT)
    own_user = _has_own_users and seccomp.become_unused_user()
    seccomp.hide_memory()
    seccomp.limit_resources(setup["memory"], setup["cpu_seconds"])
    seccomp.limit_threads(own_user=own_user)
    for ruleset in _rulesets:
        if not landlock.restrict(ruleset):
            _end(seccomp.CONFINEMENT_FAILED)
        os.close(ruleset)
    resource.setrlimit = _set_limit
    try:
        seccomp.confine(capabilities=seccomp.DAC_READ_SEARCH if _rulesets else 0)
    except ConfinementError:
        _end(seccomp.CONFINEMENT_FAILED)


def _installed_paths() -> list[str]:
    """Return the paths of Python's own modules and of installed packages."""
    return [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]


def _set_limit(kind: int, limits: tuple[int, int], _set: Callable[..., None] = resource.setrlimit) -> None:
    """Set a limit, but ignore the stack size, which many programs raise together with the recursion limit."""
    if kind != resource.RLIMIT_STACK:
        _set(kind, limits)


def _execute(source: str, namespace: dict[str, Any], file: str = FILE) -> None:
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec", dont_inherit=True), namespace)  # noqa: S102 - what confined processes are for


def _load(source: str, name: str, preamble: str = "") -> _Definitions:
    """Run a program as module `name`, and return the names that it defines.

    The names that every program has are builtins, so that they are no definitions of the program.
    """
    _execute(NODES, nodes := {"__name__": name})
    common = {key: value for key, value in {**_prelude, **nodes}.items() if not hasattr(builtins, key)}
    vars(builtins).update(common)
    module = sys.modules[name] = ModuleType(name)
    namespace = module.__dict__
    namespace["__file__"] = FILE
    _execute(preamble, namespace)
    before = dict(namespace)
    _execute(source, namespace)
    return _Definitions(namespace, before)


class _Definitions(dict[str, Any]):
    """Names of a module that are not there before a program runs; they may change."""

    def __init__(self, namespace: dict[str, Any], before: Mapping[str, Any]) -> None:
        super().__init__()
        self._namespace, self._before = namespace, before

    def __contains__(self, name: object) -> bool:
        value = self._namespace.get(name, self)  # type: ignore[call-overload]
        return value is not self and self._before.get(name, self) is not value  # type: ignore[call-overload]

    def __missing__(self, name: str) -> Any:
        if name in self:
            return self._namespace[name]
        raise NameError(f"name {name!r} is not defined")

    def names(self) -> list[str]:
        return [name for name in self._namespace if name in self]


def _run_script(source: str) -> int:
    """Run a program and return its exit status."""
    try:
        _load(source, "__main__")
    except SystemExit as error:
        return _exit_status(error.code)
    except BaseException as error:  # noqa: BLE001 - reported as the interpreter does
        sys.stdout.flush()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _exit_status(code: Any) -> int:
    """Return the status of a program that raises `SystemExit`, whose code may be a text."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _end(status: int) -> NoReturn:
    """End as the interpreter does, without its slow finalization."""
    os._exit(status if _finish() else status or OUTPUT_LOST)


def _finish() -> bool:
    """Wait for threads, run exit functions and write output; return whether that worked."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001 - output that cannot be written is an error of the program
        return False
    return True


def _run_call(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Call a function, or a method of `Solution`, and send its result as a line of JSON."""
    codec = Codec(_refuse, _refuse, lambda _: False)
    arguments = codec.decode(message["arguments"])
    result = _call(_load(message["source"], "solution"), message["name"], arguments)
    connection.sendall(json.dumps(codec.encode(result)).encode() + b"\n")


def _call(definitions: Mapping[str, Any], name: str, arguments: Sequence[Any]) -> Any:
    owner = definitions["Solution"]() if "Solution" in definitions else None
    if not hasattr(owner, name):
        return definitions[name](*arguments)
    try:
        return getattr(owner, name)(*arguments)
    except TypeError:
        # a method without `self`
        return getattr(type(owner), name)(*arguments)


def _refuse(value: Any) -> NoReturn:
    raise DataError(f"{type(value).__name__} is no data")


def _serve_program(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Run a program and let the tests use its names."""
    output = sys.stdout = io.StringIO()
    definitions = _load(message["source"], "solution", message["preamble"])
    output.truncate(output.seek(0))

    def value_of(name: str) -> Any:
        is_node = name in ("ListNode", "TreeNode") and name not in definitions
        return getattr(builtins, name) if is_node else definitions[name]

    def printed() -> str:
        text = output.getvalue()
        output.truncate(output.seek(0))
        return text

    peer = Peer(channel, operations={"names": definitions.names, "value": value_of, "await": asyncio.run})
    peer.printed = printed
    peer.serve()


def _run_tests(connection: socket.socket, channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Run tests and report whether they pass."""
    peer = Peer(channel, guarded=True)
    peer.on_printed = lambda text: sys.stdout.write(text)
    connection.sendall(b"passed\n" if _passes(peer, message) else b"failed\n")


def _passes(peer: Peer, message: Mapping[str, Any]) -> bool:
    try:
        namespace = TestNamespace(
            peer, message["statements"], message["preamble"], message["subjects"], message["has_program"]
        )
        _execute(message["statements"], namespace, "tests.py")
    except BaseException:  # noqa: BLE001 - a test that raises has failed
        return False
    return not peer.lost


class TestNamespace(dict[str, Any]):
    """Names of the tests: their own, the program's, the names that all programs have, and builtins.

    What the program defines does not replace modules, builtins or `COMPARISONS`, unless the tests are about it.
    """

    def __init__(self, peer: Peer, statements: str, preamble: str, subjects: Sequence[str], has_program: bool) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._peer = peer
        self._common = {**_prelude, "__name__": "tests"}
        _execute(preamble, self._common)
        names = {str(name) for name in peer.request("names")}
        used, self._modules = _used_names(statements)
        if has_program and "solution" not in _imported_modules(statements):
            self._subjects = {*subjects, *_subjects(used - self._modules, names, self._common)}
        else:
            self._subjects = set(subjects)
        sys.modules["solution"] = _solution_module(peer, names)
        # the bodies of classes look names up without `__missing__`
        for name in used & (names | self._common.keys()):
            if name in self._subjects or not hasattr(builtins, name):
                with suppress(NameError):
                    value = self[name]
                    if name not in names or isinstance(value, RemoteObject | type):
                        self[name] = value

    def __missing__(self, name: str) -> Any:
        if name in self._subjects:
            return self._peer.request("value", name)
        if name in self._common:
            return self._common[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(MODULES.get(name, name))
        return self._peer.request("value", name)


def _solution_module(peer: Peer, names: set[str]) -> ModuleType:
    """Return the program as a module, from which tests may import its names.

    An import of all names leaves out those by which tests compare results.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"the program has no {name}")
        return peer.request("value", name)

    public = {name for name in names - COMPARISONS if not (hasattr(builtins, name) or name.startswith("_"))}
    module = ModuleType("solution")
    module.__dict__.update(__getattr__=attribute, __all__=sorted(public))
    return module


def _used_names(statements: str) -> tuple[set[str], set[str]]:
    """Return the names that statements read and nowhere define, and which of these names are only used as modules."""
    nodes = list(ast.walk(ast.parse(statements)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = Counter(node.id for node in names if isinstance(node.ctx, ast.Load) and node.id not in defined)
    bases = Counter(
        node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    modules = {name for name in used if name in MODULES or name in sys.stdlib_module_names}
    return set(used), {name for name in modules if bases[name] == used[name]}


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, BaseException)


def _imported_modules(statements: str) -> set[str | None]:
    """Return the modules that statements import, of which `solution` is the program."""
    nodes = list(ast.walk(ast.parse(statements)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def _subjects(used: set[str], own_names: set[str], common: Mapping[str, Any]) -> set[str]:
    """Return the common names and builtins that tests take from the program.

    If the tests use other names, these are common names that the program defines, beside `COMPARISONS`. Otherwise the
    tests are about common names or builtins, whether the program defines them or not.
    """
    functions = {name for name in used if not isinstance(common.get(name), ModuleType) and not _is_exception(name)}
    others = {name for name in functions if name not in common and not hasattr(builtins, name)}
    for names in (
        {name for name in functions - COMPARISONS if not hasattr(builtins, name)},
        {name for name in functions if not hasattr(builtins, name)},
        functions - COMPARING_BUILTINS,
    ):
        if names:
            return names & own_names if others else names
    return set()
