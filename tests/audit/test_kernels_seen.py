"""What a trace says: calls, time, and which kernels a graph launched."""

from __future__ import annotations

import gzip
import json

import pytest
from audit_support import kernel, launch

from sgl_det.audit.kernels_seen import Seen, kernels, read, read_folder
from sgl_det.audit.names import canonical


@pytest.mark.parametrize(
    "raw, name",
    [
        ("_matmul_kernel", "_matmul_kernel"),
        ("void f<A<int> >(float*, B<int> const&)", "f<A<int>>"),
        (
            "void (anonymous namespace)::k<1>((anonymous namespace)::P)",
            "(anonymous namespace)::k<1>",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
        ("void g<h(int)::{lambda(float)#1} >(int, h(int)::{lambda(float)#1})", None),
        ("void m<(D::Mode)0, 2u>()", "m<(D::Mode)0, 2u>"),
        ("int)", "int)"),
    ],
)
def test_canonical_name(raw, name):
    name = "g<h(int)::{lambda(float)#1} >" if name is None else name
    assert canonical(raw) == name
    assert canonical(canonical(raw)) == canonical(raw)


def test_counts_and_captures(events):
    found = kernels(events(["void a<int>(int*)", "b"]))
    assert found == (Seen("a<int>", 2, 1, 3.5), Seen("b", 1, 1, 1.0))


def test_graph_named_by_the_profiler():
    event = kernel("k", 9)
    event["args"]["graph id"] = 4
    assert kernels([event])[0].captured == 1


def test_only_gpu_work_counts():
    events = [launch("cudaLaunchKernel", 1), kernel("aten::mm", 1, cat="cpu_op")]
    events += [kernel("Memset (Device)", 2, cat="gpu_memset"), {"ph": "i", "cat": "kernel"}]
    assert [s.name for s in kernels(events)] == ["Memset (Device)"]
    assert [s.name for s in kernels(events, ("cpu_op",))] == ["aten::mm"]


def test_folder_of_traces(tmp_path, trace):
    trace(["a"])
    (tmp_path / "audit-TP-1.trace.json").write_text(json.dumps({"traceEvents": [kernel("b", 3)]}))
    assert {s.name for s in kernels(read_folder(tmp_path))} == {"a", "b"}


def test_folder_without_traces(tmp_path):
    with pytest.raises(ValueError, match="no trace in"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"traceEvents": 1}'])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_not_a_trace(tmp_path, text, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    with pytest.raises(ValueError, match="is no trace"):
        read(path)


def test_cut_off_trace(tmp_path, trace):
    path = trace(["a"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is no trace"):
        read(path)


def test_trace_of_the_real_profiler(tmp_path):
    """On a CPU the profiler writes the same format, with operators instead of kernels."""
    torch = pytest.importorskip("torch")
    x = torch.ones(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            x = x @ x
    path = tmp_path / "t.trace.json.gz"
    profiler.export_chrome_trace(str(path))
    found = {s.name: s for s in kernels(read(path), ("cpu_op",))}
    assert found["aten::mm"].calls == 3 and found["aten::mm"].captured == 0
    assert found["aten::mm"].total_us > 0
    assert kernels(read(path)) == ()
