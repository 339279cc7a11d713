// What a decoder computes between its matrix products when it is trained, with gradients, on CPUs and in fp32
// (policy/lm/fused_llama.py): each is one pass over rows that are in the cache.

#include <algorithm>

#include "vectors.h"

namespace {

// The vector at a row's place j; what is behind the row's end is zeros.
inline Floats part(const float* row, int64_t j, int64_t width) {
  if (j + kLanes <= width) return load(row + j);
  Floats x{};
  std::memcpy(&x, row + j, (width - j) * sizeof(float));
  return x;
}
inline void store(const Floats& x, float* row, int64_t j, int64_t width) {
  std::memcpy(row + j, &x, std::min<int64_t>(kLanes, width - j) * sizeof(float));
}

// Joined heads [tokens, queries + 2 * keys, dim] to queries, keys and values of their own, or from them.
template <bool kBack>
void rope(float* joined, const float* rotations, float* q, float* k, float* v, int64_t tokens, int64_t queries,
          int64_t keys, int64_t dim, int threads) {
  const int64_t all = queries + 2 * keys;
#pragma omp parallel for num_threads(threads) if (tokens * all * dim > kWorthThreads)
  for (int64_t n = 0; n < tokens; ++n)
    for (int64_t head = 0; head < all; ++head) {
      float* here = joined + (n * all + head) * dim;
      const bool is_value = head >= queries + keys;
      float* there = head < queries ? q + (n * queries + head) * dim
                                    : (is_value ? v : k) + (n * keys + (head - queries) % keys) * dim;
      const float* from = kBack ? there : here;
      float* to = kBack ? here : there;
      if (is_value)
        std::memcpy(to, from, dim * sizeof(float));
      else
        for (int64_t j = 0; j < dim; j += kLanes) save(rotated(load(from + j), load(rotations + n * dim + j), kBack), to + j);
    }
}

}  // namespace

extern "C" {

// y = x * scale, where scale = rsqrt(mean of x^2 + eps) (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4).
void rms_norm(const float* x, float* y, float* scales, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * width;
    Floats squares{};
    for (int64_t j = 0; j < width; j += kLanes) squares += part(from, j, width) * part(from, j, width);
    const float scale = 1.0f / std::sqrt(total(squares) / static_cast<float>(width) + eps);
    for (int64_t j = 0; j < width; j += kLanes) store(part(from, j, width) * scale, y + row * width, j, width);
    scales[row] = scale;
  }
}

// out = (grad - y * mean of grad * y) * scale.
void rms_norm_backward(const float* grad, const float* y, const float* scales, float* out, int64_t rows, int64_t width,
                       int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const float *g = grad + row * width, *made = y + row * width;
    Floats products{};
    for (int64_t j = 0; j < width; j += kLanes) products += part(g, j, width) * part(made, j, width);
    const float along = total(products) / static_cast<float>(width);
    for (int64_t j = 0; j < width; j += kLanes)
      store((part(g, j, width) - part(made, j, width) * along) * scales[row], out + row * width, j, width);
  }
}

// The gradient of silu(gate) * up, where both stand beside each other in a row (Shazeer 2020, arXiv 2002.05202).
void swiglu_backward(const float* gate_up, const float* grad, float* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const float *gates = gate_up + row * 2 * width, *ups = gates + width, *g = grad + row * width;
    float* to = out + row * 2 * width;
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats gate = part(gates, j, width), some = part(g, j, width), open = sigmoid(gate), passed = gate * open;
      store(some * part(ups, j, width) * (open + passed * (1.0f - open)), to, j, width);
      store(some * passed, to + width, j, width);
    }
  }
}

// joined[tokens, queries + 2 * keys, dim]; rotations[tokens, dim / 2] complex; q[tokens, queries, dim]; k, v[tokens,
// keys, dim] (Su et al. 2021, arXiv 2104.09864; pairs are neighbours).
void rope_split(float* joined, const float* rotations, float* q, float* k, float* v, int64_t tokens, int64_t queries,
                int64_t keys, int64_t dim, int threads) {
  rope<false>(joined, rotations, q, k, v, tokens, queries, keys, dim, threads);
}
void rope_join(float* joined, const float* rotations, float* q, float* k, float* v, int64_t tokens,
               int64_t queries, int64_t keys, int64_t dim, int threads) {
  rope<true>(joined, rotations, q, k, v, tokens, queries, keys, dim, threads);
}
}
