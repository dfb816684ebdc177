"""If these fail, groups are lost between rollout and learner, rollouts run ahead, or errors hang the run."""

from __future__ import annotations

import threading
import time
import traceback

import pytest

from quintet.config.native.placement import GroupChannelConfig
from quintet.rollout.channel import Channel, ChannelClosedError
from quintet.tracking.metrics import describe


def test_items_arrive_once_and_in_order_of_each_producer() -> None:
    channel: Channel[tuple[int, int]] = Channel("groups", 3)
    received: list[list[tuple[int, int]]] = [[], []]

    def produce(number: int) -> None:
        for item in range(500):
            channel.put((number, item))

    def consume(items: list[tuple[int, int]]) -> None:
        while True:
            try:
                item = channel.get()
            except ChannelClosedError:
                return
            assert item is not None
            items.append(item)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(3)]
    consumers = [threading.Thread(target=consume, args=(items,)) for items in received]
    for thread in [*producers, *consumers]:
        thread.start()
    for thread in producers:
        thread.join(20)
    channel.close()
    for thread in consumers:
        thread.join(20)
    assert sorted(received[0] + received[1]) == [(number, item) for number in range(3) for item in range(500)]
    assert all(
        [each for each in items if each[0] == n] == sorted(x for x in items if x[0] == n)
        for items in received
        for n in range(3)
    )


def test_a_producer_waits_while_the_channel_is_full() -> None:
    channel: Channel[int] = Channel("rollout/groups", 2)
    producer = threading.Thread(target=lambda: [channel.put(item) for item in range(3)], daemon=True)
    producer.start()
    producer.join(0.2)
    assert producer.is_alive()
    assert len(channel) == 2
    assert channel.get() == 0
    producer.join(20)
    assert not producer.is_alive()
    metrics = channel.pop_metrics()
    assert metrics.pop("channel/rollout/groups/put_seconds") >= 0.15
    assert metrics.pop("channel/rollout/groups/get_seconds") < 0.15
    assert {name.rpartition("/")[2]: value for name, value in metrics.items()} == {"items": 2, "puts": 3, "gets": 1}
    assert channel.pop_metrics()["channel/rollout/groups/puts"] == 0
    for name in channel.pop_metrics():
        describe(name)


def test_a_consumer_waits_up_to_its_timeout() -> None:
    channel: Channel[int] = Channel("groups")
    started = time.monotonic()
    assert channel.get(timeout=0.1) is None
    assert 0.09 < time.monotonic() - started < 5
    assert channel.pop_metrics()["channel/groups/get_seconds"] >= 0.09


def test_an_error_of_the_producer_reaches_the_waiting_consumer_with_its_traceback() -> None:
    channel: Channel[int] = Channel("groups", 1)

    def failing_reward() -> None:
        raise OSError("disk full")

    def produce() -> None:
        channel.put(1)
        try:
            failing_reward()
        except OSError as error:
            channel.close(error)

    threading.Thread(target=produce).start()
    with pytest.raises(OSError, match="disk full") as caught:
        list(iter(channel.get, None))
    assert "failing_reward" in "".join(traceback.format_exception(caught.value))


def test_closing_ends_the_wait_of_a_producer() -> None:
    channel: Channel[int] = Channel("groups", 1)
    channel.put(1)
    threading.Timer(0.1, channel.close).start()
    with pytest.raises(ChannelClosedError, match="channel groups is closed"):
        channel.put(2)
    assert channel.get() == 1
    with pytest.raises(ChannelClosedError):
        channel.get()


def test_removed_items_make_room() -> None:
    channel: Channel[int] = Channel("groups", 4)
    for item in range(4):
        channel.put(item)
    assert channel.remove(lambda item: item % 2 == 0) == [0, 2]
    channel.put(4)
    assert [channel.get() for _ in range(3)] == [1, 3, 4]


def test_a_channel_has_the_configured_names_and_size() -> None:
    channel: Channel[int] = Channel.from_config(GroupChannelConfig(name="buffer", queue="done", size=1))
    assert channel.name == "buffer/done"
    assert GroupChannelConfig(name="buffer").full_name == "buffer/groups"
    channel.put(1)
    threading.Timer(0.1, channel.close).start()
    with pytest.raises(ChannelClosedError):
        channel.put(2)
    assert Channel.from_config(GroupChannelConfig()).name == "rollout/groups"
