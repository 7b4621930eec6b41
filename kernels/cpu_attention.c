/* Attention over a paged cache:  o[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, g]) * v[s, g]
 *
 * Shapes      q [T, H, D]   k [slots, G, D]   v [slots, G, E]   o [T, H, E]; g = h / (H / G)
 *             T query rows of R requests; row i of a request sits at position first + i and sees
 *             the keys at positions max(0, pos - window) .. pos, slot page[request][position]
 * Dtypes      q, o alike, k, v alike: fp32 | bf16 | fp16; arithmetic in fp32, one rounding on store
 * Order       keys in tiles of TILE at absolute positions, ascending. Per tile: scores with d
 *             ascending in one fp32 accumulator; weights e^(s - m) with m the running maximum; the
 *             row sum in eight lanes (key mod 8), tiles ascending; o rescaled by e^(m_old - m),
 *             then one accumulator per output with s ascending. o / sum at the end
 * No-op       a key that a row does not see enters none of its sums: a tile without any is skipped
 * Bits depend on   q[t], k and v at the positions seen, scale, window - not on the phase, the
 *             chunk, the neighbours, the page table, threads or instruction set
 */
#include <math.h>

#include "cpu_panel.h"

#define TILE 64
#define ROWS (16 * MR) /* query rows (positions * heads of a group) that share a packed tile */
#define FEW 4

typedef struct {
  const void *q, *k, *v;
  void *o;
  const int32_t *page;
  const int64_t *request, *length, *prefix; /* prefix null: one query row each, at the end */
  int64_t ldq, ldo, ldk, ldv, ldpage, requests;
  int heads, groups, d, e, dq, dk, threads;
  int window; /* -1: none */
  float scale;
} attention_args;

typedef struct {
  const attention_args *p;
  int64_t request, row0, pos0; /* first query row of the block, and its position */
  int rows, share, g, m;       /* positions; heads per group; kv head; rows = positions * share */
} block;

typedef struct {
  float *q, *s, *o, *l, *top, *kp, *vp;
  const void *krow[TILE], *vrow[TILE];
  int *lo, *hi; /* of each row: the keys of the tile that it sees */
  int panels;
} work;

INLINE int64_t first_seen(const attention_args *p, int64_t pos) {
  return p->window < 0 || pos < p->window ? 0 : pos - p->window;
}

INLINE int is_few(const block *b) { return b->m <= FEW && b->rows == 1; }

INLINE const void *query(const block *b, int r) {
  const attention_args *p = b->p;
  const int64_t row = b->row0 + r / b->share;
  return at(p->q, p->dq, row * p->ldq + (int64_t)(b->g * b->share + r % b->share) * p->d);
}

/* q as fp32: [m][d] for a few rows, else [m / MR][d][MR]. */
static void load_queries(const block *b, float *q) {
  const attention_args *p = b->p;
  const int few = is_few(b);
  for (int r = 0; r < b->m; r++) {
    const void *from = query(b, r);
    float *to = few ? q + r * p->d : q + r / MR * MR * p->d + r % MR;
    const int step = few ? 1 : MR;
    for (int i = 0; i < p->d; i++) to[i * step] = load1(at(from, p->dq, i), p->dq);
  }
}

INLINE const char *k_at(const block *b, int64_t slot) {
  return at(b->p->k, b->p->dk, slot * b->p->ldk + (int64_t)b->g * b->p->d);
}

/* Slots of the tile at t0, of which keys are in use; past them the last stands in. The values of
 * this tile and the keys of the next are asked for on the way: slots are anywhere in memory. */
