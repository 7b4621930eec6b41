"""What is timed of each backend's attention: its normal mode, what our server launches, others.

Arms: `upstream`, `served`, and what else is of interest. A mismatch is an element of the last token
of a request whose bits differ from decode by one program, or on FA3 from a prefill of that token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from attention_case import Case
from fa3_times import Layers
from graph_timing import Arm

from sgl_det.kernels import fa3_chunks, fa3_extend
from sgl_det.kernels.attention import Launch
from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.fa3_decode import decode_attention, plan_few
from sgl_det.kernels.flashinfer_order import ORDER, SPLIT

# Keys of the longest request that a server of the model takes.
CONTEXT = 40_960
Arms = dict[str, Callable[[], Arm]]
_SHARED = (1, 4, 16)
_LAUNCHES = {"128 rows, 3 stages": Launch(128, 8, 3), "64 rows": Launch(64, 4, 3)}


def not_compared() -> None:
    """Upstream has an order of its own."""


def _arm(case: Case, name: str, call: Callable[[], torch.Tensor], repeat: int) -> Callable[[], Arm]:
    return partial(Arm, name, [call] * repeat, partial(case.differs, call))


def _ours_in_decode(case: Case) -> Arms:
    programs = {f"shared {n}": n for n in _SHARED if n * case.m * case.groups <= 4096 or n == 1}
    calls = {
        name: partial(case.decode, n, case.work)
        for name, n in {"served": case.served, **programs}.items()
    }
    return {name: _arm(case, name, call, case.repeat) for name, call in calls.items()}


def triton_decode(case: Case) -> Arms:
    upstream = lambda: Arm("upstream", [case.upstream_decode()] * case.repeat, not_compared)  # noqa: E731
    return {"upstream": upstream, **_ours_in_decode(case)}


def triton_prefill(case: Case) -> Arms:
    upstream = lambda: Arm("upstream", [case.upstream_prefill()] * 2, not_compared)  # noqa: E731
    ours = {"served": None, **_LAUNCHES}
    calls = {name: partial(case.prefill, launch) for name, launch in ours.items()}
    return {"upstream": upstream, **{n: _arm(case, n, call, 2) for n, call in calls.items()}}


def _planned(case: Case, backend: str, **how) -> Callable[[], torch.Tensor]:
    """A call of FlashInfer's prefill wrapper, planned."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend)
    keys = torch.arange(0, case.m * case.n + 1, case.n, dtype=torch.int32, device="cuda")
    last = torch.ones(case.m, dtype=torch.int32, device="cuda")
    sizes = (case.heads, case.groups, case.d, 1)
    types = {"causal": True, "q_data_type": case.q.dtype, "kv_data_type": case.k.dtype}
    wrapper.plan(case.starts.int(), keys, case.table.view(-1), last, *sizes, **types, **how)
    return partial(wrapper.run, case.q, (case.k.unsqueeze(1), case.v.unsqueeze(1)))


def _edited(case: Case) -> Callable[[], torch.Tensor]:
    """The same with the module that our server builds, in one pass."""
    from flashinfer import prefill

    from sgl_det.patches.flashinfer import _headers

    make = _headers(prefill.gen_batch_prefill_module)
    module = prefill.get_batch_prefill_module.__wrapped__

    def get(backend, *args):
        with mock.patch.object(prefill, "gen_batch_prefill_module", make):
            return module(backend, *args)

    with mock.patch.object(prefill, "get_batch_prefill_module", get):
        return _planned(case, "fa2", disable_split_kv=True)


def flashinfer_decode(case: Case) -> Arms:
    def upstream() -> Arm:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        scratch = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        keys = torch.arange(0, case.m * case.n + 1, case.n, dtype=torch.int32, device="cuda")
        last = torch.ones(case.m, dtype=torch.int32, device="cuda")
        slots = case.table.view(-1).contiguous()
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=keys.clone(),
            paged_kv_indices_buffer=slots.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        types = {"q_data_type": case.q.dtype, "kv_data_type": case.k.dtype}
        wrapper.plan(keys, slots, last, case.heads, case.groups, case.d, 1, **types)
        q = case.q[case.new - 1 :: case.new].contiguous()
        call = partial(wrapper.run, q, (case.k.unsqueeze(1), case.v.unsqueeze(1)))
        return Arm("upstream", [call] * case.repeat, not_compared)

    return {"upstream": upstream, **_ours_in_decode(case)}


