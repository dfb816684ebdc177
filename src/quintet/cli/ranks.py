"""Run a command on one process, or on all ranks that torchrun started: rank 0 is the controller, the others workers."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from quintet import __version__
from quintet.config.torchrun import RankInfo, current_rank
from quintet.errors import MachineError, UserError
from quintet.tracking.run_processes import LAUNCHED_BY_RAY

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from quintet.config.composed import ComposedConfig
    from quintet.config.native.experiment import Experiment
    from quintet.config.plan.process_layout import ProcessLayout
    from quintet.runtime.calls.run_secret import RunSecret
    from quintet.runtime.controller import Controller
    from quintet.training.parallel.rendezvous import LostRank, Rendezvous

START_SECONDS = 60
"""Ranks start within this time of each other."""
FIRST_RANK_SECONDS = 10.0
"""How long an error is left to the first process of the machine to report."""


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Suppress the output of all but the first process of a machine, since all of them write the same. A user error is
    printed after a while, in case it occurred only here; defects keep their traceback."""
    rank = current_rank()
    if rank.local_rank == 0:
        yield
        return
    try:
        with open(os.devnull, "w", encoding="utf-8") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
            yield
    except UserError as error:
        sys.exit(_print_late(error, rank.rank))


def _print_late(error: UserError, rank: int) -> int:
    """Print the error after rank 0 had time to print it, and return the exit status: torchrun stops all processes when
    the first one exits, which should be the one that has printed the error. Ray's launcher reads errors from the
    records of the processes, and the death of another rank is no error that rank 0 reports as well."""
    from quintet.training.parallel.rendezvous import RankDiedError

    if isinstance(error, RankDiedError):
        print(f"quintet: {error}", file=sys.__stderr__)
        return error.exit_status
    if LAUNCHED_BY_RAY not in os.environ:
        time.sleep(FIRST_RANK_SECONDS)
    print(f"quintet: rank {rank}: {error}", file=sys.__stderr__)
    return error.exit_status


def run_on_all_ranks(composed: ComposedConfig, run: Callable[[Controller | None], int]) -> int:
    """Call `run` with a controller of all ranks that torchrun started, or with None in a single process; return the
    exit status. On the other ranks, work for that controller until it ends.

    Raises:
        MachineError: the rendezvous failed, or the run is in use by another process.
    """
    from quintet.runtime.run_registration import registered_rank
    from quintet.tracking.run_directory import RunDirectory

    rank, run = current_rank(), partial(_run_with_sources, composed, run)
    hide_other_gpus(composed.experiment)
    components = layout_of(composed.experiment).components_of(rank.rank)
    with registered_rank(RunDirectory.from_config(composed.experiment), rank, components):
        if rank.size == 1:
            return run(None)
        return _run_as_rank(rank, composed.experiment, run)


def _run_with_sources(
    composed: ComposedConfig, run: Callable[[Controller | None], int], controller: Controller | None
) -> int:
    from quintet.config.composed import errors_with_sources

    with errors_with_sources(composed):
        return run(controller)


def hide_other_gpus(config: Experiment) -> None:
    """Show only the GPUs of `placement.visible_devices` to this process, in which CUDA must not be initialised yet, and
    to those that it starts. Ray has already chosen the GPUs of the ranks that it starts."""
    if config.placement.visible_devices is not None and LAUNCHED_BY_RAY not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.placement.visible_devices))


def _run_as_rank(rank: RankInfo, config: Experiment, run: Callable[[Controller | None], int]) -> int:
    from quintet.runtime.calls.run_secret import RunSecret
    from quintet.tracking.run_directory import RunDirectory
    from quintet.training.parallel.rendezvous import join_run, local_address

    # torchrun ends rank 0 because of the others
    write_rank_report(sudden_death_report(rank, config), delay=0 if rank.rank else START_SECONDS)
    layout = layout_of(config)
    is_standalone = rank.rank not in layout.learner_ranks
    with output_to_log(rank, config, always=is_standalone), _reported_errors():
        secret = RunSecret.taken_from_environment(RunDirectory.from_config(config).processes.path)
        address = local_address()
        device = None if rank.rank in layout.cpu_ranks else layout.local_device(rank.rank)
        store = join_run(rank, device, config.placement.join_timeout_seconds)
        if rank.rank == 0:
            return _run_as_controller(rank, config, run, store, secret, address)
        _run_as_worker(rank, config, store, secret, address)
        return 0