static void find_tile(const block *b, work *w, int64_t t0, int keys, int64_t end) {
  const attention_args *p = b->p;
  const int32_t *page = p->page + p->request[b->request] * p->ldpage + t0;
  const int k_lines = (p->d * size_of(p->dk) + 63) / 64;
  const int v_lines = (p->e * size_of(p->dk) + 63) / 64;
  for (int j = 0; j < TILE; j++) {
    const int64_t slot = page[j < keys ? j : keys - 1];
    w->krow[j] = k_at(b, slot);
    w->vrow[j] = at(p->v, p->dk, slot * p->ldv + (int64_t)b->g * p->e);
    if (j < keys) fetch(w->vrow[j], v_lines);
    if (t0 + TILE + j < end) fetch(k_at(b, page[TILE + j]), k_lines);
  }
}

APART void tile_scores(int m, int64_t d, const float *q, const float *k, float *s) {
  tile_m(m, d, q, 1, MR, k, s, TILE, 1);
}

APART void tile_values(int m, int64_t keys, const float *s, const float *v, float *o, int64_t ldo) {
  tile_m(m, keys, s, TILE, 1, v, o, ldo, 0);
}

INLINE void pack_tile(const block *b, work *w, int keys, int dt) {
  const attention_args *p = b->p;
  for (int j = 0; j < keys; j += NR) pack_panel(w->krow + j, dt, 0, p->d, w->kp + j * p->d, NULL);
  for (int j = 0; j < keys; j++)
    for (int i = 0; i < p->e; i += 8)
      store8(w->vp + (i / NR * TILE + j) * NR + i % NR,
             cvt_n(at(w->vrow[j], dt, i), p->e - i, dt));
}

INLINE void scores_few(const block *b, work *w, int keys, int dt) {
  const int d = b->p->d;
  for (int j = 0; j < keys; j += 16) switch (b->m) {
      case 1: dot_rows(1, 2, w->q, d, w->krow + j, dt, d, w->s + j, TILE, NULL); break;
      case 2: dot_rows(2, 2, w->q, d, w->krow + j, dt, d, w->s + j, TILE, NULL); break;
      case 3: dot_rows(3, 2, w->q, d, w->krow + j, dt, d, w->s + j, TILE, NULL); break;
      case 4: dot_rows(4, 2, w->q, d, w->krow + j, dt, d, w->s + j, TILE, NULL); break;
    }
}

static void scores_many(const block *b, work *w, int keys) {
  const int d = b->p->d;
  for (int j = 0; j < keys; j += NR)
    for (int r = 0; r < b->m; r += MR)
      tile_scores(b->m - r < MR ? b->m - r : MR, d, w->q + r * d, w->kp + j * d,
                  w->s + r * TILE + j);
}

/* Scores become weights in place; the running maximum, sum and output move to the new maximum. */
static void weigh(const block *b, work *w, int64_t t0) {
  const i8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  const v8 unit = all8(b->p->scale), low = all8(-INFINITY);
  for (int r = 0; r < b->m; r++) {
    const int64_t pos = b->pos0 + r / b->share, from = first_seen(b->p, pos) - t0;
    const int lo = from > 0 ? (from < TILE ? (int)from : TILE) : 0;
    const int hi = pos + 1 - t0 < TILE ? (pos + 1 - t0 > 0 ? (int)(pos + 1 - t0) : 0) : TILE;
    w->lo[r] = lo;
    w->hi[r] = hi;
    if (lo >= hi) continue;
    float *s = w->s + r * TILE;
    v8 most = low;
    for (int j = 0; j < TILE; j += 8) {
      const i8 seen = (lane + j >= lo) & (lane + j < hi);
      const v8 x = pick8(seen, load8(s + j) * unit, low);
      store8(s + j, x);
      most = max8(most, x);
    }
    const float old = w->top[r], tile_top = hmax8(most), top = tile_top > old ? tile_top : old;
    v8 sum = load8(w->l + 8 * r);
    if (top != old) {
      const v8 shrink = exp_8(all8(old) - all8(top));
      sum = sum * shrink;
      float *o = w->o + (int64_t)r * w->panels * NR;
      for (int i = 0; i < w->panels * NR; i += 8) store8(o + i, load8(o + i) * shrink);
      w->top[r] = top;
    }
    for (int j = 0; j < TILE; j += 8) {
      const i8 seen = (lane + j >= lo) & (lane + j < hi);
      const v8 x = pick8(seen, exp_8(load8(s + j) - all8(top)), (v8){0});
      store8(s + j, x);
      sum = sum + x;
    }
    store8(w->l + 8 * r, sum);
  }
}

