// Attention of the few new tokens of each sequence to all of its cached keys and values, on CPUs (policy/lm/native.py).
//
// Keys and values are read once, at the speed of memory; what torch offers for so few queries takes up to twice as long
// in fp32 and more in bf16. Sums are in fp32 whatever the cache holds, and their order depends on nothing but the
// sequence itself. NaN in a sequence stays in it.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kGroup = 2 * kLanes;  // numbers of a row that are loaded together
constexpr int kTogether = 4;        // queries that stay in registers while the keys pass by
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// A group of a row as two vectors. Which number goes where is the type's own matter: `place` tells.
inline void load(const float* from, Floats& a, Floats& b) {
  a = load(from);
  b = load(from + kLanes);
}
inline int place(const float*, int vector, int lane) { return vector * kLanes + lane; }

// Of bfloat16, the lower and the upper half of each word: no shuffling, and a float has the bits in its upper half.
inline void load(const uint16_t* from, Floats& a, Floats& b) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  const Words low = words << 16, high = words & 0xffff0000u;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, &high, sizeof b);
}
inline int place(const uint16_t*, int vector, int lane) { return 2 * lane + vector; }

inline void store(float x, float& to) { to = x; }
inline void store(float x, uint16_t& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // to the nearest, ties to even; a NaN has to stay one in its upper half
  to = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float total(const Floats& x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight eight[2];
  std::memcpy(eight, &x, sizeof x);
  eight[0] += eight[1];
  Four four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// e^x for x <= 0, within 2e-7 of it, by the polynomial of Cephes (Moshier 1992, expf).
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
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
  return (p * f * f + f + 1.0f) * scale;
}

// Turns n scores into their exponentials above the highest, and returns the total; there is room for whole vectors.
inline float exponentials(float* scores, int64_t n) {
  for (int64_t t = n; t % kLanes; ++t) scores[t] = -INFINITY;
  Floats most = load(scores), sum{};
  for (int64_t t = kLanes; t < n; t += kLanes) {
    const Floats some = load(scores + t);
    most = some > most ? some : most;
  }
  float highest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = most[lane] > highest ? most[lane] : highest;
  for (int64_t t = 0; t < n; t += kLanes) {
    const Floats some = exponential(load(scores + t) - highest);
    sum += some;
    std::memcpy(scores + t, &some, sizeof some);
  }
  return total(sum);
}

// N queries of G groups of numbers; query m sees the positions before visible[m], which ascend.
template <int G, int N, typename T>
void attend(const T* const* q, const int64_t* visible, const T* keys, const T* values, T* const* out, float* weights,
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
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[m][w] += weights[m * room + t] * row[w];
  }
  for (int m = 0; m < N; ++m)
    for (int w = 0; w < W; ++w)
      for (int lane = 0; lane < kLanes; ++lane)
        store(sum[m][w][lane] * inverse[m], out[m][w / 2 * kGroup + place(q[m], w % 2, lane)]);
}

template <int G, typename T>
void some(int n, const T* const* q, const int64_t* visible, const T* k, const T* v, T* const* out, float* weights,
          int64_t room) {
  if (n == 1) attend<G, 1>(q, visible, k, v, out, weights, room);
  if (n == 2) attend<G, 2>(q, visible, k, v, out, weights, room);
  if (n == 3) attend<G, 3>(q, visible, k, v, out, weights, room);
  if (n == 4) attend<G, 4>(q, visible, k, v, out, weights, room);
}

template <typename T>
void all(const T* q, int64_t stride, const T* keys, const T* values, T* out, const int64_t* plan, int64_t rows,
         int64_t heads, int64_t group, int64_t dim, int64_t time, int threads) {
  const auto play = dim == 32 ? some<1, T> : dim == 64 ? some<2, T> : dim == 96 ? some<3, T> : some<4, T>;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> weights;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < rows * heads; ++item) {
      const int64_t *row = plan + item / heads * 4, head = item % heads;
      const int64_t slot = row[0], start = row[1], queries = row[2] * group, first = row[3];
      const int64_t base = (slot * heads + head) * time * dim;
      const int64_t room = (start + row[2] + kLanes - 1) / kLanes * kLanes;
      weights.resize(kTogether * room);
      for (int64_t begin = 0; begin < queries; begin += kTogether) {
        const int n = static_cast<int>(queries - begin < kTogether ? queries - begin : kTogether);
        const T* q_of[kTogether];
        T* out_of[kTogether];
        int64_t visible[kTogether];
        for (int m = 0; m < n; ++m) {
          const int64_t token = (begin + m) / group, at = head * group + (begin + m) % group;
          q_of[m] = q + (first + token) * stride + at * dim;
          out_of[m] = out + ((first + token) * heads * group + at) * dim;
          visible[m] = start + token + 1;
        }
        play(n, q_of, visible, keys + base, values + base, out_of, weights.data(), room);
      }
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
