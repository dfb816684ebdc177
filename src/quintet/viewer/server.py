"""The viewer's server."""

from __future__ import annotations

import socket

import uvicorn

from quintet.errors import MachineError
from quintet.runtime.serving.address import Address
from quintet.viewer.app import build_app
from quintet.viewer.run_catalog import RunCatalog


def listen(address: Address) -> socket.socket:
    """Return a socket that listens on the address.

    Raises:
        MachineError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(128)  # a browser that is faster than the application waits instead of being refused
    except OSError as error:
        listener.close()
        raise MachineError(
            f"cannot listen on {address.host}:{address.port} ({error.strerror})", "choose another --port, 0 for any"
        ) from None
    return listener


def serve(catalog: RunCatalog, address: Address, listener: socket.socket) -> None:
    """Serve the viewer until the process is interrupted."""
    config = uvicorn.Config(build_app(catalog, address), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
