"""If these fail, engines on devices of their own lose requests, have old weights, or die without anyone noticing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from standalone_workers import start_worker

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_model
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.shared_weights import SharedWeights, SharedWeightsReader
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.rollout.engines.weight_verification import check_weights, read_weights
from quintet.runtime.calls.connection import WorkerConnection, WorkerLostError
from quintet.runtime.calls.handshake import WorkerHello, send_hello
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.messages import ConnectionLostError, MessageSocket, RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ENGINE
from quintet.runtime.calls.transport import Transport
from quintet.runtime.controller import Controller
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.engine_weights import EngineWeights
from quintet.runtime.engines.remote_engines import RemoteEngine, RemoteEngines, TakeConnectedWorkers, _one_per_device
from quintet.runtime.engines.weight_sources import PolicyWeights
from quintet.runtime.worker import Worker
from quintet.training.learner import ActorLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.broadcast_group import BroadcastGroup


@pytest.fixture
def listener() -> Iterator[WorkerListener]:
    listener = WorkerListener("127.0.0.1", {1: "", 2: ""}, "the run", lost_seconds=3.0)
    yield listener
    listener.close()


Workers = dict[int, tuple[subprocess.Popen[bytes], WorkerConnection]]


@pytest.fixture
def workers(listener: WorkerListener) -> Iterator[Workers]:
    processes = {rank: start_worker(ControllerAddress.of(listener), rank) for rank in (1, 2)}
    try:
        connected = listener.wait_for([1, 2], 60.0)
        yield {worker.rank: (processes[worker.rank], worker) for worker in connected}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def experiment(*changes: str) -> Experiment:
    overrides = ("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1,2]")
    return load_experiment(
        None, (*overrides, *changes, "training.threads=1", "rollout.max_response_tokens=8")
    ).experiment


def _learners(actor: object) -> Any:
    return SimpleNamespace(actor=actor, has_full_weights=False)


def remote_engines(
    workers: Sequence[WorkerConnection],
    config: Experiment,
    policy: Path,
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    take_connected_workers: TakeConnectedWorkers = lambda ranks: (),
    adapted: ActorLearner | None = None,
) -> RemoteEngines:
    transport = Transport(local=Worker())
    staged = EngineWeights(config, weights, adapted)
    source = PolicyWeights(_learners(SimpleNamespace(weights=weights)), transport, staged)
    return RemoteEngines(transport, workers, config, policy, source, take_connected_workers)


def requests(count: int) -> list[Request]:
    return [Request(number, (5, 6, 7, 8 + number), 6, seed=number) for number in range(count)]


def generate(engines: RoutedEngines, requests: list[Request]) -> dict[int, Generation]:
    for request in requests:
        engines.add_request(request)
    done: dict[int, Generation] = {}
    end = time.monotonic() + 60
    while engines.busy:
        assert time.monotonic() < end
        done |= {generation.id: generation for generation in engines.step()}
    return done


def test_the_end_of_a_run_frees_the_memory_of_its_weights(tmp_path: Path) -> None:
    controller = Controller(Transport(local=Worker()), WorkerListener("127.0.0.1", {}, "the run", lost_seconds=20.0))
    config = load_experiment(None).experiment
    actor = SimpleNamespace(weights=lambda: iter([("weight", torch.ones(3))]))
    staged = controller.build_remote_engines(config, tmp_path, _learners(actor)).weights._staged
    staged.stage()
    (shared_tensor,) = staged._staged.shared_tensors
    assert Path(shared_tensor.file).exists()
    controller.close()
    assert not Path(shared_tensor.file).exists()


def test_two_processes_generate_with_the_learners_new_weights_and_one_is_rebuilt(
    workers: Workers, policy_directory: Path
) -> None:
    model, config = load_model(policy_directory), experiment()
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, config, policy_directory, lambda: iter(model.state_dict().items()))
    engines = RoutedEngines(group.engines())
    before = generate(engines, requests(6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    group.weights.stage()
    engines.load_weights(1, group.weights)
    after = generate(engines, requests(6))
    assert {generation.weight_version for generation in after.values()} == {1}
    assert [after[number].logprobs for number in after] != [before[number].logprobs for number in after]
    local = RoutedEngines([RestartingEngine(lambda: _hf_engine(model), None)])
    expected = generate(local, requests(6))
    for number, generation in after.items():
        assert generation.tokens == expected[number].tokens
        assert generation.logprobs == pytest.approx(expected[number].logprobs, abs=1e-5)
    group.close()


def test_weights_that_differ_from_the_learners_are_named(workers: Workers, policy_directory: Path) -> None:
    model, other = load_model(policy_directory), load_model(policy_directory)
    group = remote_engines([workers[1][1]], experiment(), policy_directory, lambda: iter(other.named_parameters()))
    (engine,) = group.engines()
    check = check_weights(engine.current, model, [(5, 6, 7)], same_dtype=True)
    assert str(check).startswith(f"engine and learner agree: {len(list(model.parameters()))} weights")
    with torch.no_grad():
        other.base_model.norm.weight[0] += 0.5
    group.weights.stage()
    engine.load_weights(1, group.weights)
    with pytest.raises(MachineError, match=r"differ in 1 weights \(model\.norm\.weight: differs by 0\.5\)"):
        check_weights(engine.current, model, [], same_dtype=True)
    group.close()


def test_weights_that_are_not_staged_are_sent_to_the_worker(workers: Workers, policy_directory: Path) -> None:
    other = load_model(policy_directory)
    with torch.no_grad():
        other.base_model.norm.weight[0] += 0.5
    (engine,) = remote_engines([workers[1][1]], experiment(), policy_directory, lambda: iter(())).engines()
    engine.load_weights(1, ModuleWeights(other))
    assert str(check_weights(engine.current, other, [], same_dtype=True)).startswith("engine and learner agree")


def test_a_sleeping_engine_returns_the_memory_of_its_kv_cache(workers: Workers, policy_directory: Path) -> None:
    process, worker = workers[1]
    resident = psutil.Process(process.pid).memory_info
    (engine,) = remote_engines([worker], experiment(), policy_directory, lambda: iter(())).engines()
    generate(RoutedEngines([engine]), requests(1))
    engine.sleep()
    engine.finish_calls()
    before = resident().rss
    for _ in range(2):
        engine.wake_up()
        asked = [replace(request, prompt=(*request.prompt, *range(5, 205))) for request in requests(64)]
        assert len(generate(RoutedEngines([engine]), asked)) == 64
        grown = resident().rss - before
        engine.sleep()
        engine.finish_calls()
        assert grown > 8 << 20
        assert resident().rss - before < grown / 2


def _hf_engine(model: torch.nn.Module):  # type: ignore[no-untyped-def]
    from quintet.rollout.engines.hf.engine import HfEngine

    return HfEngine(model, max_num_seqs=64, max_model_len=400)  # type: ignore[arg-type]


@pytest.mark.parametrize("transfer", ["process_group", "tcp"])
def test_weights_of_another_machine_are_sent_instead_of_shared(
    workers: Workers, policy_directory: Path, transfer: str
) -> None:
    """The second engine, which loads the weights once more, does so alone: the group's broadcast is over."""
    model, config = load_model(policy_directory), experiment(f"placement.weight_transfer={transfer}")
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, config, policy_directory, lambda: iter(model.state_dict().items()))
    engines = group.engines()
    for version in (1, 2):
        with torch.no_grad():
            model.base_model.norm.weight.mul_(1.5)
        group.weights.stage()
        for engine in engines:
            engine.load_weights(version, group.weights)
        engines[1].load_weights(version, group.weights)
        for engine in engines:
            check_weights(engine.current, model, [(5, 6, 7)], same_dtype=True)
    group.close()


