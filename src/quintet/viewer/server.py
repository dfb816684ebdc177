"""The viewer's server."""

from __future__ import annotations

import socket

from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.server import LimitedServer
from quintet.viewer.app import build_app
from quintet.viewer.run_catalog import RunCatalog


def serve(catalog: RunCatalog, address: Address, listener: socket.socket) -> None:
    """Serve the viewer until the process is interrupted."""
    LimitedServer(build_app(catalog, address)).run(sockets=[listener])
