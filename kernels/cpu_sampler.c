/* One token a row, of those that top_k, top_p and min_p keep: see `sampler.py`
 *
 * Dtypes      logits fp32; e^x, weights and noise in fp64; sums of weights are whole numbers
 * Order       of whole numbers' sums, none; everything else is element by element
 * Bits depend on   the row, its parameters, seed and position - not on what other rows hold
 */
#include <math.h>

#include "cpu_vec.h"

void *sgl_det_scratch(size_t size);

typedef struct {
  const float *logits, *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position;
  int64_t *token;
  int64_t rows, ld, vocab;
  int threads;
} sample_args;

/* Philox4x32-10 (Salmon et al., 2011): four words of a counter and a key. */
static void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = (uint32_t)(b >> 32) ^ c1 ^ k0, c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c3 ^ k1, c[3] = (uint32_t)a;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

void sgl_det_philox(uint32_t *counter, uint32_t k0, uint32_t k1) { philox(counter, k0, k1); }

/* A number as one without a sign in the same order; there is one zero, and a NaN is the least. */
INLINE uint32_t ordered(float x) {
  uint32_t y;
  x = x == x ? x + 0.0f : -INFINITY;
  memcpy(&y, &x, 4);
  return y ^ (y >> 31 ? ~0u : 1u << 31);
}

/* The share of e^0 that e^x has, as a whole number of 2^-40; so 2^23 of them can be added. */
INLINE int64_t weight_of(double e) { return (int64_t)(e * 0x1p40); }

/* Keys are looked at in three parts, of 11, 11 and 10 bits. */
enum { BINS = 1 << 11, PARTS = 3 };
static const int BITS[PARTS] = {11, 11, 10};
typedef struct {
  int64_t count[BINS], weight[BINS];
} histogram;

/* From the highest bin down: the one in which what is kept ends, or -1. Before it lie `count` ids
 * of `weight`, with those that lay before all bins. */
static int end_of(const histogram *h, int64_t top_k, int64_t limit, int64_t *count,
                  int64_t *weight) {
  for (int bin = BINS - 1; bin >= 0; bin--) {
    if (!h->count[bin]) continue;
    if (*count + h->count[bin] >= top_k || *weight + h->weight[bin] > limit) return bin;
    *count += h->count[bin], *weight += h->weight[bin];
  }
  return -1;
}

/* The key of the last kept x, and how many of the ids with that key are kept; the key is 0, of
 * which there is no number, where all are. */
static uint32_t last_kept(const uint32_t *key, const double *e, int64_t vocab, int64_t top_k,
                          float top_p, histogram *h, int64_t *ties) {
  if (top_k >= vocab && top_p >= 1) return 0;
  int64_t limit = 0, count = 0, weight = 0;
  uint32_t found = 0;
  int shift = 32, bin = 0;
  for (int part = 0; part < PARTS; part++) {
    const int above = shift;
    shift -= BITS[part];
    memset(h, 0, sizeof *h);
    for (int64_t v = 0; v < vocab; v++) {
      if (part && key[v] >> above != found) continue;
      bin = key[v] >> shift & ((1 << BITS[part]) - 1);
      h->count[bin]++, h->weight[bin] += weight_of(e[v]);
    }
    if (!part) {
      for (int i = 0; i < BINS; i++) limit += h->weight[i];
      if (top_p < 1) limit = (int64_t)((double)top_p * (double)limit);
    }
    bin = end_of(h, top_k, limit, &count, &weight);
    if (bin < 0) return 0; /* only of the first part: all are kept */
    found = found << BITS[part] | (uint32_t)bin;
  }
  /* Equal x have equal weights; one is kept while those before it are within the limit. */
  const int64_t each = h->weight[bin] / h->count[bin];
  *ties = top_k - count;
  if (each && (limit - weight) / each + 1 < *ties) *ties = (limit - weight) / each + 1;
  return found;
}

static int64_t sample_row(const sample_args *p, int64_t r) {
  const int64_t vocab = p->vocab, top_k = p->top_k[r];
  const float *logits = p->logits + r * p->ld, by = top_k == 1 ? 1 : p->temperature[r];
  int64_t first = 0;
  for (int64_t v = 1; v < vocab; v++)
    if (ordered(logits[v] / by) > ordered(logits[first] / by)) first = v;
  if (top_k == 1) return first;

  char *scratch = sgl_det_scratch(sizeof(histogram) + (size_t)vocab * 12);
  double *e = (double *)(scratch + sizeof(histogram));
  uint32_t *key = (uint32_t *)(e + vocab);
  const float highest = logits[first] / by;
  for (int64_t v = 0; v < vocab; v++) {
    key[v] = ordered(logits[v] / by);
    const double x = (double)(logits[v] / by) - highest;
    e[v] = x > -INFINITY ? exp(x) : 0;
  }
  int64_t ties = vocab;
  const uint32_t last =
      last_kept(key, e, vocab, top_k, p->top_p[r], (histogram *)scratch, &ties);

  const uint64_t seed = (uint64_t)p->seed[r], position = (uint64_t)p->position[r];
  double best = -INFINITY;
  int64_t token = first;
  for (int64_t begin = 0; begin < vocab; begin += 4) {
    uint32_t word[4] = {(uint32_t)(begin / 4), (uint32_t)position, (uint32_t)(position >> 32), 0};
    philox(word, (uint32_t)seed, (uint32_t)(seed >> 32));
    for (int64_t v = begin; v < vocab && v < begin + 4; v++) {
      if (key[v] < last || (key[v] == last && --ties < 0)) continue;
      if (e[v] < (double)p->min_p[r] || e[v] == 0) continue;
      /* Half a step inside both ends: neither logarithm can meet 0 or 1. */
      const double uniform = (word[v - begin] + 0.5) * 0x1p-32;
      const double x = (double)(logits[v] / by) - log(-log(uniform));
      if (x > best) best = x, token = v;
    }
  }
  return token;
}

void sgl_det_sample(const sample_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) schedule(static)
  for (int64_t r = 0; r < p->rows; r++) p->token[r] = sample_row(p, r);
}
