"""Watch the ranks that the launcher has started, and restart those that can be restarted alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.config.torchrun import describe_rank
from quintet.errors import UserError
from quintet.runtime.ray_cluster.node_processes import NodeStatus
from quintet.runtime.signals import StopRequest
from quintet.tracking.run_processes import RunProcess

POLL_SECONDS = 0.5
"""Interval at which the nodes are asked for the state of their ranks."""
EXIT_SECONDS = 15.0
"""Time for the other ranks to end after the controller has ended or a learner has failed."""


class RankFailureError(Exception):
    """Ranks ended, or hang, for a cause that may not recur: the run can continue from its last checkpoint."""


@dataclass(slots=True)
class Node:
    """A node with its actor."""

    host: str
    actor: Any
    ranks: Sequence[int]
    lost_seconds: float
    """A node that does not answer for so long, or a rank that is stopped for so long, is lost."""
    stopped_since: dict[int, float] = field(default_factory=dict)
    """Since when ranks have been stopped, seconds of the monotonic clock."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `NodeProcesses`.

        Raises:
            RankFailureError: the node does not answer.
        """
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=self.lost_seconds)
        except ray.exceptions.GetTimeoutError:
            raise RankFailureError(f"node {self.host} does not answer for {self.lost_seconds:g} seconds") from None
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankFailureError(f"node {self.host} is lost: {reason}") from error

    def stopped_ranks(self, status: NodeStatus) -> list[int]:
        """Return the ranks that have been stopped for `lost_seconds`."""
        now = time.monotonic()
        self.stopped_since = {rank: self.stopped_since.get(rank, now) for rank in status.stopped}
        return [rank for rank, since in self.stopped_since.items() if now - since > self.lost_seconds]


class RankWatch:
    """Shows the output of rank 0, and waits for the end of all ranks."""

    def __init__(
        self,
        nodes: Sequence[Node],
        stop: StopRequest,
        show: Callable[[str], None],
        restartable: frozenset[int],
        max_restarts: int,
        record_of: Callable[[int], RunProcess | None],
        components: Sequence[str] = (),
    ) -> None:
        """`restartable` ranks are restarted alone, each up to `max_restarts` times; the run goes on without them.
        `record_of` returns the record of a rank's process, which says how it ended; `components` are the names of each
        rank's components, for messages."""
        self._nodes = list(nodes)
        self._stop = stop
        self._show = show
        self._restartable = restartable
        self._max_restarts = max_restarts
        self._record_of = record_of
        self._components = components
        self._shown: set[int] = set()
        """Ranks whose failure was shown."""
        self._stopped: set[int] = set()
        """Ranks that were killed because they were stopped."""
        self._restarts: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        """Exit status by rank; negative numbers are signals."""

    def run(self) -> int:
        """Return the exit status of the run.

        Raises:
            RankFailureError: a rank that cannot be restarted alone was killed or is stopped, or its node is lost.
        """
        is_signalled, ending_since = False, None
        while True:
            if self._stop and not is_signalled:
                is_signalled = True
                self._nodes[0].call("send_signal", int(self._stop.number or signal.SIGTERM), 0)
            self._poll()
            self._show_failures()
            if set(self._codes).issuperset(rank for node in self._nodes for rank in node.ranks):
                self._show(self._nodes[0].call("status").output)
                break
            if self._is_ending:
                ending_since = ending_since or time.monotonic()
                if time.monotonic() - ending_since > EXIT_SECONDS:
                    break
            time.sleep(POLL_SECONDS)
        return self._codes.get(0) or next(iter(self._failures().values()), 0)

    def _failures(self) -> dict[int, int]:
        """Return the exit status of each rank that cannot be restarted alone and has failed."""
        return {rank: code for rank, code in self._codes.items() if code and rank not in self._restartable}

    def _show_failures(self) -> None:
        """Show once how each of these ranks ended, unless the output has its error."""
        for rank, code in self._failures().items():
            record = self._record_of(rank)
            has_error = rank == 0 and (code == UserError.exit_status or (record is not None and record.message))
            if not has_error and rank not in self._shown:
                self._show(f"quintet: {self._describe_end(rank)}\n")
            self._shown.add(rank)

    @property
    def _is_ending(self) -> bool:
        """Whether the controller has ended, or a rank that cannot be restarted alone has failed."""
        return 0 in self._codes or bool(self._failures())

    def _poll(self) -> None:
        for node in list(self._nodes):
            try:
                status = node.call("status")
                self._check(node, status)
            except RankFailureError as error:
                if not self._restartable.issuperset(node.ranks):
                    raise
                self._nodes.remove(node)
                self._show(f"quintet: {error}; continuing without it\n")

    def _check(self, node: Node, status: NodeStatus) -> None:
        if 0 in node.ranks:
            self._show(status.output)
        self._codes |= status.exit_codes
        for rank in status.exit_codes.keys() - self._restartable:
            if self._has_vanished(rank):
                raise RankFailureError(self._describe_end(rank))
        for rank in node.stopped_ranks(status):
            if rank not in self._restartable:
                raise RankFailureError(f"{self._name(rank)} is stopped (SIGSTOP)")
            self._stopped.add(rank)
            node.call("send_signal", int(signal.SIGKILL), rank)
        if not self._is_ending:
            for rank in self._restartable.intersection(status.exit_codes):
                if self._codes[rank] or self._has_vanished(rank):
                    self._restart(node, rank)

    def _restart(self, node: Node, rank: int) -> None:
        """Start a rank again that has ended, unless that was done too often."""
        restarts = self._restarts.get(rank, 0)
        if restarts >= self._max_restarts:
            return
        cause = self._describe_end(rank)
        del self._codes[rank]
        self._stopped.discard(rank)
        self._restarts[rank] = restarts + 1
        self._show(f"quintet: {cause}; restarting it ({restarts + 1} of {self._max_restarts})\n")
        node.call("restart", rank)

    def _has_vanished(self, rank: int) -> bool:
        """Return whether a rank that has ended was killed, or ended with status 0 although its work was not done."""
        record = self._record_of(rank)
        return self._codes[rank] < 0 or (self._codes[rank] == 0 and record is not None and record.outcome != "ended")

    def _name(self, rank: int) -> str:
        """Return the rank with its components and its node."""
        components = self._components[rank] if self._components else ""
        return f"{describe_rank(rank, components)} on {next(node for node in self._nodes if rank in node.ranks).host}"

    def _describe_end(self, rank: int) -> str:
        """Return how a rank ended: its signal, or its status and its error message."""
        name = self._name(rank)
        code, record = self._codes[rank], self._record_of(rank)
        if rank in self._stopped:
            return f"{name} is stopped (SIGSTOP)"
        if code < 0:
            is_known = -code in {known.value for known in signal.Signals}
            cause = ", probably because the node ran out of memory" if -code == signal.SIGKILL else ""
            return f"{name} was killed by {signal.Signals(-code).name if is_known else f'signal {-code}'}{cause}"
        message = record.message if record is not None and record.message else "without a message"
        return f"{name} ended with status {code}: {message}"
