"""If these fail, verl's profiler keys record other steps, ranks or events than in verl, or are silently left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet import hardware
from quintet.config.checks.profiles import profile_problems
from quintet.config.dialects.loader import ConversionResult
from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig

PPO = {"actor_rollout_ref": {"model": {"path": "some/model"}}}
SFT: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"train_files": "a.parquet"}}
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout"))
STEP_END, STEP_END_OF_ROLLOUT = (f"{role}.tool_config.torch.step_end" for role in (ACTOR, ROLLOUT))
"""The option of the rollout follows that of the actor."""
STEPS, TOOL = "global_profiler.steps", "global_profiler.tool"
GLOBAL = {STEPS: [2, 5], TOOL: "torch"}
ON = {**GLOBAL, f"{ACTOR}.enable": True}
OF_SFT = {"trainer.profile_interval": [3, 5], "profiler.enable": True}
SHAPES = {"torch": {"contents": ["cpu", "shapes"]}}


def profile(tmp_path: Path, changes: dict[str, Any], tree: dict[str, Any] = PPO) -> ProfileConfig | None:
    found = converted(tmp_path, "verl", changed(tree, changes))
    assert not found.unsupported
    return found.composed.experiment.tracking.profile


def waiting(found: ConversionResult) -> list[str]:
    """The settings that this version lacks."""
    assert all("further profilers and options of profiles" in problem.message for problem in found.unsupported)
    return [problem.key for problem in found.unsupported]


ROWS: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    (STEPS, [3], "steps", (3,), ON),
    (TOOL, "torch_memory", "memory_snapshot", True, {key: ON[key] for key in (STEPS, f"{ACTOR}.enable")}),
    ("global_profiler.save_path", "there", "directory", "there", ON),
    *(
        row
        for role in (ACTOR, REF, ROLLOUT)
        for row in (
            (f"{role}.enable", True, "steps", (2, 5), GLOBAL),
            (f"{role}.tool", "torch_memory", "memory_snapshot", True, {**GLOBAL, f"{role}.enable": True}),
            (f"{role}.all_ranks", True, "ranks", None, {**GLOBAL, f"{role}.enable": True}),
            (f"{role}.ranks", [1, 0], "ranks", (0, 1), {**GLOBAL, f"{role}.enable": True}),
            (f"{role}.save_path", "there", "directory", "there", {**GLOBAL, f"{role}.enable": True}),
            (f"{role}.tool_config", SHAPES, "torch.record_shapes", True, {**GLOBAL, f"{role}.enable": True}),
        )
    ),
]
SFT_ROWS: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    ("trainer.profile_interval", [3, 5], "steps", (3, 4, 5), {"profiler.enable": True}),
    ("profiler.enable", True, "steps", (3, 4, 5), {"trainer.profile_interval": [3, 5]}),
    ("profiler.tool", "torch_memory", "memory_snapshot", True, OF_SFT),
    ("profiler.all_ranks", True, "ranks", None, OF_SFT),
    ("profiler.ranks", [1], "ranks", (1,), OF_SFT),
    ("profiler.save_path", "there", "directory", "there", OF_SFT),
    ("profiler.tool_config", SHAPES, "torch.activities", ("cpu",), OF_SFT),
]


@pytest.mark.proves("verl", *(row[0] for row in (*ROWS, *SFT_ROWS)))
@pytest.mark.parametrize(
    ("tree", "row"),
    [pytest.param(tree, row, id=row[0]) for tree, rows in ((PPO, ROWS), (SFT, SFT_ROWS)) for row in rows],
)
def test_a_profiler_key_reaches_the_run(tmp_path: Path, tree: dict[str, Any], row: Any) -> None:
    key, value, native, expected, others = row
    found = converted(tmp_path, "verl", changed(tree, {**others, key: value}))
    without = converted(tmp_path, "verl", changed(tree, others))
    assert not found.unsupported
    assert natively(found, f"tracking.profile.{native}") == expected
    assert without.composed.experiment.tracking.profile != found.composed.experiment.tracking.profile


def test_the_ranks_and_contents_of_all_enabled_roles_are_recorded(tmp_path: Path) -> None:
    ref = {f"{REF}.enable": True, f"{REF}.ranks": [3], f"{REF}.tool_config.torch.contents": ["cpu", "stack"]}
    found = profile(tmp_path, {**ON, f"{ACTOR}.tool_config.torch.contents": ["memory"], **ref})
    torch = TorchProfilerConfig(activities=("cpu",), profile_memory=True, with_stack=True)
    assert found == ProfileConfig(steps=(2, 5), ranks=(0, 3), torch=torch)
    assert profile(tmp_path, ON) == ProfileConfig(steps=(2, 5), ranks=(0,), torch=TorchProfilerConfig())
    kernels = profile(tmp_path, {**ON, f"{ACTOR}.tool_config.torch.contents": ["cuda"]})
    assert kernels is not None
    assert kernels.torch == TorchProfilerConfig()


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({STEPS: [2]}, "no `profiler.enable` is true"),
        ({STEPS: [2], f"{ACTOR}.enable": True}, "no tool records profiles"),
        ({f"{ACTOR}.enable": True, TOOL: "torch"}, f"{STEPS} is null"),
    ],
)
def test_keys_that_record_nothing_in_verl_record_nothing_and_say_why(
    tmp_path: Path, changes: dict[str, Any], remark: str
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, changes))
    assert found.composed.experiment.tracking.profile is None
    assert any(remark in line for line in found.composed.remarks)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TOOL, "nsys"),
        (f"{ACTOR}.tool", "npu"),
        (f"{REF}.finish_hook_cmd", "upload"),
        ("global_profiler.finish_hook_cmd", "upload"),
        ("global_profiler.profile_continuous_steps", True),
        (f"{ACTOR}.discrete", True),
        (f"{ACTOR}.tool_config.torch.discrete", True),
        (f"{ACTOR}.tool_config.torch.schedule.active", 2),
        (f"{ACTOR}.tool_config.torch.profile_token_start", 0),
        (STEP_END, 2),
        (f"{ACTOR}.tool_config.torch.contentz", ["cpu"]),
        (f"{REF}.save_path", "elsewhere"),
        ("trainer.profile_steps", [1]),
    ],
)
def test_other_profilers_and_options_wait_and_count_only_in_a_profile(tmp_path: Path, key: str, value: Any) -> None:
    beside = {**ON, f"{REF}.enable": True, f"{ACTOR}.save_path": "there"}
    following = [STEP_END_OF_ROLLOUT] if key == STEP_END else []
    assert waiting(converted(tmp_path, "verl", changed(PPO, {**beside, key: value}))) == [key, *following]
    alone = waiting(converted(tmp_path, "verl", changed(PPO, {key: value})))
    assert alone == ([key] if key == "trainer.profile_steps" else [])


def test_an_engine_is_recorded_with_its_rank_as_a_remark_says(tmp_path: Path) -> None:
    """verl records engines only in files of their own; its example of a profile asks for it."""
    discrete = f"{ROLLOUT}.tool_config.torch.discrete"
    found = converted(tmp_path, "verl", changed(PPO, {**ON, f"{ROLLOUT}.enable": True, discrete: True}))
    assert found.composed.experiment.tracking.profile == ProfileConfig(steps=(2, 5), torch=TorchProfilerConfig())
    assert not found.unsupported
    assert any(line.startswith(discrete) and "of its rank" in line for line in found.composed.remarks)


def test_a_snapshot_without_a_gpu_is_refused_by_verl_s_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**ON, TOOL: "torch_memory"}))
    (problem,) = profile_problems(found.composed)
    assert f"({TOOL}: given.yaml:1): a snapshot of GPU memory needs a CUDA GPU" in problem.message
    monkeypatch.setattr(hardware, "sees_gpu", lambda: True)
    assert not [*profile_problems(found.composed)]


def test_options_with_the_values_of_verl_s_own_file_do_not_wait(tmp_path: Path) -> None:
    schedule = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 0, "repeat": 0}
    torch = {"contents": [], "discrete": False, "profile_token_start": None, "schedule": schedule, "name": "torch"}
    memory = {"trace_alloc_max_entries": 100_000, "stack_depth": 32}
    sections = {"torch": torch, "torch_memory": memory, "nsys": {"discrete": True}}
    for tool in ("torch", "torch_memory"):
        assert profile(tmp_path, {**ON, TOOL: tool, f"{ACTOR}.tool_config": sections}) is not None
    fewer = {**ON, TOOL: "torch_memory", "global_profiler.global_tool_config.torch_memory.stack_depth": 4}
    assert waiting(converted(tmp_path, "verl", changed(PPO, fewer))) == [list(fewer)[-1]]


@pytest.mark.parametrize("tree", [PPO, SFT], ids=["ppo", "sft"])
@pytest.mark.parametrize("tool", ["torch", "torch_memory"])
def test_a_profile_survives_a_translation(tmp_path: Path, tree: dict[str, Any], tool: str) -> None:
    changes = {**OF_SFT, "profiler.tool": tool} if tree is SFT else {**ON, TOOL: tool}
    role = "profiler" if tree is SFT else ACTOR
    changes |= {f"{role}.ranks": [0, 1], f"{role}.save_path": "there"}
    found = converted(tmp_path, "verl", changed(tree, changes))
    assert found.composed.experiment.tracking.profile is not None
    assert not [key for key in translated(found, "verl").lost if key.startswith("tracking.profile")]
