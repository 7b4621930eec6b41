// FA3's chain over the scores of one new token a request: weights, their sums, and what they make
// of V, for one request, key head and chunk of keys, and for DV columns of V.
//
// Shapes, dtypes and order are those of `fa3_decode.py`. FW warps fetch V, the last tile first,
// before the scores are there; PW warps turn scores into weights, a tile each in turn; VW warps, of
// 16 columns each, take FA3's chain over the tiles, and one warp its sums. In the product, V's
// columns are on the side of the matrix unit that has 16 rows, and the query heads on the one that
// has 8. No bit follows DV, STAGES or the warps.
//
// Compiled with D, GROUP (query heads a key head, at most 8), C (keys a chunk), DV (a multiple of
// 16), STAGES (tiles of V in flight, a multiple of 4) and SINGLE: 1 where a request has one chunk,
// whose end is taken here, else 0.

#ifndef EMULATED
#include "primitives.cuh"
#endif

namespace {

constexpr int N = 128; // keys a tile
constexpr int VW = DV / 16, PW = 7, FW = 4; // sixteen with the sum, where DV is 64
constexpr int FIRST_P = VW, SUM = VW + PW, FIRST_F = SUM + 1;
constexpr int THREADS = 32 * (FIRST_F + FW);
constexpr int TILES = C / N;
// A warp that fetches has its stages to itself: a barrier tells a phase from the next one only.
static_assert(GROUP <= 8 && DV % 16 == 0 && STAGES % FW == 0, "held by the caller");

struct alignas(128) Shared {
    u16 v[STAGES][N][DV + 8]; // padded, so that eight rows lie in other banks
    Words p[TILES][4][GROUP][4]; // of 32 keys: 2i, 2i + 1, and the same of each eight after it
    float full_weights[PW][GROUP][N + 8]; // in fp32; padded, so that heads lie in other banks
    int slots[C];
    float shift[TILES][8]; // the running maximum, times log2
    float rescale[TILES][8];
    float tops[TILES][8]; // maxima of tiles
    float top[8], total[8];
    u64 full[STAGES], empty[STAGES], weighed[TILES], summed[PW];
};

// A tile of V, in pieces of eight columns.
DEVICE void fetch_values(u16 (*to)[DV + 8], const u16 *v, u32 stride, const int *slots, int keys,
                         int lane) {
    constexpr int MANY = DV / 8, TURNS = N * MANY / 32;
#pragma unroll
    for (int begin = 0; begin < TURNS; begin += 8) {
        u32 slot[8];
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int key = ((begin + m) * 32 + lane) / MANY;
            slot[m] = key < keys ? slots[key] : 0;
        }
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int at = (begin + m) * 32 + lane, key = at / MANY, column = at % MANY * 8;
            copy_16(to[key] + column, v + (u64)slot[m] * stride + column, key < keys);
        }
    }
}

// All tiles of V, each warp in its turn; a stage is filled again once the chain has done with it.
DEVICE void fetch(Shared &s, const u16 *v, u32 stride, int tiles, int keys, int warp, int lane) {
    for (int m = warp; m < tiles; m += FW) {
        const int tile = tiles - 1 - m, stage = m % STAGES;
        if (m >= STAGES) wait_for(&s.empty[stage], m / STAGES - 1);
        fetch_values(s.v[stage], v, stride, s.slots + tile * N, keys - tile * N, lane);
        arrive_with_copies(&s.full[stage]);
    }
}

// The weights of all tiles, each warp in its turn: in bf16 for the chain and, where this thread
// block sums them, in fp32. Lane j takes keys 4j to 4j + 3 of a tile.
DEVICE void weigh(Shared &s, const float *scores, long long stride, float log2, int tiles, bool sums,
                  int warp, int lane) {
    for (int tile = tiles - 1 - warp, turn = 0; tile >= 0; tile -= PW, turn++) {
        Four x[GROUP];
#pragma unroll
        for (int head = 0; head < GROUP; head++)
            x[head] = *(const Four *)(scores + head * stride + tile * N + 4 * lane);
        if (sums && turn) wait_for(&s.summed[warp], turn - 1);
#pragma unroll
        for (int head = 0; head < GROUP; head++) {
            const float shift = -s.shift[tile][head];
            Four &p = x[head];
            p.x = power_of_two(fused(p.x, log2, shift));
            p.y = power_of_two(fused(p.y, log2, shift));
            p.z = power_of_two(fused(p.z, log2, shift));
            p.w = power_of_two(fused(p.w, log2, shift));
            if (sums) *(Four *)&s.full_weights[warp][head][4 * lane] = p;
            Words *to = s.p[tile][lane / 8][head] + lane % 2 * 2;
            to[0].of[lane / 2 % 4] = rounded(p.x, p.y);
            to[1].of[lane / 2 % 4] = rounded(p.z, p.w);
        }
        sync_warp();
        if (lane == 0) arrive(&s.weighed[tile]);
    }
}

struct Tile {
    Words p[N / 32];
    u32 v[N / 16][4];
    float rescale[2];
};

