"""If these fail, people see another run than the one they will get, or wait for torch to see any."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as command

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
Call = Callable[..., int]
Planned = Callable[..., dict[str, Any]]
Lines = Callable[..., list[str]]
RAGEN = {
    "model": {"base_model": "some/model"},
    "training": {"micro_batch_size": 4},
    "optimization": {"actor_lr": 1e-6},
    "logging": {"mode": ["console"]},
    "sft": {"env_type": "frozenlake"},
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `quintet plan` and return its exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["quintet", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0)

    return run


@pytest.fixture
def planned(call: Call, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Return the plan as JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        assert call(*arguments, "--json") == 0
        output: dict[str, Any] = json.loads(capsys.readouterr().out)
        return output

    return run


@pytest.fixture
def lines(call: Call, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return the lines of the tables."""

    def run(*arguments: str) -> list[str]:
        assert call(*arguments) == 0
        return capsys.readouterr().out.splitlines()

    return run


def cluster(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    overrides = ["policy.preset=null", f"policy.path={tmp_path}", "policy.dtype=bfloat16", "placement.nodes=2"]
    split = ["actor.backend=megatron", "actor.parallel.tensor=2", "actor.parallel.pipeline=2"]
    return [*overrides, *split, "placement.devices_per_node=8", "rollout.engine=vllm"]


def test_the_table_tells_run_arithmetic_placement_and_memory(lines: Lines) -> None:
    shown = lines("training.steps=1000")
    assert shown[0] == "frozenlake  reinforcement learning"
    for row in (
        "  policy     grid-1m, 0.8 million parameters, float32",
        "  episodes per step             512  32 start states × 16 samples each",
        "  sequences per step        ≤ 4,096  one per turn as the window slides",
        "  mini-batches                    8  of 64 episodes each, 4 groups",
        "  optimizer steps           ≤ 8,000  groups without signal need none",
        "  episodes                  512,000",
        "  actor      0            1  one process",
    ):
        assert row in shown, "\n".join(shown)
    assert not any("Warnings" in line or "Not supported" in line for line in shown)


def test_the_table_counts_only_mini_batches_of_kept_groups(lines: Lines) -> None:
    shown = lines("algorithm.filter.keep_share=0.5")
    row = next(number for number, line in enumerate(shown) if "optimizer steps per step" in line)
    assert shown[row].split("  ")[-1] == "4 mini-batches × 1 epoch,"
    assert shown[row + 1].strip() == "of the groups kept by algorithm.filter.keep_share = 0.5"


def test_the_table_is_plain_and_narrow_where_nobody_looks(tmp_path: Path, lines: Lines) -> None:
    """No colours in a file, no blanks at the ends of lines, nothing beyond 100 columns."""
    shown = lines(*cluster(tmp_path), "--device-memory", "200")
    assert max(map(len, shown)) <= 100
    assert all(line == line.rstrip() and line.isprintable() for line in shown)


def test_the_table_shows_nodes_splits_and_bytes(tmp_path: Path, lines: Lines) -> None:
    shown = lines(*cluster(tmp_path), "--device-memory", "200")
    assert "  component  node 0  node 1  copies  parallelism" in shown
    assert "  actor      0-7     8-15         4  megatron, tensor 2 × pipeline 2" in shown
    assert any(line.startswith("  devices 0-15  ") and " of 200.0 GiB  █" in line for line in shown)


def test_many_nodes_fit_into_the_table(tmp_path: Path, lines: Lines) -> None:
    shown = lines(*cluster(tmp_path), "placement.nodes=16")
    assert "  component  16 nodes × 8  copies  parallelism" in shown
    assert max(map(len, shown)) <= 100


ROBOTS = ["env.name=simulator", "env.simulator=arm", "policy.preset=arm-vla", "placement.devices_per_node=4"]
NOT_AS_ASKED = "Only devices without the actor have processes for this; otherwise the actor's do it."


@pytest.mark.parametrize(
    ("overrides", "message", "processes", "is_as_asked"),
    [
        ([], "Robots are simulated on 0-3; their actions are sampled on 0-3.", 4, True),
        (
            ["placement.envs.devices=[0,1]", "placement.rollout.devices=[2,3]", "placement.actor.devices=[0,1,2,3]"],
            "Robots are simulated on 0-3; their actions are sampled on 0-3.",
            4,
            False,
        ),
        (
            ["placement.actor.devices=[0,1]", "placement.envs.devices=[2]", "placement.rollout.devices=[3]"],
            "Robots are simulated on 2; their actions are sampled on 3.",
            1,
            True,
        ),
        (
            ["placement.actor.devices=[0,1]", "placement.rollout.devices=[2,3]", "env.processes=2"],
            "Robots are simulated on 0; their actions are sampled on 2-3.",
            2,
            False,
        ),
    ],
    ids=["everywhere", "devices of the actor", "apart", "policies apart"],
)
def test_the_plan_of_robots_tells_which_devices_really_simulate_and_sample(
    overrides: list[str], message: str, processes: int, is_as_asked: bool, lines: Lines, planned: Planned
) -> None:
    records = lines(*ROBOTS, *overrides)
    assert f"  {message}" in records
    assert (f"  {NOT_AS_ASKED}" not in records) == is_as_asked
    assert planned(*ROBOTS, *overrides)["arithmetic"]["robots"]["processes"] == processes


def test_json_has_what_the_table_has(tmp_path: Path, planned: Planned) -> None:
    actual = planned(*cluster(tmp_path))
    assert actual["run"]["kind"] == "reinforcement learning"
    assert actual["arithmetic"]["optimizer_steps_per_step"] == 8
    learner = actual["arithmetic"]["learners"]["actor"]
    assert (learner["data_parallel_ranks"], learner["episodes_per_rank"]) == (4, 16)
    assert actual["placement"]["components"]["actor"]["devices_by_node"] == {
        "0": list(range(8)),
        "1": list(range(8, 16)),
    }
    own = ((7_615_616_512 - 2 * 152064 * 3584) // 2 + 152064 * 3584) // 2
    assert actual["memory"]["components"]["actor"]["weights"] == 2 * own
    assert actual["start"] == "torchrun --nnodes 2 --nproc-per-node 8 -m quintet train …"
    assert actual["not_yet"] == []


def test_what_waits_is_listed_and_not_refused(tmp_path: Path, lines: Lines) -> None:
    """A plan is for runs of tomorrow, too."""
    shown = lines(*cluster(tmp_path), "rollout.engine=trtllm")
    assert "Not supported yet" in shown
    assert any("rollout.engine = 'trtllm' (command line) is not supported yet: requires" in line for line in shown)


def test_devices_wait_for_nothing_where_torchrun_starts_them(tmp_path: Path, lines: Lines) -> None:
    """Else a plan says that this version can't run what it runs."""
    shown = lines(*cluster(tmp_path))
    assert "  Start: torchrun --nnodes 2 --nproc-per-node 8 -m quintet train …" in shown
    assert not any("is not supported yet" in line for line in shown)


def test_devices_of_fine_tuning_are_those_that_it_names(lines: Lines) -> None:
    """`torchrun --nproc-per-node 2 -m quintet sft` begins nowhere else."""
    shown = lines("sft.devices=2", "sft.episodes={}")
    assert "  Start: torchrun --nproc-per-node 2 -m quintet sft …" in shown


def test_a_foreign_configuration_is_planned_with_what_waits_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Planned
) -> None:
    """Its model is on the hub and not here: that is told, and the rest is planned."""
    (tmp_path / "base.yaml").write_text(json.dumps(RAGEN | {"trainer": {"nnodes": 2}}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    actual = planned(str(tmp_path / "base.yaml"))
    assert actual["arithmetic"]["episodes_per_step"] == 128
    assert actual["start"] == "torchrun --nnodes 2 --nproc-per-node 1 -m quintet train …"
    assert actual["memory"]["unknown"]["policy.path"]["hint"] == "hf download some/model config.json"
    assert actual["memory"]["components"] == {}
    assert actual["not_here"] == []


def test_what_cant_work_is_refused_by_the_foreign_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: Call
) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps(RAGEN | {"system": {"n_gpus": 6}}))
    assert call(str(tmp_path / "base.yaml")) == 2
    message = capsys.readouterr().err
    assert "system.n_gpus" in message
    assert "system.cuda_visible_devices" in message


def test_what_doesnt_fit_is_refused_only_where_a_size_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: Call
) -> None:
    cluster_overrides = cluster(tmp_path)
    assert call(*cluster_overrides) == 0
    assert call(*cluster_overrides, "--device-memory", "24") == 2
    message = capsys.readouterr().err
    assert "device 0 needs" in message
    assert "what helps most: " in message


