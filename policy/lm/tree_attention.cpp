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

// The left side of a product: number k of row m is at[m * row + k * step].
struct Left {
  const float* at;
  int64_t row, step;
};

// c[H][W vectors] = a b, or c + a b.
template <int H, int W>
void tile(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t inner, bool more) {
  Floats sum[H][W];
#pragma GCC unroll 8
  for (int m = 0; m < H; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sum[m][w] = more ? load(c + m * c_row + w * kLanes) : Floats{};
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
void strip(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t inner, bool more) {
  int64_t m = 0;
  for (; m + kHigh <= rows; m += kHigh)
    tile<kHigh, W>({a.at + m * a.row, a.row, a.step}, b, b_row, c + m * c_row, c_row, inner, more);
  const Left rest{a.at + m * a.row, a.row, a.step};
  last_rows<kHigh - 1, W>(rows - m, rest, b, b_row, c + m * c_row, c_row, inner, more);
}

// c[rows][width] = a[rows][inner] b[inner][width], or added to it; the width is one of whole vectors.
void product(Left a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t width,
             int64_t inner, bool more) {
  int64_t n = 0;
  for (; n + kWide * kLanes <= width; n += kWide * kLanes) strip<kWide>(a, b + n, b_row, c + n, c_row, rows, inner, more);
  for (; n < width; n += kLanes) strip<1>(a, b + n, b_row, c + n, c_row, rows, inner, more);
}

struct Run {
  int64_t start, count;  // of packed tokens
};

// Queries of one chunk and one head of keys, and all that they see. The last run is the chunk itself.
struct Work {
  int64_t query_heads, heads, dim;
  int64_t tokens, queries, width, seen;  // queries: of all heads that share the keys; width: whole vectors of them
  int64_t first, head;
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
    const int64_t group = query_heads / heads;
    first = runs.back().start, tokens = runs.back().count, head = of_head;
    queries = tokens * group, width = (queries + kLanes - 1) / kLanes * kLanes;
    scores.resize(seen * width);
    sums.resize(queries * dim);
    totals.resize(width);
  }

  // Where query c is among [token, query_head].
  int64_t place(int64_t c) const {
    const int64_t group = query_heads / heads;
    return (first + c / group) * query_heads + head * group + c % group;
  }

  const float* of(const float* numbers, const Run& run) const { return numbers + (run.start * heads + head) * dim; }
  float* of(float* numbers, const Run& run) const { return numbers + (run.start * heads + head) * dim; }

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

  // Adds weights[seen][width] times rows [queries, dim] to numbers of the path.
  void onto_path(const float* weights, const std::vector<float>& by, float* numbers) const {
    for (const Run& run : runs) {
      product({weights, width, 1}, by.data(), dim, of(numbers, run), heads * dim, run.count, dim, queries, true);
      weights += run.count * width;
    }
  }

  // Sets what a query may not see: tokens of the chunk behind its own.
  void hide(float value) {
    const int64_t group = query_heads / heads;
    for (int64_t t = 1; t < tokens; ++t)
      std::fill_n(&scores[(seen - tokens + t) * width], t * group, value);
  }
};

void forward(const float* q, const float* k, const float* v, float* out, float* level, float scale, Work& work) {
  work.collect(q, scale, work.rows, work.columns);
  work.against_path(k, work.columns, work.scores.data());
  work.hide(-INFINITY);
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

void backward(const float* q, const float* k, const float* v, const float* out, const float* level, const float* grad,
              float* to_q, float* to_k, float* to_v, float scale, Work& work, Back& back) {
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
  work.hide(-INFINITY);
  work.against_path(v, back.columns, back.scores.data());
  for (int64_t j = 0; j < work.seen; ++j)
    for (int64_t c = 0; c < work.width; c += kLanes) {
      const int64_t at = j * work.width + c;
      const Floats weight = exponential(load(&work.scores[at]) - load(&back.levels[c]));
      save(weight, &work.scores[at]);
      save(weight * (load(&back.scores[at]) - load(&work.totals[c])), &back.scores[at]);
    }
  work.onto_path(work.scores.data(), back.rows, to_v);
  work.onto_path(back.scores.data(), work.rows, to_k);
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
    for (int64_t i = 0; i < n * heads; ++i) {
      work.take(chunks + i / heads * 2, runs, i % heads);
      forward(q, k, v, out, level, scale, work);
    }
  }
}

// The gradient; to_k and to_v begin as zeros. Which thread adds what does not depend on chance.
void tree_attention_backward(const float* q, const float* k, const float* v, const float* out, const float* level,
                             const float* grad, float* to_q, float* to_k, float* to_v, const int64_t* chunks,
                             const int64_t* runs, int64_t n, int64_t tokens, int64_t query_heads, int64_t heads,
                             int64_t dim, int threads) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t numbers = tokens * heads * dim;
  std::vector<std::vector<float>> others(threads - 1);  // what each thread but the first adds up of both
#pragma omp parallel num_threads(threads)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    Work work(query_heads, heads, dim);
    Back back;
    if (me) others[me - 1].assign(2 * numbers, 0.0f);
    float* my_k = me ? others[me - 1].data() : to_k;
    float* my_v = me ? my_k + numbers : to_v;
    for (int64_t i = me; i < n * heads; i += all) {
      work.take(chunks + i / heads * 2, runs, i % heads);
      backward(q, k, v, out, level, grad, to_q, my_k, my_v, scale, work, back);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < numbers; ++i)
      for (const auto& other : others)
        if (!other.empty()) {
          to_k[i] += other[i];
          to_v[i] += other[numbers + i];
        }
  }
}
}
