// One new token's attention: the query heads of one KV head against runs of keys that are read straight from the pool.
//
// Here lanes are dimensions. Each key is widened once for all query heads; 16 keys' products are then summed across lanes
// together. While one run is worked on, the next rows are fetched: this is where a long context's time goes.
#pragma once
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int kKeys = 64;          // keys at a time
constexpr float kHidden = -1e30f;  // a masked score

KVR_INLINE V soft_cap(V score, float cap) { return cap > 0 ? splat(cap) * tanh(score / splat(cap)) : score; }

// 2 × kLanes components of a row, and where component d then stands: pairs of bfloat16 come apart into two vectors.
KVR_INLINE void load_two(const float* p, V& first, V& second) { first = load(p), second = load(p + kLanes); }
KVR_INLINE void load_two(const bf16* p, V& first, V& second) {
  U pair = load_bits(p);
  first = widen_first(pair), second = widen_second(pair);
}
template <class R>
KVR_INLINE int place_of(int d) {
  if (sizeof(R) == 4) return d;
  return d / (2 * kLanes) * (2 * kLanes) + d % 2 * kLanes + d % (2 * kLanes) / 2;
}

// Lane i of the result is the sum of v[i]; `v` is overwritten.
template <int Width>
KVR_INLINE V lane_sums(V* v) {
  constexpr int half = Width / 2;
  I low, high;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; j++) {
    low[j] = j / Width * Width + j % half + (j % Width < half ? 0 : kLanes);
    high[j] = low[j] + half;
  }
#pragma GCC unroll 16
  for (int i = 0; i < half; i++)
    v[i] = __builtin_shuffle(v[i], v[i + half], low) + __builtin_shuffle(v[i], v[i + half], high);
  if constexpr (half > 1)
    return lane_sums<half>(v);
  else
    return v[0];
}

struct DecodeRow {
  int group, width;      // query heads; components of a row, a multiple of 2 × kLanes
  float softcap;
  const float* queries;  // [group][width] in the order of `place_of`
  float* sums;           // [group][width], the same
  float* scratch;

  static int64_t scratch_floats(int group) { return int64_t(group) * (kKeys + kLanes * kLanes + 2) + 2 * kLanes; }
  float* scores() const { return scratch; }                           // [group][64]
  float* products() const { return scratch + int64_t(group) * kKeys; }  // [group][kLanes keys][kLanes]
  float* best() const { return products() + int64_t(group) * kLanes * kLanes; }
  float* mass() const { return best() + group; }

  void begin() {
    for (int g = 0; g < group; g++) best()[g] = kHidden, mass()[g] = 0;
  }

  template <class R>
  static KVR_INLINE void fetch(const R* row, int width) {
    for (int i = 0; i < width * int(sizeof(R)); i += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + i);
  }

  // `plane`: from a key to its value.
  template <class R>
  void add(const R* const* keys, int64_t plane, int now, const R* const* next_keys, int next) {
    for (int k = 0; k < now; k += kLanes) {
      int count = min_of(kLanes, now - k);
      for (int i = 0; i < count; i++) fetch(keys[k + i] + plane, width);
      for (int d = 0; d < width; d += 8 * kLanes)
        with_few(min_of(4, (width - d) / (2 * kLanes)), [&](auto pairs) {
          for (int g = 0; g < group; g += 4)
            with_few(min_of(4, group - g), [&](auto heads) {
              multiply_keys<decltype(pairs)::value, decltype(heads)::value>(keys + k, count, g, d);
            });
        });
      for (int g = 0; g < group; g++) {
        V v[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) v[i] = load(products() + (int64_t(g) * kLanes + i) * kLanes);
        V score = soft_cap(lane_sums<kLanes>(v), softcap);
        for (int i = count; i < kLanes; i++) score[i] = kHidden;
        store(scores() + g * kKeys + k, score);
      }
    }
    for (int g = 0; g < group; g++) weigh(g, now);
    for (int i = 0; i < next; i++) fetch(next_keys[i], width);
    for (int first = 0; first < group; first += kMaxRows)
      with_rows(min_of(kMaxRows, group - first), [&](auto rows) {
        constexpr int G = decltype(rows)::value;
        for (int d = 0; d < width; d += 2 * kLanes) add_values<G>(keys, plane, now, first, d);
      });
  }

  template <class Body>
  static KVR_INLINE void with_few(int count, Body body) {
    switch (count) {
      case 1: return body(Constant<1>{});
      case 2: return body(Constant<2>{});
      case 3: return body(Constant<3>{});
      case 4: return body(Constant<4>{});
    }
  }

  // Lane by lane products of keys with G query heads from head g on, over C pairs of vectors from component d on.
  template <int C, int G, class R>
  void multiply_keys(const R* const* keys, int count, int g, int d) {
    const float* query = queries + int64_t(g) * width + d;
    for (int i = 0; i < count; i++) {
      V a[C], b[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) load_two(keys[i] + d + c * 2 * kLanes, a[c], b[c]);
#pragma GCC unroll 4
      for (int h = 0; h < G; h++) {
        float* sum = products() + (int64_t(g + h) * kLanes + i) * kLanes;
        V total = d == 0 ? V{} : load(sum);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          total += a[c] * load(query + int64_t(h) * width + c * 2 * kLanes);
          total += b[c] * load(query + int64_t(h) * width + c * 2 * kLanes + kLanes);
        }
        store(sum, total);
      }
    }
  }

  // Scores of head g become weights, and what was summed before is rescaled.
  void weigh(int g, int now) {
    float* score = scores() + g * kKeys;
    V top = splat(best()[g]);
    for (int k = 0; k < now; k += kLanes) top = max(top, load(score + k));
    float highest = largest(top);
    V total{};
    for (int k = 0; k < now; k += kLanes) {
      V weight = exp(load(score + k) - splat(highest));
      store(score + k, weight);
      total += weight;
    }
    V kept = exp(splat(best()[g] - highest));
    mass()[g] = mass()[g] * kept[0] + sum(total);
    for (int d = 0; d < width; d += kLanes) store(sums + int64_t(g) * width + d, load(sums + int64_t(g) * width + d) * kept);
    best()[g] = highest;
  }

  template <int G, class R>
  void add_values(const R* const* keys, int64_t plane, int now, int first, int d) {
    V acc[G][2];
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      acc[g][0] = load(sums + int64_t(first + g) * width + d);
      acc[g][1] = load(sums + int64_t(first + g) * width + d + kLanes);
    }
    const float* weight = scores() + int64_t(first) * kKeys;
    for (int k = 0; k < now; k++) {
      V a, b;
      load_two(keys[k] + plane + d, a, b);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        V w = splat(weight[g * kKeys + k]);
        acc[g][0] += w * a;
        acc[g][1] += w * b;
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      store(sums + int64_t(first + g) * width + d, acc[g][0]);
      store(sums + int64_t(first + g) * width + d + kLanes, acc[g][1]);
    }
  }
};

}  // namespace