def _lora_actor(policy_directory: Path) -> ActorLearner:
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=2, alpha=3.0))
    return ActorLearner(model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64)))


@torch.no_grad()
def _train_adapters(actor: ActorLearner, seed: int) -> None:
    torch.manual_seed(seed)
    for _, tensor in actor.adapters():
        tensor.normal_(std=0.2)


def _has_weights_of(engine: RestartingEngine, actor: ActorLearner) -> bool:
    """Whether the engine's weights are exactly those that the actor would send merged."""
    weights = read_weights(engine.current) or {}
    return all(torch.equal(weights[name], tensor) for name, tensor in actor.weights())


def _sent_bytes(group: RemoteEngines, worker: WorkerConnection, broadcasts: list[int]) -> int:
    """Bytes of the staged weights that would go to a worker, or have been broadcast since the last call."""
    if broadcasts:
        sent = sum(broadcasts)
        broadcasts.clear()
        return sent
    weights = group.weights.load_call(worker, 0).arguments["weights"]
    tensors = weights if isinstance(weights, dict) else dict(SharedWeightsReader().read(weights))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("transfer", ["shared_memory", "process_group", "tcp"])
def test_after_the_first_sync_only_adapters_are_sent_and_the_weights_are_those_of_a_full_sync(
    workers: Workers, policy_directory: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcasts: list[int] = []
    broadcast = BroadcastGroup.broadcast

    def counted(group: BroadcastGroup, buffers: list[torch.Tensor]) -> None:
        broadcasts.extend(map(len, buffers))
        broadcast(group, buffers)

    monkeypatch.setattr(BroadcastGroup, "broadcast", counted)
    actor, config = _lora_actor(policy_directory), experiment(f"placement.weight_transfer={transfer}")
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, config, policy_directory, actor.weights, adapted=actor)
    engines = group.engines()
    adapters = sum(tensor.nbytes for _, tensor in actor.adapters())
    base = sum(tensor.nbytes for _, tensor in actor.base_weights())
    for version in (1, 2, 3):
        _train_adapters(actor, version)
        group.weights.stage()
        if version == 3:
            connected[1].call(RemoteCall(ENGINE, "rebuild"))
        for engine in engines:
            engine.load_weights(version, group.weights)
        assert all(_has_weights_of(engine, actor) for engine in engines)
        check_weights(engines[1].current, actor.model, [(5, 6, 7)], same_dtype=True)
        padding = 64 * len(list(actor.model.parameters())) if transfer == "process_group" else 0
        expected = adapters + base * (version == 1)
        assert expected <= _sent_bytes(group, connected[0], broadcasts) <= expected + padding
    group.close()


