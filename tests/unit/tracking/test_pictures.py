"""If these fail, drawn episodes are missing, or show what wasn't played."""

from __future__ import annotations

from pathlib import Path

from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.episode_pages import write_episode_pages


def test_a_episode_is_drawn_turn_by_turn(tmp_path: Path) -> None:
    turn = Turn(
        prompt=(1,),
        tokens=(2,),
        logprobs=(-0.5,),
        finish_reason=FinishReason.STOP,
        weight_version=0,
        text="<answer> Right </answer><script>",
        observation=" P _\n O G",
        continues=False,
        actions=("Right",),
        valid_format=True,
        reward=1.0,
    )
    episode = Trajectory(env="frozenlake", seed=7, group=0, sample=0, turns=(turn, turn), outcome=Outcome.SUCCESS)
    write_episode_pages(tmp_path, 4, [episode, episode])
    pages = sorted((tmp_path / "step_4").iterdir())
    assert [page.name for page in pages] == ["trajectory_data_0.html", "trajectory_data_1.html"]
    page = pages[0].read_text()
    assert page.count("<li>") == 2
    assert page.count('class="board"') == 2
    assert "&lt;answer&gt; Right" in page
    assert "<script>" not in page
    assert "solved" in page
