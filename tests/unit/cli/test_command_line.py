"""If these fail, a command ends in a traceback, in the wrong exit status, or reads its words wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quintet import __version__, hardware
from quintet.cli import main as command
from quintet.cli.choices import check_choices
from quintet.cli.options import split
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError, InterruptedRun, MachineError


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quintet", *arguments])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


def test_a_key_that_is_given_twice_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert split("name=a", ["seed=1", "name=b", "seed=1"]) == (None, ["name=a", "seed=1", "name=b", "seed=1"])
    assert capsys.readouterr().err == "warning: name is given 2 times: name=b counts, not a\n"
    split("a.yaml", ["name=b", "seed=1"])
    assert capsys.readouterr().err == ""


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"quintet {__version__}\n"
    assert call(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    for name in ("train", "plan", "explain", "list"):
        assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("arguments", "config", "overrides"),
    [
        ([], None, []),
        (["a.yaml"], "a.yaml", []),
        (["a.yaml", "seed=1", "name=x=y"], "a.yaml", ["seed=1", "name=x=y"]),
        (["seed=1", "name=x"], None, ["seed=1", "name=x"]),
    ],
)
def test_the_first_word_is_a_file_unless_it_sets_a_key(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], config: str | None, overrides: list[str]
) -> None:
    from quintet.cli import train

    seen: list[object] = []
    monkeypatch.setattr(train, "run", lambda path, rest, dialect, unknown: seen.append((path, rest)) or 0)
    assert call(monkeypatch, "train", *arguments) == 0
    assert seen == [(config, overrides)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MachineError("disk full", "free some"), 2),
        (InterruptedRun("stopped"), 130),
        (InterruptedRun("stopped", number=15), 143),
    ],
)
def test_a_users_fault_is_one_block_and_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    from quintet.cli import train

    def fail(path: str | None, rest: list[str], dialect: str | None, unknown: str) -> int:
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert call(monkeypatch, "train") == status
    assert capsys.readouterr() == ("", f"quintet: {error}\n")


def test_a_keyboard_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quintet.cli import plan

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupt)
    assert call(monkeypatch, "plan") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What isn't the user's fault must be seen by those who can mend it."""
    from quintet.cli import plan

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(plan, "run", fail)
    monkeypatch.setattr(sys, "argv", ["quintet", "plan"])
    with pytest.raises(AssertionError, match="a defect"):
        command.main()