def test_an_engine_that_is_started_again_gets_the_weights_that_adapters_adapt(
    listener: WorkerListener, workers: Workers, policy_directory: Path
) -> None:
    actor, config = _lora_actor(policy_directory), experiment("placement.weight_transfer=tcp")
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, config, policy_directory, actor.weights, listener.take_connected_workers, actor)
    engines = group.engines()
    for version in (1, 2):
        _train_adapters(actor, version)
        group.weights.stage()
        for engine in engines:
            engine.load_weights(version, group.weights)
    workers[2][0].kill()
    engines[1].sleep()
    engines[1].finish_calls()  # the death may be noticed after the call was sent
    assert engines[1].is_dead
    restarted = start_worker(ControllerAddress.of(listener), 2)
    try:
        end = time.monotonic() + 60
        while not engines[1].revive():
            assert time.monotonic() < end
            time.sleep(0.05)
        engines[1].load_weights(2, group.weights)
        assert all(_has_weights_of(engine, actor) for engine in engines)
    finally:
        restarted.kill()
        restarted.wait()
        group.close()


def test_gpus_with_several_engines_receive_weights_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks on one GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    joined = MagicMock()
    monkeypatch.setattr("quintet.runtime.engines.engine_weights._Broadcast", joined)
    workers: Any = [MagicMock(rank=rank, host="another machine", lost_reason=None) for rank in (1, 2)]
    for devices in ("[1,2]", "[1,1]"):
        EngineWeights(experiment(f"placement.rollout.devices={devices}"), lambda: iter(())).connect(workers)
    assert [call.args[-1] for call in joined.call_args_list] == ["nccl", "gloo"]


def test_engines_on_one_device_are_built_one_after_another() -> None:
    """vLLM measures the free memory of its device, which an engine that starts beside it would take."""
    engines: Any = [MagicMock(worker=MagicMock(rank=rank)) for rank in (1, 2, 3, 4)]
    assert _one_per_device(engines, (0, 1, 1, 1, 2)) == [[engines[0], engines[3]], [engines[1]], [engines[2]]]


def test_engines_of_a_lost_broadcast_load_their_weights_over_the_connection(
    workers: Workers, policy_directory: Path
) -> None:
    model, config = load_model(policy_directory), experiment("placement.weight_transfer=process_group")
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, config, policy_directory, lambda: iter(model.state_dict().items()))
    engine, _ = group.engines()
    workers[2][0].kill()
    group.weights.stage()
    engine.load_weights(1, group.weights)
    group.weights.load_call(connected[1], 1)  # the lost worker does not receive it
    assert generate(RoutedEngines([engine]), requests(2)).keys() == {0, 1}
    group.weights.stage()
    engine.load_weights(2, group.weights)
    check_weights(engine.current, model, [], same_dtype=True)
    group.close()


