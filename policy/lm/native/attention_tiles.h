// Attention of many queries that share a head of keys: keys are turned round in tiles that stay in the cache, and
// several queries at a time multiply them, and then the values, from registers. The softmax goes on from tile to tile
// (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135).
#pragma once

#include <vector>

#include "vectors.h"

namespace {

#ifdef __AVX512F__
constexpr int kTogether = 6;  // queries whose scores or sums fill the registers
#else
constexpr int kTogether = 3;
#endif
constexpr int kTile = 4 * kLanes;  // keys that are turned round together

// As many rows as a vector has numbers become columns: time and again, each row of the upper half is dealt together
// with one of the lower half.
inline void turn(Floats* rows) {
#ifdef __AVX512F__
  const Integers low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#else
  const Integers low = {0, 8, 1, 9, 2, 10, 3, 11};
#endif
  const Integers high = low + kLanes / 2;
#pragma GCC unroll 4
  for (int times = 1; times < kLanes; times *= 2) {
    Floats dealt[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      dealt[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      dealt[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = dealt[i];
  }
}

// The first n keys of a tile as columns, to[dim][kTile]; zeros behind them.
template <typename T>
void turned(const T* keys, int64_t n, int64_t dim, float* to) {
  for (int64_t t = 0; t < kTile; t += kLanes)
    for (int64_t d = 0; d < dim; d += kGroup) {
      Floats a[kLanes], b[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        a[i] = b[i] = Floats{};
        if (t + i < n) load(keys + (t + i) * dim + d, a[i], b[i]);
      }
      turn(a);
      turn(b);
      for (int i = 0; i < kLanes; ++i) {
        save(a[i], to + (d + i) * kTile + t);
        save(b[i], to + (d + kLanes + i) * kTile + t);
      }
    }
}

// What the queries of a block have seen so far: the highest score, the total of the exponentials above it.
struct Seen {
  float highest, total;
};

// Adds n rows of values, weighted, to the sums of N queries; W vectors of each.
template <int N, int W>
void add(const float* weights, const float* factor, const float* values, int64_t n, int64_t dim, float* sums) {
  Floats sum[N][W];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sum[m][w] = load(sums + m * dim + w * kLanes) * factor[m];
  for (int64_t t = 0; t < n; ++t) {
    Floats value[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) value[w] = load(values + t * dim + w * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[m][w] += weights[m * kTile + t] * value[w];
  }
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) save(sum[m][w], sums + m * dim + w * kLanes);
}

// Scores of N queries and a tile of keys; adds what they see of its n values to sums[N][dim].
template <int N>
void tile(const float* queries, const int64_t* visible, const float* keys, const float* values, int64_t n, int64_t dim,
          Seen* seen, float* sums) {
  constexpr int W = kTile / kLanes;
  Floats score[N][W];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) score[m][w] = Floats{};
  for (int64_t d = 0; d < dim; ++d) {
    Floats key[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) key[w] = load(keys + d * kTile + w * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) score[m][w] += queries[m * dim + d] * key[w];
  }
  alignas(64) float weights[N][kTile];
  float factor[N];
  if (n < kTile || visible[0] < kTile) {  // the last positions: not all queries see them, or there are none
    Integers lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    for (int m = 0; m < N; ++m) {
      const int32_t end = static_cast<int32_t>(visible[m] < n ? visible[m] : n);
      for (int w = 0; w < W; ++w) score[m][w] = lanes + w * kLanes < end ? score[m][w] : Floats{} - INFINITY;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) {
    const float before = seen[m].highest;
    const float here = highest(larger(larger(score[m][0], score[m][1]), larger(score[m][2], score[m][3])));
    const float most = here > before ? here : before;
    Floats sum{};
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const Floats some = exponential(score[m][w] - most);
      sum += some;
      save(some, weights[m] + w * kLanes);
    }
    factor[m] = most > before ? exponential(Floats{} + (before - most))[0] : 1.0f;
    seen[m] = {most, seen[m].total * factor[m] + total(sum)};
  }
  for (int64_t d = 0; d < dim; d += kGroup * 2) {
    if (dim - d >= 2 * kGroup)
      add<N, 4>(weights[0], factor, values + d, n, dim, sums + d);
    else
      add<N, 2>(weights[0], factor, values + d, n, dim, sums + d);
  }
}

// Calls tile for the number of queries that there are.
template <int N, typename... Rest>
void tiled(int64_t queries, Rest... rest) {
  if (queries == N)
    tile<N>(rest...);
  else if constexpr (N > 1)
    tiled<N - 1>(queries, rest...);
}

// Values as floats, in the order in which `load` gives them.
inline const float* plain(const float* rows, int64_t, float*) { return rows; }
inline const float* plain(const uint16_t* rows, int64_t numbers, float* to) {
  for (int64_t i = 0; i < numbers; i += kGroup) {
    Floats a, b;
    load(rows + i, a, b);
    save(a, to + i);
    save(b, to + i + kLanes);
  }
  return to;
}

template <typename T>
void prefetch(const T* from, int64_t numbers) {
  for (int64_t i = 0; i < numbers; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i);
}

// What a block works with. Given are the scaled `queries` and how many positions each of them sees, ascending.
struct Block {
  std::vector<float> keys, values, queries, sums;
  std::vector<int64_t> visible;
  std::vector<Seen> seen;
};

// All keys that the block sees; leaves sums that are yet to be divided by the totals in `seen`.
template <typename T>
void sum_up(const T* keys, const T* values, int64_t dim, Block& s) {
  const int64_t queries = static_cast<int64_t>(s.visible.size()), steps = s.visible[queries - 1];
  s.keys.resize(kTile * dim), s.values.resize(kTile * dim);
  s.seen.assign(queries, {-INFINITY, 0.0f});
  s.sums.assign(queries * dim, 0.0f);
  for (int64_t t = 0; t < steps; t += kTile) {
    const int64_t n = steps - t < kTile ? steps - t : kTile, after = t + n;
    // the next tile is on its way while this one is used, a part of it with each of the products
    const int64_t coming = (steps - after < kTile ? steps - after : kTile) * dim;
    const int64_t groups = (queries + kTogether - 1) / kTogether, part = (coming + groups - 1) / groups;
    turned(keys + t * dim, n, dim, s.keys.data());
    const float* rows = plain(values + t * dim, n * dim, s.values.data());
    for (int64_t m = 0, ahead = 0; m < queries; m += kTogether, ahead += part) {
      const int64_t some = coming - ahead < part ? coming - ahead : part;
      prefetch(keys + after * dim + ahead, some);
      prefetch(values + after * dim + ahead, some);
      const int64_t together = queries - m < kTogether ? queries - m : kTogether;
      int64_t sees[kTogether];
      for (int64_t i = 0; i < together; ++i) sees[i] = s.visible[m + i] - t;
      if (sees[together - 1] > 0)
        tiled<kTogether>(together, &s.queries[m * dim], sees, s.keys.data(), rows, n, dim, &s.seen[m],
                         &s.sums[m * dim]);
    }
  }
}

}  // namespace