def flashinfer_prefill(case: Case) -> Arms:
    """`auto` is FlashInfer's FA3, which its normal mode takes on Hopper."""
    make = {
        "upstream": lambda: Arm("upstream", [_planned(case, "fa2")] * 2, not_compared),
        "auto": lambda: Arm("auto", [_planned(case, "auto")] * 2, not_compared),
    }
    ours = partial(case.prefill, None)
    if case.n <= SPLIT:
        make["served"] = lambda: _arm(case, "served", _edited(case), 2)()
        return make | {"triton": _arm(case, "triton", ours, 2)}
    return make | {"served": _arm(case, "served", ours, 2)}


def _rows(x: Layers, layer: int, plan: fa3_extend.Extend) -> torch.Tensor:
    return fa3_extend.extend_attention(partial(x.call, layer), x.q, plan)[0]


def _chunks(x: Layers, m: int, n: int, new: int) -> fa3_extend.Extend:
    return fa3_extend.plan_extend([n - new] * m, [new] * m, x.table, fa3_chunks.CHUNKS[x.d])


def _differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int((found.view(torch.int16) != expected.view(torch.int16)).sum())


def fa3_decode(model: str, m: int, n: int) -> Arms:
    x = Layers(model, m, n, 1)
    layers, chunk = range(len(x.k)), fa3_chunks.CHUNKS[x.d]
    normal, whole = x.metadata(x.whole, normal=True), x.metadata(x.whole)
    used = m * fa3_chunks.chunks_of(n, chunk)
    plan = fa3_chunks.plan_decode(x.lengths, x.table, chunk, used)

    heads = Heads(queries=x.heads, keys=x.groups, d=x.d, dtype=x.q.dtype)
    # A CUDA graph for more than one chunk holds the longest context.
    few = plan_few(x.lengths, n if n <= chunk else CONTEXT, heads)
    wide = torch.nn.functional.pad(x.table, (0, CONTEXT - n))

    def in_fa3(layer: int) -> torch.Tensor:
        if n <= chunk:
            return x.call(layer, x.q, x.whole, made=whole)[0]
        return fa3_chunks.decode_attention(partial(x.call, layer), x.q, plan)

    def by_all(layer: int) -> torch.Tensor:
        pools = x.k[layer].squeeze(1), x.v[layer].squeeze(1)
        return decode_attention(x.q, *pools, wide, x.lengths, few.chunks, x.d**-0.5)

    def upstream(layer: int) -> torch.Tensor:
        return x.call(layer, x.q, x.whole, normal=True, made=normal)[0]

    extend = _chunks(x, m, n, 1)

    def arm(name: str, call: Callable[[int], torch.Tensor]) -> Callable[[], Arm]:
        differs = lambda: _differing(call(0), _rows(x, 0, extend))  # noqa: E731
        return partial(Arm, name, [partial(call, i) for i in layers], differs)

    arms = {
        "upstream": partial(Arm, "upstream", [partial(upstream, i) for i in layers], not_compared)
    }
    if few:
        arms["in FA3"] = arm("in FA3", in_fa3)
    return arms | {"served": arm("served", by_all if few else in_fa3)}


def fa3_prefill(model: str, m: int, n: int) -> Arms:
    x = Layers(model, m, n, n)
    plan, last = _chunks(x, m, n, n), x.q[n - 1 :: n]
    one = fa3_extend.plan_extend([n - 1] * m, [1] * m, x.table, fa3_chunks.CHUNKS[x.d])

    def differs() -> int:
        step = fa3_extend.extend_attention(partial(x.call, 0), last.contiguous(), one)[0]
        return _differing(_rows(x, 0, plan)[n - 1 :: n].contiguous(), step)

    upstream = partial(x.call, 0, x.q, x.whole, normal=True)
    return {
        "upstream": lambda: Arm("upstream", [upstream] * 2, not_compared),
        "served": lambda: Arm("served", [partial(_rows, x, 0, plan)] * 2, differs),
    }


def arms_of(backend: str, op: str, shape: str, m: int, n: int) -> Arms:
    """The arms of decode, or of a prefill of n new tokens, of m requests with n keys."""
    if backend == "fa3":
        model = {"qwen3-8b": "128 g4", "qwen2.5-7b": "128 g7", "llama-3.2-1b": "64 g4"}[shape]
        return (fa3_decode if op == "decode" else fa3_prefill)(model, m, n)
    case = Case(
        shape, m, n, n if op == "prefill" else 1, ORDER if backend == "flashinfer" else None
    )
    if backend == "flashinfer":
        return (flashinfer_decode if op == "decode" else flashinfer_prefill)(case)
    return (triton_decode if op == "decode" else triton_prefill)(case)