def _run_as_controller(
    rank: RankInfo,
    config: Experiment,
    run: Callable[[Controller | None], int],
    store: Store,
    secret: RunSecret,
    address: str,
) -> int:
    from quintet.runtime.calls.listener import WorkerListener
    from quintet.runtime.controller import Controller

    layout, placement = layout_of(config), config.placement
    components = {number: layout.components_of(number) for number in range(1, layout.size)}
    limits = placement.lost_after_seconds, placement.call_timeout_seconds
    listener = WorkerListener(address, components, _fingerprint(config), *limits, secret)
    listener.publish(store)
    with _watched_group(rank, config, layout.learner_ranks, store, address, lambda: listener.lost_rank) as ranks:
        controller = Controller.on_ranks(ranks, listener, placement.join_timeout_seconds)
        with closing(controller):
            return run(controller)


def _run_as_worker(rank: RankInfo, config: Experiment, store: Store, secret: RunSecret, address: str) -> None:
    from quintet.runtime.calls.code_check import AllowedCode
    from quintet.runtime.calls.listener import ControllerAddress
    from quintet.runtime.worker import Worker
    from quintet.runtime.worker_process import WorkerProcess, run_worker

    layout, seconds, allowed_code = layout_of(config), config.placement.join_timeout_seconds, AllowedCode(config)
    if rank.rank in layout.learner_ranks:
        with _watched_group(rank, config, layout.learner_ranks, store, address) as ranks:
            run_worker(ranks, secret, seconds, allowed_code)
        return
    controller, fingerprint = ControllerAddress.wait_for(store, secret, seconds), _fingerprint(config)
    process = WorkerProcess(controller, rank.rank, fingerprint, allowed_code=allowed_code)
    learners = layout.standalone_learners_of(rank.rank)
    if learners is None:
        process.run(Worker())
        return
    has_engine = rank.rank in layout.standalone.get("envs", ()) or layout.has_engine(rank.rank)
    with _watched_group(rank, config, learners.ranks, store, address) as ranks:
        worker = Worker(ranks.ranks, shard_writer=learners.shard_writer(rank.rank))
        replace(process, rendezvous=ranks).run(worker, ["learners", "engine"] if has_engine else ["learners"])


@contextmanager
def _watched_group(
    rank: RankInfo,
    config: Experiment,
    group: Sequence[int],
    store: Store,
    address: str,
    lost_rank: Callable[[], LostRank | None] = lambda: None,
) -> Iterator[Rendezvous]:
    """Meet the ranks of a process group, and end this process if one is lost while it waits for it."""
    from quintet.training.parallel.rendezvous import rendezvous

    ranks = rendezvous(
        rank,
        _fingerprint(config),
        config.placement.join_timeout_seconds,
        config.placement.call_timeout_seconds,
        ranks=group,
        store=store,
        components=layout_of(config).components_of(rank.rank),
        address=address,
    )
    with closing(ranks), ranks.watchdog(partial(_exit_at_once, rank.rank, config), lost_rank):
        yield ranks


@contextmanager
def _reported_errors() -> Iterator[None]:
    """Write a user error to the report of this rank."""
    try:
        yield
    except UserError as error:
        write_rank_report(str(error))
        raise


def _exit_at_once(rank: int, config: Experiment, cause: str) -> None:
    """End this process, whose main thread waits for a rank that has died and cannot be interrupted."""
    name = layout_of(config).describe_rank(rank)
    message = f"{cause}, and a run needs all of its ranks" if rank == 0 else f"{name} ends: {cause}"
    write_rank_report(message)
    print(f"quintet: {message}", file=sys.__stderr__, flush=True)
    os._exit(MachineError.exit_status)


def _fingerprint(config: Experiment) -> str:
    """Return a hash of version and configuration, which must be the same on all ranks."""
    text = f"{__version__} {sys.version_info[:2]} {config.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()


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
