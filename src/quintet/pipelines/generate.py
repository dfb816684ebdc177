"""Generation of responses to the prompts of data files, without training."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.data import DataConfig, GenerationConfig
from quintet.config.native.experiment import Experiment
from quintet.config.yaml_writer import dump_config
from quintet.data.data_files import cache_directory, resolve_files
from quintet.data.prompt_split import PromptSplit
from quintet.data.response_file import ResponseFile
from quintet.errors import ConfigError, InterruptedRun, MachineError
from quintet.pipelines.response_store import ResponseBatch, ResponseStore, generation_settings
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.policies.reward_model import import_libraries
from quintet.records import FinishReason, Generation
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.episode import LOST, UNEXPLAINED, Episode
from quintet.rollout.sampling_params import SamplingParams, check_tokens, training_sampling
from quintet.runtime.components import build_engines, stop_token_ids
from quintet.runtime.controller import Controller
from quintet.runtime.engines.engine_builders import load_checked_tokenizer
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.signals import StopRequest, stop_on_signals
from quintet.seeds import derive_seed
from quintet.tracking.progress import Progress, build_progress
from quintet.tracking.progress_file import RecordedProgress
from quintet.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

CONFIG, STORE = "generation.yaml", "responses.jsonl"
"""Files in the run directory: the configuration, and the responses so far."""


@dataclass(slots=True)
class _Stopped(Exception):
    """A signal asks to stop in the middle of a batch."""

    request: StopRequest


def generate(composed: ComposedConfig, console: Console, controller: Controller | None = None) -> int:
    """Generate the responses that the run does not have yet with `policy.path`, on the workers of the controller or,
    without one, in this process; then write `generation.output_path`. Return the exit status.

    Raises:
        ConfigError: files, columns or lengths do not match the configuration, or stored responses belong to another.
        MachineError: the model cannot be read, an engine keeps failing, or a file cannot be written.
        InterruptedRun: a signal asked to stop; complete batches are stored.
    """
    config, controller = composed.experiment, controller or Controller.in_process()
    generation, data = _sections(config)
    import_libraries(config.external_libs, "external_libs")
    directory = RunDirectory.create_for(composed)
    with directory.lock(), stop_on_signals(controller.check_alive) as stop, ExitStack() as resources:
        directory.write_text(CONFIG, dump_config(composed))
        directory.write_keys(composed)
        directory.write_state("running")
        progress = RecordedProgress(build_progress(console), directory.progress)
        prompts = _open_prompts(config, data)
        resources.callback(prompts.close)
        files = _data_files(data)
        output = ResponseFile.plan(
            Path(generation.output_path).expanduser(), generation.response_key, lambda: _rows(prompts), files
        )
        settings, restart = generation_settings(config, files), config.resume == "never"
        store = resources.enter_context(closing(ResponseStore(directory.path / STORE, settings, restart=restart)))
        if store.num_prompts < len(prompts):
            _check_lengths(prompts, store.num_prompts, data)
            engines = _Engines.build(config, prompts, controller)
            resources.callback(engines.group.close)
            _generate_missing(engines, store, generation, progress, stop)
        output.write(_rows(prompts), (texts for batch in store.batches() for texts in batch.responses))
        directory.write_state("finished")
        for line in _summary(store, output, config):
            progress.note(line)
    return 0


def _sections(config: Experiment) -> tuple[GenerationConfig, DataConfig]:
    """Return the sections `generation` and `data`.

    Raises:
        ConfigError: there are no prompts.
    """
    if config.generation is None:
        raise AssertionError("the command has checked the section `generation`")
    if config.data is None or not config.data.train_files:
        key = "data.train_files"
        raise ConfigError("there are no prompts to respond to", key=key, hint=f"{key}=[FILE.parquet]")
    return config.generation, config.data


def _open_prompts(config: Experiment, data: DataConfig) -> PromptSplit:
    policy, trusted = Path(str(config.policy.path)), config.policy.runs_tokenizer_code
    tokenizer = load_policy_tokenizer(config.policy, policy)
    images = ImagePrompts.from_directory(policy, config.policy.vision, trust_remote_code=trusted)
    limit = config.rollout.max_prompt_tokens
    return PromptSplit.from_config(data, tokenizer, limit, "train", config.seed, images, trust_remote_code=trusted)


def _data_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the files with the rows, none if a user's class reads them."""
    if data.dataset_class is not None:
        return ()
    files = resolve_files(data.train_files, "data.train_files", cache_directory(data.cache_dir))
    return tuple(path for paths in files for path in paths)


def _rows(prompts: PromptSplit) -> Iterator[Any]:
    return (prompts.source_row(row) for row in range(len(prompts)))


def _check_lengths(prompts: PromptSplit, first: int, data: DataConfig) -> None:
    """Raise for a prompt that is too long before the first response is generated."""
    for row in range(first, len(prompts)) if data.truncation == "error" and not data.filter_long_prompts else ():
        prompts.prompt(row)


