"""Triton attention: prefill, chunks and decode give a row the same bits, near float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_det.kernels import attention_decode, attention_order
from sgl_det.kernels.attention import Launch, Options, attention
from sgl_det.kernels.attention_decode import decode_attention
from sgl_det.kernels.attention_proof import Heads, Requests
from sgl_det.testing import assert_bitwise_equal

from .attention_cases import exact
from .interpreter import ACTIVE, DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty", "small_tiles")]
BF16, FP16 = torch.bfloat16, torch.float16
# Both sides of a tile, of a split, and of two splits. GQA ratios 1, 2, 4, 7 and 8.
LENGTHS = pick(
    gpu=[1, 2, 63, 64, 65, 127, 300, 511, 512, 513, 1024, 1025, 2500, 8192],
    interpreter=[1, 16, 33, 65],
)
# heads, key heads, head_dim, dtype, options
CASES = {
    "plain": (4, 2, 64, FP16, {}),
    "soft-cap": (7, 1, 80, BF16, {"cap": 5.0}),
    "window": (8, 1, 128, BF16, {"window": 20}),
    "window-sinks": (4, 4, 96, FP16, {"window": 40, "sinks": True}),
    "gpu-window": (32, 8, 128, BF16, {"window": 700}),
    "qwen3-8b": (32, 8, 128, BF16, {}),
    "wide": (8, 4, 256, BF16, {"sinks": True, "cap": 30.0}),
}
CHOSEN = pick(gpu=list(CASES), interpreter=["plain", "soft-cap", "window", "window-sinks"])
cases = pytest.mark.parametrize("case", CHOSEN)


@pytest.fixture
def small_tiles(monkeypatch):
    """An interpreter takes tiles one by one: smaller ones cross as many edges."""
    if ACTIVE:
        monkeypatch.setattr(attention_order, "BLOCK_S", 16)
        monkeypatch.setattr(attention_order, "SPLIT", 32)


def made(case: str, lengths=LENGTHS) -> tuple[Requests, Options]:
    """The requests of a case, and what their layer asks for."""
    heads, groups, d, dtype, wanted = CASES[case]
    wanted = dict(wanted)
    if wanted.pop("sinks", False):
        wanted["sinks"] = torch.linspace(-1, 2, heads, device=DEVICE)
    options = Options(d**-0.5, **wanted)
    return Requests(
        Heads(queries=heads, keys=groups, d=d, dtype=dtype), options, lengths, DEVICE
    ), options


def launch(rows: int) -> Launch:
    return Launch(rows, 8 if rows > 64 else 4, 2)


@cases
def test_near_float64(case):
    requests, options = made(case)
    o, lse = requests.extend(requests.lengths)
    # The weights are rounded to the dtype, for their sum as well; o is rounded once more.
    unit = {BF16: 2**-8, FP16: 2**-11}[requests.heads.dtype]
    for b, n in enumerate(requests.lengths):
        for position in {0, n // 2, n - 1}:
            right, right_lse = exact(requests, b, position)
            wrong = (o[b][position].double() - right).abs().max().item()
            assert wrong < 2 * unit * max(1.0, right.abs().max().item()), (b, position)
            assert (lse[b][position].double() - right_lse).abs().max().item() < unit / 2 + 2**-12


@cases
def test_chunks_and_query_tiles_do_not_show(case):
    requests, options = made(case)
    whole, lse = requests.extend(requests.lengths, launch(64))
    for size in pick(gpu=[1, 17, 64, 512], interpreter=[1, 17]):
        new = [min(size, n) for n in requests.lengths]
        for block_m in pick(gpu=[16, 32, 64, 128], interpreter=[16]):
            o, part = requests.extend(new, launch(block_m))
            for b, n in enumerate(new):
                name = f"request {b}, last {n}, {block_m} rows a program"
                assert_bitwise_equal(o[b], whole[b][-n:], name)
                assert_bitwise_equal(part[b], lse[b][-n:], f"lse of {name}")


@cases
def test_decode_equals_prefill(case):
    requests, options = made(case)
    whole, lse = requests.extend(requests.lengths)
    for shared in pick(gpu=[1, 2, 3, 8, 16], interpreter=[1, 2]):
        o, part = requests.decode(shared)
        for b in range(len(requests.lengths)):
            assert_bitwise_equal(o[b], whole[b][-1], f"request {b}, {shared} programs")
            assert_bitwise_equal(part[b], lse[b][-1], f"lse of request {b}, {shared} programs")


@cases
def test_many_splits_are_merged_in_one_order(case):
    """Beyond the number that a program of the merge loads together; three splits show no order."""
    requests, _ = made(case, pick(gpu=[8192, 9000, 20000], interpreter=[257, 530]))
    expected = requests.decode(1)
    for shared in (2, 7):
        for x, y, name in zip(requests.decode(shared), expected, ("o", "lse"), strict=True):
            assert_bitwise_equal(x, y, f"{name}, {shared} programs")


@cases
def test_neighbours_do_not_show(case):
    requests, options = made(case)
    whole, _ = requests.extend(requests.lengths)
    pools = (requests.k, requests.v, requests.table)
    for b, n in enumerate(LENGTHS):
        rows, one = requests.rows[b : b + 1], requests.counts[b : b + 1]
        starts = torch.tensor([0, n], device=DEVICE)
        o = attention(requests.q[b], *pools, rows, starts, one, n, options)
        assert_bitwise_equal(o, whole[b], f"request {b} alone")


@pytest.mark.parametrize("case", [c for c in CHOSEN if "window" in c])
def test_keys_of_a_window_may_lie_elsewhere_and_others_be_gone(case):
    """As in SGLang's pool of its own for layers with a window, whose old slots hold anything."""
    requests, options = made(case)
    whole, _ = requests.extend(requests.lengths)
    there = torch.randperm(len(requests.k), generator=torch.Generator().manual_seed(1))
    moved = there.to(DEVICE)
    k, v = torch.empty_like(requests.k), torch.empty_like(requests.v)
    k[moved], v[moved] = requests.k, requests.v
    for b, n in enumerate(requests.lengths):
        gone = requests.table[requests.rows[b], : max(0, n - 1 - options.window)].long()
        k[moved[gone]] = v[moved[gone]] = float("nan")
    requests.k, requests.v = k, v
    requests.options = replace(options, moved=moved.int())
    for shared in (1, 2):
        o, _ = requests.decode(shared)
        for b in range(len(o)):
            assert_bitwise_equal(o[b], whole[b][-1], f"request {b}, {shared} programs")


