/* Vectors of eight floats, and the three storage types, for the CPU kernels.
 *
 * Bits        every function works lane by lane with IEEE operations and explicit FMA, so a lane's
 *             result is the same on AVX2, AVX-512, NEON and in the plain C fallback
 * Conversion  loads are exact; stores round once, to nearest even; a NaN becomes the quiet NaN
 */
#ifndef SGL_DET_CPU_VEC_H
#define SGL_DET_CPU_VEC_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif
#if !defined(__FP_FAST_FMAF)
#error "the target has no fused multiply-add instruction"
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* one copy: compiling takes seconds, not minutes */
#define UNROLL _Pragma("GCC unroll 16")

enum { F32 = 0, BF16 = 1, F16 = 2 };
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h8u __attribute__((vector_size(16), aligned(2), may_alias));

INLINE v8 load8(const float *p) { return *(const v8u *)p; }
INLINE void store8(float *p, v8 a) { *(v8u *)p = a; }
/* s - 0 keeps the sign of a zero; s + 0 would not. */
INLINE v8 all8(float s) { return s - (v8){0}; }
INLINE v8 pick8(i8 mask, v8 a, v8 b) { return (v8)((mask & (i8)a) | (~mask & (i8)b)); }
INLINE v8 max8(v8 a, v8 b) { return pick8(a > b, a, b); }

INLINE v8 fma8(v8 a, v8 b, v8 c) {
#if defined(__AVX2__)
  return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  v8 r;
  UNROLL for (int i = 0; i < 8; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

/* Lanes in one fixed tree: halves, quarters, pairs. */
INLINE float sum8(v8 a) {
  const float b0 = a[0] + a[4], b1 = a[1] + a[5], b2 = a[2] + a[6], b3 = a[3] + a[7];
  return (b0 + b2) + (b1 + b3);
}

INLINE float hmax8(v8 a) {
  float m = a[0];
  UNROLL for (int i = 1; i < 8; i++) m = a[i] > m ? a[i] : m;
  return m;
}

/* e^x for x <= 0: x = n ln 2 + r, then a polynomial in r (Cephes). exp_8(0) is exactly 1; below
 * -87, just above the smallest normal number, the result is 0; a NaN stays one. */
INLINE v8 exp_8(v8 x) {
  const v8 magic = all8(12582912.0f);
  const v8 t = fma8(x, all8(1.44269504f), magic), n = t - magic;
  const v8 r = fma8(n, all8(2.12194440e-4f), fma8(n, all8(-0.693359375f), x));
  v8 p = all8(1.98756915e-4f);
  p = fma8(p, r, all8(1.39819995e-3f));
  p = fma8(p, r, all8(8.33345191e-3f));
  p = fma8(p, r, all8(4.16657959e-2f));
  p = fma8(p, r, all8(1.66666655e-1f));
  p = fma8(p, r, all8(5.00000012e-1f));
  p = fma8(p, r * r, r) + all8(1.0f);
  const v8 scale = (v8)(((i8)t - (i8)magic + 127) << 23);
  return pick8(x < all8(-87.0f), (v8){0}, p * scale);
}

INLINE int size_of(int dt) { return dt == F32 ? 4 : 2; }
INLINE const void *at(const void *p, int dt, int64_t i) {
  return (const char *)p + i * size_of(dt);
}

INLINE float load1(const void *p, int dt) {
  if (dt == F32) return *(const float *)p;
  const uint16_t h = *(const uint16_t *)p;
  float f;
  if (dt == BF16) {
    const uint32_t u = (uint32_t)h << 16;
    memcpy(&f, &u, 4);
    return f;
  }
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  _Float16 g;
  memcpy(&g, &h, 2);
  return (float)g;
#endif
}

INLINE v8 cvt8(const void *p, int dt) {
  if (dt == F32) return load8((const float *)p);
#if defined(__AVX2__)
  const __m128i h = _mm_loadu_si128((const __m128i *)p);
  if (dt == BF16) return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#if defined(__F16C__)
  return (v8)_mm256_cvtph_ps(h);
#endif
#endif
  v8 r;
  UNROLL for (int i = 0; i < 8; i++) r[i] = load1((const char *)p + 2 * i, dt);
  return r;
}

INLINE void store1(void *p, float f, int dt) {
  if (dt == F32) {
    *(float *)p = f;
  } else if (dt == BF16) {
    uint32_t u;
    memcpy(&u, &f, 4);
    *(uint16_t *)p = f != f ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  } else {
#if defined(__F16C__)
    *(uint16_t *)p = _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
    const _Float16 g = (_Float16)f;
    memcpy(p, &g, 2);
#endif
  }
}

/* The bits of bf16, rounded, in the upper half of each lane. */
INLINE i8 bf16_bits(v8 a) {
#if defined(__AVX2__)
  const i8 odd = (i8)_mm256_srli_epi32((__m256i)a, 16) & 1;
#else
  const i8 odd = ((i8)a >> 16) & 1;
#endif
  const i8 r = (i8)a + 0x7fff + odd;
  return ((a == a) & r & (int32_t)0xffff0000) | ((a != a) & 0x7fc00000);
}

INLINE void put8(void *p, v8 a, int dt) {
  if (dt == F32) {
    store8((float *)p, a);
    return;
  }
#if defined(__AVX2__)
  if (dt == BF16) {
    const __m256i u = _mm256_srli_epi32((__m256i)bf16_bits(a), 16);
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(w));
    return;
  }
#if defined(__F16C__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
  return;
#endif
#endif
  UNROLL for (int i = 0; i < 8; i++) store1((char *)p + i * size_of(dt), a[i], dt);
}

/* To the nearest number of the storage type, kept as fp32. */
INLINE v8 round8(v8 a, int dt) {
  if (dt == F32) return a;
  if (dt == BF16) return (v8)bf16_bits(a);
  float t[8];
  put8(t, a, dt);
  return cvt8(t, dt);
}

/* The first n <= 8 elements; the rest are zero. */
INLINE v8 cvt_n(const void *p, int n, int dt) {
  if (n >= 8) return cvt8(p, dt);
  v8 r = {0};
  for (int i = 0; i < n; i++) r[i] = load1((const char *)p + i * size_of(dt), dt);
  return r;
}

INLINE void put_n(void *p, v8 a, int n, int dt) {
  if (n >= 8) {
    put8(p, a, dt);
    return;
  }
  for (int i = 0; i < n; i++) store1((char *)p + i * size_of(dt), a[i], dt);
}

/* Scratch of the calling thread: grows, is reused by the next call, never shared. */
void *sgl_det_scratch(size_t bytes);

#endif
