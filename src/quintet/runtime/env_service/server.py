"""HTTP server of an environment service."""

from __future__ import annotations

from quintet.runtime.env_service.app import ServiceSettings, build_app
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.worker_pool import check_platform
from quintet.runtime.http_service.server import START_SECONDS, BackgroundServer, LimitedServer

SHUTDOWN_SECONDS = 5
"""Time for requests in progress when the server is closed."""


class EnvServiceServer(BackgroundServer):
    """Environment service in a thread; closing it ends its worker processes."""

    def __init__(self, envs: ServedEnvs, settings: ServiceSettings) -> None:
        """Listen on the address, and handle requests in a thread; raises as `BackgroundServer`."""
        check_platform()
        server = LimitedServer(build_app(envs, settings), shutdown_seconds=SHUTDOWN_SECONDS)
        super().__init__(server, settings.address, close_seconds=SHUTDOWN_SECONDS + START_SECONDS)
