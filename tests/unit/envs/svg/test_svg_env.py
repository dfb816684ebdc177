"""If these fail, SVG code gets a wrong reward, or a target of the validation is trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from quintet.config.checks.unsupported import run_problems
from quintet.config.compose import load_experiment
from quintet.config.native.envs import SvgConfig
from quintet.data.demonstrations import run_episode
from quintet.envs.factory import build_env
from quintet.envs.start_states import Split, split_seed
from quintet.envs.svg.image_scores import canny_edges, code_score, color_score, pixel_score, structural_score
from quintet.envs.svg.model_scores import load_scorer
from quintet.envs.svg.targets import icon_code, target_code
from quintet.envs.vector_env import ActionsExecuted, LocalVectorEnv
from quintet.errors import ConfigError

SMALL: dict[str, Any] = {"image_size": 48, "max_shapes": 1}
BLANK = '<svg viewBox="0 0 16 16"></svg>'


def env(**fields: Any) -> Any:
    return build_env(SvgConfig(**SMALL | fields))


def test_an_episode_earns_the_score_of_its_last_valid_attempt() -> None:
    played = env(format_penalty=-0.25)
    played.reset(0)
    first = played.step(BLANK)
    assert 0 < first.reward < 1
    assert played.step("<svg>").reward == -0.25
    last = played.step(played.expert_action())
    assert first.reward + last.reward == pytest.approx(2.0)
    assert (last.terminated, last.info["success"], first.terminated) == (True, True, False)


def test_with_accumulated_scores_each_attempt_earns_its_score_and_the_episode_continues() -> None:
    played = env(accumulate_scores=True, pixel_weight=3.0, structural_weight=0.5)
    played.reset(0)
    steps = [played.step(played.expert_action()) for _ in range(2)]
    assert [step.reward for step in steps] == [3.5, 3.5]
    assert [(step.terminated, step.info["success"]) for step in steps] == [(False, True)] * 2


def test_color_and_code_count_with_their_weights() -> None:
    """The target's own code has color 1 and code 0.8."""
    played = env(pixel_weight=0.0, structural_weight=0.0, color_weight=2.0, code_weight=0.5)
    played.reset(0)
    assert played.step(played.expert_action()).reward == pytest.approx(2.0 + 0.5 * 0.8)


def test_the_models_of_scores_are_loaded_from_their_paths_to_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str, str]] = []

    def load(name: str, path: str, device: str) -> Any:
        loaded.append((name, path, device))
        score = {"dino": 0.5, "dreamsim": 0.25}[name]
        return SimpleNamespace(scores=lambda targets, images: [score] * len(images))

    monkeypatch.setattr("quintet.envs.svg.env.load_scorer", load)
    fields = {"dino_weight": 4.0, "dino_path": "a", "dino_device": "cuda:1"}
    fields |= {"dreamsim_weight": 2.0, "dreamsim_path": "b", "dreamsim_device": "cuda:2"}
    played = env(pixel_weight=0.0, structural_weight=0.0, **fields)
    played.reset(0)
    assert played.step(played.expert_action()).reward == 4.0 * 0.5 + 2.0 * 0.25
    assert set(loaded) == {("dino", "a", "cuda:1"), ("dreamsim", "b", "cuda:2")}


def test_invalid_code_is_explained_and_shown_as_a_white_picture() -> None:
    played = env()
    played.reset(3)
    for action, reason in {"": "no <svg> element", "<svg><script/></svg>": "<script>"}.items():
        step = played.step(action)
        assert reason in step.observation.text
        assert (step.observation.images[0] == 255).all()
        assert (step.reward, step.info["valid_format"]) == (0.0, False)


def test_images_and_icons_have_the_configured_size_and_number_of_shapes() -> None:
    """One icon of six has more than two shapes with a probability of 1 − (2 / 9)^6."""
    played = env(max_shapes=9)
    assert played.reset(0).images[0].shape == (48, 48, 3)
    assert max(target_code(SvgConfig(max_shapes=9), seed).count("/>") for seed in range(6)) == 8


def test_an_attempt_is_a_success_from_the_configured_score_on() -> None:
    played = env(success_score=0.01)
    played.reset(0)
    step = played.step(BLANK)
    assert step.reward == pytest.approx(0.7122, abs=1e-4)
    assert (step.terminated, step.info["success"]) == (True, True)


