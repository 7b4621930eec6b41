"""The GPU's sampler: the twin's tokens and kept set, and no bit from a neighbour or a launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_det.kernels import gpu_sampler, sampler
from sgl_det.kernels.gpu_sampler import Launch
from sgl_det.kernels.graph_timing import captured
from sgl_det.testing import assert_bitwise_equal

from . import cuda_emulator
from .interpreter import ACTIVE, DEVICE, MARKS, pick
from .sampler_twin import ALL, SETTINGS, assert_chi_square, assert_tokens, kept

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
if ACTIVE:
    pytestmark.append(cuda_emulator.needs_compiler)
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
SMALL = Launch(32, 32, 64, 4)
# Other thread blocks, other lists - most bins are longer than one of 2 - and other slices.
LAUNCHES = pick(
    gpu=[Launch(128, 1024, 2, 64), Launch(512, 256, 8192, 4096), Launch(32, 32, 64, 1)],
    interpreter=[Launch(64, 64, 2, 1), Launch(32, 32, 64, 300)],
)
INF = float("inf")


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    """Where there is no GPU the kernels are emulated, in small thread blocks."""
    if ACTIVE:
        monkeypatch.setattr(gpu_sampler, "run", cuda_emulator.run_sampler)
    return pick(gpu=gpu_sampler.LAUNCH, interpreter=SMALL)


def columns(setting, n):
    return [torch.full((n,), x) for x in setting]


def draw(logits, given, seeds, positions, launch):
    """On the device, whatever the parameters are on: as the CPU's sampler takes them."""
    tensors = [torch.as_tensor(x).to(DEVICE) for x in (*given, seeds, positions)]
    return gpu_sampler.sample(logits.to(DEVICE), *tensors, launch=launch).cpu()


