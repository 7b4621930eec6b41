"""The CPU kernels: built from C on first use, called through ctypes.

The C files hold the formulas, the orders and what the bits depend on; this file checks shapes and
strides and passes addresses. Rows may be strided, the last axis may not: it is made contiguous.
Threads follow `torch.get_num_threads()` and do not show in the bits.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch

from sgl_det.kernels import cpu_build


class _Codes(dict):
    def __missing__(self, dtype):
        held = ", ".join(str(d) for d in self)
        raise ValueError(f"the CPU kernels do not hold {dtype}; choose one of {held}")


_CODE = _Codes({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
DTYPES = frozenset(_CODE)
_LINEAR = struct.Struct("=4Q4q5i4x")
_ATTENTION = struct.Struct("=8Q6q8if4x")
_NORM = struct.Struct("=6Q2q9if")
_ROTARY = struct.Struct("=4Q2q7i4x")


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels; each takes one packed struct, or plain arguments."""
    library = ctypes.CDLL(str(cpu_build.build()))
    for name in ("linear", "attention", "rms_norm", "rotary", "sample"):
        getattr(library, f"sgl_det_{name}").argtypes = [ctypes.c_char_p]
    library.sgl_det_silu_and_mul.argtypes = [
        *[ctypes.c_void_p] * 2,
        ctypes.c_int64,
        *[ctypes.c_int] * 3,
    ]
    return library


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x [..., K] @ weight [N, K].T + bias [N]`` -> [..., N] of ``out_dtype``, or of x's dtype.

    Each argument may be fp32, bf16 or fp16 of its own. Raises ValueError on other dtypes or shapes.
    """
    n, k = weight.shape
    rows = _rows(x, k)
    if not weight.is_contiguous():
        raise ValueError(f"linear: weight has strides {weight.stride()}, expected contiguous rows")
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(f"linear: bias is {tuple(bias.shape)}, expected ({n},) and contiguous")
    m = rows.shape[0]
    y = rows.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    library().sgl_det_linear(
        _LINEAR.pack(
            rows.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows.stride(0),
            m,
            n,
            k,
            _CODE[x.dtype],
            _CODE[weight.dtype],
            0 if bias is None else _CODE[bias.dtype],
            _CODE[y.dtype],
            torch.get_num_threads(),
        )
    )
    return y


def attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over a paged cache; fills and returns ``out``.

    q [T, H, D]; out [T, H, E]; k_cache [slots, G, D]; v_cache [slots, G, E]; req_to_token [pool,
    positions] int32; req_pool_indices, seq_lens [R]: tokens in the cache, the new ones included;
    prefix_lens [R]: tokens before the new ones, or None for one new token a request (decode).
    window: a query at position p sees keys p - window .. p. Raises ValueError on what is not held.
    """
    _check_attention(q, out, k_cache, v_cache, req_to_token)
    request, length = (x.to(torch.int64).contiguous() for x in (req_pool_indices, seq_lens))
    prefix = None if prefix_lens is None else prefix_lens.to(torch.int64).contiguous()
    new = length.numel() if prefix is None else int((length - prefix).sum())
    if new != q.shape[0]:
        raise ValueError(f"attention: q has {q.shape[0]} rows, the lengths say {new}")
    data = (q, k_cache, v_cache, out, req_to_token, request, length)
    library().sgl_det_attention(
        _ATTENTION.pack(
            *(x.data_ptr() for x in data),
            0 if prefix is None else prefix.data_ptr(),
            *(x.stride(0) for x in (q, out, k_cache, v_cache, req_to_token)),
            length.numel(),
            q.shape[1],
            v_cache.shape[1],
            q.shape[2],
            v_cache.shape[2],
            _CODE[q.dtype],
            _CODE[k_cache.dtype],
            torch.get_num_threads(),
            -1 if window is None else window,
            scale,
        )
    )
    return out


