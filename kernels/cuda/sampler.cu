// One token a row of logits: the four kernels of `gpu_sampler.py`, by STEP.
//
// Shapes, dtypes and semantics are those of `sampler.py`. A thread block of THREADS has one of
// `slices` parts of a row, in the last step all of it; row r is blocks (r, .).
//   0 top      the largest x of a slice; of rows without a filter the token too
//   1 tally    how many ids, of what weight, have an x in each of BINS steps of 2^-6 below the
//              largest: of rows with top_k or top_p
//   2 choose   finds the bin that the kept set ends in, takes the noise of what lies before it, and
//              writes down what lies in it
//   3 finish   sorts what was written down, or where it is more than LIST, counts by parts of its
//              bits; takes the noise of what is kept of it, and the best of all slices
// Order of sums: whole numbers, so none; of maxima: none. No bit follows THREADS, LIST or slices.
// More than BINS steps below the largest x no noise, which spans 26.1, can make up for it.

#ifndef EMULATED
#include "primitives.cuh"
#endif
#include "sampler_math.cuh"
#include "sampler_row.cuh"

namespace {

DEVICE void top(Shared &s, const Call &c, const Row &row, const Note &note) {
    const int slice = blockIdx.y;
    if (row.ends && !row.greedy)
        for (int bin = slice * THREADS + threadIdx.x; bin < BINS; bin += c.slices * THREADS)
            note.counts[bin] = 0, note.weights[bin] = 0;
    if (slice == 0 && threadIdx.x == 0) *note.listed = 0;
    Candidate most = nobody(), best = nobody();
    each_four(c, row, slice, c.slices, [&](int v, const float (&x)[4]) {
        u32 kept = 0;
#pragma unroll
        for (int y = 0; y < 4; y++) {
            consider(most, {(u64)ordered(x[y]) << 32, (u32)(v + y)});
            kept |= (u32)(x[y] > -infinity()) << y;
        }
        if (!row.filtered) add_noise(best, row, v, x, kept);
    });
    most = best_of(s, most);
    if (!row.filtered) best = best_of(s, best);
    if (threadIdx.x == 0) note.tops[slice] = most, note.best[slice] = best;
}

DEVICE void tally(Shared &s, const Call &c, const Row &row, const Note &note) {
    if (!row.ends || row.greedy) return;
    const float most = number_of(best_of_slices(s, c, note.tops));
    if (!drawn(row, most)) return;
    clear(s.tally);
    Pending pending;
    each_four(c, row, blockIdx.y, c.slices, [&](int, const float (&x)[4]) {
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int bin = bin_of(x[y], most);
            if (bin < BINS) pending.take(s.tally, bin, weight_of(x[y], most));
        }
    });
    pending.add_to_tally(s.tally);
    sync_block();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        if (!s.tally.counts[bin]) continue;
        add_to(&note.counts[bin], s.tally.count(bin));
        add_to(&note.weights[bin], s.tally.weight(bin));
    }
}

DEVICE void choose(Shared &s, const Call &c, const Row &row, const Note &note) {
    if (!row.filtered || row.greedy) return;
    const float most = number_of(best_of_slices(s, c, note.tops));
    if (!drawn(row, most)) return;
    End end{0, 0, 0, 0, BINS};
    if (row.ends) end = end_of(s, row, Written{note.counts, note.weights}, end, true);
    if (blockIdx.y == 0 && threadIdx.x == 0) *note.end = end;
    const float low = least(row, most);
    const bool lists = end.inside <= LIST;
    Candidate best = nobody();
    each_four(c, row, blockIdx.y, c.slices, [&](int v, const float (&x)[4]) {
        u32 kept = 0;
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int bin = bin_of(x[y], most);
            if (bin == BINS || x[y] < low) continue;
            kept |= (u32)(bin < end.bin) << y;
            if (bin == end.bin && lists)
                note.list[add_to(note.listed, 1u)] = (u64)ordered(x[y]) << 32 | ~(u32)(v + y);
        }
        add_noise(best, row, v, x, kept);
    });
    best = best_of(s, best);
    if (threadIdx.x == 0) note.best[blockIdx.y] = best;
}

// Falling; there are 2^n of them.
DEVICE void sort(u64 *list, int many) {
    for (int size = 2; size <= many; size *= 2)
        for (int step = size / 2; step; step /= 2) {
            for (int i = threadIdx.x; i < many / 2; i += THREADS) {
                const int at = 2 * i - (i & (step - 1));
                const u64 one = list[at], two = list[at + step];
                if ((one < two) == !(at & size)) list[at] = two, list[at + step] = one;
            }
            sync_block();
        }
}

