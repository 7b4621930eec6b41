"""Plans of FA3 calls over chunks, against a twin of FA3: one order in prefill, chunks and decode.

The twin (`fa3_support`) has the bits of a row depend on the keys that it sees in its sequence. That
FA3 itself does is for `benchmarks/check_fa3.py` on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from fa3_support import BF16, CHUNK, LENGTHS, D, H, Pool

from sgl_det.kernels import fa3_chunks, fa3_extend
from sgl_det.kernels.fa3_chunks import Chunked, chunks_of, plan_decode, told_longest
from sgl_det.kernels.fa3_extend import plan_extend
from sgl_det.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "one_thread")


@pytest.fixture
def pool():
    return Pool()


PREFIXES = {
    "none": [0] * len(LENGTHS),
    "one new": [n - 1 for n in LENGTHS],
    "three": [min(3, n - 1) for n in LENGTHS],
    "a chunk": [8 if n > 8 else 0 for n in LENGTHS],
    "mixed": [0, 6, 0, 8, 3, 15, 16, 5],
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("rows", [1, 8, 17, 200, 1000])
@pytest.mark.parametrize("many", [1, 1 << 30], ids=["in place", "copied"])
def test_a_prefill_after_any_prefix_has_the_bits_of_all_others(pool, prefix, rows, many):
    whole, whole_lse = pool.prefill(PREFIXES["none"])
    o, lse = pool.prefill(prefix, rows=rows, many=many)
    for b, p in enumerate(prefix):
        assert_bitwise_equal(o[b], whole[b][p:], f"request {b}")
        assert_bitwise_equal(lse[b], whole_lse[b][:, p:], f"lse of request {b}")


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, H)], ids=["", "sinks"])
@pytest.mark.parametrize("spare", [0, 5])
def test_decode_equals_prefill(pool, sinks, spare):
    whole, whole_lse = pool.prefill(PREFIXES["none"], sinks=sinks)
    o, lse = pool.decode(spare=spare, sinks=sinks)
    for b in range(len(LENGTHS)):
        assert_bitwise_equal(o[b], whole[b][-1], f"request {b}")
        assert_bitwise_equal(lse[:, b], whole_lse[b][:, -1], f"lse of request {b}")
        alone, _ = pool.decode(requests=[b], sinks=sinks)
        assert_bitwise_equal(alone[0], o[b], f"request {b} alone")


def test_contexts_of_one_chunk_have_the_bits_of_a_call_without(pool):
    o, lse = pool.decode()
    for b, n in enumerate(LENGTHS):
        one, one_lse = pool.row(pool.q[b][-1], pool.table[b, :n].long())
        if n <= CHUNK:
            assert_bitwise_equal(o[b], one, f"{n} keys")
            assert_bitwise_equal(lse[:, b], one_lse, f"lse of {n} keys")
        wrong = (o[b].double() - one.double()).abs().max()
        assert wrong <= 2**-7 and (lse[:, b] - one_lse).abs().max() < 1e-5


def test_prefill_in_one_chunk_is_one_call(pool):
    short = [b for b, n in enumerate(LENGTHS) if n <= CHUNK]
    plan = plan_extend([0] * len(short), [LENGTHS[b] for b in short], pool.table[short], CHUNK)
    assert plan.past == () and plan.own.lengths.tolist() == [LENGTHS[b] for b in short]


def pairs(pool, call_q, sequences, source=None):
    """Every (row of q, slot) that a call computes."""
    pool.fa3(call_q, sequences)
    return [(i if source is None else int(source[i]), slot) for i, slot in pool.seen]


def expected_pairs(pool, prefix):
    rows = [(b, p) for b, n in enumerate(LENGTHS) for p in range(prefix[b], n)]
    table = pool.table.tolist()
    return sorted((i, table[b][s]) for i, (b, p) in enumerate(rows) for s in range(p + 1))


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("rows", [1, 20, 1000])
def test_prefill_covers_every_pair_once(pool, prefix, rows):
    new = [n - p for n, p in zip(LENGTHS, prefix, strict=True)]
    q = torch.randn(sum(new), H, D)
    plan = plan_extend(prefix, new, pool.table, CHUNK, many_rows=1 << 30, most_rows=rows)
    found = pairs(pool, q, plan.own)
    for group in plan.past:
        assert len(group.source) <= max(rows, CHUNK)
        found += pairs(pool, q[group.source], group.sequences, group.source)
    assert sorted(found) == expected_pairs(pool, prefix)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("rows", [1, 120, 1000])
def test_prefill_in_place_covers_every_pair_once(pool, prefix, rows):
    new = [n - p for n, p in zip(LENGTHS, prefix, strict=True)]
    q = torch.randn(sum(new), H, D)
    plan = plan_extend(prefix, new, pool.table, CHUNK, many_rows=1, most_rows=rows)
    found = pairs(pool, q, plan.own)
    for group in plan.past:
        span = group.end - group.begin
        assert len(group.calls) * span <= max(rows, span)
        for call in group.calls:
            assert int(call.starts[-1]) == span
            found += pairs(pool, q[group.begin : group.end], call, range(group.begin, group.end))
    assert sorted(found) == expected_pairs(pool, prefix)


def test_many_rows_behind_a_chunk_are_not_copied(pool):
    few, many = ([1] * 6, [2000, 300, 1, 1, 1, 1])
    table, prefix = torch.zeros(6, 60_000, dtype=torch.int32), [5000] * 6
    assert isinstance(plan_extend(prefix, few, table, 4096).past[0], Chunked)
    (group,) = plan_extend(prefix, many, table, 4096).past
    assert (group.begin, group.end, len(group.calls)) == (0, sum(many), 1)
    *groups, last = plan_extend([50_000] * 6, many, table, 4096).past
    assert [len(g.calls) for g in groups] == [fa3_extend.MOST_PARTS // sum(many)] * len(groups)
    assert sum(len(g.calls) for g in (*groups, last)) == 50_000 // 4096


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_decode_covers_every_pair_once(pool, spare):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    used = sum(chunks_of(n, CHUNK) for n in LENGTHS)
    plan = plan_decode(lengths, pool.table, CHUNK, used + spare)
    found = pairs(pool, torch.randn(used + spare, H, D), plan.sequences, plan.source)
    assert sorted(found) == expected_pairs(pool, PREFIXES["one new"])
    # What is left over has neither rows nor keys, and costs a look at its entry.
    assert plan.sequences.lengths[used:].tolist() == [0] * spare
    assert plan.sequences.starts[used:].tolist() == [used] * (spare + 1)


def test_types_that_fa3_takes(pool):
    decode = plan_decode(torch.tensor(LENGTHS, dtype=torch.int32), pool.table, CHUNK, 40)
    extend = plan_extend(PREFIXES["three"], [1] * len(LENGTHS), pool.table, CHUNK)
    place = plan_extend(PREFIXES["three"], [1] * len(LENGTHS), pool.table, CHUNK, many_rows=1).past
    chunked = (decode, *extend.past)
    calls = [call for group in place for call in group.calls]
    for s in (extend.own, *(c.sequences for c in chunked), *calls):
        for x in (s.table, s.lengths, s.starts):
            assert x.dtype == torch.int32 and x.is_contiguous()
    for rows in (c.rows for c in (*chunked, *place)):
        for x in (rows.first, rows.step, rows.count):
            assert x.dtype == torch.int32 and x.is_contiguous()


def test_decode_plan_has_fixed_shapes(pool):
    """As a CUDA graph wants it: whatever the lengths, and a padded request counts as one."""
    shapes = set()
    for lengths in ([1, 1, 1], [29, 16, 1], [0, 0, 8]):
        plan = plan_decode(torch.tensor(lengths, dtype=torch.int32), pool.table[:3], CHUNK, 12)
        s = plan.sequences
        tensors = (s.table, s.lengths, s.starts, plan.source, plan.rows.first, plan.rows.count)
        shapes.add(tuple(x.shape for x in tensors))
    assert len(shapes) == 1


def test_control_chunks_that_start_at_the_prefix_show(pool, monkeypatch):
    """As where a prefill is cut every C new tokens, and not at multiples of C."""
    whole, _ = pool.prefill(PREFIXES["none"])

    def relative(prefix, new, chunk):
        at = 0
        for b, (begin, count) in enumerate(zip(prefix, new, strict=True)):
            for k in range(0, count, chunk):
                n = min(chunk, count - k)
                yield fa3_extend._Segment(b, begin + k, begin + k + n, at + k, (begin + k) // chunk)
            at += count

    monkeypatch.setattr(fa3_extend, "_segments", relative)
    o, _ = pool.prefill(PREFIXES["mixed"])
    with pytest.raises(AssertionError, match="differ"):
        for b, p in enumerate(PREFIXES["mixed"]):
            assert_bitwise_equal(o[b], whole[b][p:])


def test_control_another_chunk_shows(pool):
    o, lse = pool.decode()
    other, other_lse = pool.decode(chunk=5)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(other_lse, lse)
        assert_bitwise_equal(other, o)


def test_control_a_plan_that_is_too_small_shows(pool):
    with pytest.raises((AssertionError, IndexError)):
        assert_bitwise_equal(pool.decode(spare=-3)[0], pool.decode()[0])


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 32, 64, 128])
def test_heads_of_64_never_take_the_short_path(group):
    for longest in (1, 2, 8, 9, 64, 65, 4096):
        told = told_longest(64, group, longest)
        assert told * group > 64 and told >= max(2, longest)
        assert told_longest(128, group, longest) == longest
        assert told_longest(256, group, longest) == max(2, longest)


def test_orders():
    for d, tile in fa3_chunks.TILES.items():
        order = fa3_chunks.reduction_order(d=d, dtype=BF16, arch=90)
        assert order.block == tile and order.split % tile == 0
    for d, dtype, arch in ((96, torch.bfloat16, 90), (64, torch.float32, 90), (64, BF16, 100)):
        with pytest.raises(ValueError, match="no order for heads"):
            fa3_chunks.reduction_order(d=d, dtype=dtype, arch=arch)


def test_no_new_tokens(pool):
    plan = plan_extend([], [], pool.table[:0], CHUNK)
    assert plan.past == () and plan.own.starts.tolist() == [0]
    assert isinstance(plan_decode(torch.ones(1).int(), pool.table, CHUNK, 1), Chunked)