/* o[r .. r+m) += weights at keys lo .. hi-1 times v, from the packed tile. */
INLINE void add_values(work *w, int r, int m, int lo, int hi) {
  if (lo >= hi) return;
  for (int i = 0; i < w->panels; i++)
    tile_values(m, hi - lo, w->s + r * TILE + lo, w->vp + (i * TILE + lo) * NR,
                w->o + ((int64_t)r * w->panels + i) * NR, w->panels * NR);
}

/* Rows of one register tile may see different keys: what all see at once, the rest row by row, so
 * that no row multiplies a key that it does not see. */
static void values_many(const block *b, work *w) {
  for (int r = 0; r < b->m; r += MR) {
    const int m = b->m - r < MR ? b->m - r : MR;
    int lo = 0, hi = TILE;
    for (int i = r; i < r + m; i++) {
      lo = w->lo[i] > lo ? w->lo[i] : lo;
      hi = w->hi[i] < hi ? w->hi[i] : hi;
    }
    if (lo >= hi) {
      for (int i = r; i < r + m; i++) add_values(w, i, 1, w->lo[i], w->hi[i]);
      continue;
    }
    for (int i = r; i < r + m; i++) add_values(w, i, 1, w->lo[i], lo);
    add_values(w, r, m, lo, hi);
    for (int i = r; i < r + m; i++) add_values(w, i, 1, hi, w->hi[i]);
  }
}

INLINE void values_chunk(work *w, const int m, const int n, const int dt, int i) {
  v8 acc[FEW][4];
  const int64_t ld = w->panels * NR;
  UNROLL for (int r = 0; r < m; r++) UNROLL for (int c = 0; c < n; c++)
      acc[r][c] = load8(w->o + r * ld + i + 8 * c);
  for (int j = w->lo[0]; j < w->hi[0]; j++) {
    v8 x[4];
    UNROLL for (int c = 0; c < n; c++) x[c] = cvt8(at(w->vrow[j], dt, i + 8 * c), dt);
    UNROLL for (int r = 0; r < m; r++) {
      const v8 a = all8(w->s[r * TILE + j]);
      UNROLL for (int c = 0; c < n; c++) acc[r][c] = fma8(a, x[c], acc[r][c]);
    }
  }
  UNROLL for (int r = 0; r < m; r++) UNROLL for (int c = 0; c < n; c++)
      store8(w->o + r * ld + i + 8 * c, acc[r][c]);
}

INLINE void values_few(const block *b, work *w, const int m, const int dt) {
  const int64_t ld = w->panels * NR;
  int i = 0;
  for (; i + 32 <= b->p->e; i += 32) values_chunk(w, m, 4, dt, i);
  for (; i + 8 <= b->p->e; i += 8) values_chunk(w, m, 1, dt, i);
  for (; i < b->p->e; i++)
    for (int r = 0; r < m; r++)
      for (int j = w->lo[0]; j < w->hi[0]; j++)
        w->o[r * ld + i] = __builtin_fmaf(w->s[r * TILE + j], load1(at(w->vrow[j], dt, i), dt),
                                          w->o[r * ld + i]);
}

INLINE void tile_step(const block *b, work *w, int64_t t0, int keys, const int dt) {
  find_tile(b, w, t0, keys, b->pos0 + b->rows);
  if (is_few(b)) {
    scores_few(b, w, keys, dt);
    weigh(b, w, t0);
    switch (b->m) {
      case 1: values_few(b, w, 1, dt); return;
      case 2: values_few(b, w, 2, dt); return;
      case 3: values_few(b, w, 3, dt); return;
      case 4: values_few(b, w, 4, dt); return;
    }
  }
  pack_tile(b, w, keys, dt);
  scores_many(b, w, keys);
  weigh(b, w, t0);
  values_many(b, w);
}

