"""cuBLASLt's algorithms for a linear layer, one by one, none of which splits K.

PyTorch takes the first that cuBLASLt's heuristic proposes for a number of rows, and it guesses ill
for narrow layers. An algorithm, once configured, serves any number of rows, so here those proposed
for some numbers of rows are candidates for all of them. Which of them has the canonical bits is
proven, not assumed (`linear_proof`).

Shapes      x [M, K]   weight [N, K]   bias [N]   y [M, N], all without gaps, bf16 | fp16
Source      cuBLAS Library documentation, "Using the cuBLASLt API"

The calls go through ctypes: nvmath-python has bindings, but a worker may only need what SGLang
installs, and of them it would need ten functions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

import torch

# Values of the enumerations in cublasLt.h, cublas_api.h and library_types.h.
_COMPUTE_FP32, _FP32, _TYPES = 68, 0, {torch.float16: 2, torch.bfloat16: 14}
_OP_TRANSPOSE, _EPILOGUE_BIAS, _REDUCTION_NONE = 1, 4, 0
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_PREF_WORKSPACE, _PREF_REDUCTION, _PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# What tells one configured algorithm from another: (attribute, bytes of its value).
_CONFIG = {
    "id": (0, 4),
    "tile": (1, 4),
    "stages": (6, 4),
    "cluster": (8, 2),
    "inner": (7, 2),
    "swizzle": (4, 4),
    "custom": (5, 4),
}
_SPLIT_K = (2, 4)
_ALIGNMENT = 16  # bytes: how `linear` lays out what it passes on


class Refused(RuntimeError):
    """cuBLASLt did not make or set what it was asked for."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """A configured algorithm; its name is that of its configuration, the same in every process."""

    name: str
    configured: _Algorithm

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        """y [M, N]. Raises RuntimeError where the algorithm does not hold the shape."""
        (m, k), n = x.shape, len(weight)
        if not (x.is_contiguous() and weight.is_contiguous()):
            raise ValueError(
                f"x {x.stride()} or weight {weight.stride()} has gaps between its rows"
            )
        y = x.new_empty((m, n))
        operation = _operation(x.dtype, bias is not None)
        if bias is not None:
            _set(
                _library().cublasLtMatmulDescSetAttribute, operation, _DESC_BIAS, bias.data_ptr(), 8
            )
        result = _layout(x.dtype, n, m)
        status = _library().cublasLtMatmul(
            _handle(x.device.index),
            operation,
            byref(_ONE),
            weight.data_ptr(),
            _layout(x.dtype, k, n),
            x.data_ptr(),
            _layout(x.dtype, k, m),
            byref(_ZERO),
            y.data_ptr(),
            result,
            y.data_ptr(),
            result,
            byref(self.configured),
            None,
            0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        if status:
            raise RuntimeError(f"{self.name} at {m}x{n}x{k}: cuBLAS status {status}")
        return y


_ONE, _ZERO = c_float(1.0), c_float(0.0)


@functools.cache
def algorithms(
    n: int, k: int, dtype: torch.dtype, bias: bool, rows: Sequence[int], most: int = 8
) -> tuple[Algorithm, ...]:
    """What cuBLASLt proposes for these numbers of rows, at most ``most`` for each, in its order.

    Empty where this PyTorch has no cuBLASLt to ask, or one of another time.
    """
    found: dict[str, Algorithm] = {}
    try:
        for m in rows:
            for algorithm in _proposed(n, k, m, dtype, bias, most):
                found.setdefault(algorithm.name, algorithm)
    except (OSError, AttributeError, Refused):
        return ()
    return tuple(found.values())


def _proposed(n: int, k: int, m: int, dtype, bias: bool, most: int) -> Iterator[Algorithm]:
    results, count = (_Result * most)(), c_int()
    operation, result = _operation(dtype, bias), _layout(dtype, n, m)
    if bias:  # its alignment is what the heuristic looks at
        _set(_library().cublasLtMatmulDescSetAttribute, operation, _DESC_BIAS, _ALIGNMENT, 8)
    status = _library().cublasLtMatmulAlgoGetHeuristic(
        _handle(torch.cuda.current_device()),
        operation,
        _layout(dtype, k, n),
        _layout(dtype, k, m),
        result,
        result,
        _preference(),
        most,
        results,
        byref(count),
    )
    for proposal in results[: 0 if status else count.value]:
        if proposal.status == 0 and _value(proposal.algorithm, *_SPLIT_K) <= 1:
            parts = [_value(proposal.algorithm, *attribute) for attribute in _CONFIG.values()]
            name = f"cublaslt {'.'.join(map(str, parts))}"
            yield Algorithm(name, _Algorithm.from_buffer_copy(proposal.algorithm))


def _value(algorithm: _Algorithm, attribute: int, size: int) -> int:
    buffer, written = c_uint64(0), c_size_t()
    get = _library().cublasLtMatmulAlgoConfigGetAttribute
    _check(get(byref(algorithm), attribute, byref(buffer), size, byref(written)))
    return buffer.value


@functools.cache
def _library() -> ctypes.CDLL:
    """The library that PyTorch has loaded. Raises OSError where there is none."""
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")
    pointer = c_void_p
    library.cublasLtMatmul.argtypes = (
        *(pointer,) * 14,
        c_size_t,
        pointer,
    )
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = (*(pointer,) * 7, c_int, pointer, pointer)
    library.cublasLtMatrixLayoutCreate.argtypes = (pointer, c_int, c_uint64, c_uint64, c_int64)
    library.cublasLtMatmulDescCreate.argtypes = (pointer, c_int, c_int)
    for name in ("MatmulDesc", "MatmulPreference"):
        set_attribute = getattr(library, f"cublasLt{name}SetAttribute")
        set_attribute.argtypes = (pointer, c_int, pointer, c_size_t)
    get = library.cublasLtMatmulAlgoConfigGetAttribute
    get.argtypes = (pointer, c_int, pointer, c_size_t, pointer)
    return library


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


@functools.cache
def _operation(dtype: torch.dtype, bias: bool) -> c_void_p:
    """weight transposed times x, both with K in front, in fp32; the bias added before rounding.

    One for all calls, which set its bias before they start: for one thread, as a worker has.
    """
    operation, library = c_void_p(), _library()
    _check(library.cublasLtMatmulDescCreate(byref(operation), _COMPUTE_FP32, _FP32))
    _set(library.cublasLtMatmulDescSetAttribute, operation, _DESC_TRANSA, _OP_TRANSPOSE, 4)
    if bias:
        _set(library.cublasLtMatmulDescSetAttribute, operation, _DESC_EPILOGUE, _EPILOGUE_BIAS, 4)
    return operation


@functools.cache
def _layout(dtype: torch.dtype, inner: int, outer: int) -> c_void_p:
    layout = c_void_p()
    create = _library().cublasLtMatrixLayoutCreate
    _check(create(byref(layout), _TYPES[dtype], inner, outer, inner))
    return layout


@functools.cache
def _preference() -> c_void_p:
    """No workspace, no split of K, and operands that start at multiples of 16 bytes."""
    preference, library = c_void_p(), _library()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    put = library.cublasLtMatmulPreferenceSetAttribute
    _set(put, preference, _PREF_WORKSPACE, 0, 8)
    _set(put, preference, _PREF_REDUCTION, _REDUCTION_NONE, 4)
    for alignment in _PREF_ALIGNMENTS:
        _set(put, preference, alignment, _ALIGNMENT, 4)
    return preference


def _set(function, what: c_void_p, attribute: int, value: int, size: int) -> None:
    _check(function(what, attribute, byref(c_uint64(value)), size))


def _check(status: int) -> None:
    if status:
        raise Refused(f"cuBLASLt refused with status {status}")
