"""Log lines with the token ids and text of responses (`rollout.engine_options.print_responses`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quintet.records import Trajectory


def response_lines(trajectories: Iterable[Trajectory], *, step: int) -> Iterator[str]:
    """Yield one line per response: its turn, stop reason, token ids and text."""
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            label = f"step {step}, group {trajectory.group}, sample {trajectory.sample}, turn {number}"
            ids = " ".join(map(str, turn.tokens))
            yield f"{label}: {len(turn.tokens)} tokens, {turn.finish_reason}: [{ids}] {turn.text!r}"
