"""The proof that a kernel has the canonical order: what it finds, on kernels in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES
from linear_support import EDGES, SHAPE, halves, kernel, twin, wrong_where
from triton.runtime.errors import OutOfResources

from sgl_det.kernels import linear_proof
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_data import KINDS, operands
from sgl_det.kernels.linear_proof import DENSE, edges, one_case, prove, rows_to_try


def proof(*candidates, shape=SHAPE, bucket_edges=EDGES, dense=5, reference=twin):
    return prove(
        shape,
        candidates,
        bucket_edges=bucket_edges,
        device="cpu",
        dense=dense,
        reference=reference,
    )


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_canonical_order_is_proven_and_another_is_named(dtype, bias):
    shape = Shape(n=16, k=64, dtype=dtype, bias=bias)
    right, wrong = proof(kernel("right"), kernel("halves", halves), shape=shape)
    assert (right.candidate, right.proven, right.reason) == ("right", True, "")
    assert right.rows == EDGES and right.cases > 10
    assert wrong.candidate == "halves" and not wrong.proven and wrong.rows == ()
    assert "elements differ at 1 rows from row 0" in wrong.reason


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_cancelling_data_show_an_order_that_realistic_data_hide(dtype):
    share = {}
    for kind in KINDS:
        data = operands(kind, Shape(n=48, k=512, dtype=dtype), 32, "cpu")
        y, expected = halves(*data), twin(*data)
        share[kind] = (y.view(torch.int16) != expected.view(torch.int16)).float().mean().item()
    assert share["realistic"] < 0.01 and share["cancelling"] > 0.5


def test_exact_results_of_cancelling_data_are_zero():
    x, weight, _ = operands("cancelling", SHAPE, 9, "cpu")
    assert not (x.double() @ weight.double().T).any()
    assert x.float().std() > 10 and weight.float().std() > 10


@pytest.mark.parametrize("kind", KINDS)
def test_data_follow_the_seed(kind):
    shape = Shape(n=16, k=65, dtype=torch.bfloat16, bias=True)
    one, same, other = (operands(kind, shape, 4, "cpu", seed) for seed in (1, 1, 2))
    for a, b, c in zip(one, same, other, strict=True):
        assert a.dtype == shape.dtype and a.tolist() == b.tolist() != c.tolist()
    assert (one.x.shape, one.weight.shape, one.bias.shape) == ((4, 65), (16, 65), (16,))


def test_what_realistic_data_hide_is_found():
    shape = Shape(n=16, k=128, dtype=torch.bfloat16)
    (verdict,) = proof(kernel("halves", halves), shape=shape)
    assert verdict.reason.endswith("cancelling data")


def test_every_number_of_rows_that_is_tried_is_seen():
    """Each kernel is wrong for one number of rows: it loses that bucket, and no other."""
    bucket_edges = (1, 2, 4, 16)
    tried = rows_to_try(bucket_edges, 5)
    assert tried == (1, 2, 3, 4, 5, 7, 9, 10, 12, 14, 15, 16)
    known = [kernel(str(m), wrong_where(lambda rows, at, m=m: rows == m)) for m in tried]
    for m, verdict in zip(tried, proof(*known, bucket_edges=bucket_edges), strict=True):
        bucket = min(e for e in bucket_edges if e >= m)
        assert verdict.candidate == str(m) and f"differ at {m} rows" in verdict.reason
        assert verdict.rows == tuple(e for e in bucket_edges if e != bucket)


@pytest.mark.parametrize("place", [0, 6, 13], ids=["first", "middle", "last"])
def test_every_place_of_the_rows_is_seen(place):
    """Next to an edge the rows are also the middle and the last of more rows: here 3 of 16."""
    run = wrong_where(lambda rows, at: (rows, at) == (3, place))
    (verdict,) = proof(kernel("placed", run), bucket_edges=(1, 2, 4, 16))
    assert f"differ at 3 rows from row {place}, " in verdict.reason
    assert verdict.rows == (1, 2, 16)


def test_one_element_is_enough():
    def nearly(x, weight, bias):
        y = twin(x, weight, bias)
        if len(x) == 8:
            y.view(torch.int16)[5, 3] ^= 1
        return y

    (verdict,) = proof(kernel("nearly", nearly))
    assert verdict.reason.startswith("1 of 128 elements differ at 8 rows from row 0")


def test_a_nan_is_a_difference_and_the_same_nan_is_none():
    def with_nan(x, weight, bias):
        y = twin(x, weight, bias)
        y[:, 0] = float("nan")
        return y

    (verdict,) = proof(kernel("nan", with_nan))
    assert verdict.reason.startswith("1 of 16 elements differ at 1 rows")
    (verdict,) = proof(kernel("nan", with_nan), reference=with_nan)
    assert verdict.proven


def test_the_sign_of_a_zero_is_a_difference():
    def zeros(x, weight, bias):
        return x.new_zeros(len(x), len(weight))

    (verdict,) = proof(kernel("negative", lambda *data: -zeros(*data)), reference=zeros)
    assert verdict.reason.startswith("16 of 16 elements differ at 1 rows")


def raising(error, when=lambda rows: True):
    def run(x, weight, bias):
        if when(len(x)):
            raise error
        return twin(x, weight, bias)

    return run


def test_a_kernel_that_raises_is_rejected_with_the_first_line_of_why():
    errors = [
        RuntimeError("no such kernel\nfor this shape"),
        ValueError("rows must start at multiples of 16 bytes"),
        OutOfResources(300000, 232448, "shared memory"),
        RuntimeError(""),
    ]
    found = proof(*(kernel(str(i), raising(error)) for i, error in enumerate(errors)))
    assert [v.rows for v in found] == [()] * 4
    assert found[0].reason == "1 rows: RuntimeError: no such kernel"
    assert found[1].reason.startswith("1 rows: ValueError: rows must start")
    assert "OutOfResources" in found[2].reason and found[3].reason == "1 rows: RuntimeError: "


def test_a_kernel_that_raises_for_some_rows_keeps_the_others():
    run = raising(RuntimeError("too few"), lambda rows: rows == 3)
    (verdict,) = proof(kernel("picky", run))
    assert verdict.rows == (1, 2, 8) and verdict.reason == "3 rows: RuntimeError: too few"


def test_nobody_is_stopped_from_interrupting():
    with pytest.raises(KeyboardInterrupt):
        proof(kernel("slow", raising(KeyboardInterrupt())))


def test_a_kernel_is_tried_only_where_it_is_offered():
    few, none = proof(
        kernel("few", wrong_where(lambda rows, at: rows > 2), rows=(1, 2)),
        kernel("none", raising(RuntimeError("never called")), rows=(100, 200)),
    )
    assert few.proven and few.rows == (1, 2)
    assert (none.cases, none.rows, none.reason) == (0, (), "not offered") and not none.proven


def test_edges_and_their_neighbours_are_tried():
    shape = Shape(n=4096, k=4096, dtype=torch.bfloat16)
    of = edges(shape)
    tried = rows_to_try(of)
    assert of == linear_proof.EDGES and set(range(1, DENSE + 1)) <= set(tried)
    for edge in of:
        assert {m for m in (edge - 1, edge, edge + 1) if 1 <= m <= of[-1]} <= set(tried)
    for low, high in zip(of, of[1:], strict=False):
        assert high - low < 7 or len([m for m in tried if low < m < high]) >= 6
    assert tried == tuple(sorted(set(tried))) and tried[-1] == of[-1]


def test_wide_layers_have_fewer_buckets():
    """A vocabulary of 151936 in 16 bits: 512 MiB are 1766 rows."""
    head = Shape(n=151936, k=4096, dtype=torch.bfloat16)
    assert edges(head)[-1] == 1024 and edges(head, most=100)[-1] == 96
    assert edges(Shape(n=1 << 30, k=8, dtype=torch.float32)) == (1,)
    assert edges(SHAPE, most=0) == (1,)


def test_one_case(monkeypatch):
    monkeypatch.setattr(linear_proof, "canonical", twin)
    assert one_case(SHAPE, kernel("right"), 5, device="cpu") == ""
    found = one_case(SHAPE, kernel("halves", halves), 5, device="cpu")
    assert "of 80 elements differ at 5 rows, cancelling data" in found
    found = one_case(SHAPE, kernel("gone", raising(RuntimeError("gone"))), 5, device="cpu")
    assert found == "5 rows: RuntimeError: gone"


def test_one_case_without_memory_proves_nothing(monkeypatch):
    """Beside a full KV pool: that the kernel is wrong is not said."""
    monkeypatch.setattr(linear_proof, "canonical", twin)
    full = kernel("full", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        one_case(SHAPE, full, 5, device="cpu")
