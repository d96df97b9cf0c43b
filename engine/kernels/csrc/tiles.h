// Register tiles: R rows of activations times NV vectors of outputs, all in registers over the whole loop.
//
// Every output is one accumulator to which inputs are added in ascending order, whatever R and NV are and however the loop is
// cut. So a row's results do not depend on how many other rows there are, nor on the number of threads.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 14;  // 2 × 14 accumulators, 2 weights and a broadcast: 31 of 32 registers
#else
constexpr int kMaxRows = 6;  // 2 × 6 accumulators, 2 weights and a broadcast: 15 of 16 registers
#endif
constexpr int kTileVectors = 2;

// c[R][NV vectors] (+)= a[R][K] × b[K][NV vectors]. Element (r, k) of a is a[r * a_row + k * a_step]; row k of b begins at
// b + k * b_row; vectors past the first 32 outputs lie b_next floats further.
template <int R, int NV>
KVR_INLINE void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int64_t b_next, int K,
                     float* c, int64_t c_row, bool accumulate) {
  V acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = accumulate ? load(c + r * c_row + v * kLanes) : V{};
  for (int k = 0; k < K; k++) {
    V w[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) w[v] = load(b + (v * kLanes / kvr::kPanel) * b_next + v * kLanes % kvr::kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      V x = splat(a[r * a_row]);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] += x * w[v];
    }
    a += a_step;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) store(c + r * c_row + v * kLanes, acc[r][v]);
}

// The same with bfloat16 weights straight from their panels: c = a[R][2 × pairs] × w. `w` points at the first output's pair.
// What lies `ahead` bytes behind each weight is fetched meanwhile; 0: nothing.
template <int R, int NV>
KVR_INLINE void tile(const float* a, int64_t a_row, const uint8_t* w, int64_t w_next, int pairs, int64_t ahead,
                     float* c, int64_t c_row) {
  V acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = V{};
  for (int k = 0; k < pairs; k++) {
    U pair[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const uint8_t* p = w + (v * kLanes / kvr::kPanel) * w_next + v * kLanes % kvr::kPanel * 4;
      pair[v] = load_bits(p);
      if (v * kLanes % 16 == 0) __builtin_prefetch(p + ahead);
    }
    V first[NV], second[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) first[v] = widen_first(pair[v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      V x = splat(a[r * a_row + 2 * k]);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] += x * first[v];
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) second[v] = widen_second(pair[v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      V x = splat(a[r * a_row + 2 * k + 1]);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] += x * second[v];
    }
    w += 4 * kvr::kPanel;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) store(c + r * c_row + v * kLanes, acc[r][v]);
}

#if defined(KVR_BF16_DOT)
#if defined(KVR_EMULATE_BF16_DOT)
// The instruction's arithmetic up to its rounding, for machines without it: the second products are added first.
KVR_INLINE V dot_pairs(V acc, U a, U b) {
  return acc + widen_second(a) * widen_second(b) + widen_first(a) * widen_first(b);
}
#else
KVR_INLINE V dot_pairs(V acc, U a, U b) { return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#endif

KVR_INLINE U splat_bits(uint32_t x) { return U{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The same on a CPU that multiplies bfloat16 pairs.
template <int R, int NV>
KVR_INLINE void tile(const bf16* a, int64_t a_row, const uint8_t* w, int64_t w_next, int pairs, int64_t ahead,
                     float* c, int64_t c_row) {
  typedef uint32_t Pair __attribute__((aligned(2), may_alias));
  V acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = V{};
  for (int k = 0; k < pairs; k++) {
    U pair[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const uint8_t* p = w + (v * kLanes / kvr::kPanel) * w_next + v * kLanes % kvr::kPanel * 4;
      pair[v] = load_bits(p);
      if (v * kLanes % 16 == 0) __builtin_prefetch(p + ahead);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      U x = splat_bits(*reinterpret_cast<const Pair*>(a + r * a_row + 2 * k));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = dot_pairs(acc[r][v], x, pair[v]);
    }
    w += 4 * kvr::kPanel;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) store(c + r * c_row + v * kLanes, acc[r][v]);
}
#endif

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls body(Constant<rows>) with 1 ≤ rows ≤ kMaxRows as a constant.
template <class Body>
KVR_INLINE void with_rows(int rows, Body body) {
  switch (rows) {
    case 1: return body(Constant<1>{});
    case 2: return body(Constant<2>{});
    case 3: return body(Constant<3>{});
    case 4: return body(Constant<4>{});
    case 5: return body(Constant<5>{});
    case 6: return body(Constant<6>{});
#if defined(__AVX512F__)
    case 7: return body(Constant<7>{});
    case 8: return body(Constant<8>{});
    case 9: return body(Constant<9>{});
    case 10: return body(Constant<10>{});
    case 11: return body(Constant<11>{});
    case 12: return body(Constant<12>{});
    case 13: return body(Constant<13>{});
    case 14: return body(Constant<14>{});
#endif
  }
}

// c[rows][32] (+)= a × b for any number of rows, cut evenly.
inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int K, float* c,
                     int64_t c_row, int rows, bool accumulate) {
  int tiles = ceil_div(rows, kMaxRows);
  for (int t = 0; t < tiles; t++) {
    int first = int(int64_t(rows) * t / tiles), end = int(int64_t(rows) * (t + 1) / tiles);
    with_rows(end - first, [&](auto count) {
      constexpr int R = decltype(count)::value;
      for (int n = 0; n < kvr::kPanel; n += kTileVectors * kLanes)
        tile<R, kTileVectors>(a + first * a_row, a_row, a_step, b + n, b_row, 0, K, c + first * c_row + n, c_row,
                              accumulate);
    });
  }
}

}  // namespace
