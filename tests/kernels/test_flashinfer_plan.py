"""Our plans against FlashInfer's scheduler where it can express them, and what they must hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sgl_det.kernels.flashinfer_plan import (
    ONE_PASS,
    Capture,
    DecodePlan,
    DoesNotFit,
    Heads,
    Plan,
    WorkspaceTooSmall,
    decode_capture,
    decode_splits,
    plan,
    prefill_capture,
    workspace_bytes,
)

from .flashinfer_scheduler import UNWRITTEN, Ask, ask, build, include_folder, nvcc

# group 1, 4, 7, 8 and, for one KV head, more query heads than a tile has rows
HEADS = [Heads(qo=q, kv=k, dim=d) for q, k, d in ((8, 8, 64), (32, 8, 128), (28, 4, 128))]
HEADS += [Heads(qo=q, kv=k, dim=d) for q, k, d in ((64, 8, 256), (71, 1, 64))]
ids = [f"{h.qo}-{h.kv}-{h.dim}" for h in HEADS]


def indptr(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Read:
    """A plan as the kernel reads it."""

    def __init__(self, plan: Plan, batch: int):
        v = plan.vector
        self.blocks, self.rows, self.tile = v[0], v[1], v[3]
        self.graph, self.split = v[13], v[14]
        self.image = plan.image
        arrays = [self._ints(at, self.blocks) for at in v[4:7]]
        self.o_indptr = self._ints(v[8], batch + 1)
        self.chunk = int(self._ints(v[9], 1)[0])
        self.live = int(self._ints(v[2], 1)[0]) if self.graph else self.rows
        self.merge = self._ints(v[7], self.live + 1) if self.split else None
        runs = slice(None)
        if self.split and self.graph:
            runs = self.image[v[12] : v[12] + self.blocks].astype(bool)
        self.all_items = list(zip(*(a.tolist() for a in arrays), strict=True))
        self.items = list(zip(*(a[runs].tolist() for a in arrays), strict=True))

    def _ints(self, offset: int, count: int) -> np.ndarray:
        return self.image[offset : offset + 4 * count].view(np.int32)

    def tree(self, request: int, token: int, kv_len: int) -> list[tuple[int, int, int]]:
        """The splits of one query token: (first key, end, row of partial results), as merged."""
        splits = -(-max(kv_len, 1) // self.chunk)  # the kernel counts them itself
        first = int(self.o_indptr[request]) + token * splits
        ends = [min((k + 1) * self.chunk, kv_len) for k in range(splits)]
        return [(min(k * self.chunk, kv_len), ends[k], first + k) for k in range(splits)]


def decoding(batch, heads, tile, chunk, context=8192, pool=500_000) -> Capture:
    splits = decode_splits(batch, chunk, context=context, pool=pool)
    return decode_capture(batch, heads, tile, splits)


def batches(seed: int, count: int):
    random = np.random.default_rng(seed)
    for _ in range(count):
        batch = int(random.choice([1, 2, 3, 7, 33, 100]))
        decode = random.random() < 0.4
        qo_len = np.ones(batch, int) if decode else random.integers(0, 150, batch)
        kv_len = qo_len + random.choice([0, 1, 63, 64, 1000, 5000], batch)
        if random.random() < 0.2:
            kv_len[0] = 0
        yield qo_len, kv_len


# --- against FlashInfer


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    if not nvcc() or not include_folder():
        pytest.skip("needs nvcc and FlashInfer's headers")
    return build(tmp_path_factory.mktemp("scheduler"))


def asks() -> list[Ask]:
    random, found = np.random.default_rng(7), []
    for qo_len, kv_len in [*batches(1, 300), *batches(2, 300)]:
        h = HEADS[random.integers(len(HEADS) - 1)]
        graph, kind = bool(random.random() < 0.4), random.choice(["auto", "fixed", "one pass"])
        qo, kv = indptr(qo_len), indptr(kv_len)
        rows = int(qo[-1]) + (int(random.integers(0, 40)) if graph and qo_len.max() > 1 else 0)
        split = int(random.choice([128, 1024, 2048])) if kind == "fixed" else 0
        rows = max(rows, 1)
        numbers = (tuple(qo.tolist()), tuple(kv.tolist()), (h.qo, h.kv, h.dim), rows, graph)
        found.append(Ask(*numbers, split, kind == "one pass"))
    return found


@pytest.mark.long
def test_agrees_with_the_scheduler(scheduler, monkeypatch):
    """Every vector and every byte that it writes, wherever it can be told our choices."""
    # It may split at any token; ours only where a KV tile ends.
    monkeypatch.setattr("sgl_det.kernels.flashinfer_plan.KV_TILE", 1)
    seen: Counter[str] = Counter()
    for case, answer in zip(asks(), ask(scheduler, asks()), strict=True):
        if answer is None:
            seen["raised"] += 1
            continue
        vector, image = answer
        chunk = int(image[vector[9] : vector[9] + 4].view(np.int32)[0])
        chunk = ONE_PASS if case.one_pass else chunk
        slots = int(image[vector[8] :][: 4 * len(case.qo)].view(np.int32)[-1])
        sizes = Capture(items=vector[0], rows=vector[1], slots=slots) if case.graph else None
        heads = Heads(qo=case.heads[0], kv=case.heads[1], dim=case.heads[2])
        ours = plan(case.qo, case.kv, heads, tile=vector[3], chunk=chunk, sizes=sizes)
        kind = f"graph {case.graph}, split {bool(vector[14])}, tile {vector[3]}"
        seen[kind] += 1
        theirs = ours.vector.copy()
        theirs[11] = vector[11]  # ours reserves less
        if case.graph and not vector[14]:
            # Ours always writes the mask under a graph, which takes the form of a split.
            theirs[7], theirs[12], theirs[14] = 0, 0, 0
        if not case.graph:
            theirs[1] = vector[1]  # a batch without a token still has one row here
        assert theirs == vector, (kind, case)
        written = image != UNWRITTEN
        at = slice(vector[9], vector[9] + 4)
        if case.one_pass:
            assert image[at].view(np.int32)[0] == -1
            written[at] = False
        if not case.graph and int(case.qo[-1]) != case.rows:
            written = written[: vector[7] or None]
        found, expected = ours.image[: len(written)], image[: len(written)]
        assert (found[written] == expected[written]).all(), (kind, case)
    assert sum(seen.values()) == 600 and seen["raised"] < 100, seen
    assert {f"graph {g}, split True, tile {t}" for g in (0 > 1, 0 < 1) for t in (16, 64)} <= {*seen}


# --- by what they must hold


@pytest.mark.parametrize("heads", HEADS, ids=ids)
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_every_item_once_and_slots_disjoint(heads, tile):
    for number, (qo_len, kv_len) in enumerate(batches(3, 40)):
        chunk = (64, 1024, ONE_PASS)[number % 3]
        sizes = None
        if number % 2:
            batch, rows = len(qo_len), int(qo_len.sum()) + number
            sizes = prefill_capture(batch, rows, heads, tile, chunk, context=8192)
            if (qo_len == 1).all():
                sizes = decoding(batch, heads, tile, chunk)
        made = plan(indptr(qo_len), indptr(kv_len), heads, tile=tile, chunk=chunk, sizes=sizes)
        read = Read(made, len(qo_len))
        expected = {
            (r, q, k)
            for r in range(len(qo_len))
            for q in range(-(-int(qo_len[r]) * heads.group // tile))
            for k in range(max(-(-int(kv_len[r]) // chunk), 1))
        }
        assert len(read.items) == len(expected) and set(read.items) == expected
        assert set(read.all_items) <= expected | {(0, 0, 0)}
        _check_slots(read, made, qo_len, kv_len, heads, sizes)


def _check_slots(read, made, qo_len, kv_len, heads, sizes):
    """Splits tile the keys at multiples of C; the merge reads what was written, in that order."""
    if not read.split:
        return
    slots, token = [], 0
    for r, (new, keys) in enumerate(zip(qo_len.tolist(), kv_len.tolist(), strict=True)):
        for t in range(new):
            tree = read.tree(r, t, keys)
            assert tree[0][0] == 0 and tree[-1][1] == keys
            assert all(first == k * read.chunk for k, (first, *_) in enumerate(tree))
            merged = range(int(read.merge[token]), int(read.merge[token + 1]))
            assert [slot for *_, slot in tree] == list(merged)
            slots += merged
            token += 1
    assert slots == list(range(len(slots))) and token == read.live
    held = sizes.slots if sizes else len(slots)
    v, s = made.vector[10:12]
    assert len(slots) <= held and s % 16 == 0
    assert v + held * heads.qo * heads.dim * 2 <= s <= made.float_bytes - held * heads.qo * 4


@pytest.mark.parametrize("keys", [1, 63, 64, 1023, 1024, 1025, 5000])
def test_one_tree_for_a_token_in_decode_and_prefill(keys):
    """However the prompt was cut, whatever the tile, and whoever is in the batch."""
    heads, chunk, trees = HEADS[1], 1024, []
    for new in sorted({1, min(2, keys), min(64, keys), keys}):
        for tile in (16, 64, 128):
            for before in ([], [7], [1] * 5):
                qo, kv = [*before, new], [*(900 + b for b in before), keys]
                made = plan(indptr(qo), indptr(kv), heads, tile=tile, chunk=chunk)
                read = Read(made, len(qo))
                tree = read.tree(len(before), new - 1, keys)
                trees.append([(first, end) for first, end, _ in tree])
    assert all(tree == trees[0] for tree in trees)


@pytest.mark.parametrize("heads", HEADS, ids=ids)
@pytest.mark.parametrize("tile", [16, 64])
def test_decode_form_gives_the_same_bytes(heads, tile):
    random, batch, chunk = np.random.default_rng(5), 33, 256
    sizes = decoding(batch, heads, tile, chunk, 4096, 30_000)
    made = DecodePlan(batch, heads, tile=tile, chunk=chunk, sizes=sizes)
    for most in (4096, 1, 300, 2000, 3000, 1):
        kv = indptr(random.integers(0 if most > 1 else 1, most + 1, batch))
        expected = plan(np.arange(batch + 1), kv, heads, tile=tile, chunk=chunk, sizes=sizes)
        fast = made(kv)
        assert fast.vector == expected.vector and fast.float_bytes == expected.float_bytes
        assert fast.image.tobytes() == expected.image.tobytes()


def test_vector_of_a_captured_batch_never_changes():
    heads, random = HEADS[1], np.random.default_rng(0)
    sizes = decoding(16, heads, 16, 1024, 32768, 200_000)
    steps = [indptr(random.integers(1, 20_000, 16)) for _ in range(20)]
    plans = [plan(np.arange(17), kv, heads, tile=16, chunk=1024, sizes=sizes) for kv in steps]
    assert {tuple(p.vector) for p in plans} == {tuple(plans[0].vector)}
    assert {len(p.image) for p in plans} == {len(plans[0].image)}
    assert {type(x) for p in plans for x in p.vector} == {int}  # FlashInfer converts no others


def test_step_that_exceeds_its_grid_says_so():
    heads = HEADS[1]
    sizes = decoding(4, heads, 16, 1024, 8192, 2048)
    fits, exceeds = indptr([1024] * 3 + [5 * 1024]), indptr([8192] * 4)
    fast = DecodePlan(4, heads, tile=16, chunk=1024, sizes=sizes)
    for make in (fast, lambda kv: plan(range(5), kv, heads, tile=16, chunk=1024, sizes=sizes)):
        assert make(fits).vector[0] == sizes.items == 8
        with pytest.raises(DoesNotFit, match="32 work items.*holds 8.*without the graph"):
            make(exceeds)
        assert Read(make(fits), 4).items[-1] == (3, 0, 4)  # as if nothing had happened


def test_workspace_that_is_too_small_says_so():
    heads, qo, kv = HEADS[1], indptr([8192]), indptr([32768])
    needed = workspace_bytes(8192 * 32, heads)
    assert plan(qo, kv, heads, tile=64, chunk=1024, float_bytes=needed).float_bytes == needed
    with pytest.raises(WorkspaceTooSmall, match="262144 partial rows need 2181038080 bytes"):
        plan(qo, kv, heads, tile=64, chunk=1024, float_bytes=1 << 30)
    with pytest.raises(WorkspaceTooSmall, match="4294967296 elements"):
        plan(indptr([32768]), kv, heads, tile=64, chunk=1024)
    whole = plan(indptr([32768]), kv, heads, tile=64, chunk=ONE_PASS, float_bytes=0)
    assert whole.float_bytes == 0 and whole.vector[14] == 0


@pytest.mark.parametrize("tile, chunk", [(32, 64), (64, 100), (64, 0), (64, 1 << 31)])
def test_what_the_kernel_cannot_hold_is_refused(tile, chunk):
    with pytest.raises(ValueError, match="expected"):
        plan(indptr([1]), indptr([1]), HEADS[0], tile=tile, chunk=chunk)
