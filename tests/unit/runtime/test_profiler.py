"""If these fail, a profile is of another step or rank than asked for, lacks its files, or outlives its run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import trace
from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig
from quintet.runtime.controller import Controller
from quintet.runtime.profiler import RankProfiler, build_torch_profiler, resident_bytes
from quintet.runtime.worker import Worker
from quintet.training.parallel.process_group import RankGroup


def work(name: str) -> None:
    with trace.span(name):
        torch.ones(8, 8) @ torch.ones(8, 8)


def names(path: Path) -> set[str]:
    """Names of all events of a trace."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return {event["name"] for event in json.loads(text)["traceEvents"] if "name" in event}


def run_steps(config: ProfileConfig, directory: Path, steps: int) -> None:
    """Run steps as `Run.profiled` does."""
    controller = Controller.in_process()
    for step in range(1, steps + 1):
        if config.covers(step) or config.prepares(step):
            with controller.profiled(config, directory, step):
                work(f"work {step}")
        else:
            work(f"work {step}")


def test_the_listed_steps_have_files_with_their_spans_and_memory(tmp_path: Path) -> None:
    run_steps(ProfileConfig(steps=(2, 3)), tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000002_rank_0.json",
        "step_000003_rank_0.json",
    ]
    recorded = names(tmp_path / "step_000003_rank_0.json")
    assert {"work 3", "memory, MiB", "process_name"} <= recorded
    assert not {"work 2", "work 4"} & recorded
    assert not trace.is_recording()


@pytest.mark.parametrize(("warmup", "steps"), [(True, (2,)), (False, (2,)), (True, (1, 2))])
def test_torch_profiler_records_the_step_and_not_its_warm_up(tmp_path: Path, warmup: bool, steps: Any) -> None:
    config = ProfileConfig(steps=steps, torch=TorchProfilerConfig(warmup=warmup, record_shapes=True))
    run_steps(config, tmp_path, 3)
    recorded = names(tmp_path / "step_000002_rank_0.torch.json.gz")
    assert {"aten::mm", "work 2"} <= recorded  # spans are ranges of torch.profiler, too
    assert not {"work 1", "work 3"} & recorded
    assert len(list(tmp_path.iterdir())) == 2 * len(steps)


def test_torch_profiler_records_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
    for name in names:
        profiler = build_torch_profiler(
            TorchProfilerConfig(**{**dict.fromkeys(names, False), name: True}), warmup=False
        )
        assert [option for option in names if getattr(profiler, option)] == [name]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    profiler = build_torch_profiler(TorchProfilerConfig(activities=("cpu",)), warmup=False)
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}


def test_a_snapshot_has_the_allocations_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, PyTorch's functions are replaced by ones that note their calls."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))

    def dump(path: str) -> None:
        calls.append("dump")
        Path(path).write_text("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    config = ProfileConfig(steps=(2,), memory_snapshot=True, trace=False)
    run_steps(config, tmp_path, 3)
    recorded = [{"stacks": "python", "max_entries": 100_000}, "dump", {"enabled": None}]
    assert calls == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002_rank_0.memory.pickle"]
    with pytest.raises(KeyError), Controller.in_process().profiled(config, tmp_path, 2):
        raise KeyError("lost")
    assert calls[-1] == {"enabled": None}  # what records allocations does not outlive the step


def test_only_the_listed_ranks_record(tmp_path: Path) -> None:
    for rank in range(3):
        worker = Worker(RankGroup(rank, 3))
        worker.start_profile(ProfileConfig(ranks=(1,)), tmp_path, 4)
        worker.stop_profile(4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004_rank_1.json"]


def test_a_step_that_fails_ends_the_recording(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Controller.in_process().profiled(ProfileConfig(), tmp_path, 1):
        raise KeyError("lost")
    assert not trace.is_recording()


def test_a_worker_that_is_closed_discards_its_profile(tmp_path: Path) -> None:
    worker = Worker()
    worker.start_profile(ProfileConfig(torch=TorchProfilerConfig()), tmp_path, 1)
    worker.close()
    assert not trace.is_recording()
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    profiler = RankProfiler(ProfileConfig(), tmp_path / "file", 0)
    profiler.start(1)
    profiler.stop(1)
    assert "the profile of step 1 is not written" in caplog.text


def test_only_what_is_recorded_is_listed() -> None:
    config = ProfileConfig(steps=(3, 5), torch=TorchProfilerConfig())
    assert [step for step in range(1, 7) if config.covers(step)] == [3, 5]
    assert [step for step in range(1, 7) if config.prepares(step)] == [2, 4]
    assert not any(ProfileConfig(steps=(3,)).prepares(step) for step in range(1, 4))
    cold = ProfileConfig(steps=(3,), torch=TorchProfilerConfig(warmup=False))
    assert not any(cold.prepares(step) for step in range(1, 4))
    assert ProfileConfig().covers(1)


def test_resident_memory_is_in_bytes() -> None:
    assert 50 << 20 < resident_bytes() < 1 << 36
