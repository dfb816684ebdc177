"""The worker processes of a verifier pool and their fork server."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict

from quintet.rewards.verifier_process import ProcessKind, VerifierProcess
from quintet.rewards.verifier_worker import Setup
from quintet.sandbox.sandboxed_process import ForkServer

WORKER = "quintet.rewards.verifier_worker:work"


class VerifierProcesses:
    """Worker processes by number. `selector` calls `on_output(process)` and `on_exit()` when they have to be read."""

    def __init__(
        self,
        setup: Setup,
        selector: selectors.DefaultSelector,
        on_output: Callable[[VerifierProcess], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._setup, self._selector = setup, selector
        self._on_output, self._on_exit = on_output, on_exit
        self._by_number: dict[int, VerifierProcess] = {}
        self._num_forked = 0
        self.start_fork_server()

    def __iter__(self) -> Iterator[VerifierProcess]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, process: VerifierProcess) -> bool:
        return process.number in self._by_number

    def get(self, number: int) -> VerifierProcess | None:
        """Return the process of that number, if it has not been killed."""
        return self._by_number.get(number)

    def num_working(self) -> int:
        """Return the number of processes with jobs that are not slow."""
        return sum(bool(process.jobs) and not process.slow for process in self)

    def idle(self, process_kind: ProcessKind) -> VerifierProcess | None:
        """Return an idle process of the kind."""
        return next((process for process in self if process.idle and process.process_kind == process_kind), None)

    def fork(self, process_kind: ProcessKind) -> None:
        """Fork a process; if the fork server has died, `on_exit` notices and the next one is asked."""
        self._num_forked += 1
        try:
            self.fork_server.load(process_kind.modules)
            setup = {**asdict(self._setup), "confined": process_kind.confined}
            connection = self.fork_server.fork(self._num_forked, setup)
        except OSError:
            return
        process = VerifierProcess(self._num_forked, process_kind, connection)
        self._by_number[process.number] = process
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_output(process))

    def kill(self, process: VerifierProcess) -> None:
        """Kill a process, idle or not."""
        del self._by_number[process.number]
        self.unregister(process)
        process.connection.close()
        self._signal(process, signal.SIGKILL)

    def kill_idle_of_other_kind(self, process_kind: ProcessKind) -> bool:
        """Kill an idle process of another kind; return whether there was one."""
        other = next((process for process in self if process.idle and process.process_kind != process_kind), None)
        if other is not None:
            self.kill(other)
        return other is not None

    def stop_until(self, process: VerifierProcess, resume_at: float) -> None:
        """Suspend a process."""
        process.resume_at = resume_at
        self._signal(process, signal.SIGSTOP)

    def resume(self, process: VerifierProcess) -> None:
        """Continue a process if it is suspended."""
        if process.resume_at is not None:
            process.resume_at = None
            self._signal(process, signal.SIGCONT)

    def unregister(self, process: VerifierProcess) -> None:
        """Stop watching the connection of a process."""
        if process.connection in self._selector.get_map():
            self._selector.unregister(process.connection)

    def start_fork_server(self) -> None:
        """Start a fork server."""
        self.fork_server = ForkServer(WORKER)
        self._selector.register(self.fork_server.connection, selectors.EVENT_READ, self._on_exit)

    def close_fork_server(self) -> None:
        """Stop watching the fork server and close it."""
        self._selector.unregister(self.fork_server.connection)
        self.fork_server.close()

    def close(self) -> None:
        """End all processes."""
        self.fork_server.close()
        for process in self:
            process.connection.close()

    def _signal(self, process: VerifierProcess, signum: signal.Signals) -> None:
        try:
            self.fork_server.signal(process.number, signum)
        except OSError:
            # it ended with its fork server
            return
