/* Row by row:  rms_norm, silu_and_mul, rotary
 *
 * Dtypes      activations fp32 | bf16 | fp16; arithmetic in fp32; rounded where SGLang rounds
 * Order       sums in 32 lanes (element mod 32) ascending, fused for squares; then lanes i, i + 16,
 *             then i, i + 8, then the tree of sum8
 * Bits depend on   the row - not on how many there are, its place, strides, threads or instructions
 */
#include <math.h>

#include "cpu_vec.h"

typedef struct {
  const void *x, *residual, *extra, *weight;
  void *y, *residual_out;
  int64_t rows, ldx;
  int d, d_var;
  int dx, dw, dy, dr, ds; /* dtypes of x and extra, weight, y, residual, residual_out */
  int dc;                 /* to which x * rsqrt is rounded before the product with weight */
  int threads;
  float eps;
} norm_args;

/* body(i, 8) for whole vectors, body(i, rest) once: the constant keeps the loop in vectors. */
#define EACH8(d, body)                        \
  do {                                        \
    int i_ = 0;                               \
    for (; i_ + 8 <= (d); i_ += 8) body(i_, 8); \
    if (i_ < (d)) body(i_, (d)-i_);           \
  } while (0)

/* x (+ residual (+ extra)) as fp32; the sum is stored as the new residual. */
INLINE v8 norm_input(const norm_args *p, int64_t r, int i, int n, const int dt) {
  const int64_t j = r * p->d + i;
  v8 v = cvt_n(at(p->x, dt, r * p->ldx + i), n, dt);
  if (p->residual) {
    v = v + cvt_n(at(p->residual, p->dr, j), n, p->dr);
    if (p->extra) v = v + cvt_n(at(p->extra, dt, j), n, dt);
    put_n((char *)at(p->residual_out, p->ds, j), v, n, p->ds);
  }
  return v;
}

/* y = round(x * rsqrt(mean(x^2) + eps) * w), x = x + residual (+ extra) in fp32, which is also the
 * new residual, rounded. x * rsqrt may be rounded to another dtype before the product with w. */
INLINE void norm_row(const norm_args *p, int64_t r, float *x, const int dt) {
  v8 sum[4] = {{0}, {0}, {0}, {0}};
  int i = 0;
  for (; i + 32 <= p->d_var; i += 32) {
    UNROLL for (int c = 0; c < 4; c++) {
      const v8 v = norm_input(p, r, i + 8 * c, 8, dt);
      store8(x + i + 8 * c, v);
      sum[c] = fma8(v, v, sum[c]);
    }
  }
  for (; i < p->d; i += 8) {
    v8 v = norm_input(p, r, i, p->d - i < 8 ? p->d - i : 8, dt);
    store8(x + i, v);
    for (int c = 0; c < 8; c++)
      if (i + c >= p->d_var) v[c] = 0;
    sum[i / 8 % 4] = fma8(v, v, sum[i / 8 % 4]);
  }
  const float square = sum8((sum[0] + sum[2]) + (sum[1] + sum[3]));
  const v8 scale = all8(1.0f / sqrtf(square / (float)p->d_var + p->eps));
#define SCALE(i, n)                                                            \
  do {                                                                         \
    v8 v = load8(x + (i)) * scale;                                             \
    v = round8(v, p->dc);                                     \
    if (p->weight) v = v * cvt_n(at(p->weight, p->dw, i), n, p->dw);           \
    put_n((char *)at(p->y, p->dy, r * p->d + (i)), v, n, p->dy);               \
  } while (0)
  EACH8(p->d, SCALE);
}

void sgl_det_rms_norm(const norm_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(static)
  for (int64_t r = 0; r < p->rows; r++) {
    float *x = sgl_det_scratch((size_t)(p->d + 32) * 4);
    if (p->dx == F32) norm_row(p, r, x, F32);
    else if (p->dx == BF16) norm_row(p, r, x, BF16);
    else norm_row(p, r, x, F16);
  }
}

