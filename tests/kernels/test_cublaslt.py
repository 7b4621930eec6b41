"""cuBLASLt's algorithms, called one by one: what they compute, and that none is made up."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sgl_det.kernels import cublaslt
from sgl_det.kernels.linear_candidates import Candidate, Shape
from sgl_det.kernels.linear_data import operands
from sgl_det.kernels.linear_proof import prove
from sgl_det.kernels.matmul import matmul
from sgl_det.testing import assert_bitwise_equal

ROWS = (1, 16, 64, 300)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def algorithms(shape, **more):
    return cublaslt.algorithms(shape.n, shape.k, shape.dtype, shape.bias, ROWS, **more)


@pytest.mark.gpu
@BIAS
@HALVES
def test_most_have_the_canonical_bits(dtype, bias):
    """All that do not split K are expected to; the proof at start-up decides for each machine."""
    shape = Shape(n=768, k=4096, dtype=dtype, bias=bias)
    found = [Candidate(name=a.name, run=a) for a in algorithms(shape)]
    verdicts = prove(shape, found, bucket_edges=(1, 16, 64, 256), dense=40)
    right = [v for v in verdicts if v.proven]
    assert len(found) > 5 and len(right) > len(found) / 2, [v.reason for v in verdicts]


@pytest.mark.gpu
def test_runs_in_a_graph_and_in_any_stream():
    shape = Shape(n=768, k=512, dtype=torch.bfloat16)
    data, graph, stream = operands("realistic", shape, 16, "cuda"), None, torch.cuda.Stream()
    algorithm = algorithms(shape)[0]
    expected = algorithm(*data)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        algorithm(*data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = algorithm(*data)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise_equal(y, expected, "in a graph")


@pytest.mark.gpu
def test_names_are_the_same_in_another_process():
    shape = Shape(n=768, k=512, dtype=torch.bfloat16)
    first = [a.name for a in algorithms(shape)]
    code = (
        "import torch; from sgl_det.kernels.cublaslt import algorithms; "
        f"print(*(a.name for a in algorithms(768, 512, torch.bfloat16, False, {ROWS})), sep='|')"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip().split("|") == first and len(set(first)) == len(first)


@pytest.mark.gpu
def test_another_shape_raises_or_is_right():
    """K of an odd number of elements: no row but the first starts where a fast kernel needs it."""
    algorithm = algorithms(Shape(n=768, k=4096, dtype=torch.bfloat16))[0]
    data = operands("realistic", Shape(n=7, k=33, dtype=torch.bfloat16), 5, "cuda")
    try:
        y = algorithm(*data)
    except RuntimeError as error:
        assert algorithm.name in str(error) and "status" in str(error)
    else:  # or it holds it, and then rightly
        assert_bitwise_equal(y, matmul(*data), "an odd shape")


def test_gaps_between_rows_raise():
    algorithm = cublaslt.Algorithm("any", cublaslt._Algorithm())
    x, weight = torch.zeros(4, 16)[:, :8], torch.zeros(4, 8)
    with pytest.raises(ValueError, match="gaps between its rows"):
        algorithm(x, weight, None)


@pytest.mark.parametrize("error", [OSError, AttributeError, cublaslt.Refused])
def test_without_the_library_there_are_none(monkeypatch, error):
    def missing(*args):
        raise error("libcublasLt.so.0: cannot open shared object file")

    monkeypatch.setattr(cublaslt, "_operation", missing)
    shape = (8, 16, torch.bfloat16, False, (1,))
    assert cublaslt.algorithms.__wrapped__(*shape) == ()
