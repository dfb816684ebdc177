"""If these fail, a model that is given away isn't the one that was trained, or can't be loaded by those who get it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config import load_experiment
from quintet.config.native.policy import LoraConfig
from quintet.errors import MachineError
from quintet.pipelines.export import export
from quintet.policies.adapters import add_lora, merged_weights, save_adapters
from quintet.policies.causal_lm import load_model, load_tokenizer
from quintet.training.checkpoint import save_checkpoint


@pytest.fixture
def run(tmp_path: Path, policy_directory: Path) -> Path:
    """A run of five steps with two checkpoints."""
    place = tmp_path / "runs/lake"
    experiment = load_experiment(None, ["name=lake", "training.steps=5", f"output_dir={tmp_path}/runs"]).experiment
    state = {"experiment": experiment.model_dump(mode="json"), "seconds": 90.0, "contents": ["model"]}

    def write(directory: Path) -> None:
        shutil.copytree(policy_directory, directory / "hf")

    for step in (3, 5):
        save_checkpoint(place / "checkpoints", step, state, write, keep=9)
    lines = [
        {"step": step, "seconds": 1.0, "val/frozenlake/success_rate": step / 10, "actor/lr": 1.0} for step in (0, 3, 5)
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_a_run_becomes_a_directory_that_transformers_reads(run: Path, tmp_path: Path, policy_directory: Path) -> None:
    found = export(str(run), tmp_path / "out", "bfloat16")
    assert found.step == 5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.bfloat16
    assert model.config.dtype is torch.bfloat16
    for name, tensor in load_file(policy_directory / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")
    assert found.size == 2 * found.parameters
    assert found.parameters == sum(tensor.numel() for tensor in load_file(tmp_path / "out/model.safetensors").values())


def test_types_stay_where_none_is_named(run: Path, tmp_path: Path, policy_directory: Path) -> None:
    export(str(run / "checkpoints/global_step_3"), tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (policy_directory, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
    )


def test_the_card_says_where_the_model_comes_from_and_how_well_it_does(run: Path, tmp_path: Path) -> None:
    export(str(run / "checkpoints/global_step_3"), tmp_path / "out", "float16")
    card = (tmp_path / "out/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "# lake, step 3" in body
    assert "| frozenlake/success_rate | 0 (step 0) | 0.3 (step 3) |" in body, "what came after the step isn't its own"
    assert "float16" in body
    told = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (told["name"], told["training"]) == ("lake", {"steps": 5})


def test_a_damaged_checkpoint_isnt_given_away(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints/global_step_5"
    (newest / "hf/model.safetensors").write_bytes(b"torn")
    assert export(str(run), tmp_path / "out").step == 3
    with pytest.raises(MachineError, match="damaged"):
        export(str(newest), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_lies_at_the_target_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(MachineError, match="is there already"):
        export(str(run), tmp_path / "out")
    with pytest.raises(MachineError, match="no model at"):
        export(str(tmp_path / "nothing"), tmp_path / "new")
    assert not list(tmp_path.glob("*new*"))


def test_large_models_stay_in_several_files(run: Path, tmp_path: Path) -> None:
    place = run / "checkpoints/global_step_3/hf"
    AutoModelForCausalLM.from_pretrained(place).save_pretrained(tmp_path / "cut", max_shard_size="100KB")
    load_tokenizer(place).save_pretrained(tmp_path / "cut")
    found = export(str(tmp_path / "cut"), tmp_path / "out", "bfloat16")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.size
    expected = AutoModelForCausalLM.from_pretrained(place).bfloat16().state_dict()
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
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in merged_weights(model).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "/nowhere"
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(MachineError, match="belong to /nowhere"):
        export(str(tmp_path / "adapters"), tmp_path / "again")


def test_the_command_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quintet", "export", str(run), str(tmp_path / "out")]
    done = subprocess.run([*command, "--dtype", "bfloat16"], capture_output=True, text=True, timeout=120, check=True)
    assert "step 5 → " in done.stdout.replace("\n", " ")
    assert "bfloat16" in done.stdout
    refused = subprocess.run([*command, "--dtype", "int3"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "take float32, bfloat16, float16" in refused.stderr
