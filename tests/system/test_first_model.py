"""If these fail, a reader who brings a model, data and a reward of their own gets stuck on the page about it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import warm_processes
from peft import PeftModel
from pretrained_model import unavailable
from transformers import AutoModelForCausalLM

PAGE = (Path(__file__).parents[2] / "docs/first-model.md").read_text()
FILES = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^\$ (.+)$", PAGE, re.M)
TUNE = (
    "quintet sft name=base policy.preset=numbers-1m data.train_files=train.jsonl data.prompt_key=question "
    "data.response_key=answer data.validation_files=validation.jsonl sft.epochs=4 sft.batch=64"
)
"""Creates a small chat model that answers with numbers, few of them right."""


@dataclass(frozen=True)
class Followed:
    """The directory of a reader, and what each command has printed."""

    directory: Path
    outputs: dict[str, str]

    def output(self, begin: str) -> str:
        """Return the output of the command that begins so."""
        (output,) = (text for command, text in self.outputs.items() if command.startswith(begin))
        return output

    def results(self, name: str) -> dict[str, object]:
        """Return the results of an evaluation."""
        results: dict[str, object] = json.loads((self.directory / f"runs/{name}/results.json").read_text())
        return results

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Return the metrics of a run, step by step."""
        return [json.loads(line) for line in (self.directory / f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def argv_of(command: str) -> list[str]:
    program, *words = shlex.split(command)
    return {"quintet": [sys.executable, "-m", "quintet"], "python": [sys.executable]}.get(program, [program]) + words


def run(command: str, directory: Path) -> str:
    done = warm_processes.run(argv_of(command), cwd=directory, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Run the commands of the page one after another, beside a small model; those of servers until the last."""
    directory = tmp_path_factory.mktemp("reader")
    for name, text in FILES:
        (directory / name).write_text(text)
    for command in ("python make_data.py", TUNE):
        run(command, directory)
    # a directory of this name comes before the published model, which takes minutes to train
    shutil.copytree(directory / "runs/base/model", directory / "smollm2-135m")
    shutil.rmtree(directory / "runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    servers: list[subprocess.Popen[str]] = []
    outputs: dict[str, str] = {}
    try:
        for command in COMMANDS:
            if command.startswith("quintet model get") and unavailable():
                continue
            if command.split()[1] in ("serve", "view"):
                listening = [*argv_of(command), "--port", port if "serve" in command else "0"]
                servers.append(warm_processes.Popen(listening, cwd=directory, stdout=subprocess.PIPE, text=True))
                outputs[command] = servers[-1].stdout.readline()  # type: ignore[union-attr]
            else:
                outputs[command] = run(command.replace("8000", port), directory)
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    return Followed(directory, outputs)


def test_a_reader_gets_from_their_own_files_to_a_trained_model(followed: Followed) -> None:
    assert {name for name, _ in FILES} == {"make_data.py", "reward.py", "tried.jsonl", "words.yaml", "answer.py"}
    assert [command for command, text in followed.outputs.items() if not text] == ["python make_data.py"]
    assert followed.output("quintet data show").startswith("536 rows, columns question, answer")
    assert followed.output("quintet data check").startswith("536 of 536 rows have a verifier")
    assert re.search(r"score +│ +0\.5 ", followed.output("quintet eval evaluation.path"))
    assert "Warnings" not in followed.output("quintet plan")
    assert [followed.results(name)["answers"] for name in ("before", "after")] == [64, 64]
    for name in ("words", "words-lora"):
        steps = followed.metrics(name)
        assert [step["step"] for step in steps] == [*range(17)]
        assert any(0 < step.get("critic/rewards/mean", 0) < 1 for step in steps), "the function has scored nothing"
        assert not any("sft/loss" in step for step in steps), "demonstrations were trained on"


def test_the_exported_model_answers_alike_in_transformers_and_served(followed: Followed) -> None:
    served = json.loads(followed.output("curl"))["choices"][0]["message"]["content"]
    assert served.removesuffix("<|im_end|>").strip() == followed.output("python answer.py").strip()
    assert followed.output("quintet serve").startswith("words on http://127.0.0.1:")


def test_merged_adapters_are_those_of_peft(followed: Followed) -> None:
    (adapters,) = re.findall(r"`(runs/words-lora/\S+)`", PAGE)
    base = AutoModelForCausalLM.from_pretrained(followed.directory / "smollm2-135m")
    tokens = torch.tensor([[5, 9, 7, 5, 8]])
    untrained = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, followed.directory / adapters)(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(followed.directory / "models/words-lora")(tokens).logits
    assert torch.allclose(adapted, merged, atol=1e-4)
    assert not torch.allclose(untrained, merged, atol=1e-4)