@pytest.mark.parametrize("fields", [{}, {"accumulate_scores": True}, {"code_weight": 5.0}])
def test_the_expert_succeeds_in_its_first_turn(fields: dict[str, Any]) -> None:
    episode = run_episode(env(**fields), 7, 1)
    assert episode is not None
    assert len(episode.turns) == 1


def test_splits_have_different_icons_and_a_seed_always_the_same() -> None:
    icons = {split: {icon_code(split_seed(split, index), 1) for index in range(300)} for split in Split}
    assert not icons[Split.TRAIN] & icons[Split.VALIDATION]
    assert not icons[Split.TRAIN] & icons[Split.DEMONSTRATION]
    assert not icons[Split.VALIDATION] & icons[Split.DEMONSTRATION]
    assert icon_code(9, 3) == icon_code(9, 3)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "svg", "arrow"])
def test_each_form_of_a_data_set_gives_disjoint_splits(tmp_path: Path, form: str) -> None:
    codes = [icon_code(seed, 2) for seed in range(60)]
    table = pa.table({"Svg": [f'<?xml version="1.0"?>\n{code}' for code in codes]})
    if form == "parquet":
        pq.write_table(table, tmp_path / "train.parquet")
    elif form == "jsonl":
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"svg": code}) for code in codes))
    elif form == "arrow":
        with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        for number, code in enumerate(codes):
            (tmp_path / f"{number}.svg").write_text(code)
    config = SvgConfig(dataset=str(tmp_path))
    chosen = {split: {target_code(config, split_seed(split, index)) for index in range(60)} for split in Split}
    assert set.union(*chosen.values()) == set(codes)
    assert sum(map(len, chosen.values())) == len(set(codes))


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "does not exist"), ("{}", "no .jsonl file with a column svg"), ("", "none of its")]
)
def test_a_data_set_that_cannot_be_read_is_told_by_its_key(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / f"{problem[:4]}.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"env\.dataset") as error:
        target_code(SvgConfig(dataset=str(file)), 0)
    assert problem in str(error.value)


def test_scores_are_those_of_their_formulas() -> None:
    white, black = (np.full((8, 8, 3), value, np.uint8) for value in (255, 0))
    gray = np.full((8, 8, 3), 119, np.uint8)
    assert (pixel_score(white, black), pixel_score(white, white)) == (0.0, 1.0)
    assert pixel_score(white, gray) == pytest.approx(1 - (136 / 255) ** 2)
    # L = 100 and 0: a third of 100² on average
    assert color_score(white, black) == pytest.approx(np.exp(-10000 / 3 / 1000), rel=1e-3)
    assert [code_score("12345678", "x" * length) for length in (8, 4, 16)] == [0.8, 0.9, 0.4]


def test_edges_of_a_square_are_its_border() -> None:
    image = np.full((20, 20, 3), 255, np.uint8)
    image[5:15, 5:15] = 0
    edges = canny_edges(image)
    assert edges[4:16, 4:16].sum() == edges.sum() > 30
    assert not edges[7:13, 7:13].any()
    assert structural_score(edges, image) == 1.0
    assert structural_score(edges, np.full_like(image, 255)) == 0.0


def test_edges_are_those_of_opencv() -> None:
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(0)
    for number in range(20):
        image = rng.integers(0, 256, (*rng.integers(5, 60, 2), 3), dtype=np.uint8)
        image = cv2.GaussianBlur(image, (7, 7), 0) if number % 2 else image
        gray = ((image.astype(int) @ [19595, 38470, 7471] + 0x8000) >> 16).astype(np.uint8)
        assert np.array_equal(cv2.Canny(gray, 100, 200) > 0, canny_edges(image))


@pytest.fixture(scope="module")
def tiny_dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    directory = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(directory)
    BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(directory)
    return directory


def test_dino_compares_the_mean_features_of_a_batch(tiny_dino: Path) -> None:
    from transformers import AutoImageProcessor, AutoModel

    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (48, 48, 3), dtype=np.uint8) for _ in range(4)]
    scorer = load_scorer("dino", str(tiny_dino), "cpu")
    assert scorer.scores(images, images) == [1.0] * 4
    model = AutoModel.from_pretrained(tiny_dino)
    inputs = AutoImageProcessor.from_pretrained(tiny_dino, backend="pil")(images=images, return_tensors="pt")
    with torch.no_grad():
        features = model(**inputs).last_hidden_state.mean(1)
    expected = (torch.nn.functional.cosine_similarity(features[:1], features[1:]) + 1) / 2
    assert scorer.scores([images[0]] * 3, images[1:]) == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_dino_score_counts_with_its_weight(tiny_dino: Path) -> None:
    played = env(pixel_weight=0.0, structural_weight=0.0, dino_weight=4.0, dino_path=str(tiny_dino))
    played.reset(0)
    assert played.step(played.expert_action()).reward == 4.0


