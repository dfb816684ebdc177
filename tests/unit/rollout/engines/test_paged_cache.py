"""If these fail, a request reads the keys and values of another one, or the cache takes more memory than its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config.plan.kv_blocks import BLOCK
from quintet.rollout.engines.hf.attention_state import AttentionState, CacheShape
from quintet.rollout.engines.hf.paged_cache import CachedSequence, PagedCache
from quintet.rollout.engines.hf.prefix_tree import BlockNode, PoolExhaustedError

SHAPE = CacheShape((0, 1), 1, 1, torch.float32, torch.device("cpu"))
LENGTH = 6 * BLOCK


def new_cache(max_blocks: int = 64, max_num_seqs: int = 8) -> PagedCache:
    return PagedCache(SHAPE, max_blocks, max_num_seqs, LENGTH)


def state(cache: PagedCache) -> AttentionState:
    attention = cache.pool.state_by_layer[0]
    assert isinstance(attention, AttentionState)
    return attention


@dataclass(eq=False)
class Running:
    """A sequence whose keys are its tokens, as if a model had computed them."""

    cache: PagedCache
    sequence: CachedSequence
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, cache: PagedCache, tokens: tuple[int, ...]) -> Running:
        running = cls(cache, cache.open(tokens), list(tokens))
        start = running.sequence.num_computed
        running.sequence.mark_computed(len(tokens))
        for position in range(start, len(tokens)):
            running.write(position)
        return running

    def write(self, position: int) -> None:
        block = self.cache.tables[self.sequence.row, position // BLOCK]
        for layer in SHAPE.layers:
            state(self.cache).keys(layer)[block, 0, position % BLOCK, 0] = self.tokens[position]
            state(self.cache).values(layer)[block, 0, position % BLOCK, 0] = -self.tokens[position]

    def append(self, token: int) -> None:
        position = len(self.tokens)
        if position % BLOCK == 0 or position == len(self.sequence.tokens):
            self.cache.make_writable(self.sequence, position)
        self.tokens.append(token)
        self.write(position)

    def read(self) -> list[int]:
        table = self.cache.tables[self.sequence.row]
        layer = SHAPE.layers[-1]
        keys, values = state(self.cache).keys(layer), state(self.cache).values(layer)
        places = [(table[i // BLOCK], 0, i % BLOCK, 0) for i in range(len(self.tokens))]
        assert all(keys[place] == -values[place] for place in places)
        return [int(keys[place]) for place in places]

    def end(self, *, keep: bool) -> None:
        self.cache.close(self.sequence, tuple(self.tokens) if keep else ())


def nodes(node: BlockNode) -> list[BlockNode]:
    return [each for child in node.children for each in (child, *nodes(child))]


def check(cache: PagedCache, running: list[Running]) -> None:
    """Sequences read their own tokens; every block in use has one owner, and every node its users."""
    cached = nodes(cache.tree._root)
    own = [block for each in running for block in each.sequence.blocks]
    owned = [*own, *(node.block for node in cached)]
    assert len(owned) == len(set(owned)) == cache.pool.num_used
    for node in cached:
        assert node.users == sum(node in each.sequence.path for each in running)
        assert not node.children or len(node.tokens) == BLOCK
        assert [child.tokens for child in node.children] == sorted(child.tokens for child in node.children)
    unused = list(cache.tree._unused)
    assert set(unused) == {node for node in cached if not node.users}
    assert all(unused.index(child) < unused.index(node) for node in unused for child in node.children)
    for each in running:
        assert each.read() == each.tokens


def test_samples_of_a_prompt_share_its_blocks_until_they_write() -> None:
    """20 tokens: one full block for all, and the last one for the first sample; the others copy it."""
    cache = new_cache()
    prompt = tuple(range(BLOCK + 4))
    samples = [Running.start(cache, prompt) for _ in range(3)]
    assert cache.pool.num_used == 2
    for number, sample in enumerate(samples):
        sample.append(100 + number)
    assert cache.pool.num_used == 1 + 3
    check(cache, samples)
    for sample in samples:
        sample.end(keep=False)
    assert cache.pool.num_used == 2
    check(cache, [])


def test_a_kept_response_is_found_again_token_by_token() -> None:
    cache = new_cache()
    first = Running.start(cache, (1, 2, 3))
    for token in range(50, 50 + 2 * BLOCK):
        first.append(token)
    first.end(keep=True)
    tokens = tuple(first.tokens)
    assert cache.open((*tokens, 9, 9)).num_computed == len(tokens)
    assert cache.open((*tokens[:20], 9, 9)).num_computed == 20
    assert cache.open((1, 2, 7)).num_computed == 2
    assert cache.open((7, 1, 2)).num_computed == 0


def test_a_prompt_in_use_is_not_evicted_and_others_are_in_the_order_of_their_use() -> None:
    cache = PagedCache(SHAPE, 7, 8, 2 * BLOCK)
    prompts = [tuple(range(100 * n, 100 * n + 2 * BLOCK)) for n in range(4)]
    used = Running.start(cache, prompts[0])
    for prompt in prompts[1:3]:
        Running.start(cache, prompt).end(keep=False)
    Running.start(cache, prompts[1]).end(keep=False)
    Running.start(cache, prompts[3]).end(keep=False)
    # of two missing blocks one was free, the other was the last block of prompt 2; that takes the last one of prompt 3
    assert cache.tree.num_new_blocks(prompts[0]) == 0
    counts = []
    for prompt in prompts[1:]:
        sequence = cache.open(prompt)
        counts.append(sequence.num_computed)
        cache.close(sequence)
    assert counts == [2 * BLOCK, BLOCK, BLOCK]
    check(cache, [used])


def test_a_full_pool_is_an_error_that_changes_nothing() -> None:
    cache = PagedCache(SHAPE, 3, 8, 2 * BLOCK)
    used = Running.start(cache, tuple(range(2 * BLOCK)))
    with pytest.raises(PoolExhaustedError):
        cache.open(tuple(range(100, 100 + 2 * BLOCK)))
    check(cache, [used])
    used.append(7)
    check(cache, [used])


def test_blocks_of_forgotten_sequences_are_used_again() -> None:
    cache = new_cache()
    Running.start(cache, (1, 2, 3)).end(keep=True)
    cache.reset()
    assert cache.pool.num_used == 0
    assert cache.open((1, 2, 3)).num_computed == 0


def test_released_memory_is_zero_when_it_is_used_again() -> None:
    cache = new_cache()
    Running.start(cache, (1, 2, 3)).end(keep=True)
    cache.reset()
    cache.pool.release_memory()
    cache.open((1, 2, 3))
    assert float(state(cache).keys(0)[:1].abs().sum()) == 0.0


@pytest.mark.parametrize("device_memory", ["reserved", "grown"])
def test_blocks_keep_their_contents_while_the_memory_grows(device_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where address space cannot be reserved, the pool grows by copies: 64 blocks first."""
    if device_memory == "grown":
        monkeypatch.setattr(AttentionState, "_reserve_addresses", lambda _: None)
    cache = PagedCache(SHAPE, 200, 40, LENGTH)
    running = [Running.start(cache, (*range(n, n + 5 * BLOCK),)) for n in range(1, 39)]
    check(cache, running)


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=3 * BLOCK)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), TOKENS),
        st.tuples(st.just("append"), st.integers(0, 7), TOKENS),
        st.tuples(st.just("end"), st.integers(0, 7), st.booleans()),
        st.tuples(st.just("continue"), st.integers(0, 7), TOKENS),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(7, 24))
def test_sequences_never_read_tokens_of_others(steps: list[tuple], max_blocks: int) -> None:
    """Prompts of two tokens share beginnings of any length; sequences start, grow, end and continue in any order."""
    cache, running, ended = new_cache(max_blocks), list[Running](), list[tuple[int, ...]]()
    for step in steps:
        try:
            if step[0] == "start" and len(running) < 8:
                running.append(Running.start(cache, tuple(step[1])))
            elif step[0] == "continue" and ended and len(running) < 8:
                tokens = ended[step[1] % len(ended)] + tuple(step[2])
                running.append(Running.start(cache, tokens[: LENGTH - 1]))
            elif step[0] == "append" and running:
                each = running[step[1] % len(running)]
                for token in step[2][: LENGTH - len(each.tokens)]:
                    each.append(token)
            elif step[0] == "end" and running:
                each = running.pop(step[1] % len(running))
                each.end(keep=step[2])
                ended.append(tuple(each.tokens))
        except PoolExhaustedError:
            continue
        check(cache, running)