@pytest.mark.parametrize("case", CHOSEN)
def test_decode_may_read_a_list_of_what_it_sees(case):
    """As SGLang lists the slots before a step: all of them, windows or not."""
    requests, options = made(case)
    expected, _ = requests.decode(1)
    rows = [requests.table[r, :n] for r, n in zip(requests.rows, requests.lengths, strict=True)]
    slots, ends = torch.cat(rows), requests.counts.cumsum(0).int()
    q = torch.stack([q[-1] for q in requests.q])
    pools = (q, requests.k, requests.v, slots)
    for shared in (1, 2):
        how = {"work": requests.work, "shared": shared}
        o = decode_attention(*pools, ends, requests.counts, options, **how)
        assert_bitwise_equal(o, expected, f"{shared} programs")
        begun = torch.nn.functional.pad(ends, (1, 0))[1:]
        o = decode_attention(*pools, begun, None, options, **how)
        assert_bitwise_equal(o, expected, f"{shared} programs, no lengths")


@pytest.mark.parametrize("block", pick(gpu=[64], interpreter=[16]))
def test_another_order_has_bits_of_its_own_and_keeps_them(block):
    """As the FlashInfer backend asks for it; the GPU's reciprocal needs the GPU."""
    asked = attention_order.Order(block, pick(gpu=512, interpreter=48), reciprocal=not ACTIVE)
    requests, options = made("plain")
    other = replace(options, order=asked)
    before, _ = requests.extend(requests.lengths)
    requests.options = other
    requests.work = attention_decode.Work.allocate(
        len(LENGTHS), requests.heads.queries, max(LENGTHS), requests.heads.d, DEVICE, asked.split
    )
    whole, _ = requests.extend(requests.lengths)
    for shared in (1, 3):
        o, _ = requests.decode(shared)
        for b in range(len(o)):
            assert_bitwise_equal(o[b], whole[b][-1], f"request {b}, {shared} programs")
    pairs = zip(before, whole, strict=True)
    assert any((x.view(torch.int16) != y.view(torch.int16)).any() for x, y in pairs)


def test_control_a_split_that_follows_the_length():
    """Splits of half the length, as a heuristic would take them, change the bits."""
    requests, options = made("plain", [LENGTHS[-1]])
    before, _ = requests.decode(1)
    attention_order.SPLIT //= 2
    try:
        after, _ = requests.decode(1)
    finally:
        attention_order.SPLIT *= 2
    assert (before.view(torch.int16) != after.view(torch.int16)).any()


def test_what_is_not_held_is_refused():
    requests, options = made("plain", [5])
    q, rows = requests.q[0], requests.rows
    lengths = torch.tensor([5], device=DEVICE)
    pools = (requests.k, requests.v, requests.table, rows)
    with pytest.raises(ValueError, match="need work memory"):
        decode_attention(q[-1:], *pools, lengths, options, shared=2)
    with pytest.raises(ValueError, match="do not fit"):
        decode_attention(q[-1:, :3], *pools, lengths, options)
    with pytest.raises(ValueError, match="heads of 48"):
        decode_attention(q[-1:, :, :48], *pools, lengths, options)