static void tile_f32(const block *b, work *w, int64_t t0, int n) { tile_step(b, w, t0, n, F32); }
static void tile_bf16(const block *b, work *w, int64_t t0, int n) { tile_step(b, w, t0, n, BF16); }
static void tile_f16(const block *b, work *w, int64_t t0, int n) { tile_step(b, w, t0, n, F16); }

static void store_rows(const block *b, const work *w) {
  const attention_args *p = b->p;
  for (int r = 0; r < b->m; r++) {
    const float *o = w->o + (int64_t)r * w->panels * NR;
    const v8 sum = all8(sum8(load8(w->l + 8 * r)));
    char *to = (char *)at(p->o, p->dq, (b->row0 + r / b->share) * p->ldo +
                          (int64_t)(b->g * b->share + r % b->share) * p->e);
    for (int i = 0; i < p->e; i += 8)
      put_n(to + i * size_of(p->dq), load8(o + i) / sum, p->e - i, p->dq);
  }
}

static void attend(const block *b) {
  const attention_args *p = b->p;
  const int panels = (p->e + NR - 1) / NR, m = (b->m + MR - 1) / MR * MR;
  work w = {.panels = panels};
  float *f = sgl_det_scratch(((int64_t)m * (p->d + TILE + panels * NR + 8 + 1 + 2) +
                              TILE * (p->d + panels * NR)) * 4 + 64);
  w.kp = f, f += TILE * p->d;
  w.vp = f, f += TILE * panels * NR;
  w.q = f, f += m * p->d;
  w.s = f, f += m * TILE;
  w.o = f, f += m * panels * NR;
  w.l = f, f += m * 8;
  w.top = f, f += m;
  w.lo = (int *)f, w.hi = w.lo + m;
  memset(w.o, 0, (size_t)m * panels * NR * 4);
  memset(w.l, 0, (size_t)m * 8 * 4);
  if (p->e % NR) memset(w.vp, 0, (size_t)TILE * panels * NR * 4);
  for (int r = 0; r < b->m; r++) w.top[r] = -INFINITY;
  load_queries(b, w.q);
  const int64_t last = b->pos0 + b->rows - 1;
  for (int64_t t0 = first_seen(p, b->pos0) / TILE * TILE; t0 <= last; t0 += TILE) {
    const int keys = last + 1 - t0 < TILE ? (int)(last + 1 - t0) : TILE;
    if (p->dk == F32) tile_f32(b, &w, t0, keys);
    else if (p->dk == BF16) tile_bf16(b, &w, t0, keys);
    else tile_f16(b, &w, t0, keys);
  }
  store_rows(b, &w);
}

void sgl_det_attention(const attention_args *p) {
  const int share = p->heads / p->groups;
  const int most = ROWS / share > 0 ? ROWS / share : 1; /* positions of one block */
  int64_t *start = malloc((p->requests + 1) * 2 * sizeof(int64_t)), *row = start + p->requests + 1;
  if (!start) abort();
  start[0] = row[0] = 0;
  for (int64_t i = 0; i < p->requests; i++) {
    const int64_t rows = p->prefix ? p->length[i] - p->prefix[i] : 1;
    row[i + 1] = row[i] + rows;
    start[i + 1] = start[i] + (rows + most - 1) / most * p->groups;
  }
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(dynamic)
  for (int64_t item = 0; item < start[p->requests]; item++) {
    int64_t i = 0;
    while (start[i + 1] <= item) i++;
    const int64_t part = (item - start[i]) / p->groups * most, rows = row[i + 1] - row[i];
    block b = {.p = p, .request = i, .row0 = row[i] + part, .share = share};
    b.pos0 = p->length[i] - rows + part;
    b.g = (int)((item - start[i]) % p->groups);
    b.rows = (int)(rows - part < most ? rows - part : most);
    b.m = b.rows * share;
    attend(&b);
  }
  free(start);
}
