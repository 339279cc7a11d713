// Attention of the new tokens of each sequence to all of its cached keys and values, on CPUs (policy/lm/native/steps.py).
//
// A token that comes alone reads keys and values once, at the speed of memory; what torch offers for so few queries
// takes up to twice as long in fp32 and more in bf16. Prompts and drafts have more queries (attention_tiles.h); unlike
// torch's, they need no padding to a common length. Sums are in fp32 whatever the cache holds, and their order depends
// on nothing but the sequence itself. NaN in a sequence stays in it.

#include <vector>

#include "attention_tiles.h"
#include "vectors.h"

namespace {

constexpr int kFew = 4;     // queries at most that have the keys for themselves
constexpr int kBlock = 96;  // queries of a block, if a head of keys is not shared by more
constexpr int64_t kAhead = 3072;  // bytes that are asked of memory before they are read

// Turns n scores into their exponentials above the highest, and returns the total; there is room for whole vectors.
inline float exponentials(float* scores, int64_t n) {
  for (int64_t t = n; t % kLanes; ++t) scores[t] = -INFINITY;
  Floats high = load(scores), sum{};
  for (int64_t t = kLanes; t < n; t += kLanes) high = larger(load(scores + t), high);
  const float most = highest(high);
  for (int64_t t = 0; t < n; t += kLanes) {
    const Floats some = exponential(load(scores + t) - most);
    sum += some;
    save(some, scores + t);
  }
  return total(sum);
}

// Asks for the row that is read `kAhead` bytes after row t; those after the last one are the first of `next`. Measured
// to be faster than what processors fetch ahead by themselves, which should stop at the ends of pages and of keys.
template <typename T>
inline void ask_ahead(const T* rows, int64_t t, int64_t steps, const T* next, int64_t dim) {
  const int64_t later = t + kAhead / (dim * static_cast<int64_t>(sizeof(T)));
  const T* row = later < steps ? rows + later * dim : next + (later - steps) * dim;
  prefetch(row, dim);
}

// Few: N queries of G groups of numbers; query m sees the positions before visible[m], which ascend.
template <int G, int N, typename T>
void few(const T* const* q, const int64_t* visible, const T* keys, const T* values, T* const* out, float* weights,
            int64_t room) {
  constexpr int W = 2 * G, dim = G * kGroup;
  const int64_t steps = visible[N - 1];
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  Floats query[N][W], sum[N][W], row[W];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      load(q[m] + g * kGroup, query[m][2 * g], query[m][2 * g + 1]);
      query[m][2 * g] *= scale, query[m][2 * g + 1] *= scale;
      sum[m][2 * g] = sum[m][2 * g + 1] = Floats{};
    }
  for (int64_t t = 0; t < steps; ++t) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) load(keys + t * dim + g * kGroup, row[2 * g], row[2 * g + 1]);
    ask_ahead(keys, t, steps, values, dim);
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      Floats products = query[m][0] * row[0];
#pragma GCC unroll 8
      for (int w = 1; w < W; ++w) products += query[m][w] * row[w];
      weights[m * room + t] = total(products);
    }
  }
  float inverse[N];
  for (int m = 0; m < N; ++m) {
    inverse[m] = 1.0f / exponentials(weights + m * room, visible[m]);
    for (int64_t t = visible[m]; t < steps; ++t) weights[m * room + t] = 0.0f;
  }
  for (int64_t t = 0; t < steps; ++t) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) load(values + t * dim + g * kGroup, row[2 * g], row[2 * g + 1]);
    ask_ahead(values, t, steps, values, dim);
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[m][w] += weights[m * room + t] * row[w];
  }
  for (int m = 0; m < N; ++m)
    for (int g = 0; g < G; ++g) save(sum[m][2 * g] * inverse[m], sum[m][2 * g + 1] * inverse[m], out[m] + g * kGroup);
}

template <int G, typename T>
void some(int n, const T* const* q, const int64_t* visible, const T* k, const T* v, T* const* out, float* weights,
          int64_t room) {
  if (n == 1) few<G, 1>(q, visible, k, v, out, weights, room);
  if (n == 2) few<G, 2>(q, visible, k, v, out, weights, room);
  if (n == 3) few<G, 3>(q, visible, k, v, out, weights, room);
  if (n == 4) few<G, 4>(q, visible, k, v, out, weights, room);
}

