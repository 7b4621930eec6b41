/* The building blocks of linear and attention:  c[m, n] = sum_k a[m, k] * b[n, k]
 *
 * Order       one fp32 accumulator per output element, k ascending, fused multiply-add
 * Schedule    a lane is an output element, so widths, row counts, panels and blocks of k are free:
 *             between blocks of k an accumulator rests in memory as the fp32 value that it is
 */
#ifndef SGL_DET_CPU_PANEL_H
#define SGL_DET_CPU_PANEL_H

#include "cpu_vec.h"

#define NR 16 /* outputs of one panel */
#if defined(__AVX512F__)
#define MR 12 /* rows of one register tile */
typedef float vp __attribute__((vector_size(64)));
typedef float vpu __attribute__((vector_size(64), aligned(4), may_alias));
INLINE vp fma_p(vp a, vp b, vp c) { return (vp)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
#define MR 6
typedef v8 vp;
typedef v8u vpu;
#define fma_p fma8
#endif
#define NV (NR * 4 / (int)sizeof(vp))

/* Columns k .. k+7 of eight fp32 rows given as lo[i] = {row i, row i + 4} for columns k .. k+3. */
#if defined(__AVX2__)
INLINE void quad(__m256 r0, __m256 r1, __m256 r2, __m256 r3, v8 *out) {
  const __m256 a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpackhi_ps(r0, r1);
  const __m256 c = _mm256_unpacklo_ps(r2, r3), d = _mm256_unpackhi_ps(r2, r3);
  out[0] = (v8)_mm256_shuffle_ps(a, c, 0x44);
  out[1] = (v8)_mm256_shuffle_ps(a, c, 0xee);
  out[2] = (v8)_mm256_shuffle_ps(b, d, 0x44);
  out[3] = (v8)_mm256_shuffle_ps(b, d, 0xee);
}
INLINE __m256 two(const void *p, const void *q, int64_t byte) {
  const __m128 lo = _mm_loadu_ps((const float *)((const char *)p + byte));
  const __m128 hi = _mm_loadu_ps((const float *)((const char *)q + byte));
  return _mm256_insertf128_ps(_mm256_castps128_ps256(lo), hi, 1);
}
#endif

/* col[i] = column k + i of eight rows, i < 8. A row is read at k .. k+7 only. */
INLINE void columns8(const void *const *row, int dt, int64_t k, v8 *col) {
#if defined(__AVX2__)
  if (dt == F32) {
    UNROLL for (int h = 0; h < 2; h++) {
      const int64_t b = (k + 4 * h) * 4;
      quad(two(row[0], row[4], b), two(row[1], row[5], b), two(row[2], row[6], b),
           two(row[3], row[7], b), col + 4 * h);
    }
    return;
  }
  if (dt == BF16) { /* a pair of bf16 travels as one 32-bit lane */
    v8 t[4];
    const int64_t b = k * 2;
    quad(two(row[0], row[4], b), two(row[1], row[5], b), two(row[2], row[6], b),
         two(row[3], row[7], b), t);
    UNROLL for (int i = 0; i < 4; i++) {
      col[2 * i] = (v8)((i8)t[i] << 16);
      col[2 * i + 1] = (v8)((i8)t[i] & (int32_t)0xffff0000);
    }
    return;
  }
#endif
  v8 r[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = cvt8(at(row[i], dt, k), dt);
#if defined(__AVX2__)
  UNROLL for (int h = 0; h < 2; h++) {
    __m256 m[4];
    UNROLL for (int i = 0; i < 4; i++)
      m[i] = h ? _mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x31)
               : _mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x20);
    quad(m[0], m[1], m[2], m[3], col + 4 * h);
  }
#else
  UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 8; i++) col[j][i] = r[i][j];
#endif
}

INLINE v8 column1(const void *const *row, int dt, int64_t k) {
  v8 c;
  UNROLL for (int i = 0; i < 8; i++) c[i] = load1(at(row[i], dt, k), dt);
  return c;
}

/* Asks for 64 bytes * lines from p on, into the second-level cache. */
INLINE void fetch(const char *p, int lines) {
  for (int i = 0; i < lines; i++) __builtin_prefetch(p + 64 * i, 0, 2);
}

