"""If these fail, a run's numbers are lost, undocumented or misleading, or its report runs foreign code."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.errors import MachineError
from quintet.records import PROMPTS, FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.atomic_files import TEMPORARY_KEY, translate_os_errors, write_atomic
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import build_loggers, truncate
from quintet.tracking.metric_columns import read_columns
from quintet.tracking.metrics import describe, markdown_table, without_timing
from quintet.tracking.progress import BarProgress, PlainProgress, build_progress, duration
from quintet.tracking.report import ComparisonRow, write_report
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import RunProcess
from quintet.tracking.summaries import summarize_envs, summarize_episodes, summarize_validation
from quintet.tracking.trajectories import read_trajectories, write_trajectories


def turn(text: str = "<answer> Right </answer>", **changes: object) -> Turn:
    fields = {
        "observation": " P G\n _ O\nLeft # Right G",
        "prompt": (1, 2, 3),
        "continues": False,
        "tokens": (4, 5),
        "logprobs": (-0.1, -0.2),
        "weight_version": 1,
        "text": text,
        "actions": ("Right",),
        "valid_format": True,
        "reward": 1.0,
        "finish_reason": FinishReason.STOP,
        "frames": (" _ √\n _ O",),
        **changes,
    }
    return Turn(**fields)


def episode(number: int = 0, *turns: Turn, outcome: Outcome = Outcome.SUCCESS) -> Trajectory:
    return Trajectory("frozenlake", number, number, 0, turns or (turn(),), outcome)


def test_every_metric_is_defined_or_refused(tmp_path: Path) -> None:
    logger = build_loggers(["jsonl"], LoggerContext(tmp_path))
    logger.log(1, 2.0, {"actor/entropy": 0.5, "val/frozenlake/success_rate": 0.25})
    with pytest.raises(ValueError, match="actor/entropi"):
        logger.log(2, 3.0, {"actor/entropi": 0.5})
    logger.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "time_seconds": 2.0, "actor/entropy": 0.5, "val/frozenlake/success_rate": 0.25}
    ]
    assert "nats" in markdown_table()
    assert describe("timing_s/gen").name == "timing_s/{phase}" or describe("timing_s/gen").unit == "s"


def test_truncate_drops_metrics_after_the_resumed_step(tmp_path: Path) -> None:
    logger = build_loggers(["jsonl"], LoggerContext(tmp_path))
    for step in range(5):
        logger.log(step, float(step), {"actor/entropy": float(step)})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "half')
    truncate(tmp_path, 2)
    assert list(read_columns(tmp_path / "metrics.jsonl").steps) == [0, 1, 2]


def test_without_timing_drops_times_and_rates() -> None:
    line = {"step": 1, "time_seconds": 3.0, "timing_s/gen": 1.0, "perf/throughput": 3.0, "actor/entropy": 0.1}
    assert without_timing(line) == {"step": 1, "actor/entropy": 0.1}


def test_not_a_number_is_written_as_null(tmp_path: Path) -> None:
    logger = build_loggers(["jsonl"], LoggerContext(tmp_path))
    logger.log(1, 0.0, {"actor/entropy": float("nan")})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["actor/entropy"] is None


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build_loggers(
        ["tensorboard"], LoggerContext(tmp_path, facts={"policy": {"preset": "grid-1m"}, "prompt": "a | b\nc"})
    )
    for step in (1, 2):
        logger.log(step, 0.0, {"actor/entropy": step / 2})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (configuration,) = events.Tensors("configuration")
    assert b"| policy.preset | grid-1m |" in configuration.tensor_proto.string_val[0]
    assert rb"| prompt | a \| b\nc |" in configuration.tensor_proto.string_val[0], "one line per key"
    assert [(e.step, e.value) for e in events.Scalars("actor/entropy")] == [(1, 0.5), (2, 1.0)]


def plain_lines(every_seconds: float, *, total: int, steps: int) -> list[str]:
    out, times = io.StringIO(), iter(float(i) for i in range(100))
    progress = PlainProgress(Console(file=out, width=200), every_seconds, clock=lambda: next(times))
    with progress.phase("learning", total) as phase:
        for _ in range(steps):
            phase.advance({"critic/score/mean": 0.534, "actor/entropy": 0.1})
    return out.getvalue().splitlines()


def test_plain_progress_prints_short_lines() -> None:
    assert plain_lines(0.0, total=10, steps=3) == [
        "learning 1/10 · reward 0.53 · 2 s/step",
        "learning 2/10 · reward 0.53 · 3 s/step · 24 s left",
        "learning 3/10 · reward 0.53 · 3 s/step · 21 s left",
        "learning 3/3 · 3 s/step",
    ]


def test_a_slow_first_step_does_not_make_the_time_left_long() -> None:
    out, now = io.StringIO(), 0.0
    progress = PlainProgress(Console(file=out, width=200), 0.0, clock=lambda: now)
    with progress.phase("learning", 10) as phase:
        for seconds in (60.0, 61.0, 62.0):
            now = seconds
            phase.advance()
    lines = out.getvalue().splitlines()
    assert lines[0] == "learning 1/10 · 60 s/step"
    assert lines[1:3] == ["learning 2/10 · 1 s/step · 8 s left", "learning 3/10 · 1 s/step · 7 s left"]


def test_ci_logs_have_one_line_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_lines(math.inf, total=3, steps=3) == ["learning 3/3 · reward 0.53 · 2 s/step"]
    monkeypatch.setenv("CI", "true")
    progress = build_progress(Console(file=io.StringIO()))
    assert isinstance(progress, PlainProgress)
    assert progress.every_seconds == math.inf


def test_a_validation_does_not_show_the_success_of_training() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=200), math.inf, clock=lambda: 0.0)
    progress.report(0, {"val/lake/success_rate": 0.25})
    with progress.phase("learning", 2) as learning:
        learning.advance({"trajectory/success_rate": 0.75})
        with progress.phase("validation", 8) as validation:
            validation.advance(count=8)
        learning.advance({"val/lake/success_rate": 0.5})
    assert out.getvalue().splitlines() == ["validation 8/8", "learning 2/2 · success 0.75 · validation 0.50"]


def test_the_validation_of_several_envs_is_shown_once() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=200), math.inf, clock=lambda: 0.0)
    with progress.phase("learning", 1) as phase:
        phase.advance({"val/lake/success_rate": 0.25, "val/all/success_rate": 0.5, "val/boxes/success_rate": 0.75})
    assert out.getvalue().splitlines() == ["learning 1/1 · validation 0.50"]


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (0.001, "playing 869/869"),
        (0.499, "playing 869/869"),
        (0.5, "playing 869/869 · 1,740 episodes/s"),  # 869 / 0.5 = 1738
    ],
)
def test_no_rate_is_shown_before_there_was_time_to_measure_it(seconds: float, line: str) -> None:
    out, times = io.StringIO(), iter([0.0, 0.0, seconds, seconds, seconds])
    progress = PlainProgress(Console(file=out, width=200), math.inf, clock=lambda: next(times))
    with progress.phase("playing", 869, unit="episode") as phase:
        phase.advance(count=869)
    assert out.getvalue().splitlines() == [line]


def test_the_rate_of_fast_steps_is_that_of_the_last_seconds() -> None:
    """10 steps in each of 200 ms, then 4 in each of 2,000 ms: 4,000 steps/s."""
    out, now = io.StringIO(), 0.0
    progress = PlainProgress(Console(file=out, width=200), math.inf, clock=lambda: now)
    with progress.phase("learning", 10_000) as phase:
        for millisecond in range(2200):
            now = (millisecond + 1) / 1000
            phase.advance(count=10 if millisecond < 200 else 4)
    assert out.getvalue().splitlines() == ["learning 10000/10000 · 4,000 steps/s"]


def test_a_phase_that_ends_early_is_shown_as_complete() -> None:
    out = io.StringIO()
    progress = BarProgress(Console(file=out, width=120, force_terminal=True, color_system=None))
    with progress.phase("warm start", 250, unit="update") as phase:
        phase.advance(count=60)
    assert "60/60" in out.getvalue().splitlines()[-2] + out.getvalue().splitlines()[-1]
    assert "left" not in out.getvalue().splitlines()[-1]


def test_durations_are_rounded() -> None:
    assert (duration(41.2), duration(125), duration(3900)) == ("41 s", "2 min", "1 h 5 min")


def test_trajectories_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "validation/step_000001.jsonl"
    write_trajectories(path, 1, "validation", [episode(3), episode(4, outcome=Outcome.MAX_TOKENS)])
    first, second = read_trajectories(path).by_line.values()
    assert ("truncated" in first, second["truncated"]) == (False, True)
    assert (first["seed"], first["outcome"], second["outcome"]) == (3, "success", "max_tokens")
    assert first["turns"][0]["text"] == "<answer> Right </answer>"


def test_trajectory_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    turn = {"text": "a", "observation": "o", "actions": [], "valid_format": False, "reward": 0.0, "frames": []}
    former = {
        "world": "lake",
        "seed": 1,
        "group": 0,
        "sample": 0,
        "outcome": "failed",
        "success": False,
        "reward": 0.0,
        "kind": "frozenlake",
        "parts": {"acc": 1.0},
        "predicted": "7",
        "failure": {"where": "step", "kind": "ValueError", "message": "m"},
        "turns": [turn | {"stop": "length"}],
    }
    path = tmp_path / "former.jsonl"
    path.write_text(json.dumps(former) + "\n")
    renamed = ("world", "kind", "parts", "predicted")
    assert read_trajectories(path).by_line == {
        1: {key: value for key, value in former.items() if key not in renamed}
        | {
            "env": "lake",
            "env_type": "frozenlake",
            "reward_components": {"acc": 1.0},
            "extracted_answer": "7",
            "failure": {"where": "step", "error_type": "ValueError", "message": "m"},
            "turns": [turn | {"finish_reason": "length"}],
        }
    }


def prompt_episode(number: int, *, measured: bool, **components: float) -> Trajectory:
    """Return a complete response to a prompt with the reward 0.8."""
    answered = turn("42", actions=(), valid_format=bool(components.get("format")), reward=0.8, frames=())
    played = Trajectory("sums", number, number, 0, (answered,), Outcome.TERMINATED, reward_components=components)
    return replace(played, env_type=PROMPTS, measures_success=measured)


def test_prompts_without_a_format_or_a_right_answer_have_no_metrics_of_them() -> None:
    scored = [prompt_episode(number, measured=False, acc=0.8) for number in range(2)]
    for metrics in (summarize_episodes(scored), summarize_validation("sums", scored), summarize_envs(scored)):
        assert metrics
        assert not [name for name in metrics if name.endswith(("success_rate", "valid_format"))]
    graded = [prompt_episode(number, measured=True, acc=0.0, format=1.0 - number) for number in range(2)]
    metrics = summarize_episodes(graded)
    assert (metrics["trajectory/success_rate"], metrics["response/valid_format"]) == (0.0, 0.5)
    assert summarize_validation("sums", graded)["val/sums/valid_format"] == 0.5


def test_the_reward_of_a_validation_is_shown_if_success_is_not_measured() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=200), math.inf, clock=lambda: 0.0)
    with progress.phase("learning", 1) as phase:
        phase.advance({"critic/score/mean": 0.5, "val/sums/reward": 0.8})
    with progress.phase("learning", 1) as phase:
        phase.advance({"val/lake/reward": 0.8, "val/lake/success_rate": 0.25})
    lines = ["learning 1/1 · reward 0.50 · validation reward 0.80", "learning 1/1 · validation 0.25"]
    assert out.getvalue().splitlines() == lines


def test_the_report_of_prompts_has_no_words_of_games(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    played = [prompt_episode(number, measured=False, acc=0.8) for number in range(3)]
    path = run.trajectories("validation", 4)
    write_trajectories(path, 4, "validation", played, decode=lambda _: "<|system|>Be <short>.")
    page = write_report(tmp_path, "sums", {}, [], episodes=3).read_text()
    episodes = page.split('<section id="episodes">')[1].split("</section></article>")[0]
    for word in ("lost", "solved", "failures", ">map ", "Action", "Format", "✗"):
        assert word not in episodes, word
    assert "complete · 1 turn · reward 0.8" in episodes
    assert "As the model saw it" in episodes
    assert "&lt;|system|&gt;Be &lt;short&gt;." in episodes


def test_episode_summaries_match_hand_computed_values() -> None:
    episodes = [
        episode(
            0,
            turn(reward=0.0, tokens=(1, 2, 3, 4)),
            turn(prompt=(9,), continues=True, finish_reason=FinishReason.CONTEXT),
        ),
        episode(1, turn(reward=-0.1, valid_format=False, finish_reason=FinishReason.LENGTH), outcome=Outcome.MAX_TURNS),
    ]
    metrics = summarize_episodes(episodes)
    assert metrics["critic/score/mean"] == pytest.approx(0.45)
    assert metrics["num_turns/mean"] == 1.5
    assert metrics["prompt_length/max"] == 3 + 4 + 1
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 3)
    assert metrics["response/valid_format"] == pytest.approx(2 / 3)
    assert metrics["trajectory/outcome/success"] == 0.5
    assert sum(v for k, v in metrics.items() if k.startswith("trajectory/outcome/")) == 1.0
    assert summarize_validation("frozenlake", episodes)["val/frozenlake/success_rate"] == 0.5
    cut = [episode(0), episode(1, turn(finish_reason=FinishReason.LENGTH), turn())]
    assert summarize_validation("frozenlake", cut)["val/frozenlake/truncated"] == 0.5
    for name in (*metrics, *summarize_validation("frozenlake", episodes)):
        describe(name)


def test_episodes_are_summarized_per_env() -> None:
    episodes = [
        replace(episode(number), env="lake" if number < 3 else "boxes", group=number // 2) for number in range(4)
    ]
    episodes[0] = replace(episodes[0], outcome=Outcome.FAILED)
    metrics = summarize_envs(episodes)
    assert (metrics["train/lake/groups"], metrics["train/boxes/groups"]) == (2, 1)
    assert metrics["train/lake/success_rate"] == pytest.approx(2 / 3)
    assert (metrics["train/lake/failed"], metrics["train/boxes/success_rate"]) == (1, 1.0)
    for name in metrics:
        describe(name)


def test_episodes_of_a_renamed_env_are_rendered_by_its_type(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    shown = " P _\n _ G"
    lake = replace(episode(3, replace(turn(), observation=shown)), env="lake")
    for env_type, boards in ((None, 0), ("frozenlake", 1)):
        write_trajectories(run.trajectories("validation", 1), 1, "validation", [replace(lake, env_type=env_type)])
        (stored,) = read_trajectories(run.trajectories("validation", 1)).by_line.values()
        assert stored.get("env_type") == env_type
        page = write_report(tmp_path, "mixed", {}, []).read_text()
        assert page.count('<symbol id="b0"') == boards


def test_the_report_is_self_contained_and_escapes_responses(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    write_trajectories(run.trajectories("validation", 4), 4, "validation", [episode(0, turn(evil)), episode(1)])
    logger = build_loggers(["jsonl"], LoggerContext(tmp_path))
    for step in range(5):
        logger.log(step, float(step), {"val/frozenlake/success_rate": step / 5, "actor/entropy": float("nan")})
    logger.close()
    rows = [ComparisonRow("success", 0.25, 0.75, share=True), ComparisonRow("turns", None, 3.0)]
    page = write_report(tmp_path, "a <b> run", {"env": "frozenlake"}, rows, episodes=2).read_text()
    assert evil not in page
    assert "<img" not in page
    assert "a &lt;b&gt; run" in page
    assert "&lt;script&gt;" in page
    for outside in ("http://", "https://", "@import", "url(http"):
        assert outside not in page.replace("http://www.w3.org", ""), outside


def test_the_report_of_a_run_without_steps_is_a_page(tmp_path: Path) -> None:
    assert "<html" in write_report(tmp_path, "empty", {}, [], episodes=12).read_text()


def test_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "disk full"), (errno.EACCES, "no permission"), (errno.ENOENT, "no such file")]
)
def test_os_errors_become_machine_errors_with_their_cause(code: int, message: str) -> None:
    with pytest.raises(MachineError, match=message), translate_os_errors(Path("/x")):
        raise OSError(code, os.strerror(code))


def test_errors_of_libraries_that_name_the_os_error_in_a_message_are_read() -> None:
    """tokenizers raises an Exception, safetensors an error of its own."""
    full = pytest.raises(MachineError, match="disk full: cannot write /tmp")
    with full as error, translate_os_errors("/tmp", TEMPORARY_KEY):
        raise Exception("No space left on device (os error 28)")
    assert "set TMPDIR to another disk" in str(error.value)
    with pytest.raises(KeyError), translate_os_errors("/tmp"):
        raise KeyError("a defect")


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".report.html.partial").symlink_to(tmp_path / "mine")
    write_atomic(tmp_path / "report.html", b"report")
    assert (tmp_path / "report.html").read_text() == "report"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_system_without_locks_does_not_prevent_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = RunDirectory(tmp_path)
    with directory.lock():
        assert "file system without locks" in caplog.text
    with subprocess.Popen(["sleep", "60"]) as other:
        owner = RunProcess.of(other.pid, "", 1)
        (tmp_path / ".lock").write_text(f"{owner.pid} {owner.start_ticks} {owner.namespace}")
        with pytest.raises(MachineError, match=f"in use by another run .process {other.pid}"), directory.lock():
            pass
        (tmp_path / ".lock").write_text(f"{owner.pid} {(owner.start_ticks or 0) - 1} {owner.namespace}")
        with directory.lock():
            """Another process has got the number of the run that was killed."""
        other.kill()
    with directory.lock():
        pass


def test_a_locked_run_directory_rejects_a_second_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    with run.lock(), pytest.raises(MachineError, match=str(os.getpid())), run.lock():
        pass
    with run.lock():
        pass


def test_a_file_in_place_of_the_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_a_link_to_nothing_in_place_of_the_output_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "missing")
    with pytest.raises(MachineError, match=f"{tmp_path}/runs is a link to {tmp_path}/missing, which does not exist"):
        RunDirectory(tmp_path / "runs" / "run").create()


def test_an_output_directory_that_cannot_be_created_is_reported_by_its_key() -> None:
    """`no such file` says neither what was asked for nor where."""
    composed = load_experiment(None, ["output_dir=/proc/x"])
    with pytest.raises(MachineError) as refused:
        RunDirectory.create_for(composed)
    assert str(refused.value).startswith("output_dir = '/proc/x' (command line): cannot create /proc/x/")
    assert "cannot create" in refused.value.message
    assert refused.value.hint == "set output_dir=DIRECTORY to a writable directory"
