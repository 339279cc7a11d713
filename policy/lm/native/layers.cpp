// What a decoder computes between its matrix products, on CPUs (policy/lm/native/steps.py). Each of these is one pass over
// numbers that are in the cache; torch takes up to ten, and each of them costs more than its numbers. All in fp32,
// rounded once.

#include "vectors.h"

namespace {

typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));

inline Floats wide(const float* from) { return load(from); }
inline Floats wide(const uint16_t* from) {
  Shorts some;
  std::memcpy(&some, from, sizeof some);
  const Words bits = __builtin_convertvector(some, Words) << 16;
  Floats x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void narrow(const Floats& x, float* to) { save(x, to); }
inline void narrow(const Floats& x, uint16_t* to) {
  const Shorts some = __builtin_convertvector(rounded(x), Shorts);
  std::memcpy(to, &some, sizeof some);
}

// f of each two numbers of rows. What is left of the last vectors is zeros.
template <typename A, typename B, typename F>
inline void along(const A* a, const B* b, int64_t width, A* to, F f) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) narrow(f(wide(a + j), wide(b + j)), to + j);
  if (j < width) {
    A some[kLanes] = {}, result[kLanes];
    B others[kLanes] = {};
    std::memcpy(some, a + j, (width - j) * sizeof(A));
    std::memcpy(others, b + j, (width - j) * sizeof(B));
    narrow(f(wide(some), wide(others)), result);
    std::memcpy(to + j, result, (width - j) * sizeof(A));
  }
}

// x * rsqrt(mean of x^2 + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4).
template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
    Floats squares{};
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) squares += wide(from + j) * wide(from + j);
    float sum = total(squares);
    for (; j < width; ++j) {
      T some[kLanes] = {from[j]};
      sum += wide(some)[0] * wide(some)[0];
    }
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
    along(from, weight, width, out + row * width, [&](Floats a, Floats w) { return a * scale * w; });
  }
}

// silu(gate) * up, where both stand beside each other in a row (Shazeer 2020, arXiv 2002.05202).
template <typename T>
void swiglu(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
  const auto gate = [](Floats x, Floats up) { return x * sigmoid(x) * up; };
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row)
    along(gate_up + row * 2 * width, gate_up + row * 2 * width + width, width, out + row * width, gate);
}

// Turns queries and keys by the rotation of their position (Su et al. 2021, arXiv 2104.09864; pairs are neighbours) in
// place, and puts keys and values where their slot and position say.
template <typename T>
void rope_and_store(T* heads_of, const float* rotations, const int64_t* slots, const int64_t* positions, T* keys,
                    T* values, int64_t tokens, int64_t query_heads, int64_t heads, int64_t dim, int64_t time,
                    int threads) {
  const int64_t all = query_heads + 2 * heads;
  const auto rotate = [](Floats pairs, Floats by) { return rotated(pairs, by, false); };
#pragma omp parallel for num_threads(threads) if (tokens * all * dim > kWorthThreads)
  for (int64_t n = 0; n < tokens; ++n) {
    const float* by = rotations + positions[n] * dim;
    T* x = heads_of + n * all * dim;
    for (int64_t head = 0; head < query_heads + heads; ++head, x += dim)
      along(x, by, dim, x, rotate);
    const T* from = x - heads * dim;
    for (int64_t head = 0; head < heads; ++head, from += dim) {
      const int64_t at = ((slots[n] * heads + head) * time + positions[n]) * dim;
      std::memcpy(keys + at, from, dim * sizeof(T));
      std::memcpy(values + at, from + heads * dim, dim * sizeof(T));
    }
  }
}

}  // namespace

// x, out[rows, width]; weight[width].
// gate_up[rows, 2 * width]; out[rows, width].
// heads_of[tokens, query_heads + 2 * heads, dim]; rotations[position, dim / 2] complex; slots, positions[tokens];
// keys, values[slot, head, time, dim].
#define FOR_ALL(TYPE, NAME)                                                                                            \
  void rms_norm_##NAME(const TYPE* x, const TYPE* weight, TYPE* out, int64_t rows, int64_t width, float eps,           \
                       int threads) {                                                                                  \
    rms_norm(x, weight, out, rows, width, eps, threads);                                                               \
  }                                                                                                                    \
  void swiglu_##NAME(const TYPE* gate_up, TYPE* out, int64_t rows, int64_t width, int threads) {                       \
    swiglu(gate_up, out, rows, width, threads);                                                                        \
  }                                                                                                                    \
  void rope_and_store_##NAME(TYPE* heads_of, const float* rotations, const int64_t* slots, const int64_t* positions,   \
                             TYPE* keys, TYPE* values, int64_t tokens, int64_t query_heads, int64_t heads,             \
                             int64_t dim, int64_t time, int threads) {                                                 \
    rope_and_store(heads_of, rotations, slots, positions, keys, values, tokens, query_heads, heads, dim, time,         \
                   threads);                                                                                           \
  }

extern "C" {
FOR_ALL(float, float32)
FOR_ALL(uint16_t, bfloat16)
}
