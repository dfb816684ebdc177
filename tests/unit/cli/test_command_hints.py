"""If these fail, a hint of a command leads nowhere: somebody follows it and gets the same error again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hint_cases import HintCase, case, name_of, sites_without_case
from saved_checkpoints import save_checkpoint

from quintet import hardware
from quintet.cli import choices, evaluate, generate, ray_launch
from quintet.cli.choices import check_choices
from quintet.cli.configuration import inspect_config
from quintet.cli.main import app
from quintet.cli.options import EvalOptions, GenerateOptions
from quintet.cli.sft import check_sft
from quintet.config.compose import load_experiment
from quintet.config.problems import raise_problems
from quintet.config.torchrun import RankInfo
from quintet.runtime.ray_cluster import launcher


def command(words: str) -> None:
    """Run a command line."""
    app(words.split(), standalone_mode=False)


def checked(overrides: list[str]) -> None:
    """What every run checks before it starts."""
    check_choices(load_experiment(None, overrides))


def planned(overrides: list[str]) -> None:
    raise_problems(choices.unknown_choices(load_experiment(None, overrides)))


def fine_tuned(overrides: list[str]) -> None:
    check_sft(load_experiment(None, overrides))


def with_library(directory: str) -> None:
    """`external_libs` with a directory in PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        checked(["external_libs=[my_rewards]"])
    sys.modules.pop("my_rewards", None)


def without_liger(overrides: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "is_installed", lambda name: name != "liger_kernel")
        checked(overrides)


def evaluated(options: tuple[str | None, EvalOptions]) -> None:
    """The options of an evaluation of a model, or of a configuration."""
    target, asked = options
    evaluate._endpoint_settings(asked)
    if asked.data is None and asked.env is None:
        evaluate._check_config_options(target, asked)
    else:
        evaluate._check_model_options(target, None, asked, from_files=asked.data is not None)


def translated(dialect: str | None) -> None:
    evaluate._check_model_options("model", dialect, EvalOptions(data="rows.jsonl"), from_files=True)


def generated(target_and_options: tuple[str | None, GenerateOptions]) -> None:
    """The options of `quintet generate`."""
    target, options = target_and_options
    generate.as_config(target, [], None, options)


def generated_in(dialect: str | None) -> None:
    generate.as_config("model", [], dialect, GenerateOptions("rows.jsonl", "x.jsonl"))


def to_generate(words: list[str]) -> None:
    generate.prepared(load_experiment(None, ["env.name=prompts", "policy.path=model", *words]))


def limited(overrides: list[str]) -> None:
    evaluate._check_limits(overrides, EvalOptions(endpoint="http://127.0.0.1:1/v1", endpoint_model="x"))


def asked_at_an_endpoint(target: str | None) -> None:
    """Ask an endpoint about a model on disk, or about a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_evaluate_endpoint", lambda *_: None)
        options = EvalOptions(endpoint="http://127.0.0.1:1/v1", endpoint_model="x", env="frozenlake")
        evaluate._evaluate_model(target, [], options, None)  # type: ignore[arg-type]


def launched(processes: int) -> None:
    """`--ray` in one of several processes of torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_launch, "current_rank", lambda: RankInfo(0, processes, 0, processes))
        patch.setattr(launcher, "run_on_ray", lambda *_: 0)
        ray_launch.run("train", "local", None, [], None, "refuse", 0)


