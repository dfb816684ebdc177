"""Replies as lines for people, token by token (`rollout.engine_options.print_replies`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quintet.records import Trajectory

__all__ = ["reply_lines"]


def reply_lines(trajectories: Iterable[Trajectory], *, step: int) -> Iterator[str]:
    """One line for each reply: where it belongs, why it ended, its token ids and its text."""
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            place = f"step {step}, group {trajectory.group}, sample {trajectory.sample}, turn {number}"
            ids = " ".join(map(str, turn.tokens))
            yield f"{place}: {len(turn.tokens)} tokens, {turn.stop}: [{ids}] {turn.text!r}"