/* y = round(round(silu(a)) * b) for rows [a, b] of 2d elements; silu(a) = a / (1 + e^-a). */
INLINE void silu_row(const void *x, void *y, int64_t r, int d, const int dt) {
  const void *a = at(x, dt, r * 2 * d), *b = at(a, dt, d);
  char *to = (char *)at(y, dt, r * d);
#define SILU(i, n)                                                             \
  do {                                                                         \
    const v8 v = cvt_n(at(a, dt, i), n, dt), w = cvt_n(at(b, dt, i), n, dt);   \
    const v8 e = exp_8((v8)((i8)v | (int32_t)0x80000000)); /* e^-|v| */        \
    const v8 s = v * pick8(v < (v8){0}, e, all8(1.0f)) / (all8(1.0f) + e);     \
    put_n(to + (i) * size_of(dt), round8(s, dt) * w, n, dt);                  \
  } while (0)
  EACH8(d, SILU);
}

void sgl_det_silu_and_mul(const void *x, void *y, int64_t rows, int d, int dt, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    if (dt == F32) silu_row(x, y, r, d, F32);
    else if (dt == BF16) silu_row(x, y, r, d, BF16);
    else silu_row(x, y, r, d, F16);
  }
}

typedef struct {
  const void *x, *table; /* x [rows, heads, head]; table [positions, rotary]: cosines, then sines */
  const int64_t *position;
  void *y; /* contiguous */
  int64_t rows, ldx;
  int heads, head, rotary, neox, dx, dt, threads;
} rotary_args;

INLINE float rounded1(float f, int dt) {
  float t;
  store1(&t, f, dt);
  return load1(&t, dt);
}

/* Every product and sum is rounded to the dtype, as the eager code does. */
INLINE void rotate(const rotary_args *p, int64_t r, const int dt) {
  const int half = p->rotary / 2;
  const void *cos = at(p->table, p->dt, p->position[r] * p->rotary), *sin = at(cos, p->dt, half);
  for (int h = 0; h < p->heads; h++) {
    const void *x = at(p->x, dt, r * p->ldx + (int64_t)h * p->head);
    char *y = (char *)at(p->y, dt, (r * p->heads + h) * p->head);
    int i = 0;
    if (p->neox)
      for (; i + 8 <= half; i += 8) {
        const v8 c = round8(cvt8(at(cos, p->dt, i), p->dt), dt);
        const v8 s = round8(cvt8(at(sin, p->dt, i), p->dt), dt);
        const v8 a = cvt8(at(x, dt, i), dt), b = cvt8(at(x, dt, half + i), dt);
        put8((void *)at(y, dt, i), round8(a * c, dt) - round8(b * s, dt), dt);
        put8((void *)at(y, dt, half + i), round8(b * c, dt) + round8(a * s, dt), dt);
      }
    for (; i < half; i++) {
      const int ia = p->neox ? i : 2 * i, ib = p->neox ? half + i : 2 * i + 1;
      const float c = rounded1(load1(at(cos, p->dt, i), p->dt), dt);
      const float s = rounded1(load1(at(sin, p->dt, i), p->dt), dt);
      const float a = load1(at(x, dt, ia), dt), b = load1(at(x, dt, ib), dt);
      store1((void *)at(y, dt, ia), rounded1(a * c, dt) - rounded1(b * s, dt), dt);
      store1((void *)at(y, dt, ib), rounded1(b * c, dt) + rounded1(a * s, dt), dt);
    }
    const size_t rest = (size_t)(p->head - p->rotary) * size_of(dt);
    memcpy(y + p->rotary * size_of(dt), at(x, dt, p->rotary), rest);
  }
}

void sgl_det_rotary(const rotary_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(static)
  for (int64_t r = 0; r < p->rows; r++) {
    if (p->dx == F32) rotate(p, r, F32);
    else if (p->dx == BF16) rotate(p, r, BF16);
    else rotate(p, r, F16);
  }
}
