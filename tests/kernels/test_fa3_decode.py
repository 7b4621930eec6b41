"""Decode of few requests in FA3's order: near float64, blind to its schedule, FA3's own bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sgl_det.kernels import fa3_chain, fa3_chunks
from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.fa3_chain import Launch
from sgl_det.kernels.fa3_decode import Few, decode_attention, plan_few
from sgl_det.kernels.graph_timing import captured
from sgl_det.testing import assert_bitwise_equal

from . import cuda_emulator
from .interpreter import ACTIVE, DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
if ACTIVE:
    pytestmark.append(cuda_emulator.needs_compiler)
BF16 = torch.bfloat16
# heads, key heads, head size
SHAPES = pick(
    gpu=[
        *[(32, 8, 128), (28, 4, 128), (4, 4, 64), (16, 2, 64), (14, 2, 64), (64, 8, 128)],
        *[(40, 8, 128), (8, 1, 128)],
    ],
    interpreter=[(6, 2, 64)],
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
CHUNK = pick(gpu=4096, interpreter=512)
# One key, both sides of a tile, of a chunk and of two; chunks of an odd number of tiles.
LENGTHS = pick(
    gpu=[1, 127, 128, 129, 257, 1000, 4095, 4096, 4097, 8193, 20000], interpreter=[1, 385, 600]
)


@pytest.fixture(autouse=True)
def chain(monkeypatch):
    """Where Triton is interpreted, the chain is emulated."""
    if ACTIVE:
        monkeypatch.setattr(fa3_chain, "attend", cuda_emulator.attend)


class Case:
    """Requests of LENGTHS keys, whose slots lie anywhere in the pools."""

    def __init__(self, shape, lengths=LENGTHS, seed=0):
        heads, groups, self.d = shape
        made = torch.Generator().manual_seed(seed)
        self.lengths, slots = lengths, sum(lengths) + 5
        sizes = (len(lengths), heads), (slots, groups), (slots, groups)
        q, k, v = (torch.randn(*size, self.d, generator=made).to(BF16) for size in sizes)
        places = torch.randperm(slots, generator=made).int()
        # Past its keys, a table points at a slot that holds NaN.
        self.beyond = int(places[-1])
        table = places[-1].repeat(len(lengths), max(lengths))
        k[self.beyond], v[self.beyond] = float("nan"), float("nan")
        for row, mine in zip(table, places[: sum(lengths)].split(lengths), strict=True):
            row[: len(mine)] = mine
        self.q, self.k, self.v, self.table = (x.to(DEVICE) for x in (2 * q, k, v, table))

    def decode(self, requests=None, chunk=CHUNK, **how):
        requests = list(range(len(self.lengths)) if requests is None else requests)
        chunks = max(fa3_chunks.chunks_of(self.lengths[i], chunk) for i in requests)
        where = self.table[requests].contiguous(), self.on_gpu(requests)
        how |= {"exact": ACTIVE, "chunk": chunk}
        q = self.q[requests].contiguous()
        return decode_attention(q, self.k, self.v, *where, chunks, self.d**-0.5, **how)

    def on_gpu(self, requests):
        return torch.tensor([self.lengths[i] for i in requests]).int().to(DEVICE)

    def exact(self, i):
        """Request i in float64: [H, D]."""
        slots = self.table[i, : self.lengths[i]].long()
        q, k, v = self.q[i].double(), self.k[slots].double(), self.v[slots].double()
        k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
        p = torch.softmax(torch.einsum("hd,shd->hs", q, k) * self.d**-0.5, dim=1)
        return torch.einsum("hs,shd->hd", p, v)


def _spread(case):
    """Queries and keys whose columns differ by 2^16, so that most rescales are 0."""
    columns = torch.exp2(torch.linspace(-8, 8, case.d, device=DEVICE)).to(BF16)
    case.q.mul_(columns)


def _sink_like(case):
    """One key a request that a hundred times outweighs the others."""
    first = case.table[:, 0].long()
    case.k[first] *= 100


def _cancelling(case):
    """Values that come in pairs of a large number and its negative, and small ones between."""
    case.v[case.beyond] = 0
    case.v[0::3] *= 4096
    case.v[1::3] = -case.v[0::3][: len(case.v[1::3])]
    case.v[case.beyond] = float("nan")


DATA = {"normal": lambda case: None}
DATA |= {"spread": _spread, "sink-like": _sink_like, "cancelling": _cancelling}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("data", DATA)
def test_no_nan_is_among_the_keys(data, seed):
    """Where all is NaN, all bits are equal; seeds put the slot beyond the keys in other places."""
    case = Case(SHAPES[0], LENGTHS[:3], seed)
    DATA[data](case)
    assert case.k[case.beyond].isnan().all() and case.v[case.beyond].isnan().all()
    assert all(case.exact(i).isfinite().all() for i in range(3))


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
    launches = pick(gpu=[(16, 4), (16, 8), (32, 8), (64, 4)], interpreter=[(16, 4), (32, 8)])
    for launch in launches:
        assert_bitwise_equal(case.decode(launch=Launch(*launch)), want, f"{launch}")
    for blocks in pick(gpu=(1, 2, 100), interpreter=(1,)):
        assert_bitwise_equal(case.decode(blocks=blocks), want, f"{blocks} blocks")
    for i in pick(gpu=range(len(LENGTHS)), interpreter=(1,)):
        assert_bitwise_equal(case.decode([i])[0], want[i], f"{LENGTHS[i]} keys alone")


if ACTIVE:

    @pytest.mark.parametrize("lazy", [False, True], ids=["at once", "late"])
    def test_no_bit_follows_when_copies_arrive(lazy, monkeypatch):
        """A ring of four stages that a chunk of ten tiles goes through more than twice."""
        case = Case(SHAPES[0], [1280, 700])
        how = {"launch": Launch(16, 4), "chunk": 1280}
        want = case.decode(**how | {"launch": Launch(16, 12)})
        monkeypatch.setattr(cuda_emulator, "lazy", lazy)
        assert_bitwise_equal(case.decode(**how), want, "a ring")


def test_the_size_of_a_chunk_shows():
    """Control: another order gives other bits."""
    case = Case(SHAPES[0])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(case.decode(chunk=CHUNK // 2), case.decode())


def test_a_sink_takes_its_share():
    case = Case(SHAPES[0], LENGTHS[:2])
    sinks = torch.linspace(-1, 2, SHAPES[0][0], device=DEVICE)
    with_none = case.decode(sinks=torch.full_like(sinks, float("-inf")))
    assert_bitwise_equal(with_none, case.decode(), "a sink of -inf")
    assert case.decode(sinks=sinks).abs().sum() < case.decode().abs().sum()


def test_what_is_planned():
    of = {"queries": 32, "keys": 8, "d": 128, "dtype": BF16}
    for requests, longest, chunks in (
        (8, 4096, 1), (9, 4096, None), (2, 4097, 2), (2, 64 * 4096, 64), (2, 64 * 4096 + 1, None),
        (3, 4097, None),
    ):  # fmt: skip
        few = plan_few(Lengths([1] * requests), longest, Heads(**of))
        assert few == (chunks and Few(chunks)), (requests, longest)
    lengths = Lengths([5, 7])
    for other in ({"keys": 33}, {"d": 256}, {"dtype": torch.float16}, {"queries": 256}):
        assert plan_few(lengths, 4096, Heads(**of | other)) is None
    lengths.is_cuda = False
    assert plan_few(lengths, 4096, Heads(**of)) is None


class Lengths(list):
    """So many requests on a GPU."""

    is_cuda = True


def test_keys_beyond_the_chunks_are_not_seen():
    """A graph for one chunk that meets a longer request leaves memory alone."""
    case = Case(SHAPES[0], [CHUNK + 100])
    of_one = Case(SHAPES[0], [CHUNK])
    of_one.q, of_one.k, of_one.v, of_one.table = case.q, case.k, case.v, case.table
    long = torch.full((1,), CHUNK + 100, dtype=torch.int32, device=DEVICE)
    where, scale = (case.table, long), case.d**-0.5
    how = {"exact": ACTIVE, "chunk": CHUNK}
    found = decode_attention(case.q, case.k, case.v, *where, 1, scale, **how)
    assert_bitwise_equal(found, of_one.decode(), "the first chunk")


def test_a_request_without_keys_gets_zeros_and_goes_where_it_is_told():
    case = Case(SHAPES[0])
    lengths, out = case.on_gpu(range(len(LENGTHS))), torch.empty_like(case.q)
    lengths[0] = 0
    where, chunks = (case.table, lengths), fa3_chunks.chunks_of(max(LENGTHS), CHUNK)
    how = {"exact": ACTIVE, "chunk": CHUNK, "out": out}
    o = decode_attention(case.q, case.k, case.v, *where, chunks, case.d**-0.5, **how)
    assert o is out and not o[0].any()
    assert_bitwise_equal(o[1:], case.decode()[1:], "the others")


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"q": lambda x: x.half()}, "float16"),
        ({"k": lambda x: x[:, :1]}, "do not fit"),
        ({"v": lambda x: x.float()}, "do not fit"),
        ({"table": lambda x: x[:1]}, "rows of the table"),
        ({"table": lambda x: x.T.contiguous().T}, "stride 1"),
    ],
    ids=["dtype", "key heads", "values", "requests", "strides"],
)
def test_what_is_not_held_is_refused(wrong, match):
    case = Case(SHAPES[0])
    for name, change in wrong.items():
        setattr(case, name, change(getattr(case, name)))
    where = case.table, case.on_gpu(range(len(LENGTHS)))
    with pytest.raises(ValueError, match=match):
        decode_attention(case.q, case.k, case.v, *where, 1, case.d**-0.5)


if not ACTIVE:
    # FA3 needs its GPU.

    def fa3(case, lengths, sinks=None):
        """The same rows by FA3 itself, in chunks."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        told = partial(fa3_chunks.told_longest, case.d, case.q.shape[1] // case.k.shape[1])

        def call(q, s, out):
            o, lse, *_ = flash_attn_with_kvcache(
                q=q,
                k_cache=case.k.unsqueeze(1),
                v_cache=case.v.unsqueeze(1),
                page_table=s.table,
                cache_seqlens=s.lengths,
                cu_seqlens_q=s.starts,
                max_seqlen_q=told(s.longest),
                softmax_scale=case.d**-0.5,
                causal=s.causal,
                num_splits=1,
                return_softmax_lse=True,
            )
            return o, lse

        capacity = sum(fa3_chunks.chunks_of(int(n), CHUNK) for n in lengths)
        plan = fa3_chunks.plan_decode(lengths, case.table, CHUNK, capacity)
        return fa3_chunks.decode_attention(call, case.q, plan, sinks=sinks)

    @shapes
    @pytest.mark.parametrize("data", DATA)
    def test_the_bits_are_those_of_fa3(shape, data):
        case = Case(shape)
        DATA[data](case)
        sinks = torch.linspace(-1, 2, shape[0], device=DEVICE)
        for name, some in (("no sink", None), ("sinks", sinks)):
            want = fa3(case, case.on_gpu(range(len(LENGTHS))), some)
            assert_bitwise_equal(case.decode(sinks=some), want, f"{shape} {data} {name}")

    @pytest.mark.parametrize("chunks", [1, 10], ids=["one chunk", "chunks"])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_graph_holds_what_serves(batch, chunks):
        """Captured with one key a request and a table for the longest context, then replayed."""
        most = 4096 if chunks == 1 else 9000
        case = Case((32, 8, 128), [most] * batch)
        case.table = torch.nn.functional.pad(case.table, (0, 40960 - most))
        lengths = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        where, scale = (case.table, lengths), case.d**-0.5
        found = []
        graph = captured(
            [lambda: found.append(decode_attention(case.q, case.k, case.v, *where, chunks, scale))]
        )
        for n in (1, 127, 128, 129, 257, 4095, 4096, 4097, 8192, 8193, 9000, 1):
            if n > most:
                continue
            lengths.fill_(n)
            lengths[0] = min(n, 129)
            graph.replay()
            assert_bitwise_equal(found[-1], fa3(case, lengths), f"{n} keys")
