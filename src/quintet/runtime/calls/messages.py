"""Messages between the controller and its workers: calls and results, as JSON followed by tensors.

A message is its kind (one byte), the length of its JSON, and the JSON, which lists the dtypes and shapes of the tensors
that follow. Checksums follow the length, the JSON and the tensors. Nothing that is received is executed or unpickled;
see `runtime/calls/remote_call.py`.
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from quintet.errors import MachineError, UserError
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.remote_call import CHECKSUM_BYTES, RemoteCall, decode_header, decode_value, encode_value

CALL: Final = b"C"
RESULT: Final = b"R"
ERROR: Final = b"E"
LENGTH_BYTES = 8
"""Size of the length of a header."""
MAX_HEADER_BYTES = 1 << 30
"""Longer headers are refused."""
BLOCK_BYTES = 1 << 20
"""Memory that is allocated for a header before its bytes have arrived."""
NO_CODE = AllowedCode()


class ConnectionLostError(ConnectionError):
    """The process at the other end has ended, or the connection broke."""


class RemoteCallError(Exception):
    """A call failed in the worker, which lives on."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(f"{error_type}: {message}")
        self.error_type = error_type
        self.message = message


class MessageSocket:
    """A connected socket that carries messages; one thread at a time sends, and one receives."""

    def __init__(
        self,
        connected: socket.socket,
        receive_broadcast: Callable[[Sequence[Tensor]], None] | None = None,
        allowed_code: AllowedCode = NO_CODE,
    ) -> None:
        """`receive_broadcast` receives the tensors of a call over the process group of the ranks, if there is one.
        Messages that would run code that is not `allowed_code` are refused."""
        self._socket = connected
        self._check = allowed_code.check
        self._receive_broadcast = receive_broadcast
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when a message has arrived."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """Address of this machine in the connection."""
        return str(self._socket.getsockname()[0])

    def send_call(self, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send an encoded call, with the tensors that the other end does not receive otherwise.

        Raises:
            ConnectionLostError: the other end is gone.
        """
        self._send(CALL, header, tensors)

    def send_result(self, result: Any) -> None:
        """Send the result of a call.

        Raises:
            ConnectionLostError: the other end is gone.
            ValueError: the result has a type that cannot be sent.
        """
        self._send(RESULT, *encode_value(result))

    def send_error(self, error: BaseException) -> None:
        """Send the error of a call: a user error with its hint, of any other error type and message.

        Raises:
            ConnectionLostError: the other end is gone.
        """
        content = {"error_type": type(error).__name__, "message": str(error)}
        if isinstance(error, UserError):
            content = {"error_type": "", "message": error.message, "hint": error.hint or ""}
        self._send(ERROR, json.dumps(content).encode(), ())

    def receive_call(self) -> RemoteCall:
        """Return the next call.

        Raises:
            ConnectionLostError: the other end is gone.
            ValueError: the message is not a call.
            UserError: the call names code that may not be run, or cannot be loaded; another one may follow.
        """
        kind, content = self._receive_header()
        if kind != CALL:
            raise ValueError("the message is not a call")
        tensors, decoded = decode_header(content, self._check)
        if self._receive_broadcast is not None and content.get("broadcasts_tensors"):
            self._receive_broadcast(tensors)
        else:
            self._receive_tensors(tensors)
        return decoded()

    def receive_result(self) -> Any:
        """Return the result of the last call.

        Raises:
            ConnectionLostError: the other end is gone.
            MachineError: the call failed by a user error.
            RemoteCallError: the call failed otherwise.
            ValueError: the message is not a result.
        """
        kind, content = self._receive_header()
        if kind == ERROR:
            raise _decode_error(content)
        if kind != RESULT:
            raise ValueError("the message is not a result")
        tensors, decoded = decode_value(content, self._check)
        self._receive_tensors(tensors)
        return decoded()

    def shutdown(self) -> None:
        """End the connection; a thread that waits in `receive` raises `ConnectionLostError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end has closed it
            return

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()

    def _send(self, kind: bytes, header: bytes, tensors: Sequence[Tensor]) -> None:
        prefix, checksum = kind + len(header).to_bytes(LENGTH_BYTES), 0
        try:
            self._socket.sendall(prefix + _checksum(prefix) + header + _checksum(header))
            for tensor in tensors:
                if tensor.numel():
                    self._socket.sendall(_bytes_of(tensor))
                    checksum = zlib.crc32(_bytes_of(tensor), checksum)
            if tensors:
                self._socket.sendall(checksum.to_bytes(CHECKSUM_BYTES))
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def _receive_header(self) -> tuple[bytes, Any]:
        """Return the kind of the next message and its JSON value."""
        prefix = self._receive_checked(1 + LENGTH_BYTES)
        kind, length = prefix[:1], int.from_bytes(prefix[1:])
        if kind not in (CALL, RESULT, ERROR) or length > MAX_HEADER_BYTES:
            raise ValueError("received something that is no message")
        try:
            return kind, json.loads(self._receive_checked(length))
        except RecursionError as error:
            raise ValueError("received a message that is nested too deeply") from error

    def _receive_checked(self, length: int) -> bytes:
        data = self._receive_bytes(length)
        if self._receive_bytes(CHECKSUM_BYTES) != _checksum(data):
            raise ValueError("received a corrupted message: its checksum is wrong")
        return data

    def _receive_tensors(self, tensors: Sequence[Tensor]) -> None:
        checksum = 0
        for tensor in tensors:
            if tensor.numel():
                self._receive_into(_bytes_of(tensor))
                checksum = zlib.crc32(_bytes_of(tensor), checksum)
        if tensors and self._receive_bytes(CHECKSUM_BYTES) != checksum.to_bytes(CHECKSUM_BYTES):
            raise ValueError("received corrupted tensors: their checksum is wrong")

    def _receive_bytes(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            block = bytearray(min(length - len(received), BLOCK_BYTES))
            self._receive_into(memoryview(block))
            received += block
        return bytes(received)

    def _receive_into(self, buffer: memoryview) -> None:
        while buffer:
            try:
                count = self._socket.recv_into(buffer)
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not count:
                raise ConnectionLostError("the connection was closed")
            buffer = buffer[count:]


def _decode_error(content: Any) -> MachineError | RemoteCallError:
    if not isinstance(content, dict):
        raise ValueError("the header of an error is a JSON object")
    error_type, message, hint = (str(content.get(name, "")) for name in ("error_type", "message", "hint"))
    return RemoteCallError(error_type, message) if error_type else MachineError(message, hint or None)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