FIT = "plan --fit"
MAKE = "data make addition out --train 3 --validation 1"
SOLVE = "data make solved solved size=2"
SHOW = "data show rows.jsonl"
MODEL, RUN = "model", "run"
ENDPOINT = "http://127.0.0.1:1/v1"
PROMPTS = ["env.name=prompts", "data.train_files=rows.jsonl"]
MINE = [*PROMPTS, "reward.function=mine.py:score"]
CASES = [
    # names, files and directories of a configuration
    case(checked, ["checkpoint.remote_dir=/proc/no"], "rerun the same command when it can be read and written, or", []),
    case(
        checked,
        ["checkpoint.remote_dir=no://x"],
        "use a URL that fsspec supports",
        ["checkpoint.remote_dir=memory://x"],
    ),
    case(with_library, "elsewhere", "install it, or add its directory to PYTHONPATH", "libraries"),
    case(
        planned, ["tracking.loggers=[tensorbord]"], "did you mean 'tensorboard'? ", ["tracking.loggers=[tensorboard]"]
    ),
    case(
        checked,
        ["data.train_files=rows.json", "env.name=prompts"],
        "did you mean",
        ["data.train_files=rows.jsonl", "env.name=prompts"],
    ),
    case(
        without_liger,
        ["actor.memory.liger=true"],
        "pip install liger-kernel, or actor.memory.liger=false",
        ["actor.memory.liger=false"],
    ),
    case(
        planned,
        ["resume=run"],
        "did you mean run/checkpoints/global_step_10?",
        ["resume=run/checkpoints/global_step_10"],
    ),
    case(
        planned,
        ["resume=model"],
        "set it to a global_step_N directory, auto or never",
        ["resume=run/checkpoints/global_step_9"],
        ["resume=auto"],
    ),
    case(planned, ["resume=nver"], "did you mean never?", ["resume=never"]),
    case(planned, ["policy.path=modell"], "did you mean model?", ["policy.path=model"]),
    case(planned, ["policy.path=zzzzzzz"], "set it to a Hugging Face directory, a .gguf ", ["policy.path=model"]),
    case(planned, [*PROMPTS, "reward.function=mine.py:scor"], "did you mean mine.py:score?", MINE),
    case(planned, [*PROMPTS, "reward.function=mine.py:zzzz"], "define it in mine.py, or name one of those", MINE),
    # generation
    case(
        generated,
        ("model", GenerateOptions(output="x.jsonl")),
        "quintet generate MODEL --data FILE --output FILE",
        ("model", GenerateOptions("rows.jsonl", "x.jsonl")),
    ),
    case(
        generated,
        (None, GenerateOptions("rows.jsonl", "x.jsonl")),
        "quintet generate MODEL --data FILE -o FILE",
        ("model", GenerateOptions("rows.jsonl", "x.jsonl")),
    ),
    case(generated_in, "verl", "remove --dialect", None),
    case(
        to_generate,
        [],
        "generation.output_path=FILE.parquet; or quintet generate MODEL",
        ["generation.output_path=FILE.parquet"],
    ),
    # options of all commands
    case(command, "plan env_config.yaml", "give the run script or the list of overrides beside it", "plan lake.txt"),
    case(command, "plan --dialect verl", "name the file: CONFIG --dialect verl", "plan verl.yaml --dialect verl"),
    case(command, "plan --dialect verll", "did you mean verl? valid: native, ", "plan verl.yaml --dialect verl"),
    case(
        command,
        "plan --unknown-keys warm",
        "did you mean warn? valid: refuse, ignore-fork, warn",
        "plan --unknown-keys warn",
    ),
    case(launched, 2, "omit torchrun", 1),
    # proposals
    case(command, "plan --device h100", "add --fit", f"{FIT} --device h100"),
    case(command, f"{FIT} --device h100 --write 1", "--write 1 -o FILE", f"{FIT} --device h100 --write 1 -o fit.yaml"),
    case(command, f"{FIT} --device h100 --write 99 -o a.yaml", "valid: 1", f"{FIT} --device h100 --write 1 -o a.yaml"),
    case(
        command,
        f"{FIT} --device h100 --devices 3 --nodes 2",
        "--devices is the number of devices of all nodes: --devices 4",
        f"{FIT} --device h100 --devices 4 --nodes 2",
    ),
    case(command, FIT, "--device h100, or --device-memory 80", f"{FIT} --device h100", f"{FIT} --device-memory 80"),
    # data
    case(command, f"{MAKE} --env sokoban", "remove --env", MAKE),
    case(command, f"{MAKE} digits --overwrite", "for example digits=3", f"{MAKE} digits=3 --overwrite"),
    case(
        command,
        "data check rows.jsonl",
        "--verifier NAME (`quintet list` shows them), or source_key=COLUMN",
        "data check rows.jsonl truth_key=prompt --verifier exact",
    ),
    case(command, f"{SHOW} prompt_key=[a", "quote the value", f"{SHOW} prompt_key='[a'"),
    case(command, SOLVE, "add --env sokoban or --env frozenlake", f"{SOLVE} --env frozenlake --train 1 --validation 1"),
    case(
        command,
        f"{SOLVE} --env frozenlake --style worked",
        "remove --style; think=false omits the thoughts",
        f"{SOLVE} --env frozenlake --train 1 --validation 1 think=false --overwrite",
    ),
    case(
        command,
        f"{SOLVE} --env frozenlake --train 0",
        "set --train and --validation to at least 1",
        f"{SOLVE} --env frozenlake --train 1 --validation 1 --overwrite",
    ),
    case(
        command,
        f"{SOLVE} --env frozenlake think=no!",
        "valid: true or false",
        f"{SOLVE} --env frozenlake --train 1 --validation 1 think=true --overwrite",
    ),
    # evaluation
    case(
        evaluated,
        (None, EvalOptions(endpoint_retries=3)),
        "add --endpoint http://…/v1",
        (None, EvalOptions(endpoint_retries=3, endpoint=ENDPOINT, endpoint_model="x")),
    ),
    case(
        evaluated,
        (None, EvalOptions(endpoint=ENDPOINT)),
        "add --endpoint-model NAME",
        (None, EvalOptions(endpoint=ENDPOINT, endpoint_model="x")),
    ),
    case(
        evaluated,
        (MODEL, EvalOptions()),
        "quintet eval MODEL --data FILE, or --env frozenlake",
        (MODEL, EvalOptions(data="rows.jsonl")),
        (MODEL, EvalOptions(env="frozenlake")),
    ),
    case(
        evaluated,
        ("native.yaml", EvalOptions(samples=3)),
        "quintet eval MODEL --data FILE, or --env frozenlake",
        (MODEL, EvalOptions(data="rows.jsonl", samples=3)),
        (MODEL, EvalOptions(env="frozenlake", samples=3)),
    ),
    case(
        evaluated,
        (None, EvalOptions(env="frozenlake")),
        "quintet eval MODEL --data FILE, or --env frozenlake",
        (MODEL, EvalOptions(data="rows.jsonl")),
        (MODEL, EvalOptions(env="frozenlake")),
    ),
    case(
        evaluated,
        (MODEL, EvalOptions(data="x", env="y")),
        "remove one of them",
        (MODEL, EvalOptions(data="x")),
        (MODEL, EvalOptions(env="y")),
    ),
    case(evaluated, (MODEL, EvalOptions(data="x", episodes=3)), "use --limit", (MODEL, EvalOptions(data="x", limit=3))),
    case(
        evaluated, (MODEL, EvalOptions(env="x", limit=3)), "use --episodes", (MODEL, EvalOptions(env="x", episodes=3))
    ),
    case(
        evaluated,
        (MODEL, EvalOptions(env="x", samples=3, temperature=0.0)),
        "set --temperature 1 or --samples 1",
        (MODEL, EvalOptions(env="x", samples=3, temperature=1.0)),
        (MODEL, EvalOptions(env="x", temperature=0.0)),
    ),
    case(translated, "verl", "remove --dialect", None),
    case(limited, ["rollout.max_prompt_tokens=5"], "remove rollout.max_prompt_tokens; ", []),
    case(asked_at_an_endpoint, MODEL, "remove one of them, or name a run for its settings", None, RUN),
    case(evaluate._valid_name, "a/b", "valid: letters, digits, . _ and -", "a.B_1-"),
    # runs
    case(command, "status lak", "did you mean lake?", "status lake"),
    case(command, "stop zzzz", "`quintet status` lists the runs below runs/", "status", "stop runs/lake"),
    case(command, "stop", "name the run: quintet stop RUN", "stop lake"),
    # keys, models and files
    case(
        command,
        "explain",
        "quintet explain KEY, quintet explain CONFIG KEY, quintet explain METRIC, or quintet explain --list",
        "explain seed",
        "explain native.yaml seed",
        "explain actor/entropy",
        "explain --list",
    ),
    case(
        command,
        "explain native.yaml zzz.qqq",
        "`quintet explain --list --dialect native` shows every key",
        "explain --list --dialect native",
    ),
    case(
        command,
        "explain native.yaml training.stesp",
        "did you mean training.steps",
        "explain native.yaml training.steps",
    ),
    case(command, "explain zzz.qqq", "`quintet explain env` shows a section", "explain env"),
    case(command, "explain actor/entropi", "did you mean actor/entropy?", "explain actor/entropy"),
    case(
        command,
        "explain zzz/qqq",
        "`quintet explain --list --metrics` shows every metric",
        "explain --list --metrics",
    ),
    case(command, "explain trainng.steps", "did you mean training.steps", "explain training.steps"),
    case(
        command,
        "export run exported --dtype float8",
        "valid: float32, bfloat16, float16",
        "export model exported --dtype float16",
    ),
    case(fine_tuned, [], "add `sft: {}` at least; ", ["sft={}", "data.train_files=rows.jsonl"]),
    case(
        fine_tuned,
        ["sft={}"],
        "set data.train_files=[FILE.parquet], or sft.episodes={} for",
        ["sft={}", "data.train_files=[FILE.parquet]"],
        ["sft.episodes={}"],
    ),
    case(
        fine_tuned,
        ["sft={episodes: {}, path: nowhere}"],
        "set it to a Hugging Face directory, a .gguf file of ",
        ["sft={episodes: {}, path: model}"],
    ),
    case(
        fine_tuned,
        ["sft={episodes: {}, lora: {path: nowhere}}"],
        "set it to a directory on this machine",
        ["sft={episodes: {}, lora: {path: model}}"],
    ),
    case(command, "translate verl.yaml --to verl", "choose another target format", "translate verl.yaml --to native"),
    case(
        command,
        "translate native.yaml -o native.yaml",
        "choose another file name, or remove the file",
        "translate native.yaml -o other.yaml",
    ),
    case(
        command,
        "translate native.yaml -o no/x.yaml",
        "choose a file in an existing writable directory",
        "translate native.yaml -o run/x.yaml",
    ),
    case(command, "examples copy native/arn.yaml", "did you mean native/arm.yaml?", "examples copy native/arm.yaml"),
    case(command, "examples copy native/arm.yaml run", "choose another directory", "examples copy native/arm.yaml new"),
    case(command, "explain seed --release 0.4", "quintet explain CONFIG KEY", "explain verl.yaml seed --release 0.4"),
]
EXEMPT = {
    "cli/example_files.py examples_directory": "another installation is the remedy",
    "cli/config_source.py _unused_arguments": "test_scripts_and_translation.py has it",
    "cli/config_source.py read_config_source": "--release without a framework's file: leaves the option out",
    "cli/choices.py missing_model": "another file is the remedy",
    "cli/choices.py template_problems": "test_cached_models.py follows it",
    "cli/view.py _show_in_terminal": "a package has to be installed",
    "cli/explain.py _check_known": "the file is the user's own",
    "cli/config_source.py _detect_dialect": "files that a defaults list names are missing",
    "cli/config_source.py _refuse_other_formats": "another file is the configuration",
    "cli/stop.py _still_running": "the run itself has to end",
    "cli/serve.py _serve": "an engine that died is replaced by a restart",
    "cli/serve_envs.py run": "another installation, or another start, is the remedy",
}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    """A working directory with a model, a run, configurations and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    (tmp_path / "model").symlink_to(policy_directory)
    for step in (9, 10):
        save_checkpoint(tmp_path / "run/checkpoints", step, {}, lambda directory: (directory / "hf").mkdir(), keep=2)
    (tmp_path / "run/config.yaml").write_text("env: {name: frozenlake}")
    (tmp_path / "run/arm.yaml").write_text("")
    (tmp_path / "runs/lake").mkdir(parents=True)
    (tmp_path / "runs/lake/run.json").write_text('{"status": "finished"}')
    (tmp_path / "native.yaml").write_text("seed: 1")
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {n: 2}}")
    (tmp_path / "env_config.yaml").write_text("lake: {env_name: frozenlake, train_size: 1024}")
    (tmp_path / "lake.txt").write_text("rollout_manager.max_turns=3\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ?", "[a": "2 + 2 = ?"}) + "\n")
    (tmp_path / "mine.py").write_text("def score(**arguments): return 1")
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/my_rewards.py").write_text("")


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_the_hint_of_a_command_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_of_a_command_is_followed() -> None:
    assert not sites_without_case("cli", CASES, EXEMPT)


def test_a_store_that_cannot_be_written_is_left_out_by_the_key_of_the_framework(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("{actor_rollout_ref: {}, trainer: {default_hdfs_dir: /proc/no}}")
    (problem,) = choices._stores(inspect_config("verl.yaml", [], "verl", "refuse").composed)
    assert str(problem.hint).endswith(", or leave trainer.default_hdfs_dir out")
