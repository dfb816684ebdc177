"""If these fail, `quintet sft` learns other rows than it says, stores other weights, or measures another loss."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.native.training import SftConfig
from quintet.data.conversations import Conversation, ConversationFormat, TokenizedConversations
from quintet.data.prompt_source import open_split
from quintet.errors import ConfigError, InterruptedRun, MachineError
from quintet.pipelines.sft import fine_tuning as sft
from quintet.pipelines.sft import rows as sft_rows
from quintet.pipelines.sft.rows import build_sft_dataset
from quintet.pipelines.sft.stage import SftStage, build_stage, with_schedule
from quintet.policies import liger
from quintet.policies.model_loading import load_tokenizer
from quintet.runtime.controller import Controller
from quintet.runtime.learners import learner_builders
from quintet.tracking.progress import NullProgress
from quintet.tracking.run_directory import RunDirectory
from quintet.training.optim.lr_schedule import learning_rate

Run = Callable[..., Path]
COMMON = (
    "sft.batch=8",
    "sft.epochs=2",
    "sft.optimizer.learning_rate=0.01",
    "tracking.loggers=[jsonl]",
    "training.threads=1",
)


def policy_after_sft(composed: ComposedConfig, output: io.StringIO) -> Path:
    """Return the policy that reinforcement learning starts from."""
    after = sft.with_fine_tuned_policy(composed, Console(file=output), Controller.in_process())
    return Path(str(after.experiment.policy.path))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_learns_and_leaves_what_it_promises(tune: Run) -> None:
    run = tune("sft.epochs=8")
    lines = metrics(run)
    # 20 rows make 2 whole steps of 8 in each of 8 passes
    assert [line["step"] for line in lines] == list(range(17))
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert lines[-1]["val/loss"] < 0.5 * lines[0]["val/loss"]
    assert lines[-1]["train/loss"] < 0.5 * lines[1]["train/loss"]
    assert lines[-1]["training/epoch"] == 8
    for name in ("train/lr", "train/grad_norm", "train/likely_tokens", "perf/throughput", "timing_s/testing"):
        assert name in lines[-1]
    assert equal(run / "model", run / "checkpoints/global_step_16/hf")
    model, tokenizer = (kind.from_pretrained(run / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "user 21"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = tokenizer.decode(model.generate(**asked, max_new_tokens=3, do_sample=False)[0, -3:])
    assert written.startswith("<answer>")
    assert "val/loss" in (run / "said").read_text()


def test_the_held_out_loss_is_the_mean_over_learnt_tokens(policy_directory: Path) -> None:
    """By hand, for a model whose head says nothing: ln(vocabulary) for each token, however rows are cut; and for one
    that does, what transformers' own forward pass says of each row alone."""
    config = load_experiment(None, [f"sft.path={policy_directory}"]).experiment
    tokenizer = load_tokenizer(policy_directory)
    talks = [
        Conversation(({"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * n * n}))
        for n in (1, 3)
    ]
    rows = TokenizedConversations(map(ConversationFormat(tokenizer).encode, talks))
    stage = build_stage(config, policy_directory, tokenizer, Controller.in_process())
    actual = stage.loss(rows, 1)
    assert actual == pytest.approx(stage.loss(rows, 2), abs=1e-6)
    plain, total, count = AutoModelForCausalLM.from_pretrained(policy_directory), 0.0, 0
    for row in range(2):
        batch = rows.batch([row])
        with torch.no_grad():
            logits = plain(batch.tokens[None]).logits[0].log_softmax(-1)
        result = logits[:-1].gather(-1, batch.tokens[1:, None]).squeeze(-1)[batch.loss_mask[1:]]
        total, count = total - float(result.sum()), count + len(result)
    assert actual == pytest.approx(total / count, abs=1e-5)
    with torch.no_grad():
        stage.learners.actor.model.get_output_embeddings().weight.zero_()
    assert stage.loss(rows, 2) == pytest.approx(math.log(stage.learners.actor.model.config.vocab_size), abs=1e-5)


def test_passes_of_the_model_dont_change_the_result(tune: Run) -> None:
    whole, cut = tune(name="whole"), tune("sft.sequences_per_pass=3", name="cut")
    checkpointed = tune("sft.gradient_checkpointing=true", name="checkpointed")
    for other in (cut, checkpointed):
        for name, tensor in weights(whole / "model").items():
            torch.testing.assert_close(tensor, weights(other / "model")[name], atol=2e-4, rtol=1e-3)
        losses = [[line["train/loss"] for line in metrics(run)[1:]] for run in (whole, other)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("override", "calls"),
    [("sft.epochs=1", 1), ("sft.sequences_per_pass=4", 2), ("sft.gradient_checkpointing=true", 2)],
)
def test_a_layer_is_computed_once_per_pass_and_again_if_its_activations_are_not_kept(
    policy_directory: Path, override: str, calls: int
) -> None:
    """Six rows fit into one pass, or into two of at most four."""
    config = load_experiment(None, [f"sft.path={policy_directory}", override]).experiment
    tokenizer = load_tokenizer(policy_directory)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    rows = TokenizedConversations(map(ConversationFormat(tokenizer).encode, [Conversation(talk)] * 6))
    stage = build_stage(config, policy_directory, tokenizer, Controller.in_process())
    computed: list[object] = []
    stage.learners.actor.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: computed.append(None))
    stage.update(rows.batch(range(6)), 1, 1)
    assert len(computed) == calls


def test_prompts_are_trained_on_if_configured(rows: tuple[str, str], policy_directory: Path) -> None:
    def trained(*overrides: str) -> str:
        config = load_experiment(None, [f"sft.path={policy_directory}", *rows, *COMMON, *overrides]).experiment
        assert config.data is not None
        tokenizer, split = load_tokenizer(policy_directory), open_split(config.data, None, "train")
        batch = build_sft_dataset(config, tokenizer, split, split, NullProgress()).train.batch([0])
        return str(tokenizer.decode(batch.tokens[batch.loss_mask]))

    response = "<answer> Up </answer><|im_end|>"
    assert trained() == response
    # all tokens but the first, which nothing predicts
    assert trained("sft.train_on_prompt=true") == f"user\nuser 0<|im_end|>\n<|im_start|>assistant\n{response}"


def test_every_pass_sees_every_row_at_most_once_in_an_order_of_its_own(
    rows: tuple[str, str], policy_directory: Path
) -> None:
    def order(*overrides: str) -> list[list[int]]:
        config = load_experiment(None, [f"sft.path={policy_directory}", *rows, *COMMON, *overrides]).experiment
        assert config.data is not None
        splits = [open_split(config.data, None, split) for split in ("train", "validation")]
        lessons = build_sft_dataset(config, load_tokenizer(policy_directory), *splits, NullProgress())
        assert (lessons.steps_per_epoch, lessons.num_steps(3, None), lessons.num_steps(3, 4)) == (2, 6, 4)
        return [lessons.rows(step) for step in range(1, 5)]

    first = order()
    assert [len(rows) for rows in first] == [8] * 4
    passes = [{*first[0], *first[1]}, {*first[2], *first[3]}]
    assert [len(numbers) for numbers in passes] == [16, 16]
    assert first[:2] != first[2:]
    assert order() == first
    assert order("data.seed=5") != first
    assert order("data.shuffle=false") == [[*range(8)], [*range(8, 16)]] * 2


def test_the_schedule_warms_up_by_share_and_wsd_holds_nine_tenths_of_the_rest() -> None:
    """By hand: 10 of 100 steps warm up, int(0.9 × 90) = 81 are held, 9 fall by the cosine."""
    config = load_experiment(None, ["sft.optimizer.schedule=wsd", "sft.optimizer.learning_rate=1.0"]).experiment
    assert config.sft is not None
    optimizer = with_schedule(config.sft, 100)
    rates = [learning_rate(optimizer, step, 100) for step in (1, 10, 11, 91, 94, 97, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.75, 0.25, 0.0])
    cosine = with_schedule(SftConfig(warmup_ratio=0.0), 10)
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.5e-5)
    assert with_schedule(SftConfig(optimizer=cosine.model_copy(update={"warmup_steps": 3})), 10).warmup_steps == 3


def test_lora_trains_adapters_alone_and_ends_merged(tune: Run, policy_directory: Path) -> None:
    run = tune("sft.lora={rank: 2, alpha: 8, target_modules: [q_proj, up_proj]}")
    base, merged = weights(policy_directory), weights(run / "model")
    touched = {name for name in base if not torch.equal(base[name], merged[name])}
    assert touched == {n for n in base if n.endswith(("q_proj.weight", "up_proj.weight"))}
    stored = load_file(run / "lora_adapter/adapter_model.safetensors")
    assert len(stored) == 2 * 2 * 2
    assert json.loads((run / "lora_adapter/adapter_config.json").read_text())["r"] == 2
    assert equal(run / "model", run / "checkpoints/global_step_4/hf")
    alone = tune("sft.lora={rank: 2, alpha: 8, target_modules: [q_proj, up_proj]}", "sft.merge=false", name="alone")
    assert not (alone / "model").exists()
    actual = load_file(alone / "lora_adapter/adapter_model.safetensors")
    assert all(torch.equal(actual[name], stored[name]) for name in stored)


def test_a_made_policy_learns_its_vocabulary_from_the_rows(tune: Run) -> None:
    run = tune("sft.path=null", "policy.preset=grid-1m", "data.max_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert len(tokenizer.encode("<answer> Right </answer>")) < 8
    assert [line["step"] for line in metrics(run)] == [0, 1]


@pytest.mark.parametrize(("measured", "best"), [([9, 3, 4, 5, 6], 1), ([9, 4, 3, 2, 5], 3), ([9, 5, 4, 3, 2], 4)])
def test_the_best_weights_are_those_with_the_lowest_held_out_loss(
    tune: Run, monkeypatch: pytest.MonkeyPatch, measured: list[float], best: int
) -> None:
    """Before any update (9), then after each of four steps."""
    losses = iter(measured)
    monkeypatch.setattr(SftStage, "loss", lambda *_: float(next(losses)))
    kept = "checkpoint.keep=1" if best < 4 else "checkpoint.keep=4"
    run = tune(
        "sft.final_weights=best", "validation.every_steps=1", "checkpoint.every_steps=1", kept, "sft.lora={rank: 1}"
    )
    monkeypatch.undo()
    plain = tune("checkpoint.every_steps=1", "checkpoint.keep=4", "sft.lora={rank: 1}", name="plain")
    assert equal(run / "model", plain / f"checkpoints/global_step_{best}/hf")
    adapters = [run / "lora_adapter", plain / f"checkpoints/global_step_{best}/lora_adapter"]
    one, other = (load_file(place / "adapter_model.safetensors") for place in adapters)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert f"best after step {best}" in (run / "said").read_text()


@pytest.mark.parametrize("kind", ["sft.lora=null", "sft.lora={rank: 2}"])
def test_a_run_that_was_stopped_goes_on_where_it_was(tune: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    overrides = (kind, "sft.final_weights=best", "sft.epochs=3")
    whole = tune(*overrides, name="whole")
    real = SftStage.update

    def until_then(stage: SftStage, batch: Any, step: int, steps: int) -> dict[str, float]:
        if step == 4:
            raise InterruptedRun("pulled the plug")
        return real(stage, batch, step, steps)

    monkeypatch.setattr(SftStage, "update", until_then)
    with pytest.raises(InterruptedRun):
        tune(*overrides)
    monkeypatch.undo()
    run = tune(*overrides)
    assert "resuming from" in (run / "said").read_text()
    assert equal(run / "model", whole / "model")
    kept = [
        [{n: v for n, v in line.items() if n.startswith(("train/", "val/"))} for line in metrics(r)]
        for r in (run, whole)
    ]
    assert kept[0] == kept[1]
    again = tune(*overrides)
    assert "Nothing to do" in (again / "said").read_text()
    longer = tune(*overrides, "sft.epochs=4")
    assert metrics(longer)[-1]["step"] == 8


def test_final_weights_lie_where_they_are_wanted_and_are_copied(tune: Run, tmp_path: Path) -> None:
    import fsspec

    overrides = ("sft.lora={rank: 1}", f"sft.output_dir={tmp_path}/out")
    run = tune(*overrides, "sft.remote_dir=memory://store/here")
    assert not (run / "model").exists()
    assert (tmp_path / "out/merged_model/model.safetensors").exists()
    there = fsspec.filesystem("memory")
    for name in ("merged_model/model.safetensors", "lora_adapter/adapter_model.safetensors"):
        assert there.cat_file(f"/store/here/{name}") == (tmp_path / "out" / name).read_bytes()
    with pytest.raises(ConfigError, match="not supported by fsspec"):
        tune("sft.remote_dir=nowhere://x", name="b")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot copy"):
        tune("sft.remote_dir=file:///proc/nowhere", "data.max_steps=1", name="c")


def test_validation_is_as_often_as_it_is_asked_for(tune: Run) -> None:
    never = tune("validation.every_steps=-1", "sft.before_training=false", name="never")
    assert not [line for line in metrics(never) if "val/loss" in line]
    each = tune("validation.every_steps=1", name="each")
    assert [line["step"] for line in metrics(each) if "val/loss" in line] == [0, 1, 2, 3, 4]


def test_loggers_name_and_project_are_those_of_the_stage(tune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.pipelines import run as of_run

    seen: list[Any] = []
    real = of_run.build_loggers
    monkeypatch.setattr(
        of_run, "build_loggers", lambda names, context: seen.append((tuple(names), context)) or real((), context)
    )
    tune("sft.name=stage", "sft.project=mine", "sft.loggers=[console]", "data.max_steps=1")
    ((names, context),) = seen
    assert (names, context.name, context.project) == (("console",), "stage", "mine")


def test_rows_may_come_from_a_data_set_of_ones_own(tune: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Rows:\n    def __init__(self, data_files, tokenizer, config):\n        self.size = 9 if 'train' in "
        "data_files[0] else 2\n    def __len__(self):\n        return self.size\n    def __getitem__(self, n):\n"
        "        return {'prompt': 'a', 'response': 'b'}\n"
    )
    run = tune(f"data.dataset_class={tmp_path}/own.py:Rows")
    assert metrics(run)[-1]["step"] == 2


def test_a_process_that_reads_rows_changes_nothing(tune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tune("data.max_steps=1", name="alone")
    monkeypatch.setattr(sft_rows, "MIN_ROWS_PER_WORKER", 20)
    monkeypatch.setattr(sft_rows, "ROWS_PER_REQUEST", 3)
    pools: list[int] = []
    pool = sft_rows.WorkerPool
    monkeypatch.setattr(sft_rows, "WorkerPool", lambda *options: pools.append(options[2]) or pool(*options))
    together = tune("data.max_steps=1", "data.workers=4", name="together")
    assert pools == [1], "the 6 held-out rows are too few for a process"
    assert equal(alone / "model", together / "model")


def test_calls_and_tools_of_a_parquet_file_are_trained_and_a_template_without_them_is_refused(
    tune: Run, tmp_path: Path, policy_directory: Path
) -> None:
    """Rows whose calls have other arguments share a column, which has nulls for those that a call lacks."""
    rows = []
    for number in range(24):
        call = (
            {"name": "add", "arguments": {"a": number}} if number % 2 else {"name": "neg", "arguments": {"b": number}}
        )
        parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in call["arguments"]}}
        tool = {"type": "function", "function": {"name": call["name"], "parameters": parameters}}
        talk = [
            {"role": "user", "content": "Up or down?"},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": f"{number}"},
            {"role": "assistant", "content": "Up"},
        ]
        rows.append({"messages": talk, "tools": [tool]})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "calls.parquet")
    keys = (f"data.train_files=[{tmp_path}/calls.parquet]", "data.messages_key=messages", "sft.max_tokens=1024")
    config = load_experiment(None, (*COMMON, *keys, "data.template=hermes", f"sft.path={policy_directory}")).experiment
    assert config.data is not None
    tokenizer = load_tokenizer(policy_directory)
    split = open_split(config.data, tokenizer, "train")
    batch = build_sft_dataset(config, tokenizer, split, split, NullProgress()).train.batch([0, 1])
    whole, trained = tokenizer.decode(batch.tokens), tokenizer.decode(batch.tokens[batch.loss_mask])
    assert "null" not in whole
    assert '"properties": {"a": {"type": "integer"}}' in whole
    assert '<tool_call>\n{"name": "neg", "arguments": {"b": 0}}\n</tool_call><|im_end|>Up<|im_end|>' in trained
    with pytest.raises(ConfigError, match=r"calls\.parquet, row \d+: message 1: its `tool_calls\[0\]\.function\.name`"):
        tune(*keys, "data.validation_files=[]", "data.tools_key=null")


def test_rows_of_which_cutting_leaves_nothing_are_left_out(tune: Run, tmp_path: Path) -> None:
    long = [json.dumps({"prompt": "x " * 400, "response": "Up"}) for _ in range(3)]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("\n" + "\n".join(long))
    with pytest.raises(ConfigError, match=r"train\.jsonl, row 20 has"):
        tune("sft.max_tokens=100")
    run = tune("sft.max_tokens=100", "data.truncation=right")
    assert "3 of 23 rows have no response left" in (run / "said").read_text()


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["sft.batch=21"], "sft.batch", "fewer than the 21"),
        (["data.epochs=2"], "data.epochs", "sft.epochs"),
        (["data.filter_long_prompts=true"], "data.filter_long_prompts", "sft.max_tokens"),
        (["data.train_files=[]"], "data.train_files", "data.train_files is empty"),
        (["data.response_key=answer"], "data.response_key", "answer"),
        (["sft.liger=true"], "sft.liger", "pip install liger-kernel"),
        (["sft.lora={target_modules: [x]}"], "sft.lora.target_modules", "no such layers"),
        (["policy.freeze_router=true"], "policy.freeze_router", "no experts"),
    ],
)
def test_invalid_fine_tuning_options_are_rejected_by_key(
    tune: Run, overrides: list[str], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        tune(*overrides)
    assert error.value.key == key
    assert message in str(error.value)


@pytest.mark.proves("rlinf", "actor.fsdp_config.use_liger_kernel")
def test_liger_kernels_are_only_applied_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is played by a module, the GPU by a parameter that says it is on one."""

    class Parameter:
        is_cuda = False

    class Model:
        def parameters(self) -> Any:
            return iter([Parameter()])

    liger_calls: list[dict[str, Any]] = []
    package, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = lambda **keywords: liger_calls.append(keywords)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="on the CPU"):
        liger.apply_liger_kernels(Model(), "sft.liger")
    Parameter.is_cuda = True
    model = Model()
    liger.apply_liger_kernels(model, "sft.liger")
    assert liger_calls == [{"model": model, "fused_linear_cross_entropy": False, "cross_entropy": False}]


def test_liger_kernels_are_applied_if_configured(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[tuple[object, str]] = []
    monkeypatch.setattr(learner_builders, "apply_liger_kernels", lambda *arguments: applied.append(arguments))
    config = load_experiment(None, [f"sft.path={policy_directory}", "sft.liger=true"]).experiment
    stage = build_stage(config, policy_directory, load_tokenizer(policy_directory), Controller.in_process())
    assert applied == [(stage.learners.actor.model, "sft.liger")]


def test_reinforcement_begins_with_the_stages_model_which_is_made_once(
    tmp_path: Path, rows: tuple[str, str], policy_directory: Path
) -> None:
    overrides = [f"sft.path={policy_directory}", f"output_dir={tmp_path}", "name=rl", *rows, *COMMON]
    composed = load_experiment(None, [*overrides, "sft.then_reinforce=true", "sft.lora={rank: 1}"])
    console = io.StringIO()
    model = policy_after_sft(composed, console)
    assert model == tmp_path / "rl/sft/model"
    assert (model / "config.json").exists()
    before = console.getvalue()
    assert policy_after_sft(composed, console) == model
    assert console.getvalue() == before
    apart = load_experiment(None, [*overrides, "sft.then_reinforce=true", "sft.lora={rank: 1}", "sft.merge=false"])
    with pytest.raises(ConfigError, match="needs merged weights"):
        policy_after_sft(apart, console)


def test_a_run_that_starts_again_leaves_nothing_of_the_former_one(
    tmp_path: Path, rows: tuple[str, str], policy_directory: Path
) -> None:
    overrides = [f"sft.path={policy_directory}", f"output_dir={tmp_path}", "name=rl", *rows, *COMMON]
    composed = load_experiment(None, [*overrides, "sft.then_reinforce=true", "data.max_steps=1"])
    model = policy_after_sft(composed, io.StringIO())
    again = load_experiment(None, [*overrides, "sft.then_reinforce=true", "data.max_steps=1", "resume=never"])
    with (model / "model.safetensors").open("rb") as former:  # while it is open, no other file has its number
        assert policy_after_sft(again, io.StringIO()) == model
        same = os.path.samestat(os.fstat(former.fileno()), (model / "model.safetensors").stat())
    assert not same, "the fine-tuning of the former run was used again"
    run = RunDirectory(tmp_path / "rl")
    for name in ("model", "lora_adapter"):
        (run.path / name).mkdir()
    (run.path / "results.json").write_text("{}")
    run.clear(keep_fine_tuning=True)
    assert {path.name for path in run.path.iterdir() if not path.name.startswith(".")} == {"sft"}
    run.clear()
    assert not (run.path / "sft").exists()


def test_copies_of_a_first_stage_lie_apart_from_those_of_what_follows(
    tmp_path: Path, policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps have the same names: on a fresh machine neither would know its own."""
    seen: list[str | None] = []
    monkeypatch.setattr(sft, "fine_tune", lambda composed, *_: seen.append(composed.experiment.checkpoint.remote_dir))
    overrides = [f"sft.path={policy_directory}", f"output_dir={tmp_path}", "sft.then_reinforce=true"]
    for more in ([], ["checkpoint.remote_dir=memory://runs/mine/"]):
        policy_after_sft(load_experiment(None, [*overrides, *more]), io.StringIO())
    assert seen == [None, "memory://runs/mine/sft"]
