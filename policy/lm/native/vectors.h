// Vectors as wide as the registers; wider ones would be taken apart, slowly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int64_t kWorthThreads = 1 << 15;  // so many numbers are
constexpr int kGroup = 2 * kLanes;  // numbers of a row that are loaded together
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// A group of a row as two vectors, and back. Which number goes where is the type's own matter.
inline void load(const float* from, Floats& a, Floats& b) {
  a = load(from);
  b = load(from + kLanes);
}
// Of bfloat16, the lower and the upper half of each word: no shuffling, and a float has the bits in its upper half.
inline void load(const uint16_t* from, Floats& a, Floats& b) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  const Words low = words << 16, high = words & 0xffff0000u;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, &high, sizeof b);
}

inline void save(const Floats& x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void save(const Floats& a, const Floats& b, float* to) {
  save(a, to);
  save(b, to + kLanes);
}

// bfloat16, in the lower halves: to the nearest, ties to even; a NaN has to stay one.
inline Words rounded(const Floats& x) {
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x != x ? Words{} + 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void save(const Floats& a, const Floats& b, uint16_t* to) {
  const Words words = rounded(a) | rounded(b) << 16;
  std::memcpy(to, &words, sizeof words);
}

typedef float Half __attribute__((vector_size(2 * kLanes)));
typedef float Four __attribute__((vector_size(16)));

inline float total(const Floats& x) {
  Half half[2];
  std::memcpy(half, &x, sizeof x);
  half[0] += half[1];
  Four four[kLanes / 8];
  std::memcpy(four, half, sizeof four);
  if constexpr (kLanes == 16) four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float highest(const Floats& x) {
  Half half[2];
  std::memcpy(half, &x, sizeof x);
  half[0] = half[0] > half[1] ? half[0] : half[1];
  Four four[kLanes / 8];
  std::memcpy(four, half, sizeof four);
  if constexpr (kLanes == 16) four[0] = four[0] > four[1] ? four[0] : four[1];
  const float even = four[0][0] > four[0][2] ? four[0][0] : four[0][2];
  const float odd = four[0][1] > four[0][3] ? four[0][1] : four[0][3];
  return even > odd ? even : odd;
}

// e^x for x <= 0, within 2e-7 of it, by the polynomial of Cephes (Moshier 1992, expf).
inline Floats exponential(Floats x) {
  const auto vanishes = x < -87.0f;
  x = vanishes ? Floats{} - 87.0f : x;
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds: so large a number has no fraction
  const Floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // ln 2 in two parts
  Floats p = Floats{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return vanishes ? Floats{} : (p * f * f + f + 1.0f) * scale;
}

inline Floats sigmoid(Floats x) {
  const Floats below = exponential(x < 0.0f ? x : -x);  // of numbers that cannot overflow
  return (x < 0.0f ? below : Floats{} + 1.0f) / (1.0f + below);
}

#ifdef __AVX512F__
constexpr Integers kSwap = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
constexpr Integers kFirst = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
#else
constexpr Integers kSwap = {1, 0, 3, 2, 5, 4, 7, 6};
constexpr Integers kFirst = {0, 0, 2, 2, 4, 4, 6, 6};
#endif

// Pairs of neighbours times a rotation (cosine, sine), or, for a gradient, times its conjugate.
inline Floats rotated(Floats x, Floats by, bool back) {
  const Floats cosine = __builtin_shuffle(by, kFirst), sine = __builtin_shuffle(by, kFirst + 1);
  const Floats across = __builtin_shuffle(x, kSwap) * sine;
  const auto first = kFirst == kSwap - 1;  // of a pair
  return x * cosine + ((first != (Integers{} - back)) ? -across : across);
}

}  // namespace
