"""Overlapped rollout: a thread generates episodes while the main thread trains on those that are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.envs.start_states import StartStates
from quintet.records import Trajectory
from quintet.rollout.async_rollout import AsyncRollout, Group
from quintet.rollout.channel import Channel, ChannelClosedError
from quintet.rollout.episode import Episode
from quintet.rollout.episode_loop import EpisodeLoop
from quintet.rollout.sampling_params import SamplingParams

CHECK_SECONDS = 1.0
"""Time without a complete group after which engines that lack weights get them."""
STOP_SECONDS = 30.0
"""Time for which `close` waits for the thread."""


class BackgroundRollout(AsyncRollout):
    """See `AsyncRollout`. While the policy is trained, a thread steps the loop and puts complete groups into a channel,
    from which `take` gets those of the next step.

    Up to `async_ratio` times the groups of a step are running or complete while the policy is trained; with 0, those of
    the step alone. The loop belongs to the thread, except within `paused`.
    """

    overlaps = True

    def __init__(
        self,
        loop: EpisodeLoop[Any],
        start_states: StartStates,
        config: Experiment,
        load_missing_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """`load_missing_weights` is called by `take`, in the main thread, if no group is complete for a while."""
        super().__init__(loop, start_states, config)
        self._load_missing_weights = load_missing_weights
        self._channel: Channel[Group] = Channel.from_config(config.placement.rollout.channel)
        self._queued: set[int] = set()
        """Numbers of the groups that are in the channel, or wait for room in it."""
        self._unqueued: list[Group] = []
        """Complete groups that are not in the channel yet."""
        self._step, self._num_taken = 0, 0
        self._sampling: SamplingParams | None = None
        self._changed = Condition()
        self._is_stepping = self._is_stopped = False
        self._num_pauses = 0
        self._thread = Thread(target=self._run, name="rollout", daemon=True)

    def take(self, step: int, sampling: SamplingParams) -> tuple[list[Trajectory], dict[str, float]]:
        """See `AsyncRollout.take`.

        Raises:
            BaseException: the error that ended the thread.
        """
        return next(self.iter_parts(step, sampling, self._groups_per_step))

    def iter_parts(
        self, step: int, sampling: SamplingParams, num_groups: int
    ) -> Iterator[tuple[list[Trajectory], dict[str, float]]]:
        """Yield the episodes of `num_groups` groups of a step at a time, as soon as they are complete. The last item
        has the metrics of the step, the others none.

        Raises:
            BaseException: the error that ended the thread.
        """
        self._begin_step(step, sampling)
        selected: list[Group] = []
        num_dropped = 0
        while len(selected) < self._groups_per_step:
            group = self._next_group()
            is_dropped = self._is_dropped(group, num_dropped)
            if is_dropped:
                num_dropped += 1
            else:
                selected.append(group)
            self._remove(group, len(selected))
            if is_dropped or len(selected) % num_groups:
                continue
            is_last = len(selected) == self._groups_per_step
            metrics = self._metrics(step, selected, num_dropped) | self._channel.pop_metrics() if is_last else {}
            yield self._episodes_of(selected)[-num_groups * self._samples_per_group :], metrics

    def _begin_step(self, step: int, sampling: SamplingParams) -> None:
        """Restart stale groups and let further groups start."""
        with self.paused():
            self._step = step
            self._sampling = sampling
            self._num_taken = 0
            self._num_restarted = 0
            self._num_visits.clear()
            for group in self._channel.remove(lambda group: self._is_stale(group, step)):
                self._queued.discard(group.number)
            self._restart_groups(step, sampling)
            # an episode that should be restarted may have ended just before
            self._unqueued = [group for group in self._complete_groups() if group.number not in self._queued]
        if self._thread.ident is None:
            self._thread.start()

    def _next_group(self) -> Group:
        """Wait for a complete group."""
        while True:
            group = self._channel.get(CHECK_SECONDS)
            if group is None:
                self._load_missing_weights()
                continue
            with self._changed:
                if self._is_complete(group):
                    return group
                self._queued.discard(group.number)  # it was restarted while it waited for room in the channel

    def _remove(self, group: Group, num_taken: int) -> None:
        with self._changed:
            del self._groups[group.number]
            self._queued.discard(group.number)
            self._num_taken = num_taken
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from stepping the loop within the context; engines finish the steps that they have started.

        Raises:
            BaseException: the error that ended the thread.
        """
        with self._changed:
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._is_stepping)
        try:
            self._channel.raise_error()
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def suspend(self) -> dict[str, Any]:
        """See `AsyncRollout.suspend`. Nothing is aborted: a run that resumes starts the groups in flight again, while
        this one continues."""
        with self.paused():
            return self._state([group.start_state for group in self._groups.values()] + self._pending_starts)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._channel.close()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Step the loop until the rollout is closed."""
        try:
            while self._wait_for_work():
                try:
                    complete = self._advance()
                finally:
                    with self._changed:
                        self._is_stepping = False
                        self._changed.notify_all()
                for group in complete:
                    self._channel.put(group)
        except ChannelClosedError:
            return
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._channel.close(error)
            return

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do and the thread is not paused; return False to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or (not self._num_pauses and self._has_work()))
            self._is_stepping = not self._is_stopped
            return self._is_stepping

    def _has_work(self) -> bool:
        return self._loop.busy or bool(self._unqueued) or self._num_missing(self._num_taken) > 0

    def _advance(self) -> list[Group]:
        """Start groups, step the loop once, and return the groups that are complete now."""
        if self._sampling is None:
            raise AssertionError("the thread is started by the first step")
        self._fill(self._step, self._sampling, self._num_taken)
        groups, self._unqueued = self._unqueued, []
        if self._loop.busy:
            groups += self._record(self._loop.step())
        with self._changed:
            complete = {group.number: group for group in groups if self._is_complete(group)}
            new = [group for number, group in complete.items() if number not in self._queued]
            self._queued.update(group.number for group in new)
        return new


class PausingEnvs:
    """See `EnvGroup`: the environments of an overlapped rollout for the main thread, which pauses the rollout to use
    them. Running episodes continue beside those of `collect_rollouts`, on the same engines."""

    def __init__(self, loop: Any, rollout: BackgroundRollout) -> None:
        """`loop` is the `EnvGroup` of the rollout."""
        self._loop = loop
        self._rollout = rollout

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        with self._rollout.paused():
            yield from self._loop.collect_rollouts(episodes, sampling)

    def pop_metrics(self) -> Mapping[str, float]:
        with self._rollout.paused():
            return dict(self._loop.pop_metrics())

    def close(self) -> None:
        """See `EnvGroup.close`; the rollout must have been closed."""
        self._loop.close()
