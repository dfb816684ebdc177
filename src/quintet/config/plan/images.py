"""Images of a run's sequences: their size, their number, and the work of the vision encoder."""

from collections.abc import Iterator
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.plan.batches import RankWorkload, max_sequence_tokens
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.vision_encoder import VisionEncoderShape, image_grid
from quintet.config.problems import ConfigProblem, raise_problems


@dataclass(frozen=True, slots=True)
class PlannedImages:
    """Images of the sequences of one environment, or of the rows of data files."""

    key: str
    """Key of the environment, or `data`."""
    rows: int
    columns: int
    """Tokens per side of the largest image."""
    per_sequence: int
    """Maximum images of a sequence."""
    is_exact: bool
    """Whether the configuration sets the size; otherwise it is the maximum of `policy.vision.max_pixels`."""
    per_turn: int = 1
    """Images of an observation."""

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.rows * self.columns

    @property
    def sequence_tokens(self) -> int:
        """Maximum image tokens of a sequence."""
        return self.tokens * self.per_sequence


def plan_images(config: Experiment, encoder: VisionEncoderShape) -> Iterator[PlannedImages]:
    """Yield the images of each environment that shows some, and of data files. Without a size in the configuration they
    have the largest that `policy.vision.max_pixels` allows; without that key they are unknown and left out."""
    limit = config.policy.vision.max_pixels
    for env in config.run_envs:
        if env.config.requires is not None:
            continue
        size = env.config.rendered_size if env.config.shows_images else None
        if size is not None:
            rows, columns = _grid(config, encoder, *size)
            per_turn = env.config.images_per_observation
            per_sequence = per_turn * _visible_turns(env)
            yield PlannedImages(env.key, rows, columns, per_sequence, is_exact=True, per_turn=per_turn)
        elif limit is not None and (env.config.shows_images or env.config.name == "custom"):
            yield PlannedImages(env.key, 1, _largest(encoder, limit), _visible_turns(env), is_exact=False)
    if limit is not None and config.env.reads_prompts and config.data and config.data.image_key:
        yield PlannedImages("data", 1, _largest(encoder, limit), 1, is_exact=False)


def _visible_turns(env: RunEnv) -> int:
    return min(env.rollout.max_turns, env.rollout.window_size or env.rollout.max_turns)


def _grid(config: Experiment, encoder: VisionEncoderShape, height: int, width: int) -> tuple[int, int]:
    vision = config.policy.vision
    min_pixels, max_pixels = vision.min_pixels or encoder.min_pixels, vision.max_pixels or encoder.max_pixels
    return image_grid(height, width, encoder.factor, min_pixels, max_pixels)


def _largest(encoder: VisionEncoderShape, max_pixels: int) -> int:
    return max(1, max_pixels // encoder.factor**2)


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Work of a vision encoder in the passes of one rank; maxima, as if no two sequences showed the same image."""

    patches: int
    """Patches of a micro-batch."""
    flops: int
    """FLOPs of a forward pass over the images of all its sequences."""


def encoder_work(config: Experiment, shape: ModelShape, work: RankWorkload) -> EncoderWork:
    """Return the work on a rank's sequences; that of the environment with most image tokens stands for all."""
    images = largest_images(config, shape)
    if images is None or shape.encoder is None:
        return EncoderWork(0, 0)
    length, area = max_sequence_tokens(config), shape.encoder.merge**2
    sequence_tokens = min(images.sequence_tokens, config.rollout.max_prompt_tokens)
    tokens = -(-work.tokens_per_micro_batch * sequence_tokens // length)
    per_sequence = sequence_tokens / images.tokens
    flops = work.sequences_per_rank * per_sequence * shape.encoder.flops(images.rows, images.columns)
    return EncoderWork(tokens * area, int(flops))


def largest_images(config: Experiment, shape: ModelShape | None) -> PlannedImages | None:
    """Return the images of the environment with most image tokens per sequence; None if there are none or their size is
    unknown."""
    if shape is None or shape.encoder is None:
        return None
    return max(plan_images(config, shape.encoder), key=lambda images: images.sequence_tokens, default=None)


def has_unknown_images(config: Experiment) -> bool:
    """Return whether an environment or data files may show images whose size the configuration does not limit."""
    if config.policy.vision.max_pixels is not None:
        return False
    envs = [env.config for env in config.run_envs if env.config.requires is None]
    shows_images = any((env.shows_images and env.rendered_size is None) or env.name == "custom" for env in envs)
    return shows_images or bool(config.env.reads_prompts and config.data and config.data.image_key)


def trains_encoder(config: Experiment, component: str) -> bool:
    """Return whether a learner trains its vision encoder, or adapters of it."""
    if config.policy.vision.freeze:
        return False
    lora = config.policy.lora
    return component == "critic" or lora is None or "all-linear" in lora.target_modules


def image_problems(composed: ComposedConfig, models: Models) -> Iterator[ConfigProblem]:
    """Yield the environments whose images alone exceed the prompt: those of one turn, or of all turns of the window."""
    config, shape = composed.experiment, models.of("actor")
    if shape is None or shape.encoder is None:
        return
    limits = {"rollout.max_prompt_tokens": config.rollout.max_prompt_tokens, "the context of the model": shape.context}
    name, limit = min(((n, size) for n, size in limits.items() if size is not None), key=lambda item: item[1])
    for images in plan_images(config, shape.encoder):
        visible = images.per_sequence if config.rollout.window_size is not None else images.per_turn
        if images.is_exact and images.tokens * visible > limit:
            yield _image_problem(composed, images, visible, name, limit, shape.encoder.factor)


def check_images(composed: ComposedConfig) -> None:
    """Check that the images of every environment fit into a prompt.

    Raises:
        ConfigError: one message names every key that cannot work.
    """
    raise_problems(image_problems(composed, find_models(composed.experiment)))


def _image_problem(
    composed: ComposedConfig, images: PlannedImages, visible: int, name: str, limit: int, factor: int
) -> ConfigProblem:
    """Return the problem, with a smaller window as the hint if an image fits, otherwise smaller images."""
    figure = f"an image of {images.key} takes {images.rows} × {images.columns} = {images.tokens:,} tokens"
    key = name if name.startswith("rollout.") else "policy.vision.max_pixels"
    maximum = f"the {limit:,} tokens of {name}"
    turn_tokens = images.tokens * images.per_turn
    if visible > images.per_turn and turn_tokens <= limit:
        window = composed.describe("rollout.window_size")
        problem = f"{figure}, and all of {window} {images.tokens * visible:,}, more than {maximum}"
        return composed.problem(key, problem, f"rollout.window_size={limit // turn_tokens}")
    side = factor * max(1, int((limit // images.per_turn) ** 0.5))
    figure += f", and the {images.per_turn} of an observation {turn_tokens:,}" if images.per_turn > 1 else ""
    return composed.problem(key, f"{figure}, more than {maximum}", f"policy.vision.max_pixels={side**2}")