def test_shared_memory_is_refused_for_another_machine(workers: Workers, policy_directory: Path) -> None:
    worker, config = workers[1][1], experiment("placement.weight_transfer=shared_memory")
    group = remote_engines([worker], config, policy_directory, lambda: iter(()))
    worker.host = "another machine"
    with pytest.raises(ConfigError, match="rank 1 shares no memory with the controller"):
        group.engines()
    group.close()


def test_a_killed_process_is_noticed_at_once_with_its_rank(workers: Workers, policy_directory: Path) -> None:
    process, worker = workers[2]
    started = time.monotonic()
    threading.Timer(0.5, process.kill).start()
    with pytest.raises(WorkerLostError, match=rf"rank 2 \(process {process.pid}\) has ended, or its connection broke"):
        worker.finish()
    assert time.monotonic() - started < 3


def test_a_stopped_process_is_noticed_by_its_missing_heartbeats(workers: Workers) -> None:
    process, worker = workers[1]
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="no heartbeat for 3 seconds: it is stopped, or its node is lost"):
        worker.finish()


def test_a_worker_that_does_not_answer_a_call_is_lost_and_a_late_controller_loses_none(policy_directory: Path) -> None:
    limited = WorkerListener("127.0.0.1", {1: ""}, "the run", lost_seconds=60.0, call_seconds=1.0)
    process = start_worker(ControllerAddress.of(limited), 1)
    try:
        (worker,) = limited.wait_for([1], 60.0)
        worker.start(RemoteCall(ENGINE, "step", {"requests": []}))
        time.sleep(2)
        with pytest.raises(RemoteCallError, match=r"before it was built \(on rank 1\)"):
            worker.finish()
        os.kill(process.pid, signal.SIGSTOP)
        worker.start(RemoteCall(ENGINE, "step", {"requests": []}))
        with pytest.raises(WorkerLostError, match="has not answered a call for 1 seconds"):
            worker.finish()
    finally:
        process.kill()
        process.wait()
        limited.close()


def test_an_error_of_a_call_names_itself_and_the_worker_lives_on(workers: Workers, policy_directory: Path) -> None:
    worker = workers[1][1]
    with pytest.raises(RemoteCallError, match="ValueError: the engine was called before it was built"):
        worker.call(RemoteCall(ENGINE, "step", {"requests": []}))
    with pytest.raises(MachineError, match="nowhere"):
        worker.call(RemoteCall(ENGINE, "build", {"config": experiment(), "policy": Path("/nowhere")}))
    arguments = {"config": experiment(), "policy": policy_directory}
    assert worker.call(RemoteCall(ENGINE, "build", arguments)) > 0


def test_workers_that_do_not_come_are_named(listener: WorkerListener) -> None:
    with pytest.raises(MachineError, match=r"workers of rank 1, rank 2 did not connect within 0\.2 seconds"):
        listener.wait_for([1, 2], 0.2)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rank": 7}, "rank 7 is no worker of this run"),
        ({"fingerprint": "of another run"}, "another configuration or version"),
    ],
)
def test_strangers_are_refused(listener: WorkerListener, changes: dict[str, object], refusal: str) -> None:
    fields = {"purpose": "calls", "worker": "a", "rank": 1, "pid": 2, "host": "h"}
    hello = WorkerHello(**{**fields, "fingerprint": "the run", **changes})  # type: ignore[arg-type]
    with (
        socket.create_connection(listener.address, timeout=5) as stranger,
        pytest.raises(MachineError, match=refusal),
    ):
        send_hello(stranger, hello, listener.address, listener.token)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n", b"x" * (1 << 15)])
def test_what_is_no_worker_is_disconnected(listener: WorkerListener, sent: bytes) -> None:
    with socket.create_connection(listener.address, timeout=5) as stranger, suppress(OSError):
        stranger.sendall(sent * 2)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    assert listener.take_connected_workers([1, 2]) == []


def test_messages_that_are_none_end_the_connection() -> None:
    ours, theirs = socket.socketpair()
    too_long = b"R" + (1 << 40).to_bytes(8)
    for sent, error in (
        (b"nothing of the kind", "corrupted"),
        (too_long + zlib.crc32(too_long).to_bytes(4), "no message"),
    ):
        theirs.sendall(sent)
        with pytest.raises(ValueError, match=error):
            MessageSocket(ours).receive_result()
        ours.close()
        ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(ConnectionLostError):
        MessageSocket(ours).receive_result()


