// Causal attention over packed rows (policy/lm/pack.py) with its gradient, in fp32. The past of a token is a path
// through the tree of prefixes: a few runs of neighbours in memory, so nothing is gathered back to rows. Queries that
// follow each other form a chunk and share that path. Their scores stand in columns: keys and values are read as they
// are, and the softmax goes along vectors of queries (Dao et al. 2022, arXiv 2205.14135, appendix B.4, for the gradient).

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

#ifdef __AVX512F__
constexpr int kWide = 4;  // vectors of a product that are kept in registers, times kHigh rows
#else
constexpr int kWide = 2;
#endif
constexpr int kHigh = 6;
constexpr int64_t kMostExtra = 1 << 26;  // numbers (256 MiB) that the threads of a gradient may need beside its own

// The left side of a product: number k of row m is at[m * row + k * step].
struct Left {
  const float* at;
  int64_t row, step;
};

// c[H][W vectors] = a b, or c + a b.
template <int H, int W>
void tile(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t inner, bool add) {
  Floats sum[H][W];
#pragma GCC unroll 8
  for (int m = 0; m < H; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sum[m][w] = add ? load(c + m * c_row + w * kLanes) : Floats{};
  for (int64_t k = 0; k < inner; ++k) {
    Floats right[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) right[w] = load(b + k * b_row + w * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < H; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[m][w] += a.at[m * a.row + k * a.step] * right[w];
  }
#pragma GCC unroll 8
  for (int m = 0; m < H; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) save(sum[m][w], c + m * c_row + w * kLanes);
}

// The last rows, fewer than kHigh.
template <int H, int W, typename... Rest>
void last_rows(int64_t rows, Rest... rest) {
  if (rows == H)
    tile<H, W>(rest...);
  else if constexpr (H > 1)
    last_rows<H - 1, W>(rows, rest...);
}

template <int W>
void strip(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t inner, bool add) {
  int64_t m = 0;
  for (; m + kHigh <= rows; m += kHigh)
    tile<kHigh, W>({a.at + m * a.row, a.row, a.step}, b, b_row, c + m * c_row, c_row, inner, add);
  const Left rest{a.at + m * a.row, a.row, a.step};
  last_rows<kHigh - 1, W>(rows - m, rest, b, b_row, c + m * c_row, c_row, inner, add);
}

// c[rows][width] = a[rows][inner] b[inner][width], or added to it; the width is one of whole vectors.
void product(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t width,
             int64_t inner, bool add) {
  int64_t n = 0;
  for (; n + kWide * kLanes <= width; n += kWide * kLanes) strip<kWide>(a, b + n, b_row, c + n, c_row, rows, inner, add);
  for (; n < width; n += kLanes) strip<1>(a, b + n, b_row, c + n, c_row, rows, inner, add);
}

struct Run {
  int64_t start, count;  // of packed tokens
};

// Queries of one chunk and one head, and all that they see. The last run is the chunk itself. What scores need grows
// with the path alone, as there are few queries in a chunk.
struct Work {
  int64_t query_heads, heads, dim;
  int64_t first, queries, width, seen;  // width: whole vectors of queries
  int64_t query_head, head;
  std::vector<Run> runs;
  std::vector<float> rows, columns, scores, sums, totals;

  Work(int64_t query_heads, int64_t heads, int64_t dim) : query_heads(query_heads), heads(heads), dim(dim) {}

  void take(const int64_t* chunk, const int64_t* all_runs, int64_t of_head) {
    runs.clear();
    seen = 0;
    for (int64_t i = chunk[0]; i < chunk[1]; ++i) {
      runs.push_back({all_runs[2 * i], all_runs[2 * i + 1]});
      seen += runs.back().count;
    }
    first = runs.back().start, queries = runs.back().count, width = (queries + kLanes - 1) / kLanes * kLanes;
    query_head = of_head, head = of_head / (query_heads / heads);
    scores.resize(seen * width);
    sums.resize(queries * dim);
    totals.resize(width);
  }

  // Where query c is among [token, query_head].
  int64_t place(int64_t c) const { return (first + c) * query_heads + query_head; }

  const float* of(const float* numbers, const Run& run) const { return numbers + (run.start * heads + head) * dim; }

  // Rows [queries, dim] of what belongs to the queries, times a factor, and the same as columns [dim, width].
  void collect(const float* from, float factor, std::vector<float>& to_rows, std::vector<float>& to_columns) const {
    to_rows.resize(queries * dim);
    to_columns.assign(dim * width, 0.0f);
    for (int64_t c = 0; c < queries; ++c)
      for (int64_t d = 0; d < dim; ++d)
        to_columns[d * width + c] = to_rows[c * dim + d] = from[place(c) * dim + d] * factor;
  }

  // to[seen][width] = numbers of the path [seen, dim] times columns.
  void against_path(const float* numbers, const std::vector<float>& by, float* to) const {
    for (const Run& run : runs) {
      product({of(numbers, run), heads * dim, 1}, by.data(), width, to, width, run.count, width, dim, false);
      to += run.count * width;
    }
  }

  // sums[queries, dim] = (weights[seen][width])^T times numbers of the path.
  void along_path(const float* weights, const float* numbers) {
    for (const Run& run : runs) {
      product({weights, 1, width}, of(numbers, run), heads * dim, sums.data(), dim, queries, dim, run.count,
              &run != runs.data());
      weights += run.count * width;
    }
  }

  // Adds weights[seen][width] times rows [queries, dim] to numbers of the path, whose tokens are `row` apart.
  void onto_path(const float* weights, const std::vector<float>& by, float* numbers, int64_t row) const {
    for (const Run& run : runs) {
      product({weights, width, 1}, by.data(), dim, numbers + run.start * row, row, run.count, dim, queries, true);
      weights += run.count * width;
    }
  }

  // What a query may not see: tokens of the chunk behind its own.
  void hide() {
    for (int64_t t = 1; t < queries; ++t) std::fill_n(&scores[(seen - queries + t) * width], t, -INFINITY);
  }
};

void forward(const float* q, const float* k, const float* v, float* out, float* level, float scale, Work& work) {
  work.collect(q, scale, work.rows, work.columns);
  work.against_path(k, work.columns, work.scores.data());
  work.hide();
  for (int64_t c = 0; c < work.width; c += kLanes) {
    float* column = &work.scores[c];
    Floats highest = Floats{} - INFINITY, sum{};
    for (int64_t j = 0; j < work.seen; ++j) highest = larger(load(column + j * work.width), highest);
    for (int64_t j = 0; j < work.seen; ++j) {
      const Floats weight = exponential(load(column + j * work.width) - highest);
      sum += weight;
      save(weight, column + j * work.width);
    }
    save(sum, &work.totals[c]);
    for (int64_t lane = 0; lane < kLanes && c + lane < work.queries; ++lane)
      level[work.place(c + lane)] = highest[lane] + std::log(sum[lane]);
  }
  work.along_path(work.scores.data(), v);
  for (int64_t c = 0; c < work.queries; ++c)
    for (int64_t d = 0; d < work.dim; ++d)
      out[work.place(c) * work.dim + d] = work.sums[c * work.dim + d] / work.totals[c];
}

// What is needed beside Work for a gradient.
struct Back {
  std::vector<float> rows, columns, scores, levels;
};

// Where the gradients of one head of keys and values are added up; tokens are `row` apart.
struct Sums {
  float *k, *v;
  int64_t row;
};

void backward(const float* q, const float* k, const float* v, const float* out, const float* level, const float* grad,
              float* to_q, const Sums& sums, float scale, Work& work, Back& back) {
  work.collect(q, scale, work.rows, work.columns);
  work.collect(grad, 1.0f, back.rows, back.columns);
  back.scores.resize(work.seen * work.width);
  back.levels.assign(work.width, 0.0f);
  std::fill(work.totals.begin(), work.totals.end(), 0.0f);
  for (int64_t c = 0; c < work.queries; ++c) {
    back.levels[c] = level[work.place(c)];
    const float* made = out + work.place(c) * work.dim;
    for (int64_t d = 0; d < work.dim; ++d) work.totals[c] += back.rows[c * work.dim + d] * made[d];
  }
  work.against_path(k, work.columns, work.scores.data());
  work.hide();
  work.against_path(v, back.columns, back.scores.data());
  for (int64_t j = 0; j < work.seen; ++j)
    for (int64_t c = 0; c < work.width; c += kLanes) {
      const int64_t at = j * work.width + c;
      const Floats weight = exponential(load(&work.scores[at]) - load(&back.levels[c]));
      save(weight, &work.scores[at]);
      save(weight * (load(&back.scores[at]) - load(&work.totals[c])), &back.scores[at]);
    }
  work.onto_path(work.scores.data(), back.rows, sums.v, sums.row);
  work.onto_path(back.scores.data(), work.rows, sums.k, sums.row);
  work.along_path(back.scores.data(), k);
  for (int64_t c = 0; c < work.queries; ++c)
    for (int64_t d = 0; d < work.dim; ++d) to_q[work.place(c) * work.dim + d] = work.sums[c * work.dim + d] * scale;
}

}  // namespace

extern "C" {

// q, out[tokens, query_heads, dim]; k, v[tokens, heads, dim]; level[tokens, query_heads]: the logarithm of what the
// weights are divided by; chunks[n, 2]: begin and end in runs[., 2]: first token and count.
void tree_attention(const float* q, const float* k, const float* v, float* out, float* level, const int64_t* chunks,
                    const int64_t* runs, int64_t n, int64_t query_heads, int64_t heads, int64_t dim, int threads) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
#pragma omp parallel num_threads(threads)
  {
    Work work(query_heads, heads, dim);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < n * query_heads; ++i) {
      work.take(chunks + i / query_heads * 2, runs, i % query_heads);
      forward(q, k, v, out, level, scale, work);
    }
  }
}

