"""A hit serves exactly the asked-for prefix, or there is no hit."""

from __future__ import annotations

import pytest
import xxhash

from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import Sequence
from tests.support.factories import make_sequence


def cached(cache: PrefixCache, block_table: list[int], token_ids: list[int], salt: str = "") -> Sequence:
    """A sequence all of whose full blocks are recorded."""
    seq = make_sequence(token_ids=token_ids, block_size=2)
    seq.block_table, seq.cache_salt = block_table, salt
    for _ in range(len(token_ids) // 2):
        cache.insert(seq)
    cache.check_integrity()
    return seq


def hits(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    seq = make_sequence(token_ids=token_ids, block_size=2)
    seq.cache_salt = salt
    return [entry.block_id for entry in cache.match(seq)]


def test_the_longest_cached_prefix_is_found() -> None:
    cache = PrefixCache(8)
    cached(cache, [5, 3, 6], [1, 2, 3, 4, 5, 6])
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7]) == [5, 3, 6]
    assert hits(cache, [1, 2, 3, 4, 9, 9, 9]) == [5, 3]
    assert hits(cache, [1, 9, 3, 4, 5, 6, 7]) == []


def test_at_least_one_token_is_always_computed() -> None:
    cache = PrefixCache(8)
    cached(cache, [0, 1], [1, 2, 3, 4])
    assert hits(cache, [1, 2, 3, 4]) == [0]
    assert hits(cache, [1, 2, 3, 4, 5]) == [0, 1]
    assert hits(cache, [1, 2]) == []


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    cache = PrefixCache(8)
    cached(cache, [0, 1], [1, 1, 7, 7])
    assert hits(cache, [2, 2, 7, 7, 0]) == []
    assert hits(cache, [7, 7, 0]) == []


def test_a_match_goes_on_from_where_the_sequence_is() -> None:
    cache = PrefixCache(8)
    seq = cached(cache, [0], [1, 2])
    cached(cache, [0, 4, 5], [1, 2, 3, 4, 5, 6])
    for token in (3, 4, 5, 6, 7):
        seq.append_token(token)
    assert [entry.block_id for entry in cache.match(seq)] == [4, 5]


def test_an_equal_block_is_recorded_once_and_its_twin_leads_on() -> None:
    cache = PrefixCache(8)
    one = cached(cache, [0], [1, 2])
    twin = cached(cache, [3, 4], [1, 2, 3, 4])
    assert not cache.holds(3)
    assert twin.prefix_entries[0] is one.prefix_entries[0]
    assert hits(cache, [1, 2, 3, 4, 5]) == [0, 4]


def test_salts_share_nothing() -> None:
    cache = PrefixCache(8)
    cached(cache, [0, 1], [1, 2, 3, 4], salt="a")
    assert hits(cache, [1, 2, 3, 4, 5], salt="b") == []
    assert hits(cache, [1, 2, 3, 4, 5]) == []
    assert hits(cache, [1, 2, 3, 4, 5], salt="a") == [0, 1]


@pytest.mark.parametrize("salt", ["\ud800", "ключ", "\0", "x" * 10_000])
def test_a_salt_may_be_any_string(salt: str) -> None:
    cache = PrefixCache(8)
    cached(cache, [0], [1, 2], salt=salt)
    assert hits(cache, [1, 2, 3], salt=salt) == [0]


def test_namespaces_and_salts_hash_apart() -> None:
    seqs = [
        cached(PrefixCache(4, namespace=name), [0], [1, 2], salt) for name, salt in (("m", ""), ("", "m"), ("", ""))
    ]
    assert len({seq.block_hashes[0] for seq in seqs}) == 3


def test_an_evicted_block_is_not_found_and_hides_what_follows_it() -> None:
    cache = PrefixCache(8)
    cached(cache, [0, 1, 2], [1, 2, 3, 4, 5, 6])
    cache.evict(1)
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7]) == [0]
    assert len(cache) == 2


def test_a_recomputed_parent_does_not_lead_to_children_of_the_evicted_one() -> None:
    cache = PrefixCache(8)
    cached(cache, [0, 1], [1, 2, 3, 4])
    cache.evict(0)
    cached(cache, [5], [1, 2])
    assert hits(cache, [1, 2, 3, 4, 9]) == [5]
    cached(cache, [5, 6], [1, 2, 3, 4])
    assert hits(cache, [1, 2, 3, 4, 9]) == [5, 6]
    assert not cache.holds(1)


def test_evicting_a_block_that_holds_nothing_is_no_error() -> None:
    cache = PrefixCache(2)
    cache.evict(1)
    assert len(cache) == 0


def test_nothing_survives_a_clear() -> None:
    cache = PrefixCache(4)
    cached(cache, [0, 1], [1, 2, 3, 4])
    cache.clear()
    assert hits(cache, [1, 2, 3, 4, 5]) == []
    assert not any(cache.holds(block_id) for block_id in range(4))


def test_each_block_is_hashed_once() -> None:
    hashed: list[bytes] = []

    def digest(data: bytes) -> bytes:
        hashed.append(data)
        return xxhash.xxh3_128_digest(data)

    cache = PrefixCache(8, digest=digest)
    cached(cache, [0, 1, 2], [1, 2, 3, 4, 5, 6])
    seq = make_sequence(token_ids=[1, 2, 3, 4, 5, 6, 7], block_size=2)
    hashed.clear()
    assert [len(cache.match(seq)) for _ in range(5)] == [3] * 5
    assert len(hashed) == 3


# --- collisions: a digest that is a constant -------------------------------------------------------------------------


def colliding() -> PrefixCache:
    return PrefixCache(8, digest=lambda data: b"same")


def test_a_collision_never_serves_another_prompts_kv() -> None:
    cache = colliding()
    cached(cache, [0], [1, 2])
    assert hits(cache, [3, 4, 5]) == []
    assert hits(cache, [1, 2, 5]) == [0]


def test_a_collision_never_serves_another_position_of_the_same_prompt() -> None:
    cache = colliding()
    cached(cache, [0], [7, 7])
    assert hits(cache, [7, 7, 7, 7, 7, 7, 7]) == [0]


def test_a_collision_never_serves_equal_tokens_after_another_parent() -> None:
    cache = colliding()
    cached(cache, [0, 1], [1, 1, 7, 7])
    assert hits(cache, [7, 7, 7]) == []
    assert hits(cache, [2, 2, 7, 7, 7]) == []


def test_a_collision_never_serves_another_salt() -> None:
    cache = colliding()
    cached(cache, [0], [1, 2], salt="a")
    assert hits(cache, [1, 2, 3], salt="b") == []


def test_the_later_of_two_that_collide_stays() -> None:
    cache = colliding()
    cached(cache, [0], [1, 2])
    cached(cache, [1], [3, 4])
    assert (hits(cache, [1, 2, 9]), hits(cache, [3, 4, 9])) == ([], [1])
    assert len(cache) == 1