def test_dreamsim_loads_local_weights_and_turns_distances_into_similarities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, opened = ModuleType("dreamsim"), []

    def dreamsim(*, pretrained: bool, cache_dir: str, device: str) -> Any:
        opened.append((pretrained, cache_dir, device))
        return (lambda a, b: (a - b).abs().amax((1, 2, 3)) * 1.5), (
            lambda image: torch.tensor(np.array(image)).permute(2, 0, 1)[None] / 255.0
        )

    package.dreamsim = dreamsim  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dreamsim", package)
    white, black, gray = (np.full((8, 8, 3), value, np.uint8) for value in (255, 0, 204))
    scorer = load_scorer("dreamsim", str(tmp_path), "cpu")
    assert scorer.scores([white] * 3, [white, black, gray]) == pytest.approx([1.0, 0.0, 0.7])
    assert opened == [(True, str(tmp_path), "cpu")]


SVG = ["env.name=svg", "policy.preset=grid-vl"]


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["env.dino_weight=1"], ("env.dino_weight = 1", "dino_path is not set", "hf download facebook/dinov2-small")),
        (["env.dino_weight=1", "env.dino_path=nowhere"], ("no config.json of dino_path = nowhere",)),
        (["env.dreamsim_weight=1"], ("env.dreamsim_weight = 1", "package dreamsim", "env.dreamsim_weight=0")),
        (["env.dataset=nowhere"], ("env.dataset = 'nowhere'", "does not exist", "env.dataset=null")),
        (["env.pixel_weight=0", "env.structural_weight=0"], ("all weights are 0", "env.structural_weight=1")),
    ],
)
def test_a_score_that_is_not_available_refuses_the_run_by_its_key(
    overrides: list[str], messages: tuple[str, ...]
) -> None:
    problems = " ".join(map(str, run_problems(load_experiment(None, [*SVG, *overrides]))))
    assert all(word in problems for word in messages)


def test_missing_weights_of_dreamsim_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.hardware.is_installed", lambda name: True)
    overrides = ["env.dreamsim_weight=1", f"env.dreamsim_path={tmp_path}"]
    (problem,) = run_problems(load_experiment(None, [*SVG, *overrides]))
    assert "ensemble_lora" in str(problem)


def test_a_score_without_weight_needs_nothing(tiny_dino: Path) -> None:
    assert not list(run_problems(load_experiment(None, SVG)))
    overrides = ["env.dino_weight=1", f"env.dino_path={tiny_dino}"]
    assert not list(run_problems(load_experiment(None, [*SVG, *overrides])))


def test_a_policy_without_eyes_is_refused() -> None:
    (problem,) = run_problems(load_experiment(None, ["env.name=svg"]))
    assert "policy.preset=grid-vl" in str(problem)
    assert "render=text" not in str(problem)


def test_the_attempts_of_all_waiting_episodes_are_compared_in_one_batch(
    tiny_dino: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"dino_weight": 1.0, "dino_path": str(tiny_dino), "success_score": 1.0}
    scorer, sizes = load_scorer("dino", str(tiny_dino), "cpu"), []
    compare = type(scorer).scores
    monkeypatch.setattr(type(scorer), "scores", lambda self, a, b: sizes.append(len(b)) or compare(self, a, b))
    envs = LocalVectorEnv(lambda: env(**fields))
    codes = [icon_code(seed, 1) for seed in range(5)] + ["<svg/>x", ""]
    for number in range(7):
        envs.start(number, number)
    envs.poll()
    for number, code in enumerate(codes):
        envs.step(number, [code])
    assert envs.pending
    envs.start(7, 7)
    together = envs.poll()
    assert (sizes, [event.episode for event in together]) == ([5], list(range(8)))
    for number, event in enumerate(together[:7]):
        alone = env(**fields)
        alone.reset(number)
        assert isinstance(event, ActionsExecuted)
        assert event.steps[0].reward == alone.step(codes[number]).reward
    envs.close()
