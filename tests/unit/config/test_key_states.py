"""If these fail, somebody sets a key and cannot find out what became of it, or is told the wrong thing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import EXAMPLES, NAMES, corpus

from quintet import hardware
from quintet.cli.configuration import InspectedConfig, inspect_config
from quintet.config.dialects.composition.foreign_config import ForeignConfig, compose_config, config_from_tree
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import set_value
from quintet.config.key_states import KeyState, State, count_states, key_states
from quintet.errors import ConfigError

VERL = """\
data: {train_files: a.parquet, val_files: a.parquet, train_batch_size: 4}
model_engine: veomni
actor_rollout_ref:
  model: {path: policy, use_fused_kernels: true}
  actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 8, use_kl_loss: false, kl_loss_coef: 0.001}
  rollout: {n: 4, gpu_memory_utilization: 0.5, enforce_eager: true, log_prob_micro_batch_size_per_gpu: 8,
            tensor_model_parallel_size: 1}
algorithm: {adv_estimator: grpo}
critic: {optim: {lr: 1.0e-05}}
trainer: {total_training_steps: 2, n_gpus_per_node: 1, critic_warmup: 3, project_name: x}
"""


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)


def inspected(tmp_path: Path, text: str, *overrides: str, unknown: str = "refuse") -> InspectedConfig:
    path = tmp_path / "given.yaml"
    path.write_text(text)
    return inspect_config(str(path), list(overrides), None, unknown)


def states(found: InspectedConfig) -> dict[str, KeyState]:
    return {each.setting.name: each for each in key_states(found.runnable, found.unsupported)}


def test_each_key_of_a_frameworks_file_has_the_state_that_it_has_in_the_run(tmp_path: Path) -> None:
    found = states(inspected(tmp_path, VERL))
    substitutes = {"model_engine": "VeOmni", "actor_rollout_ref.rollout.gpu_memory_utilization": "nothing is reserved"}
    silent = {
        "actor_rollout_ref.model.use_fused_kernels": "without a matrix of tokens times vocabulary",
        "actor_rollout_ref.actor.kl_loss_coef": "actor_rollout_ref.actor.use_kl_loss is false, not true",
        "actor_rollout_ref.rollout.enforce_eager": "the engine hf has no CUDA graphs",
        "critic.optim.lr": "the run has no critic",
        "trainer.critic_warmup": "the run has no critic",
    }
    for key, words in substitutes.items():
        assert found[key].state is State.SUBSTITUTE
        assert words in found[key].reason
    for key, words in silent.items():
        assert found[key].state is State.NO_EFFECT, key
        assert words in found[key].reason
    others = {each.state for key, each in found.items() if key not in substitutes | silent}
    assert others == {State.HONOURED}
    assert found["trainer.total_training_steps"].setting.native == ("training.steps", "data.epochs")
    assert found["trainer.total_training_steps"].setting.source.endswith("given.yaml:10")
    assert count_states([*found.values()]) == {State.HONOURED: 14, State.SUBSTITUTE: 2, State.NO_EFFECT: 5}


def test_a_critic_that_the_run_has_is_honoured(tmp_path: Path) -> None:
    found = states(inspected(tmp_path, VERL.replace("grpo", "gae")))
    assert found["critic.optim.lr"].state is found["trainer.critic_warmup"].state is State.HONOURED


def test_what_waits_is_refused_or_left_out_says_so(tmp_path: Path) -> None:
    text = VERL.replace("model_engine: veomni", "model_engine: mindspeed")
    found = states(inspected(tmp_path, text, "+trainer.invented=1", unknown="warn"))
    assert found["model_engine"].state is State.WAITS
    assert "requires further training backends" in found["model_engine"].reason
    assert found["trainer.invented"].state is State.NO_EFFECT
    assert "--unknown-keys warn" in found["trainer.invented"].reason
    refused = states(inspected(tmp_path, VERL, "actor_rollout_ref.rollout.dtype=float16"))
    assert refused["actor_rollout_ref.rollout.dtype"].state is State.REFUSED


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ("model_engine: veomni", "model_engine: torchtitan", "model_engine", "FSDP2 takes the place of TorchTitan"),
        (
            "model_engine: veomni",
            "{}",
            "actor_rollout_ref.actor.strategy",
            "FSDP2 takes the place of VeOmni",
        ),
    ],
)
def test_a_training_engine_in_whose_place_fsdp_trains_is_named(
    tmp_path: Path, old: str, new: str, key: str, words: str
) -> None:
    if new == "{}":
        text = VERL.replace(f"{old}\n", "").replace("actor: {", "actor: {strategy: veomni, ")
    else:
        text = VERL.replace(old, new)
    found = states(inspected(tmp_path, text))
    assert found[key].state is State.SUBSTITUTE
    assert words in found[key].reason


def test_deepspeed_in_whose_place_fsdp_trains_is_named() -> None:
    path = next(path for path in corpus() if path.name == "qwen2.5-3b_ppo_critic_8gpu.yaml")
    tree = compose_config(path, ()).plain()
    for worker in ("actor_train", "critic"):
        options = {"zero_optimization": {"stage": 3}}
        tree[worker]["strategy_args"] = {"strategy_name": "deepspeed_train", "strategy_config": options}
    found = {each.setting.key: each for each in key_states(convert(config_from_tree(tree), DIALECTS["roll"]).composed)}
    reason = found["actor_train.strategy_args.strategy_name"].reason
    assert "FSDP2 takes the place of DeepSpeed" in reason


ROBOT_OVERRIDES = {
    "algorithm.length_params.max_new_token": 9,
    "algorithm.length_params.max_length": 64,
    "algorithm.length_params.min_length": 2,
    "algorithm.logprob_forward_micro_batch_size": 3,
    "rollout.enforce_eager": False,
    "rollout.enable_offload": True,
    "rollout.gpu_memory_utilization": 0.4,
    "runner.seq_length": 77,
    "actor.model.val_micro_batch_size": 3,
    "actor.model.policy_setup": "panda-qpos",
    "actor.model.low_cpu_mem_usage": False,
    "actor.model.trust_remote_code": True,
    "actor.tokenizer.use_fast": True,
    "actor.tokenizer.trust_remote_code": True,
}


@pytest.mark.proves("rlinf", "actor.tokenizer.use_fast")
def test_what_a_run_of_robots_does_not_read_is_silent_and_said() -> None:
    path = next(path for path in corpus() if path.name == "libero_10_grpo_openvlaoft.yaml")
    overrides = [f"{key}={value}" for key, value in ROBOT_OVERRIDES.items()]
    overrides.append("actor.model.attn_implementation=flash_attention_2")
    found = states(inspect_config(str(path), overrides, None, "refuse"))
    assert [key for key in ROBOT_OVERRIDES if found[key].state is not State.NO_EFFECT] == []
    assert found["actor.model.policy_setup"].reason == "env.simulator = 'libero'"
    assert "torch's SDPA takes its place" in found["actor.model.attn_implementation"].reason


@pytest.mark.parametrize(
    "override",
    [
        "rollout.max_turns=5",
        "rollout.engine_options.print_responses=true",
        "rollout.engine_options.validate_weights=true",
        "actor.memory.torch_compile=true",
    ],
)
def test_a_native_run_of_robots_takes_a_key_of_text_without_a_word(override: str) -> None:
    found = inspect_config(str(EXAMPLES / "native/arm.yaml"), [override], None, "refuse")
    key = override.partition("=")[0]
    assert states(found)[key].state is State.NO_EFFECT
    assert any(key in remark for remark in found.remarks)


def test_a_native_key_counts_as_set_also_with_its_default(tmp_path: Path) -> None:
    text = "algorithm: {advantage: {name: grpo}}\ncritic: {warmup_steps: 0}\nrollout: {max_turns: 8}\nseed: 3\n"
    found = states(inspected(tmp_path, text, "actor.optimizer.kind=sgd", "actor.optimizer.epsilon=1e-8"))
    assert {key: each.state for key, each in found.items()} == {
        "algorithm.advantage.name": State.HONOURED,
        "critic.warmup_steps": State.NO_EFFECT,
        "rollout.max_turns": State.HONOURED,
        "seed": State.HONOURED,
        "actor.optimizer.kind": State.HONOURED,
        "actor.optimizer.epsilon": State.NO_EFFECT,
    }
    assert found["actor.optimizer.epsilon"].reason == "actor.optimizer.kind = 'sgd'"


@pytest.fixture
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_PATH", str(next(iter(NAMES)).parent))


FOREIGN = [path for path in corpus() if path.suffix == ".yaml" and path.parent.name in DIALECTS]


@pytest.mark.usefixtures("_paths")
@pytest.mark.parametrize("path", FOREIGN, ids=NAMES.get)
def test_every_key_of_an_example_is_in_one_state(path: Path) -> None:
    written = {*compose_config(path, ()).sources}
    leaves = {key for key in written if not any(other.startswith(f"{key}.") for other in written)}
    found = inspect_config(str(path), [], None, "refuse")
    assert leaves <= {each.setting.name for each in key_states(found.runnable, found.unsupported)}


def other_values(spec: KeySpec, value: Any) -> Iterator[Any]:
    """Legal values of a key other than one."""
    numbers = (value + 1, value / 2) if isinstance(value, int | float) and not isinstance(value, bool) else ()
    for other in (*spec.value_type.choices, True, False, *numbers, 3, 0.25, "other", None):
        if spec.value_type.accepts(other) and (other != value or type(other) is not type(value)):
            yield other


def with_value(config: ForeignConfig, key: str, value: Any) -> ForeignConfig:
    return config.with_values({key: (value, key)})


@pytest.mark.usefixtures("_paths")
@pytest.mark.parametrize("path", FOREIGN, ids=NAMES.get)
def test_no_value_of_a_key_without_effect_changes_the_run(path: Path) -> None:
    """The conversion says why nothing follows from the key; so nothing may follow."""
    config, dialect = compose_config(path, ()), DIALECTS[path.parent.name]
    found = convert(config, dialect)
    values, _ = merge_with_reference(config, dialect)
    for setting in found.composed.settings:
        spec = values.dialect.spec(setting.key)
        if setting.no_effect is None or spec is None or setting.written_as is not None:
            continue
        for other in other_values(spec, setting.value):
            with contextlib.suppress(ConfigError):  # another check refuses the value
                assert convert(with_value(config, setting.key, other), dialect).composed.experiment == (
                    found.composed.experiment
                ), (setting, other)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_documented_key_without_a_native_one_says_why_it_has_no_effect(name: str) -> None:
    """Setting one of them is legal, and changes nothing."""
    for tree in trees(name):
        dialect = DIALECTS[name].narrowed(tree)
        for spec in bare_keys(dialect):
            set_value(tree, spec.key, spec.default)
        found = convert(config_from_tree(tree), DIALECTS[name], to_plan=True).composed
        by_key = {each.setting.key: each for each in key_states(found)}
        for spec in bare_keys(dialect):
            if spec.key in by_key:
                each = by_key[spec.key]
                assert each.state is State.NO_EFFECT or each.setting.native, spec.key
                assert len(each.reason) > 10 or each.setting.native, spec.key


def trees(name: str) -> Iterator[dict[str, Any]]:
    """The examples of a framework as trees."""
    for path in FOREIGN:
        if path.parent.name == name:
            with contextlib.suppress(ConfigError):
                tree = compose_config(path, ()).plain()
                yield {name: section for name, section in tree.items() if name != "hydra"}


def bare_keys(dialect: Dialect) -> list[KeySpec]:
    return [
        spec
        for spec in dialect.specs().values()
        if not spec.native and spec.requires is None and "${" not in str(spec.default)
    ]
