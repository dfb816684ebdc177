"""`quintet serve-envs`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from quintet import hardware
from quintet.cli.options import ServeEnvsOptions
from quintet.errors import SIGNALLED, MachineError
from quintet.hardware import is_installed
from quintet.runtime.http_service.address import Address

POLL_SECONDS = 0.2
"""Interval at which stop requests are checked."""
MODULES = ("fastapi", "uvicorn", "msgpack", "PIL")


def run(envs: Sequence[str], options: ServeEnvsOptions) -> int:
    """Serve environments until a stop signal arrives; return the exit status.

    Raises:
        ConfigError: an environment or option is invalid.
        MachineError: a package is missing, the port is in use, or no worker process can run.
    """
    address = Address(options.host, options.port, os.environ.get(options.token_env) or None)
    address.check()
    if missing := [name for name in MODULES if not is_installed(name)]:
        raise MachineError(f"quintet serve-envs requires {', '.join(missing)}", 'pip install "quintet[service]"')
    from quintet.runtime.env_service.app import EnvServiceServer, ServiceSettings
    from quintet.runtime.env_service.served_envs import ServedEnvs
    from quintet.runtime.env_service.sessions import SessionLimits
    from quintet.runtime.server_process import server_interpreter
    from quintet.runtime.signals import stop_on_signals

    settings = ServiceSettings(
        address,
        num_workers=options.workers or hardware.cpu_cores(),
        env_seconds=options.env_timeout,
        memory_bytes=None if options.worker_memory is None else int(options.worker_memory * (1 << 30)),
        max_body_bytes=int(options.max_body * (1 << 20)),
        limits=SessionLimits(
            options.max_sessions, options.max_envs, options.session_timeout, int(options.max_response * (1 << 20))
        ),
    )
    with (
        stop_on_signals() as stop,
        closing(EnvServiceServer(ServedEnvs(envs), settings)) as server,
        server_interpreter(),
    ):
        print(f"{', '.join(envs)} on {server.url}", flush=True)
        print(f"{settings.num_workers} worker processes; documentation: {server.url}/docs", file=sys.stderr)
        while stop.number is None:
            time.sleep(POLL_SECONDS)
            if not server.is_running:
                raise MachineError("the environment service has stopped", "see its output above")
    print(f"stopped ({stop.number.name})", file=sys.stderr)
    return SIGNALLED + stop.number