def mixed(vocab, seed=1):
    """Rows of every setting, some with many equal logits, seeds and positions."""
    made = torch.Generator().manual_seed(seed)
    given = [torch.tensor(x) for x in zip(*[*SETTINGS.values()] * 2, strict=True)]
    n = len(given[0])
    logits = 4 * torch.randn(n, vocab, generator=made)
    logits[n // 2 :] = logits[n // 2 :].round()
    return logits, given, torch.arange(n) * (2**33 + 7), torch.arange(n) * 2**31


@settings
@pytest.mark.parametrize("vocab", pick(gpu=[1, 5, 50, 1003, 151936], interpreter=[1, 5, 50, 403]))
def test_tokens_are_those_of_the_twin(setting, vocab, launch):
    made = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(40, vocab, generator=made)
    logits[20:] = logits[20:].round()  # many equal ones
    logits[5, : vocab // 2] = -INF
    seeds, positions = torch.arange(40) * (2**33 + 7), torch.arange(40) % 7 * 2**31
    tokens = draw(logits, columns(setting, 40), seeds, positions, launch)
    assert_tokens(tokens, logits.numpy(), setting, seeds, positions)


def _rows():
    """Rows of 24 logits: flat ones, so that each kept id is drawn often."""
    made = torch.Generator().manual_seed(5)
    flat = torch.randn(24, generator=made) / 2
    rows = {"flat": flat, "equal": torch.zeros(24), "rounded": (4 * flat).round() / 4}
    masked, nan, single = flat.clone(), flat.clone(), torch.full((24,), -INF)
    masked[::3], nan[::5], single[13] = -INF, float("nan"), -3.0
    rows |= {"masked": masked, "nan": nan, "one finite": single}
    peaked = flat.clone()
    peaked[20] = 60.0
    return rows | {"none finite": single - INF, "infinite": masked.abs(), "peaked": peaked}


FILTERS = {
    "none": (1.0, ALL, 1.0, 0.0),
    "top_k": (0.7, 5, 1.0, 0.0),
    "top_k V": (0.7, 24, 1.0, 0.0),
    "top_p": (1.0, ALL, 0.6, 0.0),
    "top_p tiny": (1.0, ALL, 1e-6, 0.0),
    "top_p nearly 1": (1.0, 24, 1 - 2**-24, 0.0),
    "min_p": (1.3, ALL, 1.0, 0.6),
    "min_p 1": (0.5, ALL, 1.0, 1.0),
    "all": (2.0, 9, 0.5, 0.5),
}


@pytest.mark.parametrize("row", _rows().values(), ids=_rows())
def test_what_is_drawn_is_what_is_kept(row, launch):
    """No id that is not kept, and each that is; each draw is the twin's."""
    draws = pick(gpu=1 << 12, interpreter=100)
    logits, zero = row.expand(draws, -1), torch.zeros(draws, dtype=torch.int64)
    for name, setting in FILTERS.items():
        tokens = draw(logits, columns(setting, draws), zero + 3, torch.arange(draws), launch)
        assert_tokens(tokens, logits.numpy(), setting, zero + 3, torch.arange(draws))
        ids = kept(row.numpy(), setting)
        often = len(ids) < pick(gpu=25, interpreter=10) and not (row > 50).any()
        assert not often or set(tokens.tolist()) == set(ids.tolist()), name


def test_kept_sets_end_anywhere(launch):
    """Other parameters in each row, some with more equal logits than a list holds."""
    made = torch.Generator().manual_seed(9)
    n, vocab = pick(gpu=(400, 5003), interpreter=(60, 203))
    uniform = torch.rand(4, n, generator=made)
    top_ks = (uniform[0] * vocab / 2).long() + 2
    given = [0.2 + 2 * uniform[1], top_ks, 0.05 + 0.95 * uniform[2], 0.1 * uniform[3] ** 4]
    logits = torch.randn(n, vocab, generator=made) / 2
    logits[n // 2 :] = logits[n // 2 :].round()
    zero = torch.zeros(n, dtype=torch.int64)
    for some in (launch, LAUNCHES[0]):
        tokens = draw(logits, given, zero, zero, some)
        for r in range(n):
            setting = tuple(float(x[r]) for x in given)
            assert_tokens(tokens[r : r + 1], logits[r : r + 1].numpy(), setting, [0], [0])


@settings
def test_draws_follow_the_filtered_distribution(setting, launch):
    """Chi-square over draws, half of them by seed and half by position."""
    draws, batch = pick(gpu=(1 << 20, 1 << 14), interpreter=(1 << 9, 1 << 8))
    made = torch.Generator().manual_seed(3)
    row = 1.5 * torch.randn(40, generator=made)
    row[7] = row[3]
    counts = np.zeros(40)
    for begin in range(0, draws, batch):
        one, two = torch.arange(begin, begin + batch), torch.full((batch,), 11)
        numbers = (one, two) if begin < draws // 2 else (two, one)
        tokens = draw(row.expand(batch, -1), columns(setting, batch), *numbers, launch)
        counts += np.bincount(tokens, minlength=40)
    ids = kept(row.numpy(), setting)
    assert set(np.flatnonzero(counts)) <= set(ids)
    p = np.exp(np.float64(row.numpy()[ids]) / setting[0])
    expected = p / p.sum() * draws
    # What is expected less than five times is counted together.
    rare = expected < 5
    found = [*counts[ids][~rare], counts[ids][rare].sum()]
    expected = [*expected[~rare], expected[rare].sum() or 1e-300]
    assert rare.any() or not found.pop()
    assert_chi_square(np.array(found), np.array(expected[: len(found)]))


def test_no_bit_follows_the_batch_or_the_launch(launch):
    logits, given, *numbers = mixed(pick(gpu=151937, interpreter=1003))
    whole = draw(logits, given, *numbers, launch)
    for lo, hi in ((0, 1), (3, 4), (13, 14), (1, 9), (6, 7)):
        part = slice(lo, hi)
        some = [x[part] for x in (*given, *numbers)]
        found = draw(logits[part], some[:4], *some[4:], launch)
        assert_bitwise_equal(found, whole[part], f"rows {lo} to {hi}")
    for other in LAUNCHES:
        assert_bitwise_equal(draw(logits, given, *numbers, other), whole, f"{other}")


def test_no_bit_follows_strides_or_widths(launch):
    """Rows on and off 16 bytes, columns apart, whole numbers of four bytes; what lies beyond."""
    logits, given, seeds, positions = mixed(pick(gpu=5003, interpreter=403))
    numbers = seeds // 2**32, positions // 2**31
    whole = draw(logits, given, *numbers, launch)
    for extra in range(1, 5):
        wide = torch.full((len(logits), logits.shape[1] + extra), INF)
        wide[:, extra:] = logits
        found = draw(wide[:, extra:].clone(), given, *numbers, launch)
        assert_bitwise_equal(found, whole, f"{extra} columns before")
        on_device = wide.to(DEVICE)[:, extra:]
        assert_bitwise_equal(draw(on_device, given, *numbers, launch), whole, f"{extra} beside")
    assert_bitwise_equal(draw(logits.T.contiguous().T, given, *numbers, launch), whole, "columns")
    narrow = [x.int() for x in (given[1], *numbers)]
    for i in range(3):
        some = [narrow[y] if y == i else x for y, x in enumerate((given[1], *numbers))]
        found = draw(logits, [given[0], some[0], *given[2:]], *some[1:], launch)
        assert_bitwise_equal(found, whole, f"number {i} of four bytes")


def test_it_draws_what_the_cpu_draws(launch):
    """All but one in five hundred: two tokens may be as near as a rounding."""
    logits, given, *numbers = mixed(pick(gpu=151936, interpreter=2003), seed=2)
    draws, others = pick(gpu=100, interpreter=3), 0
    for more in range(draws):
        some = numbers[0] + more, numbers[1]
        want = sampler.sample(logits, *given, *some)
        others += int((draw(logits, given, *some, launch) != want).sum())
    assert others <= draws * len(logits) // 500


def test_control_another_seed_or_position_draws_others(launch):
    logits, zero = torch.zeros(20, 300), torch.zeros(20, dtype=torch.int64)
    given = columns(SETTINGS["plain"], 20)
    first = draw(logits, given, zero, zero, launch)
    for numbers in ((zero + 1, zero), (zero, zero + 1), (zero + 2**32, zero), (zero, zero + 2**32)):
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(draw(logits, given, *numbers, launch), first)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"logits": torch.zeros(2, 3).bfloat16()}, "bfloat16"),
        ({"logits": torch.zeros(6)}, "expected fp32"),
        ({"logits": torch.zeros(2, 0)}, "expected fp32"),
        ({"seeds": torch.zeros(1)}, "1 seeds for 2 rows"),
        ({"top_ps": torch.zeros(3)}, "3 top_ps for 2 rows"),
        ({"min_ps": torch.zeros(2, device="meta")}, "min_ps are on meta"),
    ],
    ids=["dtype", "a row", "no column", "seeds", "top_ps", "device"],
)
def test_shapes_and_dtypes_are_checked(wrong, match):
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions")
    given = {"logits": torch.zeros(2, 3)} | {name: torch.ones(2) for name in names}
    given = {name: x.to(DEVICE) for name, x in given.items()}
    with pytest.raises(ValueError, match=match):
        gpu_sampler.sample(**given | wrong)


