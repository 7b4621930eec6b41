"""bf16 in Triton's interpreter, which in Triton 3.6 computes on bit patterns and truncates.

The interpreter keeps a bf16 tensor as uint16 and hands that to numpy: a sum or product of bf16
numbers is one of integers, and a conversion from fp32 drops the low half instead of rounding.
`install` widens bf16 operands to fp32 and rounds each result back to the nearest, ties to even.
It also adds the products of a dot in ascending order, as no BLAS promises to do, and lets an
argument of a kernel bound a loop, which numpy 2.4 refuses.
"""

from __future__ import annotations

import functools

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """The fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bf16 bit patterns nearest to the values, ties to even; a NaN becomes one quiet NaN."""
    values = np.atleast_1d(values).astype(np.float32)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.reshape(np.shape(values))


def install() -> None:
    """Correct the interpreter of this process. A second call changes nothing."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    if not hasattr(Builder.create_dot, "__wrapped__"):
        Builder.create_dot = _in_fp32(_ascending(Builder.create_dot))
    for name in ("unary_op", "binary_op", "ternary_op", "create_fma"):
        original = getattr(Builder, name)
        if not hasattr(original, "__wrapped__"):
            setattr(Builder, name, _in_fp32(original))
    if not hasattr(Builder.cast_impl, "__wrapped__"):
        Builder.cast_impl = _rounded(Builder.cast_impl)
    if not hasattr(interpreter._patch_lang_tensor, "__wrapped__"):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def _in_fp32(original):
    """An op of the interpreter whose bf16 operands are widened, and whose result is narrowed."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def wide(x):
        if isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16:
            return TensorHandle(widen(x.data), tl.float32)
        return x

    @functools.wraps(original)
    def op(self, *args):
        # The interpreter gives the result the type of one operand; here a bf16 one counts first.
        narrows = any(w is not x for w, x in zip(map(wide, args), args, strict=True))
        out = original(self, *map(wide, args))
        accumulates = original.__name__ == "create_dot" and args[2].dtype.scalar != tl.bfloat16
        if not narrows or accumulates:
            return out
        if out.data.dtype == np.bool_:
            return TensorHandle(out.data, tl.int1)
        return TensorHandle(narrow(out.data), tl.bfloat16)

    return op


def _ascending(original):
    """`create_dot` with one accumulator for each output, to which products are added one by one."""
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(original)
    def create_dot(self, a, b, d, *rest):
        if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
            return original(self, a, b, d, *rest)
        acc = d.data
        left, right = a.data.astype(acc.dtype), b.data.astype(acc.dtype)
        for k in range(left.shape[-1]):
            acc = acc + left[..., k, None] * right[..., k, None, :]
        return TensorHandle(acc, d.dtype.scalar)

    return create_dot


def _rounded(original):
    """`cast_impl` with correct conversions from and to bf16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(original)
    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16:
            src = TensorHandle(widen(src.data), tl.float32)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(narrow(src.data), tl.bfloat16)
        return original(self, src, dst_type)

    return cast_impl


def _with_index(original):
    """`_patch_lang_tensor` after which a tensor of one element is a whole number for `range`."""

    @functools.wraps(original)
    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch
