/* Linear:  y[m, n] = round(sum_k x[m, k] * w[n, k] + bias[n])
 *
 * Shapes      x [M, K] rows ldx apart   w [N, K] dense   bias [N] or null   y [M, N] dense
 * Dtypes      x, w, bias, y: fp32 | bf16 | fp16, each its own; one rounding, on store
 * Order       k ascending into one fp32 accumulator, fused; the bias is added in fp32 at the end
 * Bits depend on   x[m], w[n], bias[n] - not on M, the place of a row, threads or instruction set
 */
#include "cpu_panel.h"

#define KC 256
#define MC (32 * MR)

typedef struct {
  const void *x, *w, *bias;
  void *y;
  int64_t ldx, m, n, k;
  int dx, dw, db, dy, threads;
} linear_args;

static __thread void *scratch_at;
static __thread size_t scratch_size;

void *sgl_det_scratch(size_t bytes) {
  if (bytes > scratch_size) {
    free(scratch_at);
    scratch_at = NULL;
    scratch_size = 0;
    if (posix_memalign(&scratch_at, 64, bytes)) abort();
    scratch_size = bytes;
  }
  return scratch_at;
}

/* The rows of one group of outputs; past the end the last row stands in and is not stored. */
INLINE void rows_from(const linear_args *p, int dw, int64_t n0, int count, const void **row) {
  for (int j = 0; j < count; j++)
    row[j] = at(p->w, dw, (n0 + j < p->n ? n0 + j : p->n - 1) * p->k);
}

/* The rows after this group, or null when there is no whole group left. */
INLINE const char *following(const linear_args *p, int dw, int64_t n0, int count) {
  return n0 + 2 * count <= p->n ? at(p->w, dw, (n0 + count) * p->k) : NULL;
}

APART void finish(const linear_args *p, int64_t row, int64_t n0, int count, const float *c) {
  const int64_t left = p->n - n0 < count ? p->n - n0 : count;
  for (int64_t j = 0; j < left; j += 8) {
    const int w = left - j < 8 ? (int)(left - j) : 8;
    v8 v = load8(c + j);
    if (p->bias) v = v + cvt_n(at(p->bias, p->db, n0 + j), w, p->db);
    put_n((char *)at(p->y, p->dy, row * p->n + n0 + j), v, w, p->dy);
  }
}

/* Group i of 8g outputs for m <= 4 rows. The constants must meet the code inside the parallel loop:
 * the loop's body becomes a function of its own before anything is inlined into it. */
INLINE void group(const linear_args *p, const int m, const int g, const int dw, const float *a,
                  int64_t i) {
  const void *row[8 * g];
  float c[m * 8 * g];
  const int64_t n0 = i * 8 * g;
  rows_from(p, dw, n0, 8 * g, row);
  dot_rows(m, g, a, p->k, row, dw, p->k, c, 8 * g, following(p, dw, n0, 8 * g));
  for (int r = 0; r < m; r++) finish(p, r, n0, 8 * g, c + r * 8 * g);
}

#define GROUP(dw) \
  static void group_##dw(const linear_args *p, const float *a, int64_t i) { \
    switch (p->m) { \
      case 1: group(p, 1, 2, dw, a, i); return; \
      case 2: group(p, 2, 4, dw, a, i); return; \
      case 3: group(p, 3, 2, dw, a, i); return; \
      case 4: group(p, 4, 2, dw, a, i); return; \
    } \
  }
GROUP(F32) GROUP(BF16) GROUP(F16)

static void few(const linear_args *p, const float *a) {
  const int64_t step = p->m == 2 ? 32 : 16, groups = (p->n + step - 1) / step;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(static)
  for (int64_t i = 0; i < groups; i++) {
    if (p->dw == F32) group_F32(p, a, i);
    else if (p->dw == BF16) group_BF16(p, a, i);
    else group_F16(p, a, i);
  }
}

APART void tile_packed(int m, int64_t kc, const float *a, const float *b, float *c, int first) {
  tile_m(m, kc, a, 1, MR, b, c, NR, first);
}

APART void pack(const void *const *row, int dw, int64_t k0, int64_t kc, float *b,
                const char *next) {
  if (dw == F32) pack_panel(row, F32, k0, kc, b, next);
  else if (dw == BF16) pack_panel(row, BF16, k0, kc, b, next);
  else pack_panel(row, F16, k0, kc, b, next);
}

/* NR outputs of mc rows: a block of k at a time, the sums resting in c. */
static void panel(const linear_args *p, int64_t m0, int64_t mc, int64_t n0, const float *a,
                  float *b, float *c) {
  const void *row[NR];
  const char *next = mc <= 64 ? following(p, p->dw, n0, NR) : NULL;
  rows_from(p, p->dw, n0, NR, row);
  for (int64_t k0 = 0; k0 < p->k; k0 += KC) {
    const int64_t kc = p->k - k0 < KC ? p->k - k0 : KC;
    pack(row, p->dw, k0, kc, b, next);
    for (int64_t i = 0; i < mc; i += MR)
      tile_packed(mc - i < MR ? (int)(mc - i) : MR, kc, a + i * p->k + k0 * MR, b, c + i * NR,
                  k0 == 0);
  }
  for (int64_t i = 0; i < mc; i++) finish(p, m0 + i, n0, NR, c + i * NR);
}

/* a[m / MR][k][MR] = fp32 rows m0 .. m0+mc-1. */
static void pack_rows(const linear_args *p, int64_t m0, int64_t mc, float *a) {
  for (int64_t i = 0; i < mc; i++) {
    float *to = a + i / MR * MR * p->k + i % MR;
    const void *from = at(p->x, p->dx, (m0 + i) * p->ldx);
    for (int64_t k = 0; k < p->k; k += 8) {
      const int w = p->k - k < 8 ? (int)(p->k - k) : 8;
      const v8 v = cvt_n(at(from, p->dx, k), w, p->dx);
      for (int j = 0; j < w; j++) to[(k + j) * MR] = v[j];
    }
  }
}

static void many(const linear_args *p) {
  const int64_t most = p->m < MC ? p->m : MC, panels = (p->n + NR - 1) / NR;
  const int64_t size_a = (most + MR - 1) / MR * MR * p->k;
  float *a = NULL;
  if (posix_memalign((void **)&a, 64, size_a * 4)) abort();
  for (int64_t m0 = 0; m0 < p->m; m0 += MC) {
    const int64_t mc = p->m - m0 < MC ? p->m - m0 : MC;
    pack_rows(p, m0, mc, a);
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(static)
    for (int64_t i = 0; i < panels; i++) {
      float *b = sgl_det_scratch((KC + MC) * NR * 4);
      panel(p, m0, mc, i * NR, a, b, b + KC * NR);
    }
  }
  free(a);
}

void sgl_det_linear(const linear_args *p) {
  if (p->m == 0 || p->n == 0) return;
  if (p->m > 4) {
    many(p);
    return;
  }
  float *a = malloc(p->m * p->k * 4 + 4);
  if (!a) abort();
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t k = 0; k < p->k; k += 8) {
      const int w = p->k - k < 8 ? (int)(p->k - k) : 8;
      put_n(a + i * p->k + k, cvt_n(at(p->x, p->dx, i * p->ldx + k), w, p->dx), w, F32);
    }
  few(p, a);
  free(a);
}
