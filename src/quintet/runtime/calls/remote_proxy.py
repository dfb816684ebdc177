"""Objects with the methods of a protocol that call an object on the workers of a transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Signature
from typing import Any

from quintet.runtime.calls.remote_call import RemoteCall, RemoteRef
from quintet.runtime.calls.remote_interface import REMOTE_OBJECTS, methods_of_rank_0, properties_of, remote_methods
from quintet.runtime.calls.transport import Transport


class _Proxy:
    """Base of the generated classes."""

    def __init__(self, transport: Transport, target: str) -> None:
        self._transport = transport
        self._target = target


def remote_proxy(transport: Transport, target: str) -> Any:
    """Return an object with the methods of the target's protocol, which calls the remote object `target`."""
    return _proxy_class(REMOTE_OBJECTS[target])(transport, target)


@cache
def _proxy_class(protocol: type) -> type[_Proxy]:
    single = methods_of_rank_0(protocol)
    methods = {
        name: _method(name, signature, on_all=name not in single)
        for name, signature in remote_methods(protocol).items()
    }
    properties = {name: property(_getter(name)) for name in properties_of(protocol)}
    return type(f"Remote{protocol.__name__}", (_Proxy,), {**properties, **methods})


def _method(name: str, signature: Signature, *, on_all: bool) -> Callable[..., Any]:
    def method(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        call = RemoteCall(self._target, name, {key: _as_reference(value) for key, value in arguments.items()})
        return self._transport.broadcast(call) if on_all else self._transport.call(call)

    method.__name__ = name
    return method


def _getter(name: str) -> Callable[[_Proxy], Any]:
    def getter(self: _Proxy) -> Any:
        nested = f"{self._target}.{name}"
        if nested in REMOTE_OBJECTS:
            return remote_proxy(self._transport, nested)
        return self._transport.call(RemoteCall(self._target, name))

    return getter


def _as_reference(value: Any) -> Any:
    return RemoteRef(value._target) if isinstance(value, _Proxy) else value
