"""A rank that the Ray launcher has started: `python -m quintet.cli.launched_rank WORDS…` runs `quintet WORDS…`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command. This process ends with the actor that started it, whose blocked signals it unblocks."""
    from quintet.cli.main import main as run_command
    from quintet.runtime.signals import STOP_SIGNALS
    from quintet.sandbox.seccomp import die_with_parent
    from quintet.tracking.run_processes import LAUNCHED_BY_RAY

    os.environ[LAUNCHED_BY_RAY] = "1"
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    run_command()


if __name__ == "__main__":
    main()
