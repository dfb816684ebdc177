"""Extension of vLLM's worker: exact log-probs and weight loading.

vLLM mixes `QuintetWorker` into its worker class (`worker_extension_cls`); `collective_rpc` calls its methods by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from quintet.policies.output_head import MASKED_LOGIT
from quintet.rollout.engines.hf.sampling import uniform
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeightsReader
from quintet.rollout.engines.vllm.cpu_weight_loader import CpuWeightLoader

SEED = "quintet_seed"
"""Key of a request's seed in `SamplingParams.extra_args`, on a CPU."""
NUM_SEEDS = 2**31

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM decodes greedily."""


class QuintetWorker:
    """Methods added to every vLLM worker."""

    model_runner: Any
    reload_weights: Any
    _quintet_reader: SharedWeightsReader | None = None
    _quintet_loader: CpuWeightLoader | Literal[False] | None = None
    """False if vLLM's own method loads the weights."""

    def quintet_install_exact_sampler(self, masked_tokens: Sequence[int] = ()) -> str | None:
        """Install a sampler with the log-probs of `Generation`, which never samples `masked_tokens`. Return the name of
        vLLM's sampler if it is unknown."""
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        runner = self.model_runner
        kind = type(runner.sampler)
        if f"{kind.__module__}.{kind.__qualname__}" != "vllm.v1.sample.sampler.Sampler":
            return f"{kind.__module__}.{kind.__qualname__}"
        runner.sampler = _exact_sampler(kind)(logprobs_mode="raw_logprobs")
        runner.sampler.masked_tokens = torch.tensor(masked_tokens, device=runner.device) if masked_tokens else None
        runner.sample_tokens = _keeping_unmasked_logits(runner)
        if runner.device.type == "cpu":
            runner.sampler.topk_topp_sampler.forward = _seeded_sampling(runner)
        return None

    def quintet_load_tensors(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights from tensors of this process, tied weights under each of their names."""
        if self._quintet_loader is None:
            self._quintet_loader = CpuWeightLoader.build(self.model_runner.get_model(), weights)
        # with other threads than at the start, oneDNN may pack layers in another layout than its cached kernels read;
        # in a new Python thread, their number is the machine's until torch sets it here
        torch.get_num_threads()
        if self._quintet_loader:
            self._quintet_loader.load(weights)
        else:
            self.reload_weights(weights_iterator=iter(weights.items()))

    def quintet_load_shared(self, shared_tensors: Sequence[Sequence[Any]], aliases: Sequence[tuple[str, str]]) -> None:
        """Load weights from shared memory: the fields of each `SharedTensor`, and `(alias, name)` of tied weights."""
        if self._quintet_reader is None:
            self._quintet_reader = SharedWeightsReader()
        shared = [
            SharedTensor(name, dtype, tuple(shape), *shared_tensor)
            for name, dtype, shape, *shared_tensor in shared_tensors
        ]
        weights = dict(self._quintet_reader.read(shared))
        self.quintet_load_tensors(weights | {alias: weights[name] for alias, name in aliases})


def _exact_sampler(sampler: type[Any]) -> type[Any]:
    """A subclass of vLLM's sampler with log-probs under the temperature: vLLM's `raw_logprobs` ignore the temperature,
    its `processed_logprobs` include top-k, top-p, min-p and penalties, and both the bitmask of structured outputs."""

    from vllm.v1.outputs import LogprobsTensors

    class ExactSampler(sampler):  # type: ignore[misc]
        _temperature: Tensor | None = None
        masked_tokens: Tensor | None = None
        """int64 [k], tokens that only prompts contain."""
        unmasked_logits: Tensor | None = None
        """Logits of this step before the bitmask of structured outputs, if any request has one."""

        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            """Sample from logits [requests, vocab]."""
            self._temperature = sampling_metadata.temperature
            for values in (logits, self.unmasked_logits):
                if values is not None and self.masked_tokens is not None:
                    values.index_fill_(-1, self.masked_tokens, MASKED_LOGIT)
            return super().forward(logits, sampling_metadata, *args, **kwargs)

        def compute_logprobs(self, logits: Tensor) -> Tensor:
            """Log-probs of the whole vocabulary under each request's temperature (1 if greedy), nats."""
            logits = (logits if self.unmasked_logits is None else self.unmasked_logits).float()
            if self._temperature is not None:
                temperature = self._temperature.where(self._temperature >= GREEDY_BELOW, 1.0)
                logits = logits / temperature[:, None]
            return logits.log_softmax(dim=-1)

        def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
            """Log-probs of the sampled tokens, int64 [requests]. vLLM would also compute their ranks in a compiled
            loop."""
            if num_logprobs:
                return super().gather_logprobs(logprobs, num_logprobs, token_ids)
            sampled = token_ids[:, None]
            return LogprobsTensors(sampled.int(), logprobs.gather(-1, sampled), token_ids.new_zeros(token_ids.shape))

    return ExactSampler


def _keeping_unmasked_logits(runner: Any) -> Callable[[Any], Any]:
    """The runner's `sample_tokens`, which overwrites the logits by the bitmask of structured outputs."""
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        logits = None if grammar_output is None else getattr(runner.execute_model_state, "logits", None)
        runner.sampler.unmasked_logits = None if logits is None else logits.clone()
        return sample_tokens(grammar_output)

    return sample


def _seeded_sampling(runner: Any) -> Callable[..., tuple[Tensor, None]]:
    """Sampling on a CPU with noise from the request's seed and the token's position.

    vLLM's per-request generators cannot be rewound after a chunked prefill there: vLLM dies.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def seeds() -> Tensor:
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        base = [(request.sampling_params.extra_args or {}).get(SEED, 0) for request in requests]
        positions = [len(request.output_token_ids) for request in requests]
        return (uniform(torch.tensor(base), torch.tensor(positions)) * NUM_SEEDS).long()

    def sample(logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, None]:
        processed = apply_top_k_top_p(logits, k, p).float()
        return torch.ops._C.fused_gumbel_argmax(processed, seeds()), None

    return sample
