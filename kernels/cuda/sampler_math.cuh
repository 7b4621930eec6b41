// What `sampler.cu` computes for one number: an order of its bits, its weight, its noise. Sums and
// products are rounded one by one, so that every GPU, and an emulator of one, has the same bits.
#pragma once

constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f; // the first has 15 bits
constexpr int ONE = 40; // the largest weight is 2^40, so 2^23 of them can be added

// There is one zero, and a NaN is the least.
DEVICE float clean(float x) { return x == x ? add(x, 0.0f) : -infinity(); }
// A number as one without a sign in the same order, and back.
DEVICE u32 ordered(float x) {
    const u32 y = bits_of(clean(x));
    return y ^ (y >> 31 ? ~0u : 1u << 31);
}
DEVICE float number_of(u32 key) { return from_bits(key ^ (key >> 31 ? 1u << 31 : ~0u)); }

// 2^ONE e^(x - most), rounded down: x - most without a rounding, e^y within 2^-23 of itself.
DEVICE u64 weight_of(float x, float most) {
    const float y = add(x, -most);
    if (!(y > -28.0f)) return 0; // less than one
    const float back = add(y, most), rest = add(add(x, -back), -add(most, -add(back, -y)));
    const float k = nearest(times(y, 1.44269504f));
    const float r = add(fused(k, -LN2_LOW, fused(k, -LN2_HIGH, y)), rest);
    float p = 1.9900444e-4f;
    p = fused(p, r, 1.3934545e-3f);
    p = fused(p, r, 8.333297e-3f);
    p = fused(p, r, 4.1666456e-2f);
    p = fused(p, r, 1.6666667e-1f);
    p = fused(p, r, 0.5f);
    p = add(fused(times(r, r), p, r), 1.0f);
    return (u64)times(p, from_bits((u32)((int)k + ONE + 127) << 23));
}

// y = 2^k (1 + f), with 1 + f from sqrt(1/2) to sqrt(2).
DEVICE int split(float y, float &f) {
    constexpr u32 ROOT = 0x3f3504f3;
    const u32 from_root = bits_of(y) - ROOT;
    f = add(from_bits((from_root & 0x7fffff) + ROOT), -1.0f);
    return (int)from_root >> 23;
}

// k log 2 + log(1 + f)
DEVICE float logarithm(int k, float f) {
    float p = 7.149754e-2f;
    p = fused(p, f, -1.15712015e-1f);
    p = fused(p, f, 1.1661511e-1f);
    p = fused(p, f, -1.24110505e-1f);
    p = fused(p, f, 1.4249937e-1f);
    p = fused(p, f, -1.666848e-1f);
    p = fused(p, f, 2.0000708e-1f);
    p = fused(p, f, -2.499999e-1f);
    p = fused(p, f, 3.333333e-1f);
    const float square = times(f, f);
    p = fused(times(square, f), p, times(square, -0.5f));
    return fused((float)k, LN2_HIGH, add(f, fused((float)k, LN2_LOW, p)));
}

// -log(-log(u)), u = (word + 1/2) 2^-32: half a step inside both ends, so it is -3.14 to 22.9. Where
// u is near 1, 1 - u is what the complement of the word gives.
DEVICE float gumbel(u32 word) {
    float f;
    const int k = split(times(add((float)word, 0.5f), 0x1p-32f), f);
    if (!k) f = -times(add((float)~word, 0.5f), 0x1p-32f);
    const int of_log = split(-logarithm(k, f), f);
    return -logarithm(of_log, f);
}

// Philox4x32-10 (Salmon et al., 2011): four words of a counter and a key.
DEVICE void philox(u32 (&c)[4], u32 low, u32 high) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)0xD2511F53u * c[0], b = (u64)0xCD9E8D57u * c[2];
        c[0] = (u32)(b >> 32) ^ c[1] ^ low, c[1] = (u32)b;
        c[2] = (u32)(a >> 32) ^ c[3] ^ high, c[3] = (u32)a;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
}

// A token with what it is chosen by; of equal ones the lowest id is chosen.
struct Candidate {
    u64 score;
    u32 id;
};
DEVICE Candidate nobody() { return {0, ~0u}; }
DEVICE void consider(Candidate &best, Candidate x) {
    if (x.score > best.score || (x.score == best.score && x.id < best.id)) best = x;
}
// x + y before it is rounded: the rounded sum, and below it what is missing.
DEVICE u64 score_of(float x, float y) {
    const float sum = add(x, y), part = add(sum, -x);
    const float rest = add(add(x, -add(sum, -part)), add(y, -part));
    return (u64)ordered(sum) << 32 | ordered(rest);
}
