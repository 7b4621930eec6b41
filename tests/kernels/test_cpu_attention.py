"""The CPU attention kernel: close to fp64, equal to its twin, and blind to chunks and neighbours.

Positions straddle the KV tile of 64 and the blocks of query rows.
"""

from __future__ import annotations

import pytest
import torch
from cpu_support import EPSILON, dtypes, spread

from sgl_det.kernels import cpu, reference
from sgl_det.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("one_thread", "nan_filled_empty")


class Case:
    """Requests of given lengths whose keys lie in a shuffled page table, among slots of NaN."""

    def __init__(self, lengths, heads=4, groups=2, d=32, e=32, dtype=torch.bfloat16, window=None):
        self.lengths, self.window, self.scale = lengths, window, d**-0.5
        slots = torch.randperm(sum(lengths) + 9)
        self.page = torch.full((len(lengths), max(lengths)), int(slots[-1]), dtype=torch.int32)
        self.k = torch.full((len(slots), groups, d), float("nan"), dtype=dtype)
        self.v = torch.full((len(slots), groups, e), float("nan"), dtype=dtype)
        self.q, self.keys, self.values = [], [], []
        start = 0
        for i, n in enumerate(lengths):
            where = slots[start : start + n]
            start += n
            self.page[i, :n] = where.to(torch.int32)
            self.keys.append(spread(n, groups, d, dtype=dtype))
            self.values.append(spread(n, groups, e, dtype=dtype))
            self.k[where], self.v[where] = self.keys[i], self.values[i]
            self.q.append(spread(n, heads, d, dtype=dtype))

    def run(self, parts, decode=False):
        """parts: (request, first position, end) -> the rows of all parts, in turn."""
        q = torch.cat([self.q[i][lo:hi] for i, lo, hi in parts])
        request, prefix, end = (torch.tensor(x) for x in zip(*parts, strict=True))
        return cpu.attention(
            q,
            q.new_empty((*q.shape[:2], self.v.shape[2])),
            self.k,
            self.v,
            self.page,
            request,
            end,
            None if decode else prefix,
            scale=self.scale,
            window=self.window,
        )


SHAPES = [
    pytest.param(dict(heads=4, groups=4), id="mha"),
    pytest.param(dict(heads=6, groups=2), id="gqa3"),
    pytest.param(dict(heads=10, groups=1), id="mqa10"),
    pytest.param(dict(heads=200, groups=1), id="mqa200"),
    pytest.param(dict(d=80, e=80), id="head80"),
    pytest.param(dict(d=20, e=12), id="head20-value12"),
    pytest.param(dict(window=70), id="window70"),
    pytest.param(dict(window=0), id="window0"),
]


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_close_to_fp64(shape, dtype):
    case = Case([150], dtype=dtype, **shape)
    out = case.run([(0, 0, 150)]).double()
    share = case.q[0].shape[1] // case.k.shape[1]
    k, v = (x[0].double().repeat_interleave(share, 1) for x in (case.keys, case.values))
    score = torch.einsum("thd,shd->hts", case.q[0].double(), k) * case.scale
    t = torch.arange(150)
    seen = t[None] <= t[:, None]
    if case.window is not None:
        seen &= t[None] >= t[:, None] - case.window
    weights = score.masked_fill(~seen, float("-inf")).softmax(-1)
    exact = torch.einsum("hts,she->the", weights, v)
    # The exponent turns an absolute error of a score into a relative one of its weight.
    loose = score.abs().amax().item() * 2**-22
    scale = torch.einsum("hts,she->the", weights, v.abs())
    assert ((out - exact).abs() <= exact.abs() * EPSILON[dtype] + scale * loose + 1e-6).all()


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_its_twin(shape, dtype):
    case = Case([140], dtype=dtype, **shape)
    out = case.run([(0, 0, 140)])
    for t in (0, 63, 64, 139):
        expected = reference.attention(
            case.q[0][t], case.keys[0], case.values[0], t, case.scale, case.window
        )
        assert_bitwise_equal(out[t], expected, f"position {t}")


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_chunks_and_decode_agree(shape):
    case = Case([200], **shape)
    whole = case.run([(0, 0, 200)])
    for cut in (1, 63, 64, 65, 127, 129, 199):
        parts = torch.cat([case.run([(0, 0, cut)]), case.run([(0, cut, 200)])])
        assert_bitwise_equal(parts, whole, f"chunk of {cut}")
    for t in range(200):
        one = case.run([(0, t, t + 1)], decode=True)
        assert_bitwise_equal(one, whole[t : t + 1], f"decode of {t}")


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_row_does_not_depend_on_its_neighbours(threads):
    case = Case([1, 64, 65, 300, 17])
    alone = [case.run([(i, 0, n)]) for i, n in enumerate(case.lengths)]
    torch.set_num_threads(threads)
    order = [3, 0, 4, 2, 1]
    mixed = case.run([(i, case.lengths[i] // 3, case.lengths[i]) for i in order])
    expected = torch.cat([alone[i][case.lengths[i] // 3 :] for i in order])
    assert_bitwise_equal(mixed, expected, "mixed prefill")
    last = case.run([(i, case.lengths[i] - 1, case.lengths[i]) for i in order], decode=True)
    assert_bitwise_equal(last, torch.cat([alone[i][-1:] for i in order]), "mixed decode")


def test_attention_does_not_see_later_keys():
    case = Case([130])
    before = case.run([(0, 0, 130)])
    slot = case.page[0, 100:130].long()
    case.k[slot], case.v[slot] = float("nan"), float("inf")
    assert_bitwise_equal(case.run([(0, 0, 130)])[:100], before[:100])


def test_control_pytorch_attention_depends_on_the_phase():
    q, k, v = (spread(1, 2, 512, 64) for _ in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with pytest.raises(AssertionError, match="differ in their bits"):
        for t in (65, 300, 511):
            seen = (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
            one = torch.nn.functional.scaled_dot_product_attention(*seen)
            assert_bitwise_equal(one, whole[:, :, t : t + 1])
