"""If these fail, `quintet data` makes or shows something else than it was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published_templates import published

from quintet.cli.data import app
from quintet.cli.loss_masks import iter_masks
from quintet.config.native.data import DataConfig
from quintet.data.prompt_source import open_rows
from quintet.errors import ConfigError
from quintet.policies.tiny_models import train_tokenizer


def data(*arguments: str | Path) -> None:
    app([str(word) for word in arguments], standalone_mode=False)


def test_make_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data("make", "addition", tmp_path, "digits=3", "--train", 12, "--validation", 3, "--style", "worked", "--rows", 2)
    out = capsys.readouterr().out
    assert f"{tmp_path / 'train.parquet'}: 12 train rows" in out
    assert "12 rows, columns data_source, prompt" in out
    assert len(re.findall(r"user: \d{3} \+ \d{3} = \?", out)) == 2
    assert "<think>" in out


def test_solved_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data("make", "solved", tmp_path, "--env", "frozenlake", "size=3", "think=false", "--train", 3, "--validation", 1)
    assert re.search(r"train.parquet: \d+ train rows", capsys.readouterr().out)
    data("show", tmp_path / "train.parquet", "--rows", 1)
    out = capsys.readouterr().out
    assert "system: Reach the goal" in out
    assert "<think>" not in out


def test_check_names_rows_whose_ground_truth_fits_no_verifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,key,other\n1?,B,B\n2?,Paris,C\n")
    options = ("prompt_key=question", "--verifier", "choice")
    data("check", path, *options, "truth_key=other")
    assert "2 of 2 rows" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"a.csv, row 1 has the ground truth 'Paris'"):
        data("check", path, *options, "truth_key=key")
    with pytest.raises(ConfigError, match=r"rows have no data_source .*, and --verifier = rules\n  --verifier NAME"):
        data("check", path, "prompt_key=question", "truth_key=key")


def test_show_reads_as_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(320, ["user"]).save_pretrained(tmp_path / "model")
    (tmp_path / "a.csv").write_text("q,a\n2 + 3 = ?,5\n")
    data("show", tmp_path / "a.csv", "prompt_key=q", "truth_key=a", "--model", tmp_path / "model")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 rows, columns q, a"
    assert lines[1] == "read as prompts: q"
    assert lines[2].split() == ["row", "tokens", "source", "prompt", "truth", "response"]
    assert re.fullmatch(r"\s*0\s+\d+\s+user: 2 \+ 3 = \?\s+5", lines[3])


def test_show_names_the_forms_of_all_rows_that_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ('{"instruction": "2 + 3?", "output": "5"}', '{"prompt": "2 + 3?", "completion": "5"}')
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    for shown, expected in (
        ("1", "read as instructions of Alpaca: instruction, output"),
        (
            "9",
            "read as instructions of Alpaca: instruction, output; prompts and completions of TRL: prompt, completion",
        ),
    ):
        data("show", tmp_path / "a.jsonl", "--rows", shown)
        assert f"{expected} row " in " ".join(capsys.readouterr().out.split())


def test_tasks_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    data("tasks")
    out = capsys.readouterr().out
    for word in (
        "addition",
        "arithmetic",
        "countdown",
        "reasoning_gym",
        "solved",
        "operators=+-",
        "max_target=100",
    ):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "solved", "OUT"], "solved requires an environment"),
        (["make", "solved", "OUT", "--env", "sokoban", "--style", "worked"], "has no styles"),
        (["make", "solved", "OUT", "--env", "sokoban", "--validation", "0"], "writes both splits"),
        (["make", "solved", "OUT", "--env", "sokoban", "think=maybe"], "is not a boolean"),
        (["make", "solved", "OUT", "--env", "sokoban", "max_depth=0"], "max_depth=0"),
        (["make", "addition", "OUT", "--env", "sokoban"], "has no environment"),
        (["make", "addition", "OUT", "digits"], "is not KEY=VALUE"),
        (["make", "addition", "OUT", "digits=[1"], "is not valid YAML"),
        (["show", "OUT/no.jsonl"], "no such file"),
        (["show", "ROWS", "promt_key=q"], "did you mean prompt_key"),
        (["show", "ROWS", "prompt_key=q"], "columns: data_source"),
    ],
)
def test_errors_of_the_data_command_name_the_cause(tmp_path: Path, arguments: list[str], message: str) -> None:
    out, rows = tmp_path / "out", tmp_path / "rows.jsonl"
    rows.write_text('{"data_source": "addition", "prompt": "2 + 3 = ?"}\n')
    with pytest.raises(ConfigError) as caught:
        data(*(word.replace("OUT", str(out)).replace("ROWS", str(rows)) for word in arguments))
    assert message in str(caught.value)
    assert not out.exists()


TALK = (
    '{"messages": [{"role": "user", "content": "2 + 3 = ?"}, {"role": "assistant", "content": "5 🙂"},'
    ' {"role": "user", "content": "And?"}, {"role": "assistant", "content": "6", "weight": 0},'
    ' {"role": "user", "content": "Now?"}, {"role": "assistant", "content": "7 [x]"}]}\n'
)


def test_masks_of_fine_tuning_are_shown_without_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk.jsonl").write_text(TALK)
    data("show", tmp_path / "talk.jsonl", "messages_key=messages", "--masks")
    form, title, *lines = capsys.readouterr().out.splitlines()
    assert form == "read as conversations of TRL and OpenAI: messages"
    assert re.fullmatch(r"row 0: \d+ tokens, \d+ trained", title)
    assert [line for line in lines if "⟦" in line or "6" in line] == [
        "⟦5 🙂<|im_end|>⟧",
        "6<|im_end|>",
        "⟦7 [x]<|im_end|>⟧",
    ]
    assert lines[:2] == ["<|im_start|>user", "2 + 3 = ?<|im_end|>"]


def test_masks_of_fine_tuning_are_shown_in_colour(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(TALK)
    config = DataConfig(messages_key="messages")
    rows, _ = open_rows([str(tmp_path / "talk.jsonl")], "FILE", None)
    title, text = iter_masks(rows, 1, config, None)
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    assert green == "5 🙂<|im_end|>7 [x]<|im_end|>"
    num_green = sum("green" in str(span.style) for span in text.spans)
    assert len({str(span.style) for span in text.spans}) == 4, "neighbouring tokens differ"
    trained = int(title.plain.split()[-2])
    # the four bytes of the emoji are one piece
    assert num_green <= trained <= num_green + 3


def test_masks_of_prompts_with_responses_and_of_several_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "2 + 3 = ?", "completion": [{"role": "assistant", "content": "5"}]}\n'
    )
    data("show", tmp_path / "rows.jsonl", "--masks")
    assert "⟦5<|im_end|>⟧" in capsys.readouterr().out
    published("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "talk.jsonl").write_text(TALK)
    data("show", tmp_path / "talk.jsonl", "messages_key=messages", "--masks", "--model", tmp_path / "model")
    out = capsys.readouterr().out
    assert "row 0, sequence 1 of 2:" in out
    assert out.count("⟦<think>\n\n</think>\n\n") == 2
    (tmp_path / "calls.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]}\n'
    )
    with pytest.raises(ConfigError, match=r"calls\.jsonl, row 0: message 1: its `tool_calls\[0\]"):
        data("show", tmp_path / "calls.jsonl", "messages_key=messages", "--masks")
