"""If these fail, the viewer shows an episode without its maps or with tokens in the wrong place."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from quintet.tracking.grid_svg import grid_svg
from quintet.viewer.episodes import changed_episodes, episode_details, list_rows
from quintet.viewer.trajectory_index import TrajectoryIndex


def test_grids_are_drawn_and_the_text_of_the_policy_is_data_only(run_path: Path) -> None:
    index = TrajectoryIndex(run_path)
    index.refresh(10.0)
    sampled = next(episode for episode in index.episodes() if episode.split == "train" and episode.sample == 0)
    details = episode_details(index, sampled, None)
    assert details["turns"][1]["text"] == "second <b>bold</b>"
    assert details["turns"][0]["grid"].startswith("<svg")
    assert 'href="#t-player"' in details["turns"][0]["frame_grids"][0]
    assert details["turns"][1]["advantages"] == [0.5] * 5
    assert "token_texts" not in details["turns"][0]
    assert list_rows(index, [sampled])[0]["preview"] == "second <b>bold</b>"


def test_a_character_of_several_tokens_is_shown_once(run_path: Path, tmp_path: Path) -> None:
    # tokens 4, 5: the two bytes of é in a byte-level vocabulary
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "Ã": 4, "©": 5, "x": 6, "y": 7, "z": 8}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    index = TrajectoryIndex(run_path)
    index.refresh(10.0)
    sampled = next(episode for episode in index.episodes() if episode.split == "train" and episode.sample == 0)
    turns = episode_details(index, sampled, tmp_path / "tokenizer.json")["turns"]
    assert turns[0]["token_texts"] == ["", "é"]
    assert turns[1]["token_texts"] == ["", "é", "x", "y", "z"]


def test_changes_pair_the_same_start_states_and_show_lost_ones_first(run_path: Path) -> None:
    index = TrajectoryIndex(run_path)
    index.refresh(10.0)
    before, after = ([episode for episode in index.episodes() if episode.step == step] for step in (0, 3))
    pairs = list(changed_episodes(before, after[:2] + after[2:]))
    assert [(old.seed, old.success, new.success) for old, new in pairs] == [
        (0, True, False),
        (1, False, True),
        (2, False, False),
    ]
    assert list(changed_episodes(before[:1], after[1:])) == []


def test_a_grid_without_spaces_below_coordinates_is_drawn() -> None:
    svg = grid_svg("frozenlake", "Coordinates: \nGoal: (1, 1)\nGrid Map: \nP_\nOG")
    assert svg is not None
    assert 'viewBox="0 0 40 40"' in svg
    assert 'aria-label="P _\nO G"' in svg
    assert grid_svg("frozenlake", "GO\nhome") is None
