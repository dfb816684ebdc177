"""If these fail, distillation trains on another loss than documented, or towards another model than the teacher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config.compose import load_experiment
from quintet.data.prompt_source import open_split
from quintet.pipelines.sft.rows import RowEncoder

Run = Callable[..., Path]
COMMON = (
    "sft.batch=20",
    "sft.epochs=2",
    "sft.optimizer.learning_rate=0.01",
    "sft.before_training=false",
    "sft.warmup_ratio=0",
    "tracking.loggers=[jsonl]",
    "training.threads=1",
)
OPTIONS = "{weight: 0.75, objective: reverse_kl, top_k: 5, temperature: 2.0, teacher_temperature: 0.5}"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def expected(student: Path, teacher: Path, rows: tuple[str, str], *, on_prompt: bool) -> tuple[float, float]:
    """Return cross-entropy and divergence of all training rows, each in a forward pass of its own."""
    composed = load_experiment(None, [f"sft.path={student}", *rows, f"sft.train_on_prompt={str(on_prompt).lower()}"])
    config, tokenizer = composed.experiment, AutoTokenizer.from_pretrained(student)
    assert config.data is not None
    encode = RowEncoder(config, tokenizer, open_split(config.data, tokenizer, "train"))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student, teacher)]
    losses, divergences = [], []
    for row in range(20):
        (sequence,) = encode(row)
        tokens = torch.tensor([sequence.tokens])
        with torch.no_grad():
            logits, others = (model(tokens).logits[0, :-1] for model in models)
        targets, trained = tokens[0, 1:], torch.tensor(sequence.loss_mask[1:])
        losses.append(-logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)[trained])
        top, index = (others / 2.0 / 0.5).topk(5)
        q = (logits / 2.0).gather(-1, index).log_softmax(-1)
        divergences.append((q.exp() * (q - top.log_softmax(-1))).sum(-1)[trained])
    return float(torch.cat(losses).mean()), float(torch.cat(divergences).mean())


@pytest.mark.parametrize("on_prompt", [False, True])
def test_the_loss_is_that_of_single_passes(
    tune: Run, rows: tuple[str, str], policy_directory: Path, on_prompt: bool
) -> None:
    teacher = tune(name="teacher") / "model"
    run = tune(
        f"reference.path={teacher}", f"sft.distillation={OPTIONS}", f"sft.train_on_prompt={str(on_prompt).lower()}"
    )
    first = metrics(run)[0]
    loss, divergence = expected(policy_directory, teacher, rows, on_prompt=on_prompt)
    assert first["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert first["train/distillation_loss"] == pytest.approx(divergence, rel=1e-4)


def test_a_student_learns_from_the_teachers_distributions_alone(tune: Run) -> None:
    """With weight 1, the rows' own tokens count nothing; the teacher knows them."""
    teacher = tune("sft.epochs=8", name="teacher") / "model"
    lines = metrics(tune("sft.epochs=8", f"reference.path={teacher}", "sft.distillation={weight: 1.0, top_k: 0}"))
    assert lines[-1]["train/distillation_loss"] < 0.5 * lines[0]["train/distillation_loss"]
    assert lines[-1]["val/loss"] < 0.8 * lines[0]["val/loss"]


def test_a_weight_of_zero_is_plain_fine_tuning(tune: Run, policy_directory: Path) -> None:
    plain = metrics(tune(name="plain"))
    zero = metrics(tune(f"reference.path={policy_directory}", "sft.distillation={weight: 0.0}", name="zero"))
    assert [line["train/loss"] for line in zero] == pytest.approx([line["train/loss"] for line in plain], rel=1e-5)


def test_a_distillation_continues_from_its_checkpoint(tune: Run, policy_directory: Path) -> None:
    overrides = (f"reference.path={policy_directory}", "sft.distillation={}", "sft.optimizer.schedule=constant")
    tune("sft.epochs=1", *overrides)
    lines, whole = metrics(tune("sft.epochs=2", *overrides)), metrics(tune("sft.epochs=2", *overrides, name="whole"))
    for name in ("step", "train/loss", "train/distillation_loss"):
        assert [line[name] for line in lines] == [line[name] for line in whole], name