// Where the queries of some tokens of a row lie, and where their results go.
template <typename T>
struct Piece {
  const T* q;
  T* out;
  int64_t stride, heads, group, dim, head, first, start;

  const T* query(int64_t m) const { return q + (first + m / group) * stride + (head * group + m % group) * dim; }
  T* result(int64_t m) const { return out + (((first + m / group) * heads + head) * group + m % group) * dim; }
  int64_t visible(int64_t m) const { return start + m / group + 1; }
};

template <typename T>
void play_few(const Piece<T>& piece, const T* keys, const T* values, int64_t queries, std::vector<float>& weights) {
  const int64_t dim = piece.dim;
  constexpr int G = 32 / kGroup;
  const auto play = dim == 32 ? some<G, T> : dim == 64 ? some<2 * G, T> : dim == 96 ? some<3 * G, T> : some<4 * G, T>;
  const T* q[kFew];
  T* out[kFew];
  int64_t visible[kFew];
  for (int64_t m = 0; m < queries; ++m) q[m] = piece.query(m), out[m] = piece.result(m), visible[m] = piece.visible(m);
  const int64_t room = (visible[queries - 1] + kLanes - 1) / kLanes * kLanes;
  weights.resize(kFew * room);
  play(static_cast<int>(queries), q, visible, keys, values, out, weights.data(), room);
}

template <typename T>
void play_block(const Piece<T>& piece, const T* keys, const T* values, int64_t queries, Block& s) {
  const int64_t dim = piece.dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  s.queries.resize(queries * dim), s.visible.resize(queries);
  for (int64_t m = 0; m < queries; ++m) {
    s.visible[m] = piece.visible(m);
    for (int64_t d = 0; d < dim; d += kGroup) {
      Floats a, b;
      load(piece.query(m) + d, a, b);
      save(a * scale, s.queries.data() + m * dim + d);
      save(b * scale, s.queries.data() + m * dim + d + kLanes);
    }
  }
  sum_up(keys, values, dim, s);
  for (int64_t m = 0; m < queries; ++m) {
    const float inverse = 1.0f / s.seen[m].total;
    for (int64_t d = 0; d < dim; d += kGroup) {
      const float* sum = s.sums.data() + m * dim + d;
      save(load(sum) * inverse, load(sum + kLanes) * inverse, piece.result(m) + d);
    }
  }
}

template <typename T>
void all(const T* q, int64_t stride, const T* keys, const T* values, T* out, const int64_t* plan, int64_t rows,
         int64_t heads, int64_t group, int64_t dim, int64_t time, int threads) {
  struct Item {
    int64_t slot, head, start, tokens, first;
  };
  const int64_t most = group < kBlock ? kBlock / group : 1;
  std::vector<Item> items;
  for (const int64_t* row = plan; row < plan + rows * 4; row += 4)
    for (int64_t begin = 0; begin < row[2]; begin += most)
      for (int64_t head = 0; head < heads; ++head)
        items.push_back({row[0], head, row[1] + begin, row[2] - begin < most ? row[2] - begin : most, row[3] + begin});
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> weights;
    Block block;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      const Piece<T> piece{q, out, stride, heads, group, dim, item.head, item.first, item.start};
      const int64_t base = (item.slot * heads + item.head) * time * dim, queries = item.tokens * group;
      if (queries <= kFew)
        play_few(piece, keys + base, values + base, queries, weights);
      else
        play_block(piece, keys + base, values + base, queries, block);
    }
  }
}

}  // namespace

// q[n, heads * group, dim], the rows `stride` numbers apart; keys and values [slot, heads, time, dim];
// out[n, heads * group, dim]; plan[rows, 4]: slot, first position, number of tokens, index of the first of them in q.
// dim is 32, 64, 96 or 128.
extern "C" {

void attend_float32(const float* q, int64_t stride, const float* keys, const float* values, float* out,
                    const int64_t* plan, int64_t rows, int64_t heads, int64_t group, int64_t dim, int64_t time,
                    int threads) {
  all(q, stride, keys, values, out, plan, rows, heads, group, dim, time, threads);
}

void attend_bfloat16(const uint16_t* q, int64_t stride, const uint16_t* keys, const uint16_t* values, uint16_t* out,
                     const int64_t* plan, int64_t rows, int64_t heads, int64_t group, int64_t dim, int64_t time,
                     int threads) {
  all(q, stride, keys, values, out, plan, rows, heads, group, dim, time, threads);
}
}
