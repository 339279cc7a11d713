// Draws tokens by inversion, on CPUs (policy/lm/native/decoding.py). torch makes a table of all probabilities and one of their
// sums; here a row stays in the nearest cache, and only the sums of its chunks are kept.

#include <algorithm>
#include <cfloat>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kManyLogits = 1 << 14;  // enough for threads
constexpr int64_t kChunk = 4 * kLanes;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
typedef double Doubles __attribute__((vector_size(4 * kLanes)));  // half as many

// The next logits, -inf behind the last of `left`.
inline Floats next(const float* from, int64_t left) {
  if (left >= kLanes) return load(from);
  float rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rest[lane] = lane < left ? from[lane] : kNothing;
  return load(rest);
}

inline Doubles summed(const Floats& x) {
  Half half[2];
  std::memcpy(half, &x, sizeof x);
  return __builtin_convertvector(half[0], Doubles) + __builtin_convertvector(half[1], Doubles);
}

struct Drawn {
  int64_t id;
  float logprob;
};

// A row whose sum is not finite has no distribution: its log-prob is NaN.
Drawn draw_row(const float* logits, int64_t vocab, double temperature, double uniform, std::vector<double>& until) {
  Floats tops = Floats{} + kNothing;
  for (int64_t j = 0; j < vocab; j += kLanes) tops = larger(tops, next(logits + j, vocab - j));
  const float top = highest(tops);
  const bool greedy = temperature == 0;
  const float by = greedy ? 1.0f : 1.0f / std::max(static_cast<float>(temperature), FLT_MIN);
  const auto weights = [&](int64_t j) { return exponential((next(logits + j, vocab - j) - top) * by); };

  until.clear();
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kChunk) {
    Doubles sums{};
    for (int64_t j = begin; j < std::min(begin + kChunk, vocab); j += kLanes) sums += summed(weights(j));
    for (int lane = 0; lane < kLanes / 2; ++lane) total += sums[lane];
    until.push_back(total);
  }

  int64_t id = 0;
  if (greedy) {
    while (id < vocab - 1 && logits[id] != top) ++id;
  } else {
    const double target = uniform * total;
    auto chunk = std::upper_bound(until.begin(), until.end(), target);
    // rounding may leave the number at the very end: the last chunk that holds anything
    if (chunk == until.end()) chunk = std::lower_bound(until.begin(), until.end() - 1, total);
    double passed = chunk == until.begin() ? 0.0 : *(chunk - 1);
    id = (chunk - until.begin()) * kChunk;
    const int64_t end = std::min(id + kChunk, vocab);
    for (int64_t j = id; j < end && passed <= target; j += kLanes) {
      const Floats some = weights(j);
      for (int lane = 0; lane < kLanes && passed <= target; ++lane)
        if (some[lane] > 0.0f) {
          passed += static_cast<double>(some[lane]);
          id = j + lane;
        }
    }
  }
  return {id, static_cast<float>(static_cast<double>((logits[id] - top) * by) - std::log(total))};
}

}  // namespace

// logits[rows, vocab]; temperature, uniforms, ids, logprobs[rows].
extern "C" void draw(const float* logits, const double* temperature, const double* uniforms, int64_t* ids,
                     float* logprobs, int64_t rows, int64_t vocab, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1 && rows * vocab > kManyLogits)
  {
    std::vector<double> until;
    until.reserve((vocab + kChunk - 1) / kChunk);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const Drawn drawn = draw_row(logits + row * vocab, vocab, temperature[row], uniforms[row], until);
      ids[row] = drawn.id;
      logprobs[row] = drawn.logprob;
    }
  }
}
