// What the steps of `sampler.cu` share: a row and what it asks for, what a thread block finds in it,
// and how its threads add up and compare.
#pragma once

constexpr int BINS = 2048, WARPS = THREADS / 32;
constexpr float STEPS_A_UNIT = 64.0f;

struct Call {
    const float *logits, *temperatures, *top_ps, *min_ps;
    const void *top_ks, *seeds, *positions;
    long long *token;
    u64 *scratch;
    long long ld, vocab;
    int slices, wide; // wide: bits 0 to 2 say which of the whole numbers have eight bytes
};

// Where the kept set ends: in a bin, or in BINS where it has no end; before the bin lie so many ids
// of such a weight, and in it so many. A token before which more than `limit` lies is not kept.
struct End {
    u64 count, weight, inside, limit;
    int bin;
};

// What the steps tell each other of one row; `gpu_sampler.row_words` knows the size.
struct Note {
    u32 *listed;
    End *end;
    Candidate *tops, *best;   // of slices
    u64 *counts, *weights;    // of bins
    u64 *list;                // keys above the complements of ids
    DEVICE_MEMBER Note(const Call &c, int row) {
        u64 *at = c.scratch + row * (8 + 4 * (long long)c.slices + 2 * BINS + LIST);
        listed = (u32 *)at, end = (End *)(at + 1);
        tops = (Candidate *)(at + 8), best = tops + c.slices;
        counts = (u64 *)(best + c.slices), weights = counts + BINS;
        list = weights + BINS;
    }
};

struct Row {
    const float *logits;
    float divisor, top_p, min_p;
    long long top_k;
    u64 seed, position;
    bool greedy, ends, filtered; // ends: by top_k or top_p
};

// In shared memory, so that atomics are fast: a weight is two halves.
struct Tally {
    u32 counts[BINS], low[BINS], high[BINS];
    DEVICE_MEMBER u64 count(int bin) const { return counts[bin]; }
    DEVICE_MEMBER u64 weight(int bin) const { return (u64)high[bin] << 32 | low[bin]; }
};
struct Written { // the same in a Note
    const u64 *counts, *weights;
    DEVICE_MEMBER u64 count(int bin) const { return counts[bin]; }
    DEVICE_MEMBER u64 weight(int bin) const { return weights[bin]; }
};

struct alignas(16) Shared {
    Candidate best[32];
    u64 sums[32];
    End end;
    u64 spare;
    union { // of steps 1 and 3
        Tally tally;
        u64 list[LIST];
    };
};

DEVICE long long whole(const void *of, int row, bool wide) {
    return wide ? ((const long long *)of)[row] : ((const int *)of)[row];
}

DEVICE Row row_of(const Call &c, int r) {
    Row row{c.logits + r * c.ld, c.temperatures[r], c.top_ps[r], c.min_ps[r]};
    row.top_k = whole(c.top_ks, r, c.wide & 1);
    row.seed = whole(c.seeds, r, c.wide & 2);
    row.position = whole(c.positions, r, c.wide & 4);
    row.greedy = row.top_k == 1;
    if (row.greedy) row.divisor = 1.0f;
    row.ends = row.top_k < c.vocab || row.top_p < 1.0f;
    row.filtered = row.ends || row.min_p > 0.0f;
    return row;
}

// The logits of four ids from v on, as they are; beyond the row they are -inf.
DEVICE Four take(const Call &c, const Row &row, int v) {
    const float *at = row.logits + v;
    if (((u64)at & 15) == 0 && v + 4 <= c.vocab) return *(const Four *)at;
    return {v < c.vocab ? at[0] : -infinity(), v + 1 < c.vocab ? at[1] : -infinity(),
            v + 2 < c.vocab ? at[2] : -infinity(), v + 3 < c.vocab ? at[3] : -infinity()};
}
DEVICE void scale(float (&x)[4], const Row &row, const Four &logits) {
    const float of[4] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
    for (int y = 0; y < 4; y++) x[y] = clean(divided(of[y], row.divisor));
}

// Calls body(v, x) for the groups of four ids of a slice; the next one is fetched meanwhile.
template <class Body>
DEVICE void each_four(const Call &c, const Row &row, int slice, int slices, Body body) {
    const int groups = (int)((c.vocab + 3) / 4), many = (groups + slices - 1) / slices;
    const int end = (slice + 1) * many < groups ? (slice + 1) * many : groups;
    int group = slice * many + threadIdx.x;
    if (group >= end) return;
    for (Four logits = take(c, row, 4 * group);;) {
        const int after = group + THREADS;
        const Four next = after < end ? take(c, row, 4 * after) : logits;
        float x[4];
        scale(x, row, logits);
        body(4 * group, x);
        if (after >= end) return;
        group = after, logits = next;
    }
}