def test_a_reader_that_goes_away_is_no_fault() -> None:
    """`quintet explain env | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "quintet", "explain", "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_explain_tells_type_range_and_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "warm_start.optimizer.learning_rate") == 0
    shown = capsys.readouterr().out
    assert "type     a number > 0\n" in shown
    assert "default  0.002\n" in shown
    assert call(monkeypatch, "explain", "env.max_steps") == 0
    assert capsys.readouterr().out.count("env.max_steps") == 1
    assert call(monkeypatch, "explain", "checkpoint") == 0
    assert "    checkpoint.every_steps\n    checkpoint.keep\n" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "algorithm.advantage") == 0
    assert capsys.readouterr().out.count("algorithm.advantage.name\n") == 1
    assert call(monkeypatch, "explain", "rollout.state_reward.judge.url") == 0
    shown = capsys.readouterr().out
    assert "  required\n" in shown
    assert "default" not in shown
    assert call(monkeypatch, "explain", "env.path") == 0
    assert "    custom: required, text, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("batch size", "training.groups_per_step"),
        ("batch_size", "training.groups_per_step"),
        ("lr", "actor.optimizer.learning_rate"),
        ("kl", "algorithm.kl.coefficient"),
        ("max tokens", "rollout.max_response_tokens"),
        ("temperature", "rollout.temperature"),
        ("lora rank", "policy.lora.rank"),
    ],
)
def test_explain_leads_from_common_words_to_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, key: str
) -> None:
    assert call(monkeypatch, "explain", words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert key in [line.split()[0] for line in lines[1:6]]
    assert max(map(len, lines)) < 140


def test_explain_prints_one_block_for_a_key_of_several_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "algorithm.advantage.name") == 0
    output = capsys.readouterr().out
    assert output.count("algorithm.advantage.name") == 1
    assert "default  'grpo'" in output
    assert "type     one of grpo, brpo" in output
    assert call(monkeypatch, "explain", "algorithm.advantage.gamma") == 0
    output = capsys.readouterr().out
    assert output.count("type ") == 1
    assert "    bi_level_gae: default 1.0, Discount factor per token inside a turn." in output


def test_explain_names_the_nearest_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "explain", "rolout.window_size") == 2
    assert "did you mean rollout.window_size?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", "train"])
def test_everything_that_is_named_is_looked_up_before_anything_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logger's name that is mistyped must not be found after the warm start."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "train.jsonl").write_text("{}")
    overrides = [
        "env={name: prompts}",
        f"data.train_files={tmp_path}/trian.jsonl",
        "algorithm.advantage={name: gae}",
        "critic.path=/nowhere/critic",
        "rollout.engine=vlm",
        "tracking.loggers=[jsonl, tensorbord]",
        "policy.preset=null",
        f"policy.path={tmp_path}/policis",
        "resume=/nowhere/global_step_3",
        f"output_dir={tmp_path}/runs",
    ]
    assert call(monkeypatch, name, *overrides) == 2
    message = capsys.readouterr().err
    for part in (
        "rollout.engine = 'vlm' (command line)",
        "known: hf",
        "tracking.loggers = 'tensorbord' (command line)",
        "did you mean 'tensorboard'?",
        f"did you mean {tmp_path}/policies?",
        # a plan may be made where the data aren't
        *([f"did you mean {tmp_path}/train.jsonl?"] if name == "train" else []),
        "critic.path = '/nowhere/critic' (command line): no such directory",
        "resume = '/nowhere/global_step_3' (command line): no such directory",
    ):
        assert part in message, message
    assert not (tmp_path / "runs").exists()


def test_list_shows_what_can_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "list") == 0
    shown = capsys.readouterr().out
    for name in ("frozenlake", "sokoban", "bi_level_gae", "hf", "jsonl", "grid-1m"):
        assert f"\n  {name} " in shown


def test_explain_tells_the_dialects_keys_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "rollout_manager.window_size", "--dialect", "vagen") == 0
    output = capsys.readouterr().out
    assert "(vagen, vagen)" in output
    assert "rollout.window_size" in output
    assert call(monkeypatch, "explain", "rollout_manager.window_size", "--dialect", "verl") == 2
    assert call(monkeypatch, "explain", "x", "--dialect", "regen") == 2
    assert "did you mean ragen?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "status", "shown"),
    [
        (["trainer.balance_batch", "--dialect", "verl"], 0, "(verl, verl_run)"),
        (["trainer.balance_batch", "--dialect", "verl"], 0, "releases since 0.3.0"),
        (["actor_rollout_ref.rollout.mode", "--dialect", "ragen"], 0, "(verl, verl_rollout)"),
        (["critic.optim.weight_decay"], 0, "has the documentation of actor_rollout_ref.actor.optim.weight_decay"),
        (["critic.engine", "--dialect", "verl"], 2, "is a key of verl without documentation here"),
        (["trainer.balance_bach", "--dialect", "verl"], 2, "did you mean trainer.balance_batch?"),
    ],
)
def test_explain_knows_the_keys_of_releases_that_the_reference_documents_omit(
    overrides: list[str], status: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", *overrides) == status
    assert shown in "".join(capsys.readouterr())


def test_the_whole_ledger_is_one_object_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "--list", "--json") == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    documents = {
        *("ragen", "vagen", "vagen_env_config", "rlinf_basic", "rlinf_math", "rlinf_embodied", "rlinf_env", "roll"),
        *("verl_ppo_trainer", "verl_megatron_optim", "verl_sft_trainer", "verl_evaluation"),
    }
    assert sum(one["file"] in documents for one in objects) == 643
    assert {one["file"] for one in objects} > documents | {"ragen_agent", "verl_run", "roll_rlvr", "rlinf_newer"}
    assert {"dialect", "file", "key", "default", "native", "state", "effect", "releases"} <= set(objects[0])
    assert all(one["state"] in ("honoured", "pending") for one in objects)


def test_the_schema_knows_every_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"policy", "env", "rollout", "algorithm", "training"}
    assert schema["additionalProperties"] is False


def test_explain_tells_a_files_own_value_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "verl.yaml").write_text("data:\n  max_prompt_length: 99\nactor_rollout_ref: {}\n")
    (tmp_path / "own.yaml").write_text("seed: 7\n")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "explain", "verl.yaml", "actor_rollout_ref.rollout.prompt_length") == 0
    assert "prompt_length = 99  (follows from data.max_prompt_length: verl.yaml:2)" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "verl.yaml", "data.max_prompt_length") == 0
    assert "data.max_prompt_length = 99  (verl.yaml:2)" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "own.yaml", "seed") == 0
    assert "seed = 7  (own.yaml:1)" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "own.yaml", "sed") == 2
    assert "did you mean seed?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["trainer.test_freq", "--dialect", "verl"], 0, "-1 in ppo_trainer of verl 0.9.0"),
        (["verl.yaml", "trainer.test_freq"], 0, "trainer.test_freq = -1  (default of verl 0.9.0)"),
        (["verl.yaml", "trainer.test_freq", "--release", "0.1"], 0, "trainer.test_freq = 2  (default of verl 0.1)"),
        (["trainer.test_freq", "--release", "0.1"], 2, "quintet explain CONFIG KEY --release"),
    ],
)
def test_explain_shows_the_default_of_the_reference_in_place_of_that_of_the_release(
    words: list[str],
    status: int,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {model: {path: policy}}\n")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "explain", *words) == status
    assert shown in "".join(capsys.readouterr())


def test_modules_from_outside_are_imported_before_names_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user's own module registers can be chosen; a module that isn't there is told with its key."""
    imports = "from quintet.tracking.logger import LOGGERS\nfrom quintet.tracking.loggers import *\n"
    module = f"{imports}LOGGERS.add('mine', ConsoleLogger, help='mine')\n"
    (tmp_path / "my_loggers.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    composed = load_experiment(None, ["external_libs=[my_loggers]", "tracking.loggers=[mine]"])
    check_choices(composed)
    with pytest.raises(ConfigError, match=r"external_libs = 'my_logger' \(command line\) cannot be imported"):
        check_choices(load_experiment(None, ["external_libs=[my_logger]"]))


@pytest.mark.parametrize(
    ("word", "package"),
    [
        ("actor.backend=megatron", "megatron.core"),
        ("critic.backend=megatron", "megatron.core"),
        ("actor.memory.liger=true", "liger-kernel"),
    ],
)
def test_a_learner_without_its_package_is_refused_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, word: str, package: str
) -> None:
    """Else episodes are solved, or ranks started, for a run that can't be."""
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    with pytest.raises(ConfigError) as error:
        check_choices(load_experiment(None, ["algorithm.advantage.name=gae", word]))
    key, _, _ = word.partition("=")
    assert f"{key} = " in str(error.value)
    assert f"(command line) needs {package}, not installed here" in str(error.value)
    assert "pip install" in str(error.value)


