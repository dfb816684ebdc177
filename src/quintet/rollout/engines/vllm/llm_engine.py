"""Wrapper of vLLM's `LLMEngine`: start, requests, weights, sleep and shutdown.

Only this module uses vLLM's classes in the controller and worker processes. In this process `LLMEngine` runs a step per
call; in its own processes it runs ahead and puts outputs into a queue.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.errors import ConfigError, UserError
from quintet.policies.output_head import OutputHead
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.rollout.engines.engine import EngineError, EngineSetup
from quintet.rollout.engines.shared_weights import MappedWeights, SharedWeights
from quintet.rollout.engines.vllm.options import KEY, Release, engine_arguments, environment
from quintet.rollout.engines.vllm.weight_sync import WeightPlan
from quintet.rollout.engines.vllm.worker_extension import SEED

NUM_SEEDS = 2**63
GRACE_SECONDS = 2.0
"""Time that processes have to exit."""
_ENGINES_IN_PROCESS: list[int] = []


class RequestRejectedError(ValueError):
    """vLLM rejects a request."""


class LlmEngine:
    """A running vLLM."""

    def __init__(self, setup: EngineSetup) -> None:
        """See `build_vllm_engine`."""
        self._setup = setup
        self._separate_process = setup.options.separate_process
        several = setup.options.tensor_parallel * setup.options.pipeline_parallel > 1
        self._has_workers = self._separate_process or several or setup.options.executor == "ray"
        if not self._separate_process:
            _check_exclusive()
        self._engine: Any = None
        self._weights_offloaded = False
        self._shared_weights = SharedWeights()
        self._exit_messages: list[str] = []
        self._all_processes: list[Any] = []
        if not setup.options.log_statistics:
            # for messages before vLLM has read its settings
            logging.getLogger("vllm").setLevel(logging.ERROR)
        num_gpus = setup.options.tensor_parallel * setup.options.pipeline_parallel
        variables = gpu_variables(num_gpus) if self._separate_process else {}
        with _preserved_process_state(environment(setup.options), variables):
            self._start()
        if not self._separate_process:
            _ENGINES_IN_PROCESS.append(id(self))
        with ExitStack() as stack:
            # also KeyboardInterrupt must not leave processes behind
            stack.callback(self.close)
            self._set_up()
            stack.pop_all()

    def _set_up(self) -> None:
        """Find vLLM's processes and install exact sampling."""
        self._processes = self._find_processes()
        self._all_processes = _process_tree(self._processes)
        if self._separate_process:
            threading.Thread(target=self._watch, args=(self._engine.engine_core,), daemon=True).start()
        self._install_exact_sampler()

    def _start(self) -> None:
        try:
            self._create_engine()
        except UserError:
            raise
        except ValueError as error:
            message = f"vLLM rejects the engine options: {_first_lines(error)}"
            raise ConfigError(message, key=KEY, hint=f"change {KEY} or rollout.max_concurrent") from error
        except Exception as error:  # vLLM raises errors of any type
            raise EngineError(f"vLLM does not start: {_first_lines(error)}") from error
        finally:
            if self._engine is None and not self._separate_process:
                _destroy_process_groups()

    def _create_engine(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if is_vision_language(self._setup.model.config):
            importlib.import_module("quintet.rollout.engines.vllm.image_inputs")
        self._release = _installed_release(EngineArgs)
        config = EngineArgs(**engine_arguments(self._setup, self._release)).create_engine_config()
        self._has_sleep_mode = bool(config.model_config.enable_sleep_mode)
        self._multimodal = bool(config.model_config.is_multimodal_model)
        self.max_model_len = int(config.model_config.max_model_len)
        statistics = self._setup.options.log_statistics
        self._engine = _build_llm_engine(
            LLMEngine, config, separate_process=self._separate_process, statistics=statistics
        )
        # stop tokens are those of the request, also for `min_tokens`
        self._engine.input_processor.generation_config_fields = {}

    def _find_processes(self) -> list[Any]:
        """Child processes of vLLM as `multiprocessing` processes."""
        if self._separate_process:
            return list(self._engine.engine_core.resources.engine_manager.processes)
        # Ray ends its actors itself
        has_children = self._has_workers and self._setup.options.executor == "mp"
        return [worker.proc for worker in self._engine.model_executor.workers] if has_children else []

    def _watch(self, client: Any) -> None:
        """Fail pending calls once a process of vLLM has ended; vLLM would wait forever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        wait([process.sentinel for process in self._processes])
        for process in self._processes:
            process.join(timeout=GRACE_SECONDS)
        self._exit_messages = [_exit_message(process) for process in self._processes]
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(EngineDeadError())
        for future in list(client.utility_results.values()):
            if not future.done():
                future.set_exception(EngineDeadError())

    def _install_exact_sampler(self) -> None:
        head = self._setup.model.get_output_embeddings()
        masked = head.masked_tokens.tolist() if isinstance(head, OutputHead) else []
        results = self._engine.collective_rpc("quintet_install_exact_sampler", args=(masked,))
        unknown = [name for name in results if name]
        if unknown:
            message = f"vLLM {self._release.version} samples with {unknown[0]}, whose log-probs are unknown"
            raise EngineError(f"{message}; vLLM 0.32.0 is supported")

    def seed_arguments(self, seed: int) -> dict[str, Any]:
        """Return the arguments of `SamplingParams` for a seed. vLLM treats -1 as no seed."""
        seed = seed % NUM_SEEDS
        return {"extra_args": {SEED: seed}} if self._release.cpu else {"seed": seed}

    def add_request(self, name: str, prompt: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """Queue a request under a unique name; `prompt` is one of vLLM's.

        Raises:
            RequestRejectedError: vLLM rejects it; other requests continue.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        options = {"detokenize": self._setup.options.detokenize, "output_kind": RequestOutputKind.DELTA}
        structured = sampling["structured_outputs"]
        try:
            options["structured_outputs"] = structured and StructuredOutputsParams(**structured)
            self._engine.add_request(name, dict(prompt), SamplingParams(**{**sampling, **options}))
        except (ValueError, VLLMClientError) as error:
            raise RequestRejectedError(_first_lines(error)) from error

    def step(self) -> list[Any]:
        """Return new outputs; with its own process, wait for some."""
        outputs: list[Any] = self._engine.step()
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    def pause(self) -> list[Any]:
        """Pause generation and return the outputs until then."""
        if not self._separate_process:
            return []
        self._engine.sleep(level=0, mode="keep")
        outputs = []
        while not self._engine.engine_core.outputs_queue.empty():
            outputs += self._engine.step()
        return outputs

    def resume(self) -> None:
        if self._separate_process:
            self._engine.wake_up(tags=["scheduling"])

    def load_weights(self, weights: Mapping[str, Tensor], plan: WeightPlan, mapped: MappedWeights | None) -> None:
        """Load full weights into the model; `mapped` names the weights that are in shared memory already."""
        if self._weights_offloaded:
            self._engine.wake_up(tags=["weights"])
            self._weights_offloaded = False
        if not self._has_workers:
            self._engine.collective_rpc("quintet_load_tensors", args=(dict(plan.with_aliases(weights)),))
            return
        shared_tensors = self._share(weights, mapped)
        self._engine.collective_rpc("quintet_load_shared", args=(shared_tensors, list(plan.aliases)))

    def _share(self, weights: Mapping[str, Tensor], mapped: MappedWeights | None) -> list[tuple[Any, ...]]:
        """Copy weights that are not in shared memory there, and return the fields of each `SharedTensor`."""
        shared = {name: mapped.shared_tensor_of(tensor) for name, tensor in weights.items()} if mapped else {}
        shared_tensors = [
            replace(shared_tensor, name=name) for name, shared_tensor in shared.items() if shared_tensor is not None
        ]
        unshared = ((name, tensor) for name, tensor in weights.items() if shared.get(name) is None)
        return [
            astuple(shared_tensor)
            for shared_tensor in (*shared_tensors, *self._shared_weights.write(unshared, self._setup.dtype))
        ]

    def reset_prefix_cache(self) -> None:
        """Drop the KV cache, also of running requests, which are prefilled again."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self._multimodal:
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Free the KV cache, and with `offload` move the weights to the CPU."""
        self.reset_prefix_cache()
        if self._has_sleep_mode:
            self._engine.sleep(level=1)
            self._weights_offloaded = self._setup.options.offload
            if not self._weights_offloaded:
                self._engine.wake_up(tags=["weights"])

    def wake_up(self) -> None:
        if self._has_sleep_mode:
            self._engine.wake_up(tags=None if self._weights_offloaded else ["kv_cache"])
            self._weights_offloaded = False

    def describe_error(self, error: Exception) -> str:
        """Return the error with the exit status of ended processes."""
        messages = [f"{type(error).__name__}: {_first_lines(error)}", *self._exit_messages]
        return "; ".join(messages)

    def close(self) -> None:
        """Shut down vLLM and kill processes that do not exit."""
        engine, self._engine = self._engine, None
        self._shared_weights.close()
        if engine is None:
            return
        engine.engine_core.shutdown(timeout=GRACE_SECONDS)
        _kill_remaining(self._all_processes)
        if not self._separate_process:
            _ENGINES_IN_PROCESS.remove(id(self))
            _destroy_process_groups()


def _check_exclusive() -> None:
    """vLLM's process groups are global: shutting it down destroys all groups of the process."""
    user = "another vLLM" if _ENGINES_IN_PROCESS else "a learner of several ranks"
    if _ENGINES_IN_PROCESS or torch.distributed.is_initialized():
        raise ConfigError(
            f"{KEY}.separate_process = false: {user} runs in this process",
            key=f"{KEY}.separate_process",
            value=False,
            hint=f"set {KEY}.separate_process=true",
        )


def _process_tree(processes: Sequence[Any]) -> list[Any]:
    """The processes and their descendants as `psutil` processes, which are safe against reused process ids."""
    import psutil

    roots = [psutil.Process(process.pid) for process in processes]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def _kill_remaining(processes: Sequence[Any]) -> None:
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=GRACE_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def _build_llm_engine(engine: Any, config: Any, *, separate_process: bool, statistics: bool) -> Any:
    from vllm.v1.executor import Executor

    return engine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=statistics,
        multiprocess_mode=separate_process,
    )