// The noise of what is kept of the list.
DEVICE void finish_listed(Candidate &best, Shared &s, const Row &row, const Note &note, const End &end,
                          float most) {
    const int listed = *note.listed;
    int many = 2;
    while (many < listed) many *= 2;
    for (int i = threadIdx.x; i < many; i += THREADS) s.list[i] = i < listed ? note.list[i] : 0;
    sync_block();
    sort(s.list, many);
    const int each = (many + THREADS - 1) / THREADS, begin = threadIdx.x * each;
    u64 mine = 0, all;
    for (int i = begin; i < begin + each && i < listed; i++)
        mine += weight_of(number_of((u32)(s.list[i] >> 32)), most);
    u64 weight = end.weight + sum_before(s, mine, all);
    for (int i = begin; i < begin + each && i < listed; i++) {
        if (end.count + i >= (u64)row.top_k || weight > end.limit) return;
        const float x = number_of((u32)(s.list[i] >> 32));
        add_noise(best, row, ~(u32)s.list[i], x);
        weight += weight_of(x, most);
    }
}

// The same where the list is too short: the key of the last kept id by parts of its bits, then as
// many of the ids with that key as are kept, from the lowest on.
DEVICE void finish_counted(Candidate &best, Shared &s, const Call &c, const Row &row, End at,
                           float most) {
    const int end = at.bin;
    u32 found = 0;
    int above = 32;
    for (int part = 0; part < 3; part++) {
        const int bits = part < 2 ? 11 : 10, shift = above - bits;
        clear(s.tally);
        Pending pending;
        each_four(c, row, 0, 1, [&](int, const float (&x)[4]) {
#pragma unroll
            for (int y = 0; y < 4; y++) {
                const u32 key = ordered(x[y]);
                if (bin_of(x[y], most) != end || (part && key >> above != found)) continue;
                // Rising numbers of bins stand for falling keys.
                const int bin = ~(key >> shift) & ((1 << bits) - 1);
                pending.take(s.tally, bin, weight_of(x[y], most));
            }
        });
        pending.add_to_tally(s.tally);
        sync_block();
        at = end_of(s, row, s.tally, at, false);
        found = found << bits | (~(u32)at.bin & ((1 << bits) - 1));
        above = shift;
    }
    const u64 each = weight_of(number_of(found), most);
    const float low = least(row, most);
    u64 ties = row.top_k - at.count, before = 0;
    if (each && (at.limit - at.weight) / each + 1 < ties) ties = (at.limit - at.weight) / each + 1;
    for (int begin = 0; begin < c.vocab; begin += 4 * THREADS) {
        const int v = begin + 4 * threadIdx.x;
        float x[4];
        scale(x, row, take(c, row, v));
        u32 equal = 0, kept = 0;
#pragma unroll
        for (int y = 0; y < 4; y++) equal += x[y] > -infinity() && ordered(x[y]) == found;
        u64 all, rank = before + sum_before(s, equal, all);
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const u32 key = ordered(x[y]);
            const bool inside = bin_of(x[y], most) == end && x[y] >= low;
            kept |= (u32)(inside && (key > found || (key == found && rank++ < ties))) << y;
        }
        add_noise(best, row, v, x, kept);
        before += all;
    }
}

DEVICE void finish(Shared &s, const Call &c, const Row &row, const Note &note) {
    const Candidate most = best_of_slices(s, c, note.tops);
    u32 id = most.id;
    if (drawn(row, number_of(most))) {
        Candidate best = nobody();
        for (int slice = threadIdx.x; slice < c.slices; slice += THREADS)
            consider(best, note.best[slice]);
        const End end = row.ends ? *note.end : End{0, 0, 0, 0, BINS};
        if (end.bin < BINS && end.inside <= LIST)
            finish_listed(best, s, row, note, end, number_of(most));
        else if (end.bin < BINS)
            finish_counted(best, s, c, row, end, number_of(most));
        id = best_of(s, best).id;
    }
    if (threadIdx.x == 0) c.token[blockIdx.x] = id;
}

} // namespace

extern "C" KERNEL void sampler(const float *logits, const float *temperatures, const float *top_ps,
                               const float *min_ps, const void *top_ks, const void *seeds,
                               const void *positions, long long *token, u64 *scratch, long long ld,
                               long long vocab, int slices, int wide) {
    SHARED_MEMORY
    Shared &s = *reinterpret_cast<Shared *>(shared);
    const Call c{logits, temperatures, top_ps,  min_ps, top_ks, seeds, positions,
                 token,  scratch,      ld,      vocab,  slices, wide};
    wait_for_kernel();
    let_next_kernel_begin();
    const Row row = row_of(c, blockIdx.x);
    const Note note(c, blockIdx.x);
    if (STEP == 0) top(s, c, row, note);
    if (STEP == 1) tally(s, c, row, note);
    if (STEP == 2) choose(s, c, row, note);
    if (STEP == 3) finish(s, c, row, note);
}
