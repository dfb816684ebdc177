"""If these fail, a policy does not learn from demonstrations, or learns something else after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from robot_datasets import episode, lerobot
from torch import Tensor

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.training import WarmStartConfig
from quintet.data.robot_demonstrations.dataset import FeatureNames
from quintet.data.robot_demonstrations.expert import RecordedDataset
from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics, RobotObservation
from quintet.errors import ConfigError
from quintet.pipelines.embodied.behavior_cloning import CloningBatches, load_demonstrations
from quintet.pipelines.warm_start_updates import Update, make_updates

CHUNK, DIM, BINS = 3, 2, 16
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=5)
CONFIG = WarmStartConfig(updates=30, turns_per_update=16, until_success=None, optimizer=OPTIMIZER)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run these small layers on one thread: several ones wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class StatePolicy(torch.nn.Module):
    """Bins of actions in [-1, 1] from the state of the robot."""

    action_chunk, action_dim, robot_action_dim, value_size = CHUNK, DIM, DIM, 0

    def __init__(self, state_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(state_size, 32), torch.nn.Tanh(), torch.nn.Linear(32, CHUNK * DIM * BINS)
        )

    def prepare(self, observation: RobotObservation) -> dict[str, Tensor]:
        return {"state": torch.from_numpy(observation.state), "images": torch.from_numpy(observation.images)}

    def logprobs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.layers(inputs["state"]).view(-1, CHUNK, DIM, BINS).log_softmax(-1)

    def sample(self, inputs: dict[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        del uniforms, sampling
        best = self.logprobs(inputs).max(-1)
        return ActionSample(best.indices, best.values)

    def statistics(self, inputs: dict[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        del sampling
        logprobs = self.logprobs(inputs)
        return ActionStatistics(logprobs.gather(-1, actions[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1))

    def to_robot_actions(self, actions: Tensor) -> np.ndarray:
        return ((actions.float() + 0.5) / BINS * 2 - 1).numpy()

    def from_robot_actions(self, actions: np.ndarray) -> Tensor:
        return torch.from_numpy(np.clip((actions + 1) / 2 * BINS, 0, BINS - 1).astype(np.int64))


class StatePolicyLearner:
    """One optimizer step after another on the mean log-prob of the actions under the mask."""

    def __init__(self, policy: StatePolicy) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters())
        self.batches: list[tuple[Mapping[str, Tensor], Tensor, Tensor]] = []

    def clone(
        self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, rate: float, decay: float
    ) -> dict[str, float]:
        del decay
        self.batches.append((inputs, actions, mask))
        logprobs = self.policy.statistics(dict(inputs), actions, ActionSampling()).logprobs
        loss = -(logprobs * mask[..., None]).sum() / (mask.sum() * DIM)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return {"sft/loss": loss.item(), "grad_norm": 1.0}


def arm(**options: object) -> SimulatorConfig:
    return SimulatorConfig(
        simulator="arm", camera_height=16, camera_width=16, max_steps=40, options={"renderer": "numpy", **options}
    )


def clones(batches: CloningBatches, learner: StatePolicyLearner) -> Update:
    return lambda update, rate, weight_decay: learner.clone(*batches.batch(update), rate, weight_decay)


def cloned(
    batches: CloningBatches, learner: StatePolicyLearner, config: WarmStartConfig = CONFIG, done: int = 0
) -> list[dict[str, float]]:
    logged: list[dict[str, float]] = []

    def should_stop(update: int, metrics: dict[str, float]) -> bool:
        logged.append({"update": update, **metrics})
        return False

    make_updates(clones(batches, learner), config, should_stop, done=done)
    return logged


def marginal_entropy(learner: StatePolicyLearner) -> float:
    """The least loss of a policy that does not see the state."""
    actions = torch.cat([actions for _, actions, _ in learner.batches])
    masks = torch.cat([mask for _, _, mask in learner.batches])
    entropies = []
    for slot in range(CHUNK):
        for dim in range(DIM):
            counts = torch.bincount(actions[:, slot, dim][masks[:, slot]], minlength=BINS).double()
            shares = counts[counts > 0] / counts.sum()
            entropies.append(float(masks[:, slot].sum() * -(shares * shares.log()).sum()))
    return sum(entropies) / float(masks.sum() * DIM)


def test_a_policy_imitates_the_expert_of_a_simulator() -> None:
    pytest.importorskip("mujoco")
    config = CONFIG.model_copy(update={"episodes": 24, "updates": 100, "turns_per_update": 32})
    datasets = load_demonstrations(config, arm(privileged_state=True))
    assert len(datasets[0].lengths) == 24
    learner = StatePolicyLearner(StatePolicy(datasets[0].episode(0).observations.state.shape[1]))
    logged = cloned(CloningBatches(datasets, learner.policy, 32, 0), learner, config)
    assert logged[0]["sft/loss"] == pytest.approx(np.log(BINS), abs=0.2)
    assert logged[-1]["sft/loss"] < marginal_entropy(learner) - 0.3
    assert [each["update"] for each in logged] == list(range(1, 101))
    assert logged[0]["sft/lr"] < logged[4]["sft/lr"]


def test_a_resumed_warm_start_continues_with_the_same_batches(tmp_path: Path) -> None:
    dataset = lerobot(tmp_path, [episode(9, number) for number in range(3)])
    learners = [StatePolicyLearner(StatePolicy(2)) for _ in range(2)]
    whole = cloned(CloningBatches([dataset], learners[0].policy, 16, 3), learners[0])
    assert whole == cloned(CloningBatches([dataset], learners[1].policy, 16, 3), learners[1])
    resumed = StatePolicyLearner(StatePolicy(2))
    cloned(CloningBatches([dataset], resumed.policy, 16, 3), resumed, done=20)
    assert len(resumed.batches) == 10
    for expected, batch in zip(learners[0].batches[20:], resumed.batches, strict=True):
        assert torch.equal(expected[0]["images"], batch[0]["images"])
        assert torch.equal(expected[1], batch[1])
        assert torch.equal(expected[2], batch[2])


def test_a_success_check_ends_the_warm_start(tmp_path: Path) -> None:
    dataset = lerobot(tmp_path, [episode(9)])
    learner = StatePolicyLearner(StatePolicy(2))
    batches = CloningBatches([dataset], learner.policy, 16, 0)
    make_updates(clones(batches, learner), CONFIG, lambda update, _: update == 4)
    assert len(learner.batches) == 4


def test_actions_of_another_dimension_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"have 3 dimensions, those of the policy 2(?s:.*)policy.vla.action_dim=3"):
        CloningBatches([RecordedDataset("a", [episode(4, dim=3)])], StatePolicy(2), 4, 0)


def test_crops_change_images_only_if_the_policy_crops(tmp_path: Path) -> None:
    dataset = lerobot(tmp_path, [episode(9, size=64)])
    policy = StatePolicy(2)
    plain, again, moved, repeated = (
        CloningBatches([dataset], policy, 9, 0, random_crops=crops).batch(1)[0]["images"]
        for crops in (False, False, True, True)
    )
    assert torch.equal(plain, again)
    assert torch.equal(moved, repeated)
    assert not torch.equal(plain, moved)


def test_files_replace_the_expert(tmp_path: Path) -> None:
    names: Sequence[str] = [str(tmp_path / name) for name in "ab"]
    for number, name in enumerate(names):
        lerobot(Path(name), [episode(4, number, cameras=2)])
    config = CONFIG.model_copy(update={"files": tuple(names), "cameras": ("camera1",)})
    datasets = load_demonstrations(config, arm())
    assert [dataset.name for dataset in datasets] == ["a", "b"]
    assert datasets[0].episode(0).observations.images.shape == (4, 1, 8, 8, 3)
    with pytest.raises(ConfigError, match=r"warm_start.files: .*/c does not exist"):
        load_demonstrations(CONFIG.model_copy(update={"files": (str(tmp_path / "c"),)}), arm())


def test_files_are_read_with_the_configured_state_and_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(
        "quintet.pipelines.embodied.behavior_cloning.open_robot_dataset",
        lambda path, key, names: opened.append((path.name, names)),
    )
    update = {"files": ("a", "b"), "state_key": "joints", "cameras": ("front",)}
    load_demonstrations(CONFIG.model_copy(update=update), arm())
    names = FeatureNames(("front",), "joints")
    assert opened == [("a", names), ("b", names)]
