"""If these fail, a model that is given away isn't the one that was trained, or can't be loaded by those who get it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.cli.export import run as export_command
from quintet.config.compose import load_experiment
from quintet.config.native.policy import LoraConfig
from quintet.errors import MachineError
from quintet.pipelines.export import export
from quintet.policies.lora import add_lora, iter_merged_weights, save_adapters
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.runtime.signals import stop_on_signals
from quintet.training.checkpoint.hf_directory import HfDirectory


@pytest.fixture
def run(tmp_path: Path, policy_directory: Path) -> Path:
    """A run of five steps with two checkpoints."""
    root = tmp_path / "runs/lake"
    overrides = ["name=lake", "training.steps=5", f"output_dir={tmp_path}/runs", f"policy.path={policy_directory}"]
    experiment = load_experiment(None, [*overrides, "policy.preset=null"]).experiment
    state = {"experiment": experiment.model_dump(mode="json"), "seconds": 90.0, "contents": ["model"]}

    def write(directory: Path) -> None:
        shutil.copytree(policy_directory, directory / "hf")

    for step in (3, 5):
        save_checkpoint(root / "checkpoints", step, state, write, keep=9)
    lines = [
        {"step": step, "seconds": 1.0, "val/frozenlake/success_rate": step / 10, "actor/lr": 1.0} for step in (0, 3, 5)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def test_a_run_becomes_a_directory_that_transformers_reads(run: Path, tmp_path: Path, policy_directory: Path) -> None:
    actual = export(str(run), tmp_path / "out", "bfloat16")
    assert actual.step == 5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.bfloat16
    assert model.config.dtype is torch.bfloat16
    for name, tensor in load_file(policy_directory / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")
    assert actual.size == 2 * actual.parameters
    assert actual.parameters == sum(tensor.numel() for tensor in load_file(tmp_path / "out/model.safetensors").values())


def test_types_stay_where_none_is_named(run: Path, tmp_path: Path, policy_directory: Path) -> None:
    export(str(run / "checkpoints/global_step_3"), tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (policy_directory, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
    )


def test_the_card_says_where_the_model_comes_from_and_how_well_it_does(
    run: Path, tmp_path: Path, policy_directory: Path
) -> None:
    export(str(run / "checkpoints/global_step_3"), tmp_path / "out", "float16")
    card = (tmp_path / "out/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "# lake, step 3" in body
    assert "| frozenlake/success_rate | 0 (step 0) | 0.3 (step 3) |" in body, "what came after the step isn't its own"
    assert "float16" in body
    usage = body.split("```python\n")[1].split("```")[0]
    assert "path = 'out'" in usage
    assert str(tmp_path) not in card, "paths of this machine mean nothing to others"
    names = subprocess.run(
        [sys.executable, "-c", usage + "print(type(model).__name__)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert names.stdout.strip() == "Qwen2ForCausalLM", names.stderr
    parsed = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (parsed["name"], parsed["training"]) == ("lake", {"steps": 5})
    assert parsed["policy"]["path"] == policy_directory.name


def test_the_card_of_fine_tuning_has_no_settings_of_reinforcement_learning(
    tmp_path: Path, policy_directory: Path
) -> None:
    overrides = [f"sft={{path: {policy_directory}, epochs: 3, batch: 8}}", "data.train_files=[/data/chats.jsonl]"]
    experiment = load_experiment(None, overrides).experiment.model_dump(mode="json")

    def write(directory: Path) -> None:
        shutil.copytree(policy_directory, directory / "hf")

    state = {"experiment": experiment, "seconds": 60.0, "contents": ["model"], "reached": {}}
    root = tmp_path / "runs/tuned/checkpoints"
    save_checkpoint(root, 7, state, write, keep=1)
    export(str(root.parent), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "supervised fine-tuning" in card
    assert ": 7 steps, 1.0 minutes" in card
    assert "| epochs | 3 |" in card
    assert f"| base model | {policy_directory.name} |" in card
    for other in ("advantage", "episodes a step", " of 100 steps", "/data/", str(policy_directory)):
        assert other not in card, other


def test_a_damaged_checkpoint_isnt_given_away(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints/global_step_5"
    (newest / "hf/model.safetensors").write_bytes(b"torn")
    skipped: list[str] = []
    assert export(str(run), tmp_path / "out", warn=skipped.append).step == 3
    damage = "hf/model.safetensors has 4 bytes"
    assert [message.partition(damage)[0] for message in skipped] == ["skipping checkpoint global_step_5: "]
    assert skipped[0].endswith("; using global_step_3")
    with pytest.raises(MachineError, match="damaged"):
        export(str(newest), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("part", ["hf", "actor/huggingface", "lora_adapter"])
def test_a_part_of_a_damaged_checkpoint_isnt_given_away(run: Path, tmp_path: Path, part: str) -> None:
    def write(directory: Path) -> None:
        shutil.copytree(run / "checkpoints/global_step_5/hf", directory / "hf")
        (directory / "actor").mkdir()
        (directory / "actor/huggingface").symlink_to("../hf")
        (directory / "lora_adapter").mkdir()
        (directory / "lora_adapter/adapter_config.json").write_text("{}")

    state = json.loads((run / "checkpoints/global_step_5/state.json").read_text())
    newest = save_checkpoint(run / "checkpoints", 6, state | {"step": 6}, write, keep=9)
    if part == "hf":
        assert export(str(newest / part), tmp_path / "whole").step == 6
    weights = newest / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(MachineError, match="global_step_6 is damaged: hf/model"):
        export(str(newest / part), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_another_programs_steps_are_no_damaged_checkpoints(tmp_path: Path, policy_directory: Path) -> None:
    directory = tmp_path / "global_step_5" / "merged"
    shutil.copytree(policy_directory, directory)
    assert export(str(directory), tmp_path / "out").step is None


def test_weights_that_cant_be_read_are_a_users_fault_and_leave_nothing(policy_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_directory, tmp_path / "torn")
    (tmp_path / "torn/model.safetensors").write_bytes(b"torn")
    with pytest.raises(MachineError, match=r"cannot read the weights at .*torn"):
        export(str(tmp_path / "torn"), tmp_path / "out")
    (tmp_path / "torn/model.safetensors").rename(tmp_path / "torn/pytorch_model.bin")
    with pytest.raises(MachineError, match="no weights in safetensors"):
        export(str(tmp_path / "torn"), tmp_path / "out", "bfloat16")
    assert not list(tmp_path.glob("*out*"))


def test_a_model_can_be_written_into_its_own_directory(policy_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_directory, tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "model/narrow", "bfloat16")
    names = {path.name for path in policy_directory.iterdir()} | {"README.md"}
    assert {path.name for path in (tmp_path / "model/narrow").iterdir()} == names


def test_results_that_are_no_numbers_are_left_out_of_the_card(run: Path, tmp_path: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "seconds": 1.0, "val/loss": None}) + "\n")
    export(str(run), tmp_path / "out")
    assert "val/loss" not in (tmp_path / "out/README.md").read_text().split("## Results")[1].split("##")[0]


def test_a_model_with_settings_that_transformers_doesnt_write_again_is_written(
    policy_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy_directory, tmp_path / "model")
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    files = HfDirectory.from_model(load_model(tmp_path / "model")).files
    assert settings.items() <= json.loads(files["generation_config.json"]).items()


def test_what_lies_at_the_target_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(MachineError, match="already exists"):
        export(str(run), tmp_path / "out")
    with pytest.raises(MachineError, match="no model at"):
        export(str(tmp_path / "nothing"), tmp_path / "new")
    assert not list(tmp_path.glob("*new*"))


def test_a_target_that_cannot_be_written_is_to_be_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"cannot write .*/file: not a directory\n  choose another directory"):
        export(str(run), tmp_path / "file/out")


def test_large_models_stay_in_several_files(run: Path, tmp_path: Path) -> None:
    directory = run / "checkpoints/global_step_3/hf"
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "cut", max_shard_size="100KB")
    load_tokenizer(directory).save_pretrained(tmp_path / "cut")
    actual = export(str(tmp_path / "cut"), tmp_path / "out", "bfloat16")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == actual.size
    expected = AutoModelForCausalLM.from_pretrained(directory).bfloat16().state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())


def test_adapters_are_merged(tmp_path: Path, policy_directory: Path) -> None:
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=2, alpha=8.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    save_adapters(model, tmp_path / "adapters", policy_directory)
    export(str(tmp_path / "adapters"), tmp_path / "out")
    actual = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in iter_merged_weights(model):
        torch.testing.assert_close(actual[name], tensor, atol=1e-6, rtol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    narrow = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    load_tokenizer(policy_directory).save_pretrained(tmp_path / "narrow")
    settings["base_model_name_or_path"] = str(tmp_path / "narrow")
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(settings))
    export(str(tmp_path / "adapters"), tmp_path / "as they were")
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "as they were/model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    settings["base_model_name_or_path"] = "/nowhere"
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(MachineError, match=r"base model /nowhere of the adapters at .* is missing"):
        export(str(tmp_path / "adapters"), tmp_path / "again")


def test_the_command_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quintet", "export", str(run), str(tmp_path / "out")]
    done = subprocess.run([*command, "--dtype", "bfloat16"], capture_output=True, text=True, timeout=120, check=True)
    assert "step 5 → " in done.stdout.replace("\n", " ")
    assert "bfloat16" in done.stdout
    refused = subprocess.run([*command, "--dtype", "int3"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "valid: float32, bfloat16, float16" in refused.stderr


def test_an_export_that_is_terminated_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As job schedulers end a process."""
    monkeypatch.setattr("quintet.pipelines.export._convert", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    # without the command's own handler, the signal would only be recorded
    with stop_on_signals(), pytest.raises(KeyboardInterrupt):
        export_command(str(run), str(tmp_path / "out"), None, trust_remote_code=False)
    assert not list(tmp_path.glob("*out*"))