def _generate_missing(
    engines: _Engines, store: ResponseStore, generation: GenerationConfig, progress: Progress, stop: StopRequest
) -> None:
    """Generate and store the responses to all prompts that have none, batch by batch."""
    rows = range(len(engines.prompts))
    samples = generation.samples
    size = generation.batch_size
    done = store.num_prompts
    with progress.phase("generating", len(rows) * samples, done=done * samples, unit="response") as phase:
        for first in range(done, len(rows), size):
            try:
                store.append(engines.respond(rows[first : first + size], samples, phase.advance, stop))
            except _Stopped as stopped:
                number = stopped.request.number or signal.SIGINT
                message = f"stopped by {number.name}: {store.num_prompts:,} of {len(rows):,} prompts have responses"
                raise InterruptedRun(message, "rerun the same command to continue", number) from None


@dataclass(frozen=True, slots=True)
class _Engines:
    """Engines with the policy, and what they answer."""

    group: RoutedEngines
    tokenizer: Any
    prompts: PromptSplit
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_tokens: int

    @classmethod
    def build(cls, config: Experiment, prompts: PromptSplit, controller: Controller) -> _Engines:
        """Build the engines on the workers of the controller, with the model at `policy.path`."""
        policy = Path(str(config.policy.path))
        learners = controller.build_learners(config, policy)
        model = learners.actor.model
        vocabulary = model.config.get_text_config().vocab_size
        tokenizer = load_checked_tokenizer(config, policy, vocabulary)
        check_tokens(config, vocabulary)
        group, weight_sync = build_engines(config, policy, tokenizer, learners, controller)
        weight_sync.sync(0)  # merged adapters, or all weights if `load_format` is dummy
        sampling = training_sampling(config, derive_seed(config.seed, "generation"))
        ends = stop_token_ids(tokenizer, model.generation_config)
        return cls(group, tokenizer, prompts, sampling, ends, config.rollout.max_response_tokens)

    def respond(
        self, rows: Sequence[int], samples: int, advance: Callable[[], None], stop: StopRequest
    ) -> ResponseBatch:
        """Return `samples` responses to each prompt of `rows`. They depend on the seed, the row and the sample, not on
        earlier batches."""
        self.group.reset_prefix_cache()
        texts, counts = [[""] * samples for _ in rows], dict.fromkeys(FinishReason, 0)
        waiting = self._request(rows, samples)
        num_empty, tokens = len(rows) * samples - len(waiting), 0
        while self.group.busy:
            for generation in self.group.step():
                prompt, sample = divmod(generation.id, samples)
                texts[prompt][sample] = self._text(generation, rows[prompt])
                counts[generation.finish_reason] += 1
                tokens += len(generation.tokens)
                waiting.discard(generation.id)
                advance()
            if stop:
                self.group.abort(waiting)
                raise _Stopped(stop)
        if waiting:
            raise _failed(rows[min(waiting) // samples], f"{LOST.error_type}: {LOST.message}")
        return ResponseBatch(texts, tokens, counts[FinishReason.LENGTH] + counts[FinishReason.CONTEXT], num_empty)

    def _request(self, rows: Sequence[int], samples: int) -> set[int]:
        """Request the responses; return the ids of requests for which the context has room."""
        accepted = set()
        for index, row in enumerate(rows):
            prompt, images = self.prompts.prompt(row), self.prompts.images(row)
            for sample in range(samples):
                seed, number = Episode(row, row, sample).sampling_seed(self.sampling, 0), index * samples + sample
                request = self.sampling.request(
                    number, prompt, self.max_tokens, seed, self.stop_token_ids, images=images
                )
                try:
                    self.group.add_request(request)
                except ValueError:
                    continue
                accepted.add(number)
        return accepted

    def _text(self, generation: Generation, row: int) -> str:
        if generation.finish_reason is FinishReason.FAILED:
            failure = generation.failure or UNEXPLAINED
            raise _failed(row, f"{failure.error_type}: {failure.message}")
        text = str(self.tokenizer.decode(list(generation.tokens), skip_special_tokens=True))
        # tokens may decode to lone surrogates, which no file can hold
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _failed(row: int, problem: str) -> MachineError:
    hint = "fix the engine, and rerun the same command to continue after the last batch"
    return MachineError(f"the response to prompt {row} could not be generated: {problem}", hint)


def _summary(store: ResponseStore, output: ResponseFile, config: Experiment) -> Iterator[str]:
    """Yield what was written, and what is unusual about it."""
    responses = tokens = cut_off = empty = 0
    for batch in store.batches():
        responses += sum(map(len, batch.responses))
        tokens, cut_off, empty = tokens + batch.tokens, cut_off + batch.num_cut_off, empty + batch.num_empty
    mean = f"{tokens / max(1, responses):,.0f} tokens on average"
    limit = f"{cut_off / max(1, responses):.0%} cut off at {config.rollout.max_response_tokens:,} tokens"
    yield f"{store.num_prompts:,} prompts, {responses:,} responses: {mean}, {limit}"
    if empty:
        yield f"{empty:,} responses are empty: rollout.engine_options.max_model_tokens leaves their prompts no room"
    yield f"written to {output.path}; score it: quintet eval evaluation.path={output.path}"
