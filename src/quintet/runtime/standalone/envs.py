"""Environments on standalone workers, env hosts, as the controller sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_readable
from typing import Any

from quintet.config.native.envs import InteractiveEnvSection
from quintet.config.native.experiment import Experiment
from quintet.envs.event_messages import event_digest
from quintet.envs.start_states import env_index
from quintet.envs.vector_env import EnvEvent, EpisodeFailed
from quintet.errors import MachineError
from quintet.records import Failure
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_interface import STANDALONE_ENVS, EnvRequest
from quintet.runtime.standalone.listener import StandaloneWorker, WorkerLostError

HOST_POLL_SECONDS = 0.01
"""How long a host waits for an event of its worker processes before it takes further requests."""
POLL_SECONDS = 0.05
MAX_REASSIGNMENTS = 2
"""How often an episode whose host was lost is started again on another one."""


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """An episode, and all that is needed to continue it on another host."""

    number: int
    order: tuple[int, int]
    """Index of its env, and number of its last request among those of all episodes."""
    requests: list[EnvRequest]
    """The start, and the actions of each turn."""
    digests: list[bytes] = field(default_factory=list)
    """Of the event that completed each request, except the one in progress."""
    host: EnvHost | None = None
    num_completed: int = 0
    """Number of requests that the current host has completed."""
    num_losses: int = 0
    """How many hosts have been lost with the episode."""
    failure: Failure | None = None
    """Why the episode cannot continue, reported at its next request."""


@dataclass(slots=True, eq=False)
class EnvHost:
    """The environments of a standalone worker."""

    worker: StandaloneWorker
    episodes: dict[int, HostedEpisode] = field(default_factory=dict)
    is_built: bool = False
    queue: list[EnvRequest] = field(default_factory=list)
    """Requests that have not been sent."""
    has_call: bool = False
    """Whether the result of a call has not been taken."""

    @property
    def is_available(self) -> bool:
        """Whether episodes can start here."""
        return self.is_built and self.worker.lost_reason is None

    @property
    def is_busy(self) -> bool:
        """Whether requests are queued or in progress."""
        return bool(self.queue) or any(each.num_completed < len(each.requests) for each in self.episodes.values())

    def start_build(self, config: Experiment) -> None:
        """Start to build the environments; raises as `start_exchange` does."""
        self._start(RemoteCall(STANDALONE_ENVS, "build", {"config": config}))

    def start_exchange(self, wait_seconds: float) -> None:
        """Send the queued requests, unless a call is in progress or there is nothing to do.

        Raises:
            WorkerLostError: the worker is lost.
        """
        if self.has_call or not self.is_busy:
            return
        requests, self.queue = self.queue, []
        arguments = {"requests": requests, "wait_seconds": wait_seconds}
        self._start(RemoteCall(STANDALONE_ENVS, "exchange", arguments))

    def finish(self) -> Sequence[EnvEvent]:
        """Return the result of the call: events, none of `build`.

        Raises:
            WorkerLostError: the worker is lost.
            MachineError: the environments cannot run.
        """
        self.has_call = False
        events: Sequence[EnvEvent] = self.worker.finish() or ()
        self.is_built = True
        return events

    def _start(self, call: RemoteCall) -> None:
        self.has_call = True
        self.worker.start(call)


class HostedVectorEnv:
    """`VectorEnv` over env hosts. An episode starts on the host with the fewest running ones, and stays there.

    All hosts compute at the same time. If the envs run in the processes of the hosts themselves, `poll` waits for all
    requests, and returns their events in the order in which a `LocalVectorEnv` would: so a run has the same numbers,
    bit for bit. If they run in worker processes of the hosts (`env.processes`), `poll` only waits as its caller says.

    The episodes of a lost host start again on another one, from their seed and with the actions so far. They continue
    if all observations and rewards are the same, and fail otherwise.
    """

    def __init__(
        self,
        workers: Sequence[StandaloneWorker],
        config: Experiment,
        take_arrived: Callable[[], Sequence[StandaloneWorker]] = tuple,
    ) -> None:
        """Build the environments on the workers; `take_arrived` returns workers that were started again.

        Raises:
            MachineError: a worker is lost, or cannot build them.
        """
        self.seconds = 0.0
        self._config, self._take_arrived = config, take_arrived
        self._max_wait_seconds = float(config.placement.join_timeout_seconds)
        envs = [env.config for env in config.run_envs]
        self._waits_for_all = all(isinstance(env, InteractiveEnvSection) and env.processes is None for env in envs)
        self._hosts: dict[int, EnvHost] = {}
        self._episodes: dict[int, HostedEpisode] = {}
        self._pending: set[int] = set()
        """Episodes with a request in progress."""
        self._events: list[tuple[tuple[int, int], EnvEvent]] = []
        """Events with the order of their episode."""
        self._num_requests = self._num_reassigned = 0
        self._no_host_since: float | None = None
        self._join(workers)
        while any(host.has_call for host in self._hosts.values()):
            self._receive(POLL_SECONDS)
        if not self._hosts:
            raise MachineError("all env hosts were lost while they started", "see the logs of their ranks")

    def start(self, episode: int, seed: int) -> None:
        request = EnvRequest(episode, seed=seed)
        started = HostedEpisode(episode, (env_index(seed), self._num_requests), [request])
        self._episodes[episode] = started
        self._num_requests += 1
        self._pending.add(episode)
        self._place(started)

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
            MachineError: all hosts have been lost for `placement.join_timeout_seconds`, or the envs cannot run.
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
        """See `VectorEnv.pop_metrics`."""
        reassigned, self._num_reassigned = self._num_reassigned, 0
        return {"env/episodes_reassigned": reassigned}

    def close(self) -> None:
        """End all episodes. The hosts end with the controller."""
        for episode in list(self._episodes):
            self.drop(episode)

    # ---- calls

    def _advance(self, seconds: float) -> None:
        """Send what is queued, and handle the results that are there within `seconds`."""
        self._join(self._take_arrived())
        self._check_hosts()
        for host in list(self._hosts.values()):
            try:
                if host.is_built:
                    host.start_exchange(0.0 if self._waits_for_all else HOST_POLL_SECONDS)
            except WorkerLostError as error:
                self._lose(host, error)
        self._receive(seconds)

    def _receive(self, seconds: float) -> None:
        """Handle the results that are there within `seconds`."""
        waiting = {host.worker.fileno(): host for host in self._hosts.values() if host.has_call}
        readable = frozenset(wait_readable(list(waiting), seconds))
        for host in [host for descriptor, host in waiting.items() if descriptor in readable]:
            try:
                was_built, events = host.is_built, host.finish()
            except WorkerLostError as error:
                self._lose(host, error)
                continue
            if not was_built:
                self._place_waiting()
            for event in events:
                self._handle(host, event)

    def _handle(self, host: EnvHost, event: EnvEvent) -> None:
        """Pass on the event of a request, or compare it if the request is replayed; send the next one."""
        episode = host.episodes.get(event.episode)
        if episode is None:
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

    def _join(self, workers: Iterable[StandaloneWorker]) -> None:
        """Start to build the environments on workers that have connected."""
        for worker in workers:
            if (former := self._hosts.get(worker.rank)) is not None:
                self._lose(former, WorkerLostError(f"the env host of {worker.name} was started again"))
            host = self._hosts[worker.rank] = EnvHost(worker)
            try:
                host.start_build(self._config)
            except WorkerLostError as error:
                self._lose(host, error)

    def _lose(self, host: EnvHost, error: WorkerLostError) -> None:
        """Start the episodes of a lost host again on others, or fail those that several hosts were lost with."""
        if self._hosts.get(host.worker.rank) is host:
            del self._hosts[host.worker.rank]
        lost, host.episodes = list(host.episodes.values()), {}
        for episode in lost:
            episode.host, episode.num_completed = None, 0
            episode.num_losses += 1
            if episode.num_losses > MAX_REASSIGNMENTS:
                where = "step" if episode.digests else "reset"
                self._fail(episode, Failure(where, type(error).__name__, str(error)))
            else:
                self._num_reassigned += 1
                self._place(episode)

    def _place(self, episode: HostedEpisode) -> None:
        """Start an episode on the host with the fewest running ones, if there is a host."""
        available = [host for host in self._hosts.values() if host.is_available]
        if available:
            host = episode.host = min(available, key=lambda each: (len(each.episodes), each.worker.rank))
            host.episodes[episode.number] = episode
            host.queue.append(episode.requests[0])

    def _place_waiting(self) -> None:
        for episode in self._episodes.values():
            if episode.host is None and episode.failure is None:
                self._place(episode)

    def _leave_host(self, episode: HostedEpisode) -> None:
        """Let the host discard an episode."""
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
        if any(host.worker.lost_reason is None for host in self._hosts.values()):
            self._no_host_since = None
            return
        now = time.monotonic()
        self._no_host_since = self._no_host_since or now
        if now - self._no_host_since > self._max_wait_seconds:
            raise MachineError(
                f"all env hosts have been lost for {self._max_wait_seconds:g} seconds (placement.join_timeout_seconds)",
                "see the logs of their ranks in the run directory; rerun the same command to continue from the last "
                "checkpoint",
            )


def _not_reproducible(episode: HostedEpisode) -> Failure:
    """Return the failure of an episode whose replay differs."""
    where = "step" if episode.num_completed else "reset"
    problem = "after the loss of its host, the same seed and actions gave another observation or reward"
    return Failure(where, "NotReproducible", problem)