def test_files_that_are_here_are_counted(tmp_path: Path, planned: Planned, lines: Lines) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "?", "data_source": "addition", "answer": "1"}\n' * 70)
    overrides = ["env.name=prompts", f"data.train_files=[{tmp_path}/x.jsonl]", "data.epochs=2"]
    actual = planned(*overrides)["arithmetic"]
    assert (actual["rows"], actual["steps"], actual["optimizer_steps"], actual["rows_dropped_per_pass"]) == (
        70,
        4,
        32,
        6,
    )
    shown = lines(*overrides)
    results = [" ".join(line.split()) for line in shown]
    assert "steps 4 2 × 70 rows, 32 in each step" in results
    assert "episodes per step 512 32 prompts × 16 samples each" in results
    assert any(line.startswith("  validations") and line.endswith("of 70 responses each") for line in shown)
    there = ["env.name=prompts", "data.train_files=[/nowhere/x.parquet]", "data.epochs=2"]
    elsewhere = planned(*there)["arithmetic"]
    assert (elsewhere["steps"], elsewhere["optimizer_steps"], elsewhere["checkpoints"]) == (None, None, None)
    shown = lines(*there)
    assert any(line.split()[:2] == ["steps", "unknown"] for line in shown)


def test_rows_that_fill_no_step_are_refused_by_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: Call
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "?"}\n' * 7)
    assert call("env.name=prompts", f"data.train_files=[{tmp_path}/x.jsonl]", "data.epochs=2") == 2
    message = capsys.readouterr().err
    assert "training.groups_per_step = 32 (default): the data have 7 rows" in message
    assert "nearest valid value: training.groups_per_step=7" in message


