// The names of `primitives.cuh` for a CPU: each thread of a block is a coroutine, and a barrier lets
// the others run. Copies are carried out at once or, with `lazy`, where they are waited for,
// so that a missing wait shows in one of them and a place that is used again too early in the other.
// With an `order` that is not 0, blocks, warps and lanes run in one of many orders, and some warps as
// far ahead of others as barriers let them, so that a missing barrier shows as another result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstddef>
#include <cstring>
#include <limits>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(8) Pair { float x, y; };
struct alignas(16) Four { float x, y, z, w; };
struct alignas(16) Words { u32 of[4]; };
struct Place { int x = 0, y = 0, z = 0; };

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL
#define SHARED_MEMORY char *shared = emulator::mine();

namespace emulator {

struct Copy { char *to; const char *from; bool there; };
struct Barrier {
    int arrived = 0, phase = 0;
    void arrive(int all) { if (++arrived == all) arrived = 0, phase++; }
};
struct Warp { Barrier barrier; u32 words[32][6]; const void *rows[32]; };
struct Block {
    std::vector<char> memory;
    char *shared;
    Barrier barriers[16];
    std::vector<Warp> warps;
};
struct Thread {
    ucontext_t context;
    bool done = false;
    Place block, thread;
    std::vector<Copy> copies;
};

static Block block;
static std::vector<Thread> threads;
static Thread *current;
static ucontext_t scheduler;
static bool lazy;
static u64 moved; // how often any thread came to a barrier or left one
static u32 order; // 0: rising, all threads from one barrier to the next

static inline u32 below(u32 many) { // of a sequence that follows from `order`
    order = order * 1664525u + 1013904223u;
    order += !order;
    return (u32)((u64)order * many >> 32);
}
static inline void yield() { swapcontext(&current->context, &scheduler); }
static inline Warp &warp() { return block.warps[current->thread.x / 32]; }
static inline char *mine() { return block.shared; }
static inline void meet(Barrier &barrier, int all) {
    const int phase = barrier.phase;
    barrier.arrive(all), moved++;
    while (barrier.phase == phase) yield();
    moved++;
}
static inline void carry_out(const Copy &c) {
    if (c.there) memcpy(c.to, c.from, 16); else memset(c.to, 0, 16);
}
static inline float wide(u32 half) { // bf16 in the low half
    u32 x = half << 16;
    float y;
    memcpy(&y, &x, 4);
    return y;
}

} // namespace emulator

#define blockIdx (emulator::current->block)
#define threadIdx (emulator::current->thread)

DEVICE void copy_16(void *to, const void *from, bool there) {
    emulator::Copy c{(char *)to, (const char *)from, there};
    if (emulator::lazy) emulator::current->copies.push_back(c); else emulator::carry_out(c);
}
// Arrivals that a phase lacks in the low half, those it needs above them, then the phase.
DEVICE void prepare(u64 *barrier, int arrivals) { *barrier = arrivals | (u64)arrivals << 16; }
DEVICE void arrive(u64 *barrier) {
    *barrier -= 1;
    if (!(*barrier & 0xffff)) *barrier += (*barrier >> 16 & 0xffff) + ((u64)1 << 32);
}
DEVICE void arrive_with_copies(u64 *barrier) {
    for (auto &c : emulator::current->copies) emulator::carry_out(c);
    emulator::current->copies.clear();
    arrive(barrier);
}
DEVICE void wait_for(u64 *barrier, int phase) {
    while ((*barrier >> 32) % 2 == phase % 2) emulator::yield();
    emulator::moved++;
}
DEVICE void sync_warp() { emulator::meet(emulator::warp().barrier, 32); }
template <int ID, int COUNT> DEVICE void sync_some() {
    emulator::meet(emulator::block.barriers[ID], COUNT);
}
DEVICE void sync_block() {
    emulator::meet(emulator::block.barriers[0], emulator::block.warps.size() * 32);
}
DEVICE void wait_for_kernel() {}
DEVICE void let_next_kernel_begin() {}
template <class Whole> DEVICE Whole add_to(Whole *to, Whole x) {
    const Whole before = *to;
    *to += x;
    return before;
}