def test_no_rows_have_no_tokens(launch):
    none = torch.zeros(0).long()
    assert draw(torch.zeros(0, 7), [none.float()] * 4, none, none, launch).shape == (0,)


if ACTIVE:

    def test_control_a_maximum_without_ids_follows_the_launch(launch, monkeypatch):
        """Of equal logits any may be taken, where ids are not compared."""
        monkeypatch.setattr(cuda_emulator, "changed", ("x.id < best.id", "false"))
        logits, zero = torch.zeros(8, 1003), torch.zeros(8, dtype=torch.int64)
        logits[:, 130:] = 1
        given = columns(SETTINGS["greedy"], 8)
        whole = draw(logits, given, zero, zero, launch)
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(draw(logits, given, zero, zero, LAUNCHES[0]), whole)

else:

    @cuda_emulator.needs_compiler
    def test_a_gpu_has_the_bits_of_the_emulator():
        """Weights and noise are rounded as they are written: on no GPU otherwise."""
        logits, given, *numbers = mixed(1003)
        found = draw(logits, given, *numbers, gpu_sampler.LAUNCH)
        kept_run, gpu_sampler.run = gpu_sampler.run, cuda_emulator.run_sampler
        try:
            tensors = (*given, *numbers)
            want = gpu_sampler.sample(logits, *tensors, launch=SMALL)
        finally:
            gpu_sampler.run = kept_run
        assert_bitwise_equal(found, want)

    @pytest.mark.parametrize("batch", [1, 14])
    def test_a_graph_draws_what_it_is_given(batch):
        """Captured once, replayed with other logits, parameters and numbers."""
        logits, given, *numbers = mixed(151936)
        cases = [torch.randperm(14)[:batch] for _ in range(6)]
        held = [x[cases[0]].to(DEVICE) for x in (logits, *given, *numbers)]
        found = []
        graph = captured([lambda: found.append(sampler.sample(*held))])
        for rows in cases:
            some = [x[rows] for x in (logits, *given, *numbers)]
            for to, x in zip(held, some, strict=True):
                to.copy_(x)
            graph.replay()
            want = draw(some[0], some[1:5], *some[5:], LAUNCHES[1])
            assert_bitwise_equal(found[-1].cpu(), want)

    def test_the_same_a_thousand_times(launch):
        """Threads race for the list's places and the sums: no bit may follow who wins."""
        logits, given, *numbers = mixed(151936)
        held = [x.to(DEVICE) for x in (logits, *given, *numbers)]
        want = gpu_sampler.sample(*held)
        for _ in range(1000):
            assert_bitwise_equal(gpu_sampler.sample(*held), want)