def test_fine_tuning_is_planned_in_rows_passes_and_losses(tmp_path: Path, planned: Planned, lines: Lines) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "?"}\n' * 70)
    overrides = [f"data.train_files=[{tmp_path}/x.jsonl]", "sft.batch=16", "sft.epochs=3", "sft.sequences_per_pass=4"]
    actual = planned(*overrides, "validation.every_steps=0")["arithmetic"]
    assert (actual["steps"], actual["passes_per_step"], actual["rows_dropped_per_pass"]) == (12, 4, 6)
    assert actual["validations"] == 4  # before, and after each of three passes
    shown = lines(*overrides)
    assert any(line.split() == ["steps", "12", "3", "×", "70", "rows,", "16", "in", "each", "step"] for line in shown)
    episodes = lines("sft.episodes={episodes: 50}", "sft.batch=16")
    assert any(line.split()[:3] == ["episodes", "50", "demonstrations,"] for line in episodes)


def test_an_evaluation_is_planned_in_questions_and_ks(tmp_path: Path, planned: Planned, lines: Lines) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "?"}\n' * 70)
    overrides = [f"evaluation.path={tmp_path}/x.jsonl", "evaluation.samples=[1, 4]"]
    assert planned(*overrides)["arithmetic"] == {"rows": 70, "samples": [1, 4], "learners": {}}
    assert any(line.split() == ["prompts", "70", "with", "stored", "responses"] for line in lines(*overrides))


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["sft.batch=8"], "supervised fine-tuning"),
        (["evaluation.path=x.parquet"], "evaluation of stored answers"),
        (["validation.only=true"], "validation only"),
        (["sft.then_reinforce=true"], "supervised fine-tuning, then reinforcement learning"),
    ],
)
def test_other_kinds_of_run_are_planned_as_what_they_are(
    overrides: list[str], kind: str, planned: Planned, lines: Lines
) -> None:
    assert planned(*overrides)["run"]["kind"] == kind
    assert lines("name=mine", *overrides)[0] == f"mine  {kind}"


