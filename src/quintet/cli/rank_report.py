"""Report of a rank that ended, which torchrun prints last.

torchrun ends with the content of the file `TORCHELASTIC_ERROR_FILE` of the rank that failed, or of several the one with
the earliest time. A rank that is killed cannot write it, so each rank writes it when it starts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.torchrun import RankInfo
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.config.native.experiment import Experiment
    from quintet.config.plan.process_layout import ProcessLayout


@cache
def _error_file() -> Path | None:
    """Return the path at the first call: the rendezvous removes torchrun's variables from the environment."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def write_rank_report(message: str, *, delay: int = 0) -> None:
    """Write the report that torchrun prints if this rank fails; does nothing without torchrun.

    `delay`, in seconds, is added to the time: of two ranks that failed, torchrun names the earlier one as the cause.
    """
    if path := _error_file():
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()) + delay)}}
        path.write_text(json.dumps({"message": error}), encoding="utf-8")


def layout_of(config: Experiment) -> ProcessLayout:
    """Return the processes of a run; its module is imported when a run starts, not for `quintet --help`."""
    from quintet.config.plan.process_layout import process_layout

    return process_layout(config)


def sudden_death_report(rank: RankInfo, config: Experiment) -> str:
    """Return the report of a rank that ends without an error message."""
    log = f"Its log: {rank_log(rank.rank, config)}" if rank.local_rank else "Its output is above."
    name = layout_of(config).describe_rank(rank.rank)
    return (
        f"{name} ended before the run was complete. Without an error message it was killed, for example "
        f"because the machine ran out of memory (see `dmesg`).\n{log}\n"
        f"To continue from the last checkpoint: {continue_command(rank, config)}"
    )


def continue_command(rank: RankInfo, config: Experiment) -> str:
    """Return the command that continues the run, for each of its machines."""
    nodes = rank.size // rank.local_size
    options = [*(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc-per-node", str(rank.local_size)]
    resume = [] if config.resume == "auto" else ["resume=auto"]
    return shlex.join(["torchrun", *options, "-m", "quintet", *sys.argv[1:], *resume])


def rank_log(rank: int, config: Experiment) -> Path:
    """Return the file with the output of a rank that does not print."""
    from quintet.tracking.run_directory import RunDirectory

    return RunDirectory.from_config(config).logs / f"rank_{rank}.log"


@contextmanager
def output_to_log(rank: RankInfo, config: Experiment, *, always: bool = False) -> Iterator[None]:
    """Redirect the output of all but the first rank of a machine to its log, with `always` also of the first one."""
    if rank.local_rank == 0 and not always:
        yield
        return
    path = rank_log(rank.rank, config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if always else "w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
            yield
        except UserError as error:
            print(f"quintet: {error}", file=log)
            raise
        except BaseException:  # the interpreter prints it elsewhere
            traceback.print_exc(file=log)
            raise