// Considers those of four ids whose bit is set.
DEVICE void add_noise(Candidate &best, const Row &row, int v, const float (&x)[4], u32 kept) {
    if (!kept) return;
    u32 word[4] = {(u32)v / 4, (u32)row.position, (u32)(row.position >> 32), 0};
    philox(word, (u32)row.seed, (u32)(row.seed >> 32));
#pragma unroll
    for (int y = 0; y < 4; y++)
        if (kept >> y & 1) consider(best, {score_of(x[y], gumbel(word[y])), (u32)(v + y)});
}
DEVICE void add_noise(Candidate &best, const Row &row, u32 v, float x) {
    u32 word[4] = {v / 4, (u32)row.position, (u32)(row.position >> 32), 0};
    philox(word, (u32)row.seed, (u32)(row.seed >> 32));
    const u32 low = v & 1 ? word[1] : word[0], high = v & 1 ? word[3] : word[2];
    consider(best, {score_of(x, gumbel(v & 2 ? high : low)), v});
}

// The best candidate of all threads, for all of them.
DEVICE Candidate best_of(Shared &s, Candidate x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int by = 16; by; by /= 2) {
        const Candidate other{from_lane(x.score, lane ^ by), from_lane(x.id, lane ^ by)};
        consider(x, other);
    }
    sync_block();
    if (lane == 0) s.best[threadIdx.x / 32] = x;
    sync_block();
    for (int warp = 0; warp < WARPS; warp++) consider(x, s.best[warp]);
    return x;
}
DEVICE Candidate best_of_slices(Shared &s, const Call &c, const Candidate *of) {
    Candidate best = nobody();
    for (int slice = threadIdx.x; slice < c.slices; slice += THREADS) consider(best, of[slice]);
    return best_of(s, best);
}

// The sum of the threads before this one, and of all.
DEVICE u64 sum_before(Shared &s, u64 mine, u64 &all) {
    const int lane = threadIdx.x % 32;
    u64 sum = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u64 other = from_lane(sum, lane < by ? lane : lane - by);
        if (lane >= by) sum += other;
    }
    sync_block();
    if (lane == 31) s.sums[threadIdx.x / 32] = sum;
    sync_block();
    u64 before = sum - mine;
    all = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        if (warp * 32 < threadIdx.x / 32 * 32) before += s.sums[warp];
        all += s.sums[warp];
    }
    return before;
}

// The largest x, or what has no noise to it: an infinity.
DEVICE float number_of(Candidate top) { return number_of((u32)(top.score >> 32)); }
DEVICE bool drawn(const Row &row, float most) {
    return !row.greedy && most > -infinity() && most < infinity();
}
// The least x that min_p keeps.
DEVICE float least(const Row &row, float most) {
    return row.min_p > 0.0f ? rounded_up((double)most + log((double)row.min_p)) : -infinity();
}
DEVICE int bin_of(float x, float most) {
    const float steps = times(add(most, -x), STEPS_A_UNIT);
    return steps < (float)BINS ? (int)steps : BINS;
}

// Bins of neighbours are often the same, where logits are equal: they are added up first.
struct Pending {
    int bin = 0;
    u32 count = 0;
    u64 weight = 0;
    DEVICE_MEMBER void add_to_tally(Tally &t) {
        if (!count) return;
        add_to(&t.counts[bin], count);
        const u32 low = (u32)weight, carry = add_to(&t.low[bin], low) + low < low;
        const u32 high = (u32)(weight >> 32) + carry;
        if (high) add_to(&t.high[bin], high);
    }
    DEVICE_MEMBER void take(Tally &t, int next, u64 of) {
        if (next != bin) {
            add_to_tally(t);
            bin = next, count = 0, weight = 0;
        }
        count++, weight += of;
    }
};
DEVICE void clear(Tally &t) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
        t.counts[bin] = 0, t.low[bin] = 0, t.high[bin] = 0;
    sync_block();
}

// The bin, from 0 on, in which what is kept ends; before all bins lie `count` and `weight`. first:
// the bins are those of a whole row, whose weight makes the limit.
template <class Bins>
DEVICE End end_of(Shared &s, const Row &row, const Bins &bins, End from, bool first) {
    constexpr int EACH = BINS / THREADS;
    static_assert(BINS % THREADS == 0, "held by the caller");
    const int begin = threadIdx.x * EACH;
    u64 counts = 0, weights = 0, all;
#pragma unroll
    for (int bin = begin; bin < begin + EACH; bin++)
        counts += bins.count(bin), weights += bins.weight(bin);
    u64 count = from.count + sum_before(s, counts, all);
    u64 weight = from.weight + sum_before(s, weights, all);
    if (first) from.limit = row.top_p < 1.0f ? (u64)((double)row.top_p * (double)all) : 1ull << 62;
    if (threadIdx.x == 0) s.end = {0, 0, 0, from.limit, BINS};
    sync_block();
    for (int bin = begin; bin < begin + EACH; bin++) {
        const u64 inside = bins.count(bin), of = bins.weight(bin);
        const bool before = count < (u64)row.top_k && weight <= from.limit;
        const bool after = count + inside < (u64)row.top_k && weight + of <= from.limit;
        if (before && !after) s.end = {count, weight, inside, from.limit, bin};
        count += inside, weight += of;
    }
    sync_block();
    return s.end; // its next writer meets a barrier first, in `sum_before`
}