// Keys 32m to 32m + 31 of a tile, for V's 16 columns from one on.
DEVICE void take(Tile &to, const Shared &s, int column, int stage, int tile, int m, int lane) {
    const int head = lane / 4 < GROUP ? lane / 4 : GROUP - 1;
    if (!m)
        for (int y = 0; y < 2; y++) to.rescale[y] = s.rescale[tile][lane % 4 * 2 + y];
    to.p[m] = s.p[tile][m][head][lane % 4];
    const int key = 32 * m + lane / 16 * 8 + lane % 8, side = column + lane / 8 % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++)
        matrices_transposed(to.v[2 * m + half], s.v[stage][key + 16 * half] + side);
}

// acc: columns lane / 4 and 8 + lane / 4 of V for heads 2i and 2i + 1, i = lane % 4; keys 16m on.
DEVICE void add_values(float (&acc)[4], const Tile &t, int m) {
    multiply(acc, t.v[m], t.p[m / 2].of[m % 2 * 2], t.p[m / 2].of[m % 2 * 2 + 1]);
}

// One tile, and the next one is taken meanwhile: what is waited for here, or read, hides behind the
// matrix unit, of which each product needs the one before it. After the last tile nothing is taken.
DEVICE void step(float (&acc)[4], const Tile &now, Tile &ahead, Shared &s, int column, int tile,
                 int &stage, int &phase, int lane) {
    const bool more = tile > 0;
#pragma unroll
    for (int x = 0; x < 4; x++) acc[x] = times(acc[x], now.rescale[x % 2]);
    add_values(acc, now, 0);
    if (++stage == STAGES) stage = 0, phase++;
    if (more) wait_for(&s.full[stage], phase);
    add_values(acc, now, 1);
    if (more) wait_for(&s.weighed[tile - 1], 0);
    add_values(acc, now, 2);
#pragma unroll
    for (int m = 0; m < N / 32; m++) {
        if (more) take(ahead, s, column, stage, tile - 1, m, lane);
        add_values(acc, now, 3 + m);
    }
    // The stage is in registers: it is free for another tile.
    sync_warp();
    if (more && lane == 0) arrive(&s.empty[stage]);
    add_values(acc, now, 7);
}

DEVICE void chain(float (&acc)[4], Shared &s, int column, int tiles, int lane) {
    static_assert(N == 128, "eight products a tile");
    Tile even, odd;
    int tile = tiles - 1, stage = 0, phase = 0;
    wait_for(&s.full[0], 0);
    wait_for(&s.weighed[tile], 0);
#pragma unroll
    for (int m = 0; m < N / 32; m++) take(even, s, column, 0, tile, m, lane);
    sync_warp();
    if (lane == 0) arrive(&s.empty[0]);
    for (;; tile -= 2) {
        step(acc, even, odd, s, column, tile, stage, phase, lane);
        if (tile < 1) break;
        step(acc, odd, even, s, column, tile - 1, stage, phase, lane);
        if (tile < 2) break;
    }
}

struct Weights {
    Pair of[N / 8];
    float rescale;
};

// What a sum takes of the m-th tile from the last; whoever weighs may then go on.
DEVICE void take_weights(Weights &to, Shared &s, int m, int tiles, int head, int lane) {
    if (m >= tiles) return;
    wait_for(&s.weighed[tiles - 1 - m], 0);
    to.rescale = s.rescale[tiles - 1 - m][head];
#pragma unroll
    for (int y = 0; y < N / 8; y++)
        to.of[y] = *(const Pair *)&s.full_weights[m % PW][head][8 * y + lane % 4 * 2];
    sync_warp();
    if (lane == 0) arrive(&s.summed[m % PW]);
}

DEVICE void add_weights(float &sum, const Weights &t) {
    // FA3 adds a tile's first weight by one rounding with the rescale.
    sum = fused(sum, t.rescale, t.of[0].x);
    sum = add(sum, t.of[0].y);
#pragma unroll
    for (int y = 1; y < N / 8; y++) sum = add(add(sum, t.of[y].x), t.of[y].y);
}

// The sum of a head: lane i of four takes keys 2i, 2i + 1 of each eight.
DEVICE float sum_of(Shared &s, int head, int tiles, int lane) {
    float sum = 0.0f;
    Weights even, odd;
    take_weights(even, s, 0, tiles, head, lane);
    for (int m = 0; m < tiles; m += 2) {
        take_weights(odd, s, m + 1, tiles, head, lane);
        add_weights(sum, even);
        if (m + 1 == tiles) break;
        take_weights(even, s, m + 2, tiles, head, lane);
        add_weights(sum, odd);
    }
    sum = add(sum, from_lane_xor(sum, 2));
    return add(sum, from_lane_xor(sum, 1));
}

