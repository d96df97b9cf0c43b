from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.errors import ConservationError, OutOfBlocks
from wire.block_hash import block_hashes


def hashes(tokens, block_size=2, salt=""):
    return list(block_hashes(tokens, block_size, salt))


def publish_all(pool, blocks, block_hashes_):
    for block, block_hash in zip(blocks, block_hashes_, strict=True):
        pool.publish(block, block_hash)


def test_one_block_through_its_life():
    pool = BlockPool(2)
    [known] = hashes([1, 2])
    # 1. Allocated: held by one.
    (block,) = pool.allocate(1)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 1)
    # 2. Published: findable, held all the same.
    pool.publish(block, known)
    assert pool.find([known]) == (block,)
    assert pool.num_held == 1
    # 3. Released: cached, available.
    pool.release((block,))
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 0)
    # 4. Found again, held by two; one release leaves it held.
    pool.hold((block,))
    pool.hold((block,))
    pool.release((block,))
    assert pool.num_held == 1
    pool.check_conservation([(block,)])
    # 5. Evicted when someone needs it: not findable any more.
    pool.release((block,))
    taken = pool.allocate(2)
    assert sorted(taken) == [0, 1]
    assert pool.find([known]) == ()
    pool.release(taken)
    pool.check_conservation([])
    assert pool.num_free == 2


def test_a_block_that_was_never_published_is_free_after_release():
    pool = BlockPool(1)
    pool.release(pool.allocate(1))
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_eviction_takes_the_least_recently_released_and_a_sequence_tail_first():
    pool = BlockPool(4)
    old, new = hashes([1, 2, 3, 4]), hashes([5, 6, 7, 8])
    old_blocks, new_blocks = pool.allocate(2), pool.allocate(2)
    publish_all(pool, old_blocks, old)
    publish_all(pool, new_blocks, new)
    pool.release(old_blocks)
    pool.release(new_blocks)

    assert pool.allocate(1) == (old_blocks[1],)
    assert pool.find(old) == (old_blocks[0],)
    # A hit makes the old one's rest the most recent.
    pool.hold((old_blocks[0],))
    pool.release((old_blocks[0],))
    assert pool.allocate(2) == (new_blocks[1], new_blocks[0])
    assert pool.find(old) == (old_blocks[0],)


def test_allocate_takes_nothing_when_there_is_too_little():
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 available of 3"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_conservation([held])


def test_find_stops_at_the_first_hole_and_respects_the_salt():
    pool = BlockPool(3)
    chain = hashes([1, 2, 3, 4, 5, 6])
    blocks = pool.allocate(3)
    pool.publish(blocks[0], chain[0])
    pool.publish(blocks[2], chain[2])
    assert pool.find(chain) == (blocks[0],)
    assert pool.find(hashes([1, 2], salt="other")) == ()
    assert pool.find(hashes([3, 4])) == ()  # the same tokens behind another prefix are another block


def test_of_two_equal_blocks_the_first_stays_findable_and_the_second_becomes_free():
    pool = BlockPool(2)
    [same] = hashes([1, 2])
    first, second = pool.allocate(2)
    pool.publish(first, same)
    pool.publish(second, same)
    assert pool.find([same]) == (first,)
    pool.release((first,))
    pool.release((second,))
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.check_conservation([])


def test_availability_counts_cached_blocks_that_a_hit_would_take():
    pool = BlockPool(3)
    known = hashes([1, 2, 3, 4])
    blocks = pool.allocate(2)
    publish_all(pool, blocks, known)
    assert pool.num_available_without(blocks) == 1  # held already: holding them once more takes nothing
    pool.release(blocks)
    assert pool.num_available_without(blocks) == 1


def test_conservation_sees_a_leak_a_foreign_holder_and_a_double_release():
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(ConservationError, match="1 references, 0 holders"):
        pool.check_conservation([held[:1]])
    with pytest.raises(ConservationError, match="1 references, 2 holders"):
        pool.check_conservation([held, held[:1]])
    pool.release(held)
    with pytest.raises(ConservationError, match="released more often"):
        pool.release(held)


def test_a_pool_has_blocks():
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        BlockPool(0)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=8)), max_size=40), st.data())
def test_holders_with_shared_prefixes_always_balance(actions, data):
    pool = BlockPool(6)
    tables = []
    for kind, tokens in actions:
        if kind == 0 and tables:
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
            continue
        chain = hashes(tokens)
        found = pool.find(chain)
        fresh = -(-len(tokens) // 2) - len(found)
        if fresh > pool.num_available_without(found):
            continue
        pool.hold(found)
        table = found + pool.allocate(fresh)
        if kind == 1:
            publish_all(pool, table[: len(chain)], chain)
        tables.append(table)
        pool.check_conservation(tables)
        assert pool.num_free + pool.num_cached + pool.num_held == 6
    for table in tables:
        pool.release(table)
    pool.check_conservation([])
    assert pool.num_held == 0
