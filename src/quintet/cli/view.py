"""`quintet view`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from quintet.cli.status import RUNS, find_run
from quintet.errors import MachineError
from quintet.hardware import extra_packages, install_command
from quintet.runtime.http_service.address import Address


def run(targets: Sequence[str], host: str, port: int, *, in_terminal: bool) -> None:
    """Show some runs in the terminal, or serve them for browsers until Ctrl-C.

    Raises:
        ConfigError: the address is open to other machines without a token.
        MachineError: a run does not exist, the port is in use, or a package is missing.
    """
    paths = [find_run(target, with_parents=True) for target in targets] if targets else [RUNS]
    if in_terminal:
        _show_in_terminal(paths)
        return
    address = Address(host, port, os.environ.get("QUINTET_TOKEN") or None)
    address.check()
    from quintet.runtime.http_service.server import listen
    from quintet.viewer.app import serve
    from quintet.viewer.run_catalog import RunCatalog

    listener = listen(address)
    suffix = "?token=…" if address.token else ""
    print(f"runs of {', '.join(map(str, paths))}: http://{host}:{listener.getsockname()[1]}/{suffix}", flush=True)
    serve(RunCatalog(paths), address, listener)


def _show_in_terminal(paths: Sequence[Path]) -> None:
    if find_spec("textual") is None:
        raise MachineError("--terminal needs the package textual", install_command(extra_packages("terminal")))
    from quintet.viewer.run_catalog import RunCatalog
    from quintet.viewer.terminal import TerminalViewer

    TerminalViewer(RunCatalog(paths)).run()
