"""The merge of chunks: near float64, an exact copy of one chunk, and blind to its schedule."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels import merge_chunks as module
from sgl_det.kernels.merge_chunks import Rows, State, merge_chunks, reference
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty", "few_in_flight")]
BF16, FP16 = torch.bfloat16, torch.float16
# heads, head size, dtype
SHAPES = pick(
    gpu=[(32, 128, BF16), (28, 128, FP16), (8, 256, BF16), (64, 64, BF16), (6, 80, FP16)],
    interpreter=[(3, 24, FP16), (2, 16, BF16)],
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
# Chunks of each row: none, one, both sides of what is in flight at once, and many.
COUNTS = pick(gpu=[1, 0, 2, 3, 7, 8, 9, 16, 17, 33, 1], interpreter=[1, 0, 2, 9])
T = len(COUNTS)


@pytest.fixture
def few_in_flight(monkeypatch):
    """An interpreter takes chunks one by one: also those that are masked."""
    monkeypatch.setattr(module, "UNROLL", pick(gpu=module.UNROLL, interpreter=2))


class Chunks:
    """Rows of COUNTS chunks, packed one row after the other, or by a step of their own."""

    def __init__(self, shape, counts=COUNTS, step=1, seed=0):
        self.heads, self.d, self.dtype = shape
        made = torch.Generator().manual_seed(seed)
        first, n = [], 0
        for count in counts:
            first.append(n)
            n += count * step
        self.o = torch.randn(max(n, 1), self.heads, self.d, generator=made).to(self.dtype)
        self.lse = 3 * torch.randn(self.heads, max(n, 1), generator=made)
        self.o, self.lse = self.o.to(DEVICE), self.lse.to(DEVICE)
        steps = [step] * len(counts)
        self.rows = Rows(*torch.tensor([first, steps, counts], dtype=torch.int32, device=DEVICE))

    def out(self):
        """Where the result goes: o [T, H, D] and lse [H, T], which hold NaN."""
        rows = len(self.rows.count)
        o = torch.empty(rows, self.heads, self.d, dtype=self.dtype, device=DEVICE)
        return o, torch.empty(self.heads, rows, device=DEVICE)

    def merged(self, merge=merge_chunks, rows=None, **options):
        o, lse = self.out() if rows is None else (x.clone() for x in rows)
        merge(self.o, self.lse, self.rows, out=o, lse=lse, **options)
        return o, lse

    def parts(self, t):
        """Values [n, H, D] and lse [n, H] of the chunks of row t, in order."""
        first, step, count = (int(x[t]) for x in (self.rows.first, self.rows.step, self.rows.count))
        r = [first + j * step for j in range(count)]
        return self.o[r], self.lse.T[r]


def assert_same(actual, expected, name=""):
    for what, a, b in zip(("o", "lse"), actual, expected, strict=True):
        assert_bitwise_equal(a, b, f"{what} {name}")


@shapes
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_near_float64(shape, sinks):
    chunks = Chunks(shape)
    given = torch.linspace(-2, 3, shape[0], device=DEVICE) if sinks else None
    unit = {BF16: 2**-8, FP16: 2**-11}[shape[2]]
    for o, lse in (chunks.merged(sinks=given), chunks.merged(reference, sinks=given)):
        for t in range(T):
            values, top = (x.double() for x in chunks.parts(t))
            if sinks:
                values = torch.cat([values, torch.zeros_like(values[:1] if t != 1 else o[:1])])
                top = torch.cat([top, given.double()[None]])
            if not len(top):
                assert (o[t] == 0).all() and (lse[:, t] == float("-inf")).all()
                continue
            exact = (torch.softmax(top, 0)[..., None] * values).sum(0)
            # One rounding to the dtype, and fp32's of every weight, product and sum.
            assert ((o[t].double() - exact).abs() <= unit * exact.abs() + 2**-17).all(), t
            assert ((lse[:, t].double() - torch.logsumexp(top, 0)).abs() < 2**-18 * 8).all(), t


@shapes
def test_one_chunk_is_copied(shape):
    """Signed zeros and the smallest numbers too; also when it is the last chunk, in place."""
    chunks = Chunks(shape, counts=[1] * T)
    tiny = torch.finfo(shape[2]).tiny
    chunks.o[:2] = -0.0
    chunks.o[2] = tiny / 4
    chunks.lse[0, 0] = 0.0
    assert_same(chunks.merged(), (chunks.o, chunks.lse))
    none = Chunks(shape, counts=[0] * T)
    assert_same(none.merged(rows=(chunks.o, chunks.lse), last=True), (chunks.o, chunks.lse))


@shapes
def test_row_depends_on_its_own_chunks(shape):
    """Alone, with other neighbours, by another step, and with NaN in what it does not read."""
    whole = Chunks(shape)
    o, lse = whole.merged()
    for t in range(T):
        values, top = whole.parts(t)
        for step in pick(gpu=[1, 3], interpreter=[3]):
            one = Chunks(shape, counts=[2, COUNTS[t], 1], step=step, seed=1)
            at = [2 * step + j * step for j in range(COUNTS[t])]
            one.o.fill_(float("nan"))
            one.lse.fill_(float("nan"))
            one.o[at], one.lse[:, at] = values, top.T
            found, found_lse = one.merged()
            assert_bitwise_equal(found[1], o[t], f"row {t}, step {step}")
            assert_bitwise_equal(found_lse[:, 1], lse[:, t], f"lse of row {t}, step {step}")


@shapes
def test_empty_chunks_do_not_show(shape):
    """A chunk without a key, anywhere among the others: FA3 gives 0 and -inf."""
    full = Chunks(shape, counts=[4])
    expected = full.merged()
    for empty in pick(gpu=[[0], [4], [2], [0, 1, 3, 6, 8]], interpreter=[[0], [0, 1, 3, 6, 8]]):
        n = 4 + len(empty)
        wider = Chunks(shape, counts=[n])
        kept = [j for j in range(n) if j not in empty]
        wider.o[empty], wider.lse[:, empty] = 0.0, float("-inf")
        wider.o[kept], wider.lse[:, kept] = full.o, full.lse
        assert_same(wider.merged(), expected, f"{empty} empty")


@shapes
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_launches_do_not_show(shape, sinks):
    """All chunks in one launch, or a few a launch through the state, the last in place."""
    chunks = Chunks(shape, counts=[max(n, 1) for n in COUNTS])
    given = torch.linspace(-2, 3, shape[0], device=DEVICE) if sinks else None
    expected = chunks.merged(sinks=given)
    rows, original = chunks.rows, chunks.rows
    lasts = (rows.first + (rows.count - 1) * rows.step).long()
    last = chunks.o[lasts], chunks.lse[:, lasts]
    for size in pick(gpu=[1, 2, 5, 64], interpreter=[3, 64]):
        state = State.allocate(T, chunks.heads, chunks.d, torch.device(DEVICE))
        most = int(original.count.max()) - 1
        for begin in range(0, most, size):
            count = (original.count - 1 - begin).clamp(0, size)
            chunks.rows = Rows(original.first + begin * original.step, original.step, count)
            final = begin + size >= most
            options = {"last": True, "sinks": given, "state": state, "final": final}
            found = chunks.merged(rows=last, **options)
            if not final:
                assert_same(found, last, "nothing is stored before the final launch")
        assert_same(found, expected, f"{size} a launch")


@shapes
def test_programs_do_not_show(shape, monkeypatch):
    """Heads a program, warps and chunks in flight: every operation is on single elements."""
    chunks = Chunks(shape)
    expected = chunks.merged()
    gpu = [(1, 1, 1), (1, 2, 8), (9999, 4, 3), (9999, 8, 16), (1, 8, 2)]
    for many, warps, unroll in pick(gpu=gpu, interpreter=[(1, 1, 1), (9999, 4, 3)]):
        monkeypatch.setattr(module, "MANY", many)
        monkeypatch.setattr(module, "_warps", lambda elements, warps=warps: warps)
        monkeypatch.setattr(module, "UNROLL", unroll)
        assert_same(chunks.merged(), expected, f"{many}, {warps} warps, {unroll} in flight")


@shapes
def test_near_its_twin(shape):
    """Equal where no weight is rounded: chunks of one lse."""
    chunks = Chunks(shape)
    chunks.lse.fill_(0.5)
    assert_bitwise_equal(chunks.merged()[0], chunks.merged(reference)[0], "equal weights")


@shapes
def test_strides_do_not_show(shape):
    chunks = Chunks(shape)
    expected = chunks.merged()
    heads, d = chunks.heads, chunks.d
    wide = torch.zeros(len(chunks.o), heads + 2, d + 16, dtype=chunks.dtype, device=DEVICE)
    wide[:, 1:-1, :d] = chunks.o
    long = torch.zeros(heads, len(chunks.o) + 5, device=DEVICE)
    long[:, : len(chunks.o)] = chunks.lse
    chunks.o, chunks.lse = wide[:, 1:-1, :d], long[:, : len(chunks.o)]
    out = torch.zeros(T, heads + 1, d, dtype=chunks.dtype, device=DEVICE)[:, 1:]
    lse = torch.zeros(heads, T + 3, device=DEVICE)[:, :T]
    merge_chunks(chunks.o, chunks.lse, chunks.rows, out=out, lse=lse)
    assert_same((out, lse), expected)


@shapes
def test_control_another_order_shows(shape):
    """Descending, or folded by twos with a rounding between, as other merges do."""
    chunks, states = Chunks(shape, counts=[9]), []
    expected, up = chunks.merged()[0], chunks.rows
    for rows in (up, Rows(up.first + 8, -up.step, up.count)):
        chunks.rows = rows
        states.append(State.allocate(1, chunks.heads, chunks.d, torch.device(DEVICE)))
        chunks.merged(state=states[-1], final=False)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(states[1].acc, states[0].acc)
    o, lse = chunks.o[:1].clone(), chunks.lse[:, :1].clone()
    pair = Rows(*torch.tensor([[0], [1], [1]], dtype=torch.int32, device=DEVICE))
    for j in range(1, 9):
        part, part_lse = chunks.o[j : j + 1], chunks.lse[:, j : j + 1].contiguous()
        merge_chunks(part, part_lse, pair, out=o, lse=lse, last=True)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(o, expected)


def test_no_rows():
    chunks = Chunks(SHAPES[0], counts=[])
    assert chunks.merged()[0].shape[0] == 0


def test_what_does_not_fit_is_refused():
    chunks = Chunks(SHAPES[0])
    o, lse = chunks.out()
    good = {"parts": chunks.o, "parts_lse": chunks.lse, "rows": chunks.rows, "out": o, "lse": lse}
    for change, reason in [
        ({"out": o[:, :1]}, "do not fit"),
        ({"out": o.float()}, "expected one of"),
        ({"parts_lse": chunks.lse.T}, "lse of parts"),
        ({"lse": lse[:, 1:]}, "lse of o"),
        ({"rows": Rows.none(3, torch.device(DEVICE))}, "must be int32"),
        ({"lse": None, "last": True}, "needs its lse"),
        ({"final": False}, "needs a state"),
        ({"parts": chunks.o.transpose(1, 2).contiguous().transpose(1, 2)}, "stride 1"),
        ({"state": State.allocate(1, 2, 3, torch.device(DEVICE))}, "the state holds"),
    ]:
        with pytest.raises(ValueError, match=reason):
            merge_chunks(**(good | change))