/* b[k][NR] = fp32 columns k0 .. k0+kc-1 of the NR rows. */
INLINE void pack_panel(const void *const *row, int dt, int64_t k0, int64_t kc, float *b,
                       const char *next) {
  int64_t k = 0;
  for (; k + 32 <= kc; k += 32) {
    if (next) fetch(next + (k0 + k) * NR * size_of(dt), NR * 32 * size_of(dt) / 64);
    for (int g = 0; g < NR / 8; g++)
      UNROLL for (int s = 0; s < 32; s += 8) {
        v8 col[8];
        columns8(row + 8 * g, dt, k0 + k + s, col);
        UNROLL for (int i = 0; i < 8; i++) store8(b + (k + s + i) * NR + 8 * g, col[i]);
      }
  }
  for (; k < kc; k++)
    UNROLL for (int g = 0; g < NR / 8; g++)
        store8(b + k * NR + 8 * g, column1(row + 8 * g, dt, k0 + k));
}

/* c[m][0..NR) (+)= sum over kc of a[m, k] * b[k][0..NR);  a[m, k] = a[m * am + k * ak]. */
INLINE void tile(const int m, int64_t kc, const float *a, const int am, const int ak,
                 const float *b, float *c, int64_t ldc, int first) {
  vp acc[MR][NV];
  UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < NV; j++)
      acc[i][j] = first ? (vp){0} : (vp) * (const vpu *)(c + i * ldc + j * (NR / NV));
  for (int64_t k = 0; k < kc; k++, a += ak, b += NR) {
    vp w[NV];
    UNROLL for (int j = 0; j < NV; j++) w[j] = *(const vpu *)(b + j * (NR / NV));
    UNROLL for (int i = 0; i < m; i++) {
      const vp x = a[i * am] - (vp){0};
      UNROLL for (int j = 0; j < NV; j++) acc[i][j] = fma_p(x, w[j], acc[i][j]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < NV; j++)
      *(vpu *)(c + i * ldc + j * (NR / NV)) = acc[i][j];
}

/* am and ak are constants of the caller, which keeps one copy of this. */
INLINE void tile_m(int m, int64_t kc, const float *a, const int am, const int ak, const float *b,
                   float *c, int64_t ldc, int first) {
#define CASE(n) \
  case n: tile(n, kc, a, am, ak, b, c, ldc, first); return;
  switch (m) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MR == 12
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
  }
#undef CASE
}

/* c[m][0 .. 8g) = sum_k a[m][k] * row[n][k], for few m. Each step turns whole cache lines of the
 * rows into columns: rows a power of two apart fall into few cache sets, so a line left is lost.
 * next (or null): memory of the same extent that is wanted after this, fetched on the way. */
INLINE void dot_rows(const int m, const int g, const float *a, int64_t lda, const void *const *row,
                     int dt, int64_t kc, float *c, int64_t ldc, const char *next) {
  enum { STEP = 32 };
  float b[STEP * 32] __attribute__((aligned(64)));
  v8 acc[4][4]; /* a constant size, or the compiler keeps it in memory */
  UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < g; j++) acc[i][j] = (v8){0};
  int64_t k = 0;
  for (; k + STEP <= kc; k += STEP) {
    for (int j = 0; j < g; j++)
      UNROLL for (int s = 0; s < STEP; s += 8) {
        if (next) fetch(next + (k * g + j * STEP + s) * 8 * size_of(dt), size_of(dt));
        v8 col[8];
        columns8(row + 8 * j, dt, k + s, col);
        UNROLL for (int p = 0; p < 8; p++) store8(b + (s + p) * 8 * g + 8 * j, col[p]);
      }
    for (int p = 0; p < STEP; p++) {
      v8 w[4];
      UNROLL for (int j = 0; j < g; j++) w[j] = load8(b + p * 8 * g + 8 * j);
      UNROLL for (int i = 0; i < m; i++) {
        const v8 x = all8(a[i * lda + k + p]);
        UNROLL for (int j = 0; j < g; j++) acc[i][j] = fma8(x, w[j], acc[i][j]);
      }
    }
  }
  for (; k < kc; k++)
    UNROLL for (int j = 0; j < g; j++) {
      const v8 col = column1(row + 8 * j, dt, k);
      UNROLL for (int i = 0; i < m; i++) acc[i][j] = fma8(all8(a[i * lda + k]), col, acc[i][j]);
    }
  UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < g; j++)
      store8(c + i * ldc + 8 * j, acc[i][j]);
}

#endif
