"""Calls of PyTorch's products and reductions, each a function of `Tensors`."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from .interpreter import DEVICE, pick

M, N, K, L = pick(gpu=(65, 200, 520, 5), interpreter=(5, 24, 48, 3))


class Tensors:
    """Operands by their letters, functions of the dtype alone."""

    def __init__(self, dtype):
        source = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(shape, generator=source).to(dtype).to(DEVICE)

        self.dtype = dtype
        self.a, self.b, self.c = make(M, K), make(K, N), make(M, N)
        self.bias, self.v, self.rows = make(N), make(K), make(M)
        self.w = self.b.t().contiguous()
        self.A, self.B, self.C = make(L, M, K), make(L, K, N), make(L, M, N)

    def out(self, *shape):
        return torch.empty(shape, dtype=self.dtype, device=DEVICE)


PRODUCTS = {
    "mm": lambda t: t.a @ t.b,
    "mm of columns": lambda t: t.a @ t.w.t(),
    "mm of strides": lambda t: t.a[:, ::2] @ t.b[::2],
    "mm of one product": lambda t: t.a[:, :1] @ t.b[:1],
    "mm of one column": lambda t: t.a @ t.b[:, :1],
    "mm.out": lambda t: torch.mm(t.a, t.b, out=t.out(M, N)),
    "mm.out resized": lambda t: torch.mm(t.a, t.b, out=t.out(0)),
    "mm.out columns": lambda t: torch.mm(t.a, t.b, out=t.out(N, M).t()),
    "linear": lambda t: linear(t.a, t.w),
    "linear with bias": lambda t: linear(t.A, t.w, t.bias),
    "linear of one row": lambda t: linear(t.v, t.w, t.bias),
    "addmm": lambda t: torch.addmm(t.c, t.a, t.b),
    "addmm of a row": lambda t: torch.addmm(t.bias, t.a, t.b),
    "addmm of a number": lambda t: torch.addmm(t.bias[:1], t.a, t.b),
    "addmm scaled": lambda t: torch.addmm(t.c, t.a, t.b, beta=0.5, alpha=2),
    "addmm without": lambda t: torch.addmm(t.c * float("nan"), t.a, t.b, beta=0),
    "addmm.out": lambda t: torch.addmm(t.c, t.a, t.b, alpha=2, out=t.out(M, N)),
    "bmm": lambda t: torch.bmm(t.A, t.B),
    "bmm of one for all": lambda t: torch.bmm(t.A, t.b.expand(L, K, N)),
    "bmm.out": lambda t: torch.bmm(t.A, t.B, out=t.out(L, M, N)),
    "baddbmm": lambda t: torch.baddbmm(t.C, t.A, t.B),
    "baddbmm scaled": lambda t: torch.baddbmm(t.C, t.A, t.B, beta=2, alpha=0.5),
    "baddbmm.out": lambda t: torch.baddbmm(t.C, t.A, t.B, out=t.out(L, M, N)),
    "addmm in place": lambda t: t.c.clone().addmm_(t.a, t.b, beta=0.5),
    "baddbmm in place": lambda t: t.C.clone().baddbmm_(t.A, t.B, alpha=2),
    "addmv in place": lambda t: t.rows.clone().addmv_(t.a, t.v),
    "addmv.out": lambda t: torch.addmv(t.rows, t.a, t.v, out=t.out(M)),
    "mv": lambda t: torch.mv(t.a, t.v),
    "mv of one product": lambda t: torch.mv(t.a[:, :1], t.v[::2][:1]),
    "mv from the left": lambda t: t.v @ t.b,
    "mv of many": lambda t: t.A @ t.v,
    "addmv": lambda t: torch.addmv(t.rows, t.a, t.v, beta=0.5, alpha=2),
    "matmul": lambda t: torch.matmul(t.A, t.b),
    "einsum": lambda t: torch.einsum("lmk,lkn->mln", t.A, t.B),
}
REDUCTIONS = {
    "softmax": lambda t: t.a.softmax(-1),
    "softmax of columns": lambda t: t.A.softmax(1),
    "softmax in fp32": lambda t: torch.softmax(t.a, -1, dtype=torch.float32),
    "log_softmax": lambda t: t.A.log_softmax(-1),
    "log_softmax of columns": lambda t: t.a.t().log_softmax(0),
    "softmax.out": lambda t: torch.softmax(t.a, -1, out=t.out(M, K)),
    "log_softmax.out": lambda t: torch.log_softmax(t.a, -1, out=t.out(M, K)),
    "mean.out": lambda t: torch.mean(t.a, -1, out=t.out(M)),
    "mean": lambda t: t.a.mean(-1),
    "mean of columns": lambda t: t.A.mean(1, keepdim=True),
    "mean of two axes": lambda t: t.A.mean((0, 2), keepdim=True),
    "mean of the first axes": lambda t: t.A.mean((0, 1)),
    "mean of all": lambda t: t.A.mean(),
    "mean in fp32": lambda t: t.a.mean(0, dtype=torch.float32),
}
EMPTY = {
    "no rows": lambda t: t.a[:0] @ t.b,
    "no columns": lambda t: t.a @ t.b[:, :0],
    "no products": lambda t: t.a[:, :0] @ t.b[:0],
    "no products but a bias": lambda t: torch.addmm(t.bias, t.a[:, :0], t.b[:0]),
    "no matrices": lambda t: torch.bmm(t.A[:0], t.B[:0]),
    "no products of matrices": lambda t: torch.bmm(t.A[..., :0], t.B[:, :0]),
    "no vector": lambda t: torch.mv(t.a[:, :0], t.v[:0]),
    "softmax of nothing": lambda t: t.a[:0].softmax(-1),
    "mean of no rows": lambda t: t.a[:0].mean(-1),
}
