"""What Quintet adds to vLLM's worker, in whatever process that lives: exact log-probs, and weights by file.

vLLM mixes `QuintetWorker` into its own worker class (`worker_extension_cls`) and calls its methods by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.rollout.sampling import uniform

__all__ = ["SEED", "QuintetWorker"]

SEED = "quintet_seed"
"""Name of a request's seed among the further arguments of its sampling, on a CPU."""
MOST_STREAMS = 2**31
SMALL = 64 * 2**20
"""Bytes."""

GREEDY_BELOW = 1e-5
"""vLLM's own bound: colder requests take the likeliest token."""


class QuintetWorker:
    """Methods of every worker of an engine of ours."""

    model_runner: Any
    reload_weights: Any

    def quintet_draw_exactly(self) -> str | None:
        """Draw and report log-probs as `Generation` promises; otherwise the name of the sampler that can't."""
        # of its own code, about its own code
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        runner = self.model_runner
        kind = type(runner.sampler)
        if f"{kind.__module__}.{kind.__qualname__}" != "vllm.v1.sample.sampler.Sampler":
            return f"{kind.__module__}.{kind.__qualname__}"
        runner.sampler = _exact_sampler(kind)(logprobs_mode="raw_logprobs")
        if runner.device.type == "cpu":
            runner.sampler.topk_topp_sampler.forward = _drawing_by_place(runner)
        return None

    def quintet_take(self, weights: Iterable[tuple[str, Tensor]], size: int) -> None:
        """Take weights of `size` bytes; for an engine in this process."""
        with _few_threads(size):
            self.reload_weights(weights_iterator=weights)

    def quintet_load(self, path: str, aliases: list[tuple[str, str]]) -> None:
        """Take the weights of a safetensors file; each alias is one of them once more, under another name."""
        self.quintet_take(_stored(Path(path), aliases), Path(path).stat().st_size)


@contextmanager
def _few_threads(size: int) -> Iterator[None]:
    """One thread for little weights: what several would gain in many small copies, they lose many times over in waiting
    for each other as soon as anything else runs on the machine."""
    threads = torch.get_num_threads()
    # `torch.set_num_threads` does nothing in a worker
    torch._C.set_num_threads(1 if size < SMALL else threads)
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)


def _stored(path: Path, aliases: list[tuple[str, str]]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            yield name, file.get_tensor(name)
        for alias, name in aliases:
            yield alias, file.get_tensor(name)


def _exact_sampler(sampler: type[Any]) -> type[Any]:
    """vLLM's sampler, with log-probs of another kind: its `raw_logprobs` forget the temperature, and its
    `processed_logprobs` are of what top-k, top-p, min-p and the penalty left over."""

    from vllm.v1.outputs import LogprobsTensors as theirs  # noqa: N813

    class ExactSampler(sampler):  # type: ignore[misc]
        _temperature: Tensor | None = None

        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            """Logits [requests, vocabulary]."""
            self._temperature = sampling_metadata.temperature
            return super().forward(logits, sampling_metadata, *args, **kwargs)

        def compute_logprobs(self, logits: Tensor) -> Tensor:
            """Nats of the whole vocabulary under each request's temperature, under 1 where it is greedy."""
            logits = logits.float()
            if self._temperature is not None:
                heat = self._temperature.where(self._temperature >= GREEDY_BELOW, 1.0)
                logits = logits / heat[:, None]
            return logits.log_softmax(dim=-1)

        def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
            """Those of the drawn tokens, int64 [requests], alone; vLLM would count the likelier ones, too, in a loop
            that it compiles first."""
            if num_logprobs:
                return super().gather_logprobs(logprobs, num_logprobs, token_ids)
            drawn = token_ids[:, None]
            return theirs(drawn.int(), logprobs.gather(-1, drawn), token_ids.new_zeros(token_ids.shape))

    return ExactSampler


def _drawing_by_place(runner: Any) -> Callable[..., tuple[Tensor, None]]:
    """How tokens are drawn on a CPU: from noise that follows from a request's seed and the token's place.

    vLLM's own way there draws from a generator that each request carries, and can't turn it back where a prompt was
    read in pieces: it dies.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def seeds() -> Tensor:
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        own = [(request.sampling_params.extra_args or {}).get(SEED, 0) for request in requests]
        places = [len(request.output_token_ids) for request in requests]
        return (uniform(torch.tensor(own), torch.tensor(places)) * MOST_STREAMS).long()

    def draw(logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, None]:
        kept = apply_top_k_top_p(logits, k, p).float()
        return torch.ops._C.fused_gumbel_argmax(kept, seeds()), None

    return draw
