"""Attention of requests in float64, for the tests of the kernels."""

from __future__ import annotations

import torch

from sgl_det.kernels.attention_proof import Requests


def exact(requests: Requests, request: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [H, D], lse [H]) of one token in float64."""
    options, heads = requests.options, requests.heads
    slots = requests.table[requests.rows[request], : position + 1].long()
    share = heads.queries // heads.keys
    k, v = (x[slots].double().repeat_interleave(share, dim=1) for x in (requests.k, requests.v))
    s = torch.einsum("hd,shd->hs", requests.q[request][position].double(), k) * options.scale
    if options.cap:
        s = options.cap * torch.tanh(s / options.cap)
    if options.window >= 0:
        s[:, : max(0, position - options.window)] = float("-inf")
    sinks = options.sinks
    whole = s if sinks is None else torch.cat([s, sinks.double()[:, None]], dim=1)
    lse = torch.logsumexp(whole, dim=1)
    return torch.einsum("hs,shd->hd", torch.exp(s - lse[:, None]), v), lse
