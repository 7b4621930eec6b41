"""Start-up proof on the processor at hand: the kernels equal their twins, whatever the schedule.

Every shape of the loaded model is tried with its own weights, on data that cancels: a sum in
another order, or a compiler that fused or split one operation, shows in the bits. A few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sgl_det.kernels import cpu, cpu_build, reference, sampler_proof
from sgl_det.kernels.order import straddles

_COLUMNS = 40  # outputs per weight that the slow twin computes: more than two panels
_TOKENS = 200  # three whole tiles of keys and a part


class Heads(NamedTuple):
    """An attention layer: query heads, KV heads, sizes of a key and of a value."""

    heads: int
    groups: int
    d: int
    e: int
    dtype: torch.dtype


def shapes_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """One floating-point matrix of each shape and dtype among the parameters."""
    found = {
        (p.shape, p.dtype): p.detach()
        for p in model.parameters()
        if p.dim() == 2 and p.dtype in cpu.DTYPES and p.is_contiguous()
    }
    return list(found.values())


def self_test(weights: Iterable[torch.Tensor], heads: Heads | tuple, vocab: int) -> dict[str, Any]:
    """Prove every op for the weights [N, K] and the heads. Raises RuntimeError if one differs.

    Returns what was proven, for the report.
    """
    heads = Heads(*heads)
    rng = torch.Generator().manual_seed(0)
    weights = list(weights)
    for weight in weights:
        _linear(weight, heads.dtype, rng)
    _attention(heads, None, rng)
    _attention(heads, 70, rng)
    for d in sorted({w.shape[1] for w in weights} | {heads.d}):
        _rms_norm(d, heads.dtype, rng)
    _log_softmax(vocab, rng)
    sampler_proof.check("cpu")
    return {
        "instruction_set": cpu_build.instruction_set(),
        "threads": torch.get_num_threads(),
        "linear": [f"N={w.shape[0]} K={w.shape[1]} {_plain(w.dtype)}" for w in weights],
        "rows": list(straddles()),
        "attention": f"{heads.heads} over {heads.groups} heads of {heads.d}: "
        "prefill = chunked = decode = PyTorch twin",
        "rms_norm": "PyTorch twin",
        "log_softmax": f"V={vocab}, a row alone = a row among others",
        "sampler": f"the tokens of {sampler_proof.ROWS} rows known beforehand",
    }


def _linear(weight: torch.Tensor, dtype: torch.dtype, rng: torch.Generator) -> None:
    n, k = weight.shape
    what = f"linear N={n} K={k} {_plain(weight.dtype)}"
    most = straddles()[-1] + 1
    x = _cancelling((most, k), dtype, rng)
    columns = torch.randperm(n, generator=rng)[:_COLUMNS].sort().values
    few = weight[columns].contiguous()
    # In fp32 a sum shows its last digits; rounded to 16 bits it would hide most differences.
    y = cpu.linear(x, few, None, torch.float32)
    _same(cpu.linear(x, few), y.to(dtype), f"{what}, rounded on store")
    rows = [r for r in (0, 5, 6, most // 2, most - 2, most - 1) if r < most]
    _same(y[rows], reference.linear(x[rows], few, None, torch.float32), f"{what} against its twin")
    for m in straddles():
        for part in (slice(0, m), slice(most - m, most)):
            _same(cpu.linear(x[part], few, None, torch.float32), y[part], f"{what}, {m} rows")
    for m in (1, 2, 5, 7):
        whole = cpu.linear(x[:m], weight, None, torch.float32)
        _same(whole[:, columns], y[:m], f"{what}, {m} rows over all outputs")


def _attention(heads: Heads, window: int | None, rng: torch.Generator) -> None:
    h, g, d, e, dtype = heads
    what = f"attention {h}/{g} heads of {d}, window {window}"
    k, v, q = (
        _cancelling((_TOKENS, n, size), dtype, rng, 1.0) for n, size in ((g, d), (g, e), (h, d))
    )
    q32 = q.float()
    page = torch.randperm(_TOKENS, generator=rng).to(torch.int32)[None]
    kv = [torch.empty_like(x).index_copy_(0, page[0].long(), x) for x in (k, v)]
    zero = torch.zeros(1, dtype=torch.int64)

    def run(lo: int, hi: int, decode: bool = False, q: torch.Tensor = q32) -> torch.Tensor:
        out = q.new_empty((hi - lo, h, e))
        prefix = None if decode else zero + lo
        where = (*kv, page, zero, zero + hi, prefix)
        return cpu.attention(q[lo:hi], out, *where, scale=d**-0.5, window=window)

    whole = run(0, _TOKENS)
    _same(run(0, _TOKENS, q=q), whole.to(dtype), f"{what}, rounded on store")
    for cut in (1, 63, 64, 65, 130, _TOKENS - 1):
        parts = torch.cat([run(0, cut), run(cut, _TOKENS)])
        _same(parts, whole, f"{what}, a chunk of {cut} tokens and the rest")
    for t in range(_TOKENS):
        _same(run(t, t + 1, decode=True), whole[t : t + 1], f"{what}, decode of token {t}")
    for t in (0, 64, _TOKENS - 1):
        twin = reference.attention(q32[t], k, v, t, d**-0.5, window)
        _same(whole[t], twin, f"{what}, token {t} against its twin")


def _rms_norm(d: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, residual = (_cancelling((19, d), dtype, rng) for _ in range(2))
    weight = torch.randn(d, generator=rng).to(dtype)
    pairs = zip(
        cpu.rms_norm(x, weight, 1e-6, residual),
        reference.rms_norm(x, weight, 1e-6, residual),
        strict=True,
    )
    for ours, twin in pairs:
        _same(ours, twin, f"rms_norm D={d} against its twin")
    many = cpu.rms_norm(x, weight, 1e-6)
    for row in (0, 7, 18):
        alone = cpu.rms_norm(x[row : row + 1], weight, 1e-6)
        _same(alone, many[row : row + 1], f"rms_norm D={d}, row {row} alone")


def _log_softmax(vocab: int, rng: torch.Generator) -> None:
    x = torch.randn(9, vocab, generator=rng) * 4
    for op in (torch.log_softmax, torch.softmax, torch.cumsum):
        many = op(x, -1)
        for lo, hi in ((0, 1), (3, 4), (8, 9), (1, 3), (2, 9)):
            _same(op(x[lo:hi].clone(), -1), many[lo:hi], f"PyTorch's {op.__name__} V={vocab}")


def _cancelling(
    shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator, decades: float = 2.0
) -> torch.Tensor:
    """Normal values over some decades of magnitude: sums lose digits where their order tells."""
    size = 10 ** (decades * (torch.rand(shape, generator=rng) - 0.5))
    return (torch.randn(shape, generator=rng) * size).to(dtype)


def _same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    bits = [x.contiguous().view(torch.uint8) for x in (actual, expected)]
    if not torch.equal(*bits):
        count = int((actual != expected).sum())
        raise RuntimeError(
            f"the CPU kernels failed their self-test on this machine: {what}: {count} of "
            f"{actual.numel()} values differ in their bits; report the compiler and the processor"
        )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