def _check_attention(q, out, k_cache, v_cache, req_to_token) -> None:
    (t, h, d), (_, g, e) = q.shape, v_cache.shape
    if h % g or k_cache.shape[1:] != (g, d) or out.shape != (t, h, e) or out.dtype != q.dtype:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k_cache.shape)}, v {tuple(v_cache.shape)}, "
            f"out {tuple(out.shape)} {out.dtype} do not fit together"
        )
    if k_cache.dtype != v_cache.dtype or req_to_token.dtype != torch.int32:
        raise ValueError(
            f"attention: k is {k_cache.dtype}, v {v_cache.dtype}, page table {req_to_token.dtype}; "
            f"expected one dtype for the cache and int32 for the page table"
        )
    for name, x in (("q", q), ("out", out), ("k", k_cache), ("v", v_cache)):
        if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]) or not x.is_cpu:
            raise ValueError(
                f"attention: {name} on {x.device} has strides {x.stride()}, expected heads that "
                f"follow each other, on the CPU"
            )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    extra: torch.Tensor | None = None,
    var_size: int | None = None,
    cast_first: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y = x * rsqrt(mean(x ** 2) + eps) * weight`` over the last axis, in fp32, rounded once.

    x [..., D] -> y [..., D] of ``out_dtype`` (x's own by default). With ``residual`` [..., D], x is
    x + residual (+ extra) in fp32, and (y, that sum rounded to ``residual_dtype``) is returned.
    var_size: the mean is over the first elements only. cast_first: x * rsqrt is rounded to
    ``out_dtype``, and y has the type to which that and the weight promote.
    """
    d = x.shape[-1]
    rows = _rows(x, d)
    out_dtype = out_dtype or x.dtype
    y_dtype = torch.promote_types(weight.dtype, out_dtype) if cast_first else out_dtype
    y = rows.new_empty(x.shape, dtype=y_dtype)
    code_x, total, residual_in, extra_in, codes = _CODE[x.dtype], None, 0, 0, (0, 0)
    if residual is not None:
        residual = residual.contiguous()
        extra = None if extra is None else extra.to(x.dtype).contiguous()
        total = rows.new_empty(x.shape, dtype=residual_dtype or out_dtype)
        residual_in, codes = residual.data_ptr(), (_CODE[residual.dtype], _CODE[total.dtype])
        extra_in = 0 if extra is None else extra.data_ptr()
    library().sgl_det_rms_norm(
        _NORM.pack(
            rows.data_ptr(),
            residual_in,
            extra_in,
            weight.data_ptr(),
            y.data_ptr(),
            0 if total is None else total.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            d,
            var_size or d,
            code_x,
            _CODE[weight.dtype],
            _CODE[y_dtype],
            *codes,
            _CODE[out_dtype] if cast_first else 0,
            torch.get_num_threads(),
            eps,
        )
    )
    return y if total is None else (y, total)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(a) * b`` of x = [a, b] [..., 2D] -> [..., D]; silu(a) is rounded on the way."""
    d = x.shape[-1] // 2
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], d))
    rows = x.numel() // (2 * d)
    library().sgl_det_silu_and_mul(
        x.data_ptr(), y.data_ptr(), rows, d, _CODE[x.dtype], torch.get_num_threads()
    )
    return y


def rotary(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head: int, neox: bool
) -> torch.Tensor:
    """x [T, heads * head] rotated by ``table[positions]``; table [positions, rotary] = cos | sin.

    Each product and sum is rounded to x's dtype, as the eager expression does, bit for bit.
    """
    rows = _rows(x, x.shape[-1])
    y = rows.new_empty(x.shape)
    positions = positions.to(torch.int64).contiguous()
    if positions.numel() != rows.shape[0]:
        raise ValueError(f"rotary: {positions.numel()} positions for {rows.shape[0]} rows")
    library().sgl_det_rotary(
        _ROTARY.pack(
            rows.data_ptr(),
            table.data_ptr(),
            positions.data_ptr(),
            y.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            rows.shape[1] // head,
            head,
            table.shape[1],
            neox,
            _CODE[x.dtype],
            _CODE[table.dtype],
            torch.get_num_threads(),
        )
    )
    return y


def _rows(x: torch.Tensor, d: int) -> torch.Tensor:
    """x [..., d] as rows [T, d] whose last axis is contiguous."""
    if x.shape[-1] != d or not x.is_cpu:
        raise ValueError(
            f"the last axis is {x.shape[-1]} long on {x.device}, expected {d} on the CPU"
        )
    if x.dim() != 2:
        x = x.reshape(-1, d)
    return x if x.stride(1) == 1 else x.contiguous()
