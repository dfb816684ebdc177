"""Run Python programs in forks of one process that has imported the heavy packages already; see `warm_processes`.

python fork_server.py SOCKET

Each fork has its own arguments, directory, environment, standard streams and random numbers. It ends as a started
interpreter does, with its messages, its exit status and the functions of `atexit`, but without the finalization of
modules, which takes a second for so many packages. The server starts no Python threads, so that no fork inherits a held
lock. All forks of a server have its seed of string hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from typing import Any

MAX_REQUEST_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1
PAUSE_BEFORE = "PAUSE_BEFORE"
"""Variable with a path that a fork neither opens nor renames anything to before it gets SIGCONT."""
MODULES = [
    "numpy",
    "pandas",
    "peft",
    "pyarrow.json",
    "pyarrow.parquet",
    "rich.table",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "quintet.cli.main",
    "quintet.cli.train",
    "quintet.config.dialects.scripts.run_script_reader",
    "quintet.envs.env",
    "quintet.pipelines.rl",
    "quintet.rollout.engines.hf.engine",
    "quintet.runtime.learners.learner_builders",
    "quintet.runtime.run_registration",
]


def import_packages() -> None:
    """Import `MODULES`, but those that do not fit the others, such as a pandas that needs a newer NumPy: a program that
    uses them fails itself."""
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request; return the request and its descriptors in the forks, and None in the server when all
    clients have ended. The forks are killed when the server ends.

    The descriptors of a request are standard input, output and error, the write end of its status pipe, and the
    client's end of the socket. The status pipe gets the process id and, when the fork has ended, its wait status.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    status_pipes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            report_ended(status_pipes)
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 5)
        if not message:
            return None
        server, process = os.getpid(), os.fork()
        if process == 0:
            end_with(server)
            signal.set_wakeup_fd(-1)
            for descriptor in (wake_read, wake_write, descriptors.pop(3), *status_pipes.values()):
                os.close(descriptor)
            requests.close()
            return json.loads(message), descriptors
        status_pipes[process] = descriptors.pop(3)
        for descriptor in descriptors:
            os.close(descriptor)
        send_number(status_pipes[process], process)


def end_with(server: int) -> None:
    """Have the kernel kill this process when its parent, the server, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def report_ended(status_pipes: dict[int, int]) -> None:
    """Write the wait status of each fork that has ended to its pipe, and forget the fork."""
    for process in list(status_pipes):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            descriptor = status_pipes.pop(process)
            send_number(descriptor, status)
            os.close(descriptor)


def send_number(status_pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the client of this fork has ended
        os.write(status_pipe, f"{number}\n".encode())


def enter(request: dict[str, Any], streams: list[int]) -> None:
    """Give this fork what an interpreter gets at its start."""
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()  # `random` does so itself
    sys.modules["torch"].default_generator.seed()
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        by_lines = not unbuffered and (stream is sys.stderr or stream.isatty())
        stream.reconfigure(line_buffering=by_lines, write_through=unbuffered)
    if request["ignore_warnings"]:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")


def pause_before(path: str) -> None:
    """Stop this process when it is about to open `path` or to rename something to it."""

    def pause(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.path.abspath(arguments[1]) == path:
            os.kill(os.getpid(), signal.SIGSTOP)
        if event == "open" and isinstance(arguments[0], str) and os.path.abspath(arguments[0]) == path:
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(pause)


def run_program(arguments: list[str]) -> None:
    """Run `-m MODULE ARGUMENT…`, `-c CODE ARGUMENT…` or `SCRIPT ARGUMENT…` as the interpreter does."""
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *arguments[2:]]
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main_module))
    elif arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = arguments[1:]
        if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
            sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that it runs a second time
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(arguments[0])
        sys.argv[:] = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


class ExitStatus:
    """The status with which a program ends this process."""

    def __init__(self) -> None:
        self.status: int | None = None
        """None if only the interpreter knows it."""
        atexit.register(self.exit_now)  # the first of all, so that it is called last

    def run(self, arguments: list[str]) -> None:
        """Run a program and note its status, also that of an exception, which is not caught."""
        try:
            run_program(arguments)
            self.status = 0
        except SystemExit as error:
            self.status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
            raise
        except Exception:
            self.status = 1
            raise

    def exit_now(self) -> None:
        """End the process, or leave it to the interpreter if the output cannot be written."""
        if self.status is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.status & 0xFF)


def main() -> None:
    exit_status = ExitStatus()
    requests = socket.socket(fileno=int(sys.argv[1]))
    import_packages()
    sys.modules["quintet.config.schema"].keys()  # cached
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # garbage collections of the forks visit their own objects only
    if (received := serve(requests)) is None:
        os._exit(0)  # the finalization of so many packages takes long
    request, (*streams, client) = received
    enter(request, streams)
    if path := os.environ.pop(PAUSE_BEFORE, None):
        pause_before(path)
    if request["arguments"][:2] == ["-m", "torch.distributed.run"]:
        import warm_processes

        warm_processes.start_here_too(client, request["environment"])
    else:
        os.close(client)
    exit_status.run(request["arguments"])


if __name__ == "__main__":
    main()