def _installed_release(arguments: Any) -> Release:
    from vllm.platforms import current_platform

    fields = frozenset(arguments.__dataclass_fields__)
    return Release(importlib.metadata.version(_distribution()), fields, cpu=bool(current_platform.is_cpu()))


def _distribution() -> str:
    """Name of the distribution; CPU builds of vLLM have another one."""
    return importlib.metadata.packages_distributions()["vllm"][0]


def _destroy_process_groups() -> None:
    """Undo vLLM's changes to `torch.distributed`, so that another engine can start in this process."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def gpu_variables(num_gpus: int = 1) -> Mapping[str, str]:
    """Return the environment variable that limits a child process to `num_gpus` GPUs from this process's GPU on; empty
    for the first GPU."""
    if not torch.cuda.is_available() or not (index := torch.cuda.current_device()):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[index : index + num_gpus])}


@contextmanager
def _preserved_process_state(defaults: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, `defaults` only if they are not set, and restore the process state after vLLM has
    started.

    vLLM changes environment variables (preloaded libraries, threads) that later child processes would inherit, seeds
    the global random generators, reduces torch's threads and replaces `torch.set_num_threads` with a no-op.
    """
    before = dict(os.environ)
    set_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    os.environ.update({**defaults, **before, **variables})
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _exit_message(process: Any) -> str:
    deadline = time.monotonic() + GRACE_SECONDS
    # vLLM waits for the process, too: a second waiter gets no status until the first one has stored it
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        process.join(timeout=0.05)
        time.sleep(0.01)
    outcome = f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
    return f"its process {process.pid} ended: {outcome}"


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