// FA3's running maximum after each tile, and what a tile rescales by. By all but who fetch.
DEVICE void run_maxima(Shared &s, const float *tops, long long stride, float log2, int tiles,
                       int thread) {
    constexpr int MANY = 32 * FIRST_F;
    for (int at = thread; at < TILES * GROUP; at += MANY) {
        const int tile = at % TILES, head = at / TILES;
        s.tops[tile][head] = tile < tiles ? tops[head * stride + tile] : -infinity();
    }
    sync_some<1, MANY>();
    for (int at = thread; at < TILES * GROUP; at += MANY) {
        const int tile = at / GROUP, head = at % GROUP;
        float before = -infinity();
#pragma unroll
        for (int later = 1; later < TILES; later++) {
            const float top = s.tops[later][head];
            if (later > tile) before = larger(before, top);
        }
        const float top = larger(before, s.tops[tile][head]);
        s.shift[tile][head] = times(top, log2);
        s.rescale[tile][head] = power_of_two(times(add(before, -top), log2));
        if (!tile) s.top[head] = top;
    }
    sync_some<1, MANY>();
}

} // namespace

extern "C" KERNEL void fa3_chain(const u16 *v, const int *table, const int *lengths,
                                 const float *scores, const float *tops, float *parts, float *ends,
                                 u16 *o, long long stride_vs, long long stride_vg,
                                 long long stride_table, long long stride_scores,
                                 long long stride_ot, long long stride_oh, int groups, int longest,
                                 int chunks, int batch, float log2) {
    SHARED_MEMORY
    Shared &s = *reinterpret_cast<Shared *>(shared);
    const int piece = blockIdx.x, g = blockIdx.y % groups, chunk = blockIdx.y / groups;
    const int b = blockIdx.z, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int head = lane / 4, i = lane % 4, begin = chunk * C;

    // Slots before it is known how many are needed: one wait less.
    const int known = longest - begin < C ? longest - begin : C;
    const int *mine = table + b * stride_table + begin;
    int slots[(C + THREADS - 1) / THREADS];
#pragma unroll
    for (int x = 0; x < (C + THREADS - 1) / THREADS; x++) {
        const int at = x * THREADS + thread;
        slots[x] = at < known ? mine[at] : 0;
    }
    const int length = lengths[b] < longest ? lengths[b] : longest;
    const int column = piece * DV + warp * 16; // of a warp that takes the chain
    u16 *out = o + b * stride_ot + (g * GROUP + head) * stride_oh + column + 2 * i;
    let_next_kernel_begin();
    if (begin >= length) {
        if (SINGLE && warp < VW && head < GROUP) *(u32 *)out = 0, *(u32 *)(out + 8) = 0;
        return;
    }
    if (thread < STAGES) {
        prepare(&s.full[thread], 32);
        prepare(&s.empty[thread], VW);
    }
    if (thread < TILES) prepare(&s.weighed[thread], 1);
    if (thread < PW) prepare(&s.summed[thread], 1);
#pragma unroll
    for (int x = 0; x < (C + THREADS - 1) / THREADS; x++) {
        const int at = x * THREADS + thread;
        if (at < C) s.slots[at] = slots[x];
    }
    const int keys = length - begin < C ? length - begin : C, tiles = (keys + N - 1) / N;
    sync_block();

    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const long long out_row = ((long long)b * chunks + chunk) * groups * GROUP + g * GROUP;
    if (warp >= FIRST_F) {
        fetch(s, v + g * stride_vg + piece * DV, stride_vs, tiles, keys, warp - FIRST_F, lane);
    } else {
        wait_for_kernel();
        const long long row = ((long long)b * groups + g) * GROUP;
        const float *here = scores + row * stride_scores + begin;
        const long long per_row = stride_scores / N;
        run_maxima(s, tops + row * per_row + begin / N, per_row, log2, tiles, thread);
        const bool sums = SINGLE || piece == 0;
        if (warp < VW) {
            chain(acc, s, warp * 16, tiles, lane);
        } else if (warp < SUM) {
            weigh(s, here, stride_scores, log2, tiles, sums, warp - FIRST_P, lane);
        } else if (sums) {
            const float total = sum_of(s, head < GROUP ? head : GROUP - 1, tiles, lane);
            if (head < GROUP && i == 0) {
                s.total[head] = total;
                if (!SINGLE) {
                    const long long size = (long long)batch * chunks * groups * GROUP;
                    ends[out_row + head] = s.top[head];
                    ends[size + out_row + head] = total;
                }
            }
        }
    }
    if (SINGLE) sync_block();
    if (warp >= VW) return;
    if (SINGLE) {
        const float once = reciprocal(s.total[2 * i]), twice = reciprocal(s.total[2 * i + 1]);
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const u32 both =
                transposed(rounded(times(acc[2 * y], once), times(acc[2 * y + 1], twice)));
            if (head < GROUP) *(u32 *)(out + 8 * y) = both;
        }
    } else {
#pragma unroll
        for (int y = 0; y < 4; y++)
            if (2 * i + y % 2 < GROUP)
                parts[(out_row + 2 * i + y % 2) * D + column + y / 2 * 8 + lane / 4] = acc[y];
    }
}