// The gradient; to_k and to_v begin as zeros. A thread has neighbouring heads. Where several share a head of keys, the
// first adds to the gradient itself, and each other one adds up by itself what comes to it at the end: so with the same
// number of threads the result is the same.
void tree_attention_backward(const float* q, const float* k, const float* v, const float* out, const float* level,
                             const float* grad, float* to_q, float* to_k, float* to_v, const int64_t* chunks,
                             const int64_t* runs, int64_t n, int64_t tokens, int64_t query_heads, int64_t heads,
                             int64_t dim, int threads) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t items = n * query_heads, of_head = items / heads, numbers = tokens * dim;
  const int64_t most = std::min(items, 1 + kMostExtra / (2 * numbers));
  threads = static_cast<int>(std::min<int64_t>(threads, most));
  struct Extra {
    int64_t head;
    std::vector<float> sums;
  };
  std::vector<Extra> extras(threads);
#pragma omp parallel num_threads(threads)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t begin = items * me / all, end = items * (me + 1) / all;
    Work work(query_heads, heads, dim);
    Back back;
    Extra& extra = extras[me];
    extra.head = begin % of_head ? begin / of_head : -1;  // begun by the thread before
    if (extra.head >= 0) extra.sums.assign(2 * numbers, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      work.take(chunks + i % n * 2, runs, i / n);
      const int64_t at = work.head * dim;
      const Sums direct{to_k + at, to_v + at, heads * dim}, apart{extra.sums.data(), extra.sums.data() + numbers, dim};
      backward(q, k, v, out, level, grad, to_q, work.head == extra.head ? apart : direct, scale, work, back);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
      for (const Extra& other : extras) {
        if (other.sums.empty()) continue;
        float *k_row = to_k + (t * heads + other.head) * dim, *v_row = to_v + (t * heads + other.head) * dim;
        for (int64_t d = 0; d < dim; ++d) k_row[d] += other.sums[t * dim + d];
        for (int64_t d = 0; d < dim; ++d) v_row[d] += other.sums[numbers + t * dim + d];
      }
  }
}
}