def test_a_learner_that_the_run_has_not_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: name != "liger_kernel")
    check_choices(load_experiment(None, ["critic.memory.liger=true"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=atuo"], "resume = 'atuo' (command line): no such directory\n  did you mean auto?"),
        (["resume={run}"], "not a checkpoint\n  did you mean {run}/checkpoints/global_step_10?"),
        (["resume={run}/checkpoints"], "not a checkpoint\n  did you mean {run}/checkpoints/global_step_10?"),
        (["resume={run}/policy"], "not a checkpoint\n  set it to a global_step_N directory, auto or never"),
        (["policy.lora.path=/nowhere"], "policy.lora.path = '/nowhere' (command line): no such directory"),
    ],
)
def test_where_a_run_goes_on_is_looked_at_before_anything_begins(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    """A run's directory in place of its checkpoint isn't a damaged one, and episodes aren't solved before that is said."""  # noqa: E501
    for name in ("checkpoints/global_step_9", "checkpoints/global_step_10", "policy"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        check_choices(load_experiment(None, [word.format(run=tmp_path) for word in overrides]))
    assert message.format(run=tmp_path) in str(error.value)


def test_explain_tells_the_state_of_a_key_in_the_run_at_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    native, verl = tmp_path / "native.yaml", tmp_path / "verl.yaml"
    native.write_text("critic: {warmup_steps: 3}\nseed: 1\n")
    verl.write_text(
        "model_engine: torchtitan\n"
        "data: {train_files: a.parquet, val_files: a.parquet, train_batch_size: 4}\n"
        "actor_rollout_ref:\n"
        "  model: {path: policy}\n"
        "  actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 4}\n"
        "  rollout: {name: hf, log_prob_micro_batch_size_per_gpu: 4, tensor_model_parallel_size: 1}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "critic: {optim: {lr: 1.0e-5}}\n"
        "trainer: {n_gpus_per_node: 1}\n"
    )
    expected = {
        (native, "critic.warmup_steps"): "state    no effect here: the run has no critic",
        (native, "seed"): "state    honoured\n",
        (native, "rollout.max_turns"): "state    not set",
        (verl, "critic.optim.lr"): "state    no effect here: the run has no critic",
        (verl, "model_engine"): "state    honoured by a substitute: FSDP2 takes the place of TorchTitan",
        (verl, "data.train_batch_size"): "state    honoured\n",
    }
    for (path, key), line in expected.items():
        assert call(monkeypatch, "explain", str(path), key) == 0
        assert line in capsys.readouterr().out, key


def test_explain_tells_which_values_of_a_key_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "model_engine") == 0
    line = "honoured with 'dp' or 'megatron' or 'veomni' or 'torchtitan'; other values are not supported yet: requires"
    assert line in capsys.readouterr().out
