"""Decode of few requests in FA3's order: near float64, blind to its schedule, FA3's own bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sgl_det.kernels import fa3_chunks
from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.fa3_decode import Few, Launch, decode_attention, plan_few
from sgl_det.testing import assert_bitwise_equal

from .interpreter import ACTIVE, DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
BF16 = torch.bfloat16
# heads, key heads, head size
SHAPES = pick(
    gpu=[(32, 8, 128), (28, 4, 128), (4, 4, 64), (16, 2, 64), (14, 2, 64), (16, 1, 128)],
    interpreter=[(6, 2, 64)],
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
CHUNK = pick(gpu=4096, interpreter=256)
# One key, both sides of a tile, of a chunk and of two.
LENGTHS = pick(
    gpu=[1, 127, 128, 129, 1000, 4095, 4096, 4097, 8193, 20000], interpreter=[1, 256, 300]
)


class Case:
    """Requests of LENGTHS keys, whose slots lie anywhere in the pools."""

    def __init__(self, shape, lengths=LENGTHS, seed=0):
        heads, groups, self.d = shape
        made = torch.Generator().manual_seed(seed)
        self.lengths, slots = lengths, sum(lengths) + 5
        sizes = (len(lengths), heads), (slots, groups), (slots, groups)
        q, k, v = (torch.randn(*size, self.d, generator=made).to(BF16) for size in sizes)
        places = torch.randperm(slots, generator=made).int()
        # Past its keys, a table points at slots that hold NaN.
        table = places[-1].repeat(len(lengths), max(lengths))
        k[places[-1]], v[places[-1]] = float("nan"), float("nan")
        for row, mine in zip(table, places[: sum(lengths)].split(lengths), strict=True):
            row[: len(mine)] = mine
        self.q, self.k, self.v, self.table = (x.to(DEVICE) for x in (2 * q, k, v, table))

    def few(self, requests, chunk=CHUNK):
        lengths = torch.tensor([self.lengths[i] for i in requests]).int().to(DEVICE)
        chunks = max(fa3_chunks.chunks_of(self.lengths[i], chunk) for i in requests)
        return Few(lengths, self.table[list(requests)].contiguous(), chunks)

    def decode(self, requests=None, chunk=CHUNK, **how):
        requests = range(len(self.lengths)) if requests is None else requests
        q, few = self.q[list(requests)].contiguous(), self.few(requests, chunk)
        how |= {"exact": ACTIVE, "chunk": chunk}
        return decode_attention(q, self.k, self.v, few, self.d**-0.5, **how)

    def exact(self, i):
        """Request i in float64: [H, D]."""
        slots = self.table[i, : self.lengths[i]].long()
        q, k, v = self.q[i].double(), self.k[slots].double(), self.v[slots].double()
        k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
        p = torch.softmax(torch.einsum("hd,shd->hs", q, k) * self.d**-0.5, dim=1)
        return torch.einsum("hs,shd->hd", p, v)


@shapes
def test_it_is_near_float64(shape):
    case = Case(shape)
    o = case.decode()
    for i, n in enumerate(LENGTHS):
        error = (o[i].double() - case.exact(i)).abs().max()
        assert error < 2e-2, f"{n} keys: {error}"


@shapes
def test_no_bit_follows_the_schedule(shape):
    case = Case(shape)
    want = case.decode()
    launches = pick(gpu=[(16, 2, 5), (16, 4, 7), (64, 4, 3)], interpreter=[(64, 4, 5)])
    for launch in launches:
        assert_bitwise_equal(case.decode(launch=Launch(*launch)), want, f"{launch}")
    for blocks in pick(gpu=(1, 2, 100), interpreter=(1,)):
        assert_bitwise_equal(case.decode(blocks=blocks), want, f"{blocks} blocks")
    for i in pick(gpu=range(len(LENGTHS)), interpreter=(1,)):
        assert_bitwise_equal(case.decode([i])[0], want[i], f"{LENGTHS[i]} keys alone")


def test_the_size_of_a_chunk_shows():
    """Control: another order gives other bits."""
    case = Case(SHAPES[0])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(case.decode(chunk=CHUNK // 2), case.decode())


def test_a_sink_takes_its_share():
    case = Case(SHAPES[0])
    sinks = torch.linspace(-1, 2, SHAPES[0][0], device=DEVICE)
    with_none = case.decode(sinks=torch.full_like(sinks, float("-inf")))
    assert_bitwise_equal(with_none, case.decode(), "a sink of -inf")
    assert case.decode(sinks=sinks).abs().sum() < case.decode().abs().sum()


@pytest.mark.skipif(ACTIVE, reason="FA3 needs its GPU")
@shapes
def test_the_bits_are_those_of_fa3(shape):
    flash_attn = pytest.importorskip("sgl_kernel.flash_attn")
    case = Case(shape)
    heads, groups, d = shape
    sinks = torch.linspace(-1, 2, heads, device=DEVICE)
    told = partial(fa3_chunks.told_longest, d, heads // groups)

    def call(q, s, out):
        o, lse, *_ = flash_attn.flash_attn_with_kvcache(
            q=q,
            k_cache=case.k.unsqueeze(1),
            v_cache=case.v.unsqueeze(1),
            page_table=s.table,
            cache_seqlens=s.lengths,
            cu_seqlens_q=s.starts,
            max_seqlen_q=told(s.longest),
            softmax_scale=d**-0.5,
            causal=s.causal,
            num_splits=1,
            return_softmax_lse=True,
        )
        return o, lse

    few = case.few(range(len(LENGTHS)))
    capacity = sum(fa3_chunks.chunks_of(n, CHUNK) for n in LENGTHS)
    plan = fa3_chunks.plan_decode(few.lengths, few.table, CHUNK, capacity)
    for name, some in (("no sink", None), ("sinks", sinks)):
        want = fa3_chunks.decode_attention(call, case.q, plan, sinks=some)
        assert_bitwise_equal(case.decode(sinks=some), want, f"{shape} {name}")


def test_what_is_planned():
    lengths, table = torch.ones(2, dtype=torch.int32, device=DEVICE), torch.zeros(2, 9)
    of = {"queries": 32, "keys": 8, "d": 128, "dtype": BF16}
    plan = plan_few(lengths, table, 4096, Heads(**of))
    assert (plan is None) if ACTIVE else (plan.chunks == 1 and plan.table is table)
    for other in ({"keys": 16}, {"d": 256}, {"dtype": torch.float16}, {"queries": 256}):
        assert plan_few(lengths, table, 4096, Heads(**of | other)) is None
    assert plan_few(lengths, table, 4097, Heads(**of)) is None


def test_what_is_not_held_is_refused():
    case = Case(SHAPES[0])
    case.q = case.q.half()
    with pytest.raises(ValueError, match="float16"):
        case.decode()
