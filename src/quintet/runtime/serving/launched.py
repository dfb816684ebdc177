"""Server that a run starts for itself: `python -m quintet.runtime.serving.launched`.

Its settings are one line of JSON on standard input, so that the token is not in the process list; its URL is the only
line on standard output. When standard input ends, because the run has ended in any way, it stops.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.runtime.http_service.address import Address
from quintet.runtime.serving.launch_settings import LaunchSettings
from quintet.sandbox.seccomp import hide_memory


def main() -> None:
    """Serve until standard input ends."""
    hide_memory()
    from quintet.runtime.server_process import server_interpreter
    from quintet.runtime.serving.app import ServingServer
    from quintet.runtime.serving.build import build_request_handler

    settings = LaunchSettings(**json.loads(sys.stdin.readline()))
    config = Experiment.model_validate(settings.config, strict=False)
    policy = Path(str(config.policy.path))
    served = build_request_handler(
        config,
        policy,
        name="judge",
        context=settings.context,
        default_context=settings.default_context,
        template=settings.template,
        can_sleep=True,
    )
    address = Address(settings.host, 0, settings.token)
    with server_interpreter(), closing(served.handler), closing(ServingServer(served.handler, address)) as service:
        sys.stdout.write(f"{service.url}\n")
        sys.stdout.flush()
        while sys.stdin.readline():
            continue


if __name__ == "__main__":
    main()