DEVICE void matrices_transposed(u32 (&to)[4], const void *row) {
    auto &w = emulator::warp();
    const int lane = threadIdx.x % 32;
    w.rows[lane] = row;
    sync_warp();
    for (int m = 0; m < 4; m++) {
        const u16 low = ((const u16 *)w.rows[8 * m + lane % 4 * 2])[lane / 4];
        const u16 high = ((const u16 *)w.rows[8 * m + lane % 4 * 2 + 1])[lane / 4];
        to[m] = low | (u32)high << 16;
    }
    sync_warp();
}

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    auto &w = emulator::warp();
    const int lane = threadIdx.x % 32;
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b_low, b_high};
    memcpy(w.words[lane], mine, sizeof mine);
    sync_warp();
    for (int y = 0; y < 4; y++) {
        double sum = c[y];
        for (int k = 0; k < 16; k++) {
            const int by = k % 8 / 2, shift = k % 2 * 16;
            const u32 one = w.words[lane / 4 * 4 + by][y / 2 + k / 8 * 2] >> shift & 0xffff;
            const u32 two = w.words[(lane % 4 * 2 + y % 2) * 4 + by][4 + k / 8] >> shift & 0xffff;
            sum += (double)emulator::wide(one) * emulator::wide(two);
        }
        c[y] = sum;
    }
    sync_warp();
}

DEVICE u32 from_lane(u32 x, int from) {
    auto &w = emulator::warp();
    w.words[threadIdx.x % 32][0] = x;
    sync_warp();
    const u32 y = w.words[from][0];
    sync_warp();
    return y;
}
DEVICE u64 from_lane(u64 x, int from) {
    const u64 high = from_lane((u32)(x >> 32), from);
    return high << 32 | from_lane((u32)x, from);
}
DEVICE float from_lane_xor(float x, int by) {
    u32 word;
    memcpy(&word, &x, 4);
    word = from_lane(word, threadIdx.x % 32 ^ by);
    memcpy(&x, &word, 4);
    return x;
}
DEVICE u32 transposed(u32 x) {
    const int lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 16;
    const u32 low = from_lane(x, from) >> shift & 0xffff;
    return low | (from_lane(x, from + 4) >> shift & 0xffff) << 16;
}

DEVICE u32 bits_of(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float from_bits(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float infinity() { return std::numeric_limits<float>::infinity(); }
DEVICE float add(float a, float b) { return a + b; }
DEVICE float times(float a, float b) { return a * b; }
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float divided(float a, float b) { return a / b; }
DEVICE float nearest(float x) { return rintf(x); }
DEVICE float rounded_up(double x) {
    const float y = x;
    return y < x ? nextafterf(y, std::numeric_limits<float>::infinity()) : y;
}
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float power_of_two(float x) { return exp2f(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
DEVICE u32 rounded(float low, float high) {
    u32 words[2];
    memcpy(&words[0], &low, 4), memcpy(&words[1], &high, 4);
    for (u32 &w : words) w = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    return words[0] | words[1] << 16;
}

namespace emulator {

static inline bool step(Thread &x) {
    if (x.done) return false;
    current = &x;
    swapcontext(&scheduler, &x.context);
    return true;
}
// Any warp takes one step, or as many as there are until it waits for another warp.
static inline void some_warp() {
    const int first = 32 * below(threads.size() / 32);
    const bool far = below(2);
    u64 before;
    do {
        before = moved;
        for (int i = 0, lane = below(32); i < 32; i++, lane = (lane + 11) % 32)
            step(threads[first + lane]);
    } while (far && moved != before);
}
static inline bool all_done() {
    for (const Thread &x : threads)
        if (!x.done) return false;
    return true;
}
// Of `many` blocks the one that runs after `at` others.
static inline int of_block(int at, int many, int first, bool falling) {
    const int i = falling ? many - 1 - at : at;
    return (i + first) % many;
}

// Runs `kernel` for every block of a grid, one after the other.
template <class Kernel>
void run(Place grid, int block_size, size_t bytes, bool wait_lazily, Kernel kernel) {
    lazy = wait_lazily;
    static Kernel *entered;
    entered = &kernel;
    std::vector<std::vector<char>> stacks(block_size, std::vector<char>(1 << 16));
    const int many = grid.x * grid.y * grid.z, first = order ? below(many) : 0;
    const bool falling = order && below(2);
    for (int i = 0; i < many; i++) {
        const int at = of_block(i, many, first, falling);
        block = {};
        block.memory.assign(bytes + 128, (char)0xff); // NaN
        block.shared = (char *)(((uintptr_t)block.memory.data() + 127) / 128 * 128);
        block.warps.resize(block_size / 32);
        threads = std::vector<Thread>(block_size);
        for (int t = 0; t < block_size; t++) {
            Thread &x = threads[t];
            x.block = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
            x.thread.x = t;
            getcontext(&x.context);
            x.context.uc_stack.ss_sp = stacks[t].data();
            x.context.uc_stack.ss_size = stacks[t].size();
            x.context.uc_link = &scheduler;
            makecontext(&x.context, +[] { (*entered)(); current->done = true; }, 0);
        }
        while (!all_done()) {
            if (order) some_warp();
            else for (Thread &x : threads) step(x);
        }
    }
}

} // namespace emulator