def test_text_of_a_configuration_cant_move_the_cursor(lines: Lines) -> None:
    """Nor is it read as markup."""
    shown = lines("env.name=prompts", r'data.train_files=["\x1b]0;x\x07[bold]a.jsonl"]')
    assert any("[bold]a.jsonl" in line for line in shown)
    assert all(line.isprintable() for line in shown)


HEAVY = {"torch", "ray", "transformers", "tensorboard"}
"""A plan imports numpy, to measure the rate of this machine."""


@pytest.mark.parametrize(
    ("overrides", "heavy"),
    [
        (["plan"], HEAVY),
        (["plan", "--json"], HEAVY),
        (["--help"], {*HEAVY, "numpy", "pydantic", "yaml", "quintet.config.native"}),
    ],
)
def test_plan_and_help_load_nothing_that_makes_them_slow(overrides: list[str], heavy: set[str]) -> None:
    code = (
        "import sys\n"
        "from quintet.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    print(end.code or 0, *sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *overrides], capture_output=True, text=True, check=True, timeout=60
    )
    status, *modules = done.stderr.split()
    assert (status, heavy & set(modules)) == ("0", set())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "jamba"}, "state-space layers (jamba) are not supported yet"),
        ({"layer_types": ["full_attention", "recurrent"]}, "recurrent layers (qwen2) are not supported yet"),
        ({"index_topk": 64}, "sparse attention by an index (qwen2) are not supported yet"),
    ],
)
@pytest.mark.parametrize("command_name", ["plan", "train"])
def test_models_that_are_not_supported_are_named_before_they_are_loaded(
    settings: dict[str, Any],
    reason: str,
    command_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **settings}))
    monkeypatch.setattr(sys, "argv", ["quintet", command_name, f"policy.path={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        command.main()
    printed = capsys.readouterr()
    assert reason in " ".join((printed.out + printed.err).split())
    assert end.value.code == (2 if command_name == "train" else 0)


def test_the_state_of_each_key_that_is_set_is_counted_and_listed(
    call: Call, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "lake.yaml"
    path.write_text("seed: 3\ncritic: {warmup_steps: 0}\nrollout: {engine: trtllm}\n")
    assert call(str(path)) == 0
    counted = "1 honoured, 1 no effect here, 1 waits for a capability; `quintet plan --keys` lists them"
    assert counted in capsys.readouterr().out
    assert call(str(path), "--keys") == 0
    listed = capsys.readouterr().out
    assert listed.startswith("3 keys are set")
    assert f"critic.warmup_steps = 0 ({path}:2)\n      the run has no critic\n" in listed
    assert call(str(path), "--keys", "--json") == 0
    states = {each["key"]: each for each in json.loads(capsys.readouterr().out)}
    assert states["rollout.engine"]["state"] == "waits for a capability"
    assert states["seed"] == {
        "key": "seed",
        "value": 3,
        "source": f"{path}:1",
        "native": ["seed"],
        "state": "honoured",
        "reason": "",
    }


def test_the_keys_of_a_frameworks_file_are_counted_in_json(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "ragen.yaml"
    path.write_text(json.dumps(RAGEN))
    assert planned(str(path))["keys"] == {"honoured": 5}
