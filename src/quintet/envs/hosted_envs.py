"""Environments in other processes, env hosts, as one vector env; episodes of a lost host continue on another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_readable
from typing import Any, Protocol

from quintet.envs.event_messages import event_digest
from quintet.envs.start_states import env_index
from quintet.envs.vector_env import EnvEvent, EpisodeFailed
from quintet.errors import MachineError
from quintet.records import Failure

POLL_SECONDS = 0.05
MAX_REASSIGNMENTS = 2
"""How often an episode whose host was lost is started again on another one: it may be the cause."""
MAX_LOSSES_WITHOUT_CAUSE = 10
"""The same for an episode that its host has lost because of another episode, which it has named (`EpisodeLost`)."""


class HostLostError(RuntimeError):
    """An env host has ended, hangs, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class EpisodeLost:
    """An episode that a host has lost, although the host is alive; it starts again from its seed."""

    episode: int
    reason: str


HostEvent = EnvEvent | EpisodeLost


@dataclass(frozen=True, slots=True)
class EnvRequest:
    """A call of `VectorEnv` for one episode: `start` with a seed, `step` with actions, `drop` with neither."""

    episode: int
    seed: int | None = None
    actions: tuple[Any, ...] | None = None


class HostConnection(Protocol):
    """Connection to an env host, with one call at a time. All methods but `fileno` raise `HostLostError` if it is
    lost."""

    @property
    def rank(self) -> int:
        """Number of the host, the same after it was started again."""

    @property
    def lost_reason(self) -> str | None:
        """Why the host cannot be called any more."""

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when the result of the started call is there."""

    def check_deadline(self) -> None:
        """Check that the started call has not exceeded its time limit, if it has one."""

    def start_build(self) -> None:
        """Start to build the environments."""

    def start_exchange(self, requests: Sequence[EnvRequest]) -> None:
        """Start to execute the requests in their order; its result are the events since the last call."""

    def finish(self) -> Sequence[HostEvent]:
        """Wait for the result of the started call; none for `start_build`.

        Raises:
            MachineError: the environments cannot run.
        """

    def close(self) -> None:
        """Close the connection; never raises."""


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """An episode, and all that is needed to continue it on another host."""

    number: int
    order: tuple[int, int]
    """Index of its env, and number of its last request among the requests of all episodes."""
    requests: list[EnvRequest]
    """The start, and the actions of each turn."""
    digests: list[int] = field(default_factory=list)
    """Of the event that completed each request, except the one in progress."""
    host: EnvHost | None = None
    num_completed: int = 0
    """Number of requests that the current host has completed."""
    num_losses: int = 0
    """How often the episode has been lost, with its host or alone."""
    failure: Failure | None = None
    """Why the episode cannot continue, reported at its next request."""


@dataclass(slots=True, eq=False)
class EnvHost:
    """The environments of a host, and the episodes that run there."""

    connection: HostConnection
    episodes: dict[int, HostedEpisode] = field(default_factory=dict)
    is_built: bool = False
    queue: list[EnvRequest] = field(default_factory=list)
    """Requests that have not been sent."""
    has_call: bool = False
    """Whether the result of a call has not been taken."""

    @property
    def is_available(self) -> bool:
        """Whether episodes can start here."""
        return self.is_built and self.connection.lost_reason is None

    @property
    def is_busy(self) -> bool:
        """Whether requests are queued or in progress."""
        return bool(self.queue) or any(
            episode.num_completed < len(episode.requests) for episode in self.episodes.values()
        )

    def start_build(self) -> None:
        """Start to build the environments; raises as `start_exchange` does."""
        self.has_call = True
        self.connection.start_build()

    def start_exchange(self) -> None:
        """Send the queued requests, unless a call is in progress or there is nothing to do.

        Raises:
            HostLostError: the host is lost.
        """
        if self.has_call or not self.is_busy:
            return
        requests, self.queue = self.queue, []
        self.has_call = True
        self.connection.start_exchange(requests)

    def finish(self) -> Sequence[HostEvent]:
        """Return the result of the call: events, none of `start_build`.

        Raises:
            HostLostError: the host is lost.
            MachineError: the environments cannot run.
        """
        self.has_call = False
        events = self.connection.finish()
        self.is_built = True
        return events


@dataclass(frozen=True, slots=True)
class HostWait:
    """Time limit of a wait for a host if all are lost."""

    seconds: float
    key: str
    """Key that sets it."""
    hint: str
    """What to do when it is exceeded."""


class HostedVectorEnv:
    """`VectorEnv` over env hosts. An episode starts on the host with the fewest running ones, and stays there.

    All hosts compute at the same time. With `waits_for_all`, `poll` waits for all requests, and returns their events in
    the order in which a `LocalVectorEnv` would: so a run has the same numbers, bit for bit. Otherwise it only waits as
    its caller says.

    The episodes of a lost host start again on another one, from their seed and with the actions so far. They continue
    if all observations and rewards are the same, and fail otherwise.
    """

    def __init__(
        self,
        connections: Sequence[HostConnection],
        wait: HostWait,
        *,
        waits_for_all: bool,
        take_connected_hosts: Callable[[], Sequence[HostConnection]] = tuple,
    ) -> None:
        """Build the environments on the hosts; `take_connected_hosts` returns connections to hosts that were
        started again.

        Raises:
            MachineError: all hosts are lost, or one cannot build them.
        """
        self.seconds = 0.0
        self._wait, self._take_connected_hosts, self._waits_for_all = wait, take_connected_hosts, waits_for_all
        self._hosts: dict[int, EnvHost] = {}
        self._episodes: dict[int, HostedEpisode] = {}
        self._pending: set[int] = set()
        """Episodes with a request in progress."""
        self._events: list[tuple[tuple[int, int], EnvEvent]] = []
        """Events with the order of their episode."""
        self._num_requests = self._num_reassigned = 0
        self._no_host_since: float | None = None
        self._last_loss = ""
        self._join(connections)
        while any(host.has_call for host in self._hosts.values()):
            self._receive(POLL_SECONDS)
        if not self._hosts:
            raise MachineError(f"all env hosts were lost while they started{self._last_loss}", wait.hint)

    def start(self, episode: int, seed: int) -> None:
        request = EnvRequest(episode, seed=seed)
        started = HostedEpisode(episode, (env_index(seed), self._num_requests), [request])
        self._episodes[episode] = started
        self._num_requests += 1
        self._pending.add(episode)
        self._place_on_host(started)

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        stepped = self._episodes[episode]
        stepped.order = (stepped.order[0], self._num_requests)
        self._num_requests += 1
        if stepped.failure is not None:
            self._events.append((stepped.order, EpisodeFailed(episode, stepped.failure)))
            return
        stepped.requests.append(EnvRequest(episode, actions=tuple(actions)))
        self._pending.add(episode)
        if stepped.host is not None and stepped.num_completed == len(stepped.requests) - 1:
            stepped.host.queue.append(stepped.requests[-1])

    def drop(self, episode: int) -> None:
        dropped = self._episodes.pop(episode, None)
        if dropped is not None:
            self._pending.discard(episode)
            self._events = [entry for entry in self._events if entry[1].episode != episode]
            self._leave_host(dropped)

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        """See `VectorEnv.poll`.

        Raises:
            MachineError: all hosts have been lost for too long, or the envs cannot run.
        """
        started = time.perf_counter()
        self._advance(0.0)
        while self._pending and (self._waits_for_all or (wait and not self._events)):
            self._advance(POLL_SECONDS if seconds is None else min(seconds, POLL_SECONDS))
            wait = seconds is None
        events, self._events = self._events, []
        self.seconds += time.perf_counter() - started
        return [event for _, event in (sorted(events, key=lambda entry: entry[0]) if self._waits_for_all else events)]

    @property
    def pending(self) -> bool:
        return bool(self._pending or self._events)

    def pop_metrics(self) -> Mapping[str, float]:
        reassigned, self._num_reassigned = self._num_reassigned, 0
        return {"env/episodes_reassigned": reassigned}

    def lost_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have no host."""
        return [rank for rank in ranks if rank not in self._hosts]

    def close(self) -> None:
        """End all episodes, and close the connections."""
        for episode in list(self._episodes):
            self.drop(episode)
        for host in self._hosts.values():
            host.connection.close()

    # ---- calls

    def _advance(self, seconds: float) -> None:
        """Send queued requests, and handle the results that arrive within `seconds`."""
        self._join(self._take_connected_hosts())
        self._check_hosts()
        for host in list(self._hosts.values()):
            try:
                if host.is_built:
                    host.start_exchange()
            except HostLostError as error:
                self._lose(host, error)
        self._receive(seconds)

    def _receive(self, seconds: float) -> None:
        """Handle the results that are there within `seconds`."""
        waiting = {host.connection.fileno(): host for host in self._hosts.values() if host.has_call}
        readable = frozenset(wait_readable(list(waiting), seconds))
        for descriptor, host in waiting.items():
            try:
                if descriptor not in readable:
                    host.connection.check_deadline()
                    continue
                was_built, events = host.is_built, host.finish()
            except HostLostError as error:
                self._lose(host, error)
                continue
            if not was_built:
                self._place_waiting()
            for event in events:
                self._handle(host, event)

    def _handle(self, host: EnvHost, event: HostEvent) -> None:
        """Pass on the event of a request, or compare it if the request is replayed; send the next one."""
        episode = host.episodes.get(event.episode)
        if episode is None:
            return
        if isinstance(event, EpisodeLost):
            self._leave_host(episode)
            self._reassign(episode, Failure("step", "EpisodeLost", event.reason), MAX_LOSSES_WITHOUT_CAUSE)
            return
        if isinstance(event, EpisodeFailed):
            self._fail(episode, event.failure)
            return
        digest = event_digest(event)
        if episode.num_completed < len(episode.digests):
            if episode.digests[episode.num_completed] != digest:
                self._fail(episode, _not_reproducible(episode))
                return
        else:
            episode.digests.append(digest)
            self._pending.discard(episode.number)
            self._events.append((episode.order, event))
        episode.num_completed += 1
        if episode.num_completed < len(episode.requests):
            host.queue.append(episode.requests[episode.num_completed])

    def _fail(self, episode: HostedEpisode, failure: Failure) -> None:
        """End an episode: now if a request is in progress, otherwise at the next one."""
        self._leave_host(episode)
        episode.failure = failure
        if episode.number in self._pending:
            self._pending.discard(episode.number)
            self._events.append((episode.order, EpisodeFailed(episode.number, failure)))

    # ---- hosts

    def _join(self, connections: Iterable[HostConnection]) -> None:
        """Start to build the environments on hosts that have connected."""
        for connection in connections:
            if (former := self._hosts.get(connection.rank)) is not None:
                self._lose(former, HostLostError(f"the env host of rank {connection.rank} was started again"))
            host = self._hosts[connection.rank] = EnvHost(connection)
            try:
                host.start_build()
            except HostLostError as error:
                self._lose(host, error)

    def _lose(self, host: EnvHost, error: HostLostError) -> None:
        """Restart the episodes of a lost host on other hosts, or fail episodes with which several hosts were lost."""
        self._last_loss = f": {error}"
        if self._hosts.get(host.connection.rank) is host:
            del self._hosts[host.connection.rank]
        lost, host.episodes = list(host.episodes.values()), {}
        host.connection.close()
        for episode in lost:
            self._reassign(episode, Failure("step", type(error).__name__, str(error)), MAX_REASSIGNMENTS)

    def _reassign(self, episode: HostedEpisode, failure: Failure, max_losses: int) -> None:
        """Start an episode without a host again, or fail it if it was lost too often."""
        episode.host, episode.num_completed = None, 0
        episode.num_losses += 1
        if episode.num_losses > max_losses:
            self._fail(episode, failure if episode.digests else replace(failure, where="reset"))
        else:
            self._num_reassigned += 1
            self._place_on_host(episode)

    def _place_on_host(self, episode: HostedEpisode) -> None:
        """Start an episode on the host with the fewest running ones, if there is a host."""
        available = [host for host in self._hosts.values() if host.is_available]
        if available:
            host = episode.host = min(available, key=lambda each: (len(each.episodes), each.connection.rank))
            host.episodes[episode.number] = episode
            host.queue.append(episode.requests[0])

    def _place_waiting(self) -> None:
        for episode in self._episodes.values():
            if episode.host is None and episode.failure is None:
                self._place_on_host(episode)

    def _leave_host(self, episode: HostedEpisode) -> None:
        """Discard an episode on its host."""
        host, episode.host = episode.host, None
        if host is not None:
            del host.episodes[episode.number]
            host.queue = [request for request in host.queue if request.episode != episode.number]
            host.queue.append(EnvRequest(episode.number))

    def _check_hosts(self) -> None:
        """
        Raises:
            MachineError: there has been no host for too long.
        """
        if any(host.connection.lost_reason is None for host in self._hosts.values()):
            self._no_host_since = None
            return
        now = time.monotonic()
        self._no_host_since = self._no_host_since or now
        if now - self._no_host_since > self._wait.seconds:
            limit = f"{self._wait.seconds:g} seconds ({self._wait.key})"
            raise MachineError(f"all env hosts have been lost for {limit}{self._last_loss}", self._wait.hint)


def _not_reproducible(episode: HostedEpisode) -> Failure:
    """Return the failure of an episode whose replay differs."""
    where = "step" if episode.num_completed else "reset"
    problem = "after the loss of its host, the same seed and actions gave another observation or reward"
    return Failure(where, "NotReproducible", problem)