@pytest.mark.parametrize("place", [0, 8, 20, -10])
def test_a_result_that_was_changed_on_its_way_is_never_used_and_its_rank_is_named(place: int) -> None:
    """A changed kind, length, JSON or tensor."""
    passed, theirs = socket.socketpair()
    MessageSocket(theirs).send_result([torch.ones(3), "text"])
    message = bytearray(passed.recv(1 << 16))
    message[place] ^= 1
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes(message))
    worker = WorkerConnection(2, 77, "host", MessageSocket(ours))
    with pytest.raises(WorkerLostError, match=r"rank 2 \(process 77\) cannot be understood: received .*corrupted"):
        worker.finish()
    assert theirs.recv(1) == b""  # the worker ends, and can be started again


def test_only_methods_of_the_protocol_are_called() -> None:
    with pytest.raises(ValueError, match="learners was called before it was built"):
        Worker().execute(RemoteCall("learners", "save"))


def test_shared_weights_are_those_that_were_written_last_and_leave_no_file() -> None:
    first = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(0)}
    shared, reader = SharedWeights(), SharedWeightsReader()
    places = shared.write(first.items())
    files = {Path(place.file) for place in places}
    for weights in (first, {name: tensor + 1 for name, tensor in first.items()}):
        read = dict(reader.read(shared.write(weights.items())))
        assert read.keys() == weights.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert {Path(place.file) for place in shared.write(first.items())} == files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    shared.close()
    assert not any(file.exists() for file in files)


def test_a_full_shared_memory_leaves_the_weights_in_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, size: int) -> None:
        if path.is_relative_to("/dev/shm"):
            raise OSError(28, "No space left on device")
        path.write_bytes(bytes(size))

    monkeypatch.setattr("quintet.rollout.engines.shared_weights._allocate", full)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    shared = SharedWeights()
    places = shared.write([("a", torch.ones(3))])
    assert Path(places[0].file).is_relative_to(tmp_path)
    shared.close()


def test_a_killed_engine_costs_no_request_and_one_that_is_started_again_joins(
    listener: WorkerListener, workers: Workers, policy_directory: Path
) -> None:
    model, config = load_model(policy_directory), experiment()
    connected = [worker for _, worker in workers.values()]
    weights = dict(model.state_dict())
    group = remote_engines(
        connected, config, policy_directory, lambda: iter(weights.items()), listener.take_connected_workers
    )
    engines = RoutedEngines(group.engines(), max_wait_seconds=60)
    group.weights.stage()
    engines.load_weights(3, group.weights)
    expected = generate(engines, requests(8))
    for request in requests(8):
        engines.add_request(request)
    workers[2][0].kill()
    assert generate(engines, []) == expected
    assert engines.pop_metrics()["engine/requests_reassigned"] == 4
    assert generate(engines, requests(8)) == expected
    restarted = start_worker(ControllerAddress.of(listener), 2)
    try:
        end = time.monotonic() + 60
        while not all(isinstance(engine, RemoteEngine) and engine.is_available for engine in engines.engines):
            assert time.monotonic() < end
            generate(engines, requests(1))
            time.sleep(0.05)
        assert generate(engines, requests(8)) == expected
        assert engines.pop_metrics()["engine/restarts"] == 1
        (engine,) = (each for each in engines.engines if isinstance(each, RemoteEngine) and each.worker.rank == 2)
        assert engine.worker.pid == restarted.pid
    finally:
        restarted.kill()
        restarted.wait()
        group.close()


def test_a_run_without_living_engines_ends_with_a_message(workers: Workers, policy_directory: Path) -> None:
    connected = [worker for _, worker in workers.values()]
    group = remote_engines(connected, experiment(), policy_directory, lambda: iter(()))
    engines = RoutedEngines(group.engines(), max_wait_seconds=0.2)
    for process, _ in workers.values():
        process.kill()
    with pytest.raises(MachineError, match=r"all 2 engines have been dead for 0\.2 seconds"):
        generate(engines, requests(3))


def test_requests_that_were_not_sent_are_aborted_at_once(workers: Workers, policy_directory: Path) -> None:
    group = remote_engines([workers[1][1]], experiment(), policy_directory, lambda: iter(()))
    engines = RoutedEngines(group.engines())
    for request in requests(3):
        engines.add_request(request)
    aborted = engines.abort([1])
    assert [(each.id, each.finish_reason) for each in aborted] == [(1, FinishReason.ABORT)]
    assert sorted(generate(engines, [])) == [0, 2]
    with pytest.raises(ValueError, match="the prompt has 5000 tokens"):
        engines.add_request(Request(9, (1,) * 5000, 4, seed=0))
