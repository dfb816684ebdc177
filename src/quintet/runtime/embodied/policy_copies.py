"""Copies of the action policy on standalone workers: the copy of a worker, and the controller's calls to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSample, ActionSampling
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.rollout.engines.shared_weights import SharedWeightsReader, StagedTensors
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ACTION_POLICY_COPY
from quintet.runtime.calls.transport import Transport
from quintet.runtime.device import compute_device
from quintet.runtime.engines.staged_weights import StagedWeights
from quintet.runtime.process_settings import configure_process
from quintet.training.parallel.strategy import load_full_weights


class LocalActionPolicyCopy:
    """See `ActionPolicyCopy`."""

    def __init__(self) -> None:
        self._policy: ActionPolicy | None = None
        self._shared_weights = SharedWeightsReader()

    def build(self, config: Experiment, policy: Path) -> None:
        from quintet.policies.vla.build import load_action_policy

        configure_process(config)
        self._policy = load_action_policy(policy, config).to(compute_device())

    def load_weights(self, weights: StagedTensors) -> None:
        load_full_weights(self._module, self._shared_weights.read(weights))

    @torch.no_grad()
    def sample(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, temperature: float, top_k: int
    ) -> Mapping[str, Any]:
        device = compute_device()
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        sampling = ActionSampling(temperature, top_k)
        sample = self._module.sample(on_device, None if uniforms is None else uniforms.to(device), sampling)
        values = None if sample.values is None else sample.values.float()
        return {"actions": sample.actions, "logprobs": sample.logprobs.float(), "values": values}

    @property
    def _module(self) -> Any:
        """
        Raises:
            ValueError: `build` has not been called.
        """
        if self._policy is None:
            raise ValueError("the policy was called before it was built")
        return self._policy

    def close(self) -> None:
        """Free the policy."""
        self._policy = None


class ActionPolicyCopies:
    """Copies of the policy on workers, which sample for equal shares of the robots."""

    def __init__(
        self,
        workers: Sequence[WorkerConnection],
        config: Experiment,
        policy: Path,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        """Build the model at `policy` on the workers; `weights` yields the learner's weights.

        Raises:
            RankDiedError: a worker is lost, or failed.
            MachineError: a worker cannot build it.
        """
        self._transport = Transport(workers, "copy of the policy")
        self._weights, self._staged = weights, StagedWeights(num_buffers=1)
        self._transport.broadcast(RemoteCall(ACTION_POLICY_COPY, "build", {"config": config, "policy": policy}))

    def sync_weights(self) -> None:
        """Load the learner's weights into all copies; raises as `sample` does."""
        self._staged.stage(self._weights())
        staged = [self._staged.for_worker(worker) for worker in self._transport.workers]
        self._transport.call_together(
            [RemoteCall(ACTION_POLICY_COPY, "load_weights", {"weights": each}) for each in staged]
        )

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        """See `ActionPolicy.sample`.

        Raises:
            RankDiedError: a worker is lost, or failed.
        """
        rows = len(next(iter(inputs.values())))
        parts = [part for part in torch.arange(rows).tensor_split(self._transport.world_size) if len(part)]
        calls = []
        for part in parts:
            arguments = {
                "inputs": {name: tensor[part] for name, tensor in inputs.items()},
                "uniforms": None if uniforms is None else uniforms[part],
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
            }
            calls.append(RemoteCall(ACTION_POLICY_COPY, "sample", arguments))
        samples = self._transport.call_together(calls)
        return ActionSample(
            torch.cat([sample["actions"] for sample in samples]),
            torch.cat([sample["logprobs"] for sample in samples]),
            None if samples[0]["values"] is None else torch.cat([sample["values"] for sample in samples]),
        )

    def close(self) -> None:
        """Release the memory of weights."""
        self._staged.close()
