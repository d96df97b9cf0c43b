// The small operations between linear layers and attention, on rows in float32.
#pragma once
#include "abi.h"
#include "simd.h"

extern "C" float erff(float);
extern "C" float sqrtf(float);
extern "C" float cosf(float);
extern "C" float sinf(float);

namespace {

// y = norm(x) over n components; x and y may be the same row.
template <class Y>
inline void normalise(const float* x, Y* y, const kvr::Norm& norm, int n) {
  int whole = n / kLanes * kLanes;
  float mean = 0;
  if (norm.kind == kvr::kLayerNorm) {
    V total{};
    for (int i = 0; i < whole; i += kLanes) total += load(x + i);
    mean = sum(total);
    for (int i = whole; i < n; i++) mean += x[i];
    mean /= float(n);
  }
  V squares{};
  for (int i = 0; i < whole; i += kLanes) {
    V d = load(x + i) - splat(mean);
    squares += d * d;
  }
  float power = sum(squares);
  for (int i = whole; i < n; i++) power += (x[i] - mean) * (x[i] - mean);
  float factor = 1.0f / sqrtf(power / float(n) + norm.eps);
  for (int i = 0; i < whole; i += kLanes) {
    V v = (load(x + i) - splat(mean)) * splat(factor) * load(norm.weight + i);
    if (norm.bias) v += load(norm.bias + i);
    store(y + i, v);
  }
  for (int i = whole; i < n; i++)
    narrow(y + i, (x[i] - mean) * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f));
}

KVR_INLINE V activate(V x, int kind) {
  if (kind == kvr::kSilu) return x * logistic(x);
  if (kind == kvr::kGeluTanh) {
    V inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return x * logistic(inner + inner);
  }
  V y;
  for (int i = 0; i < kLanes; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.7071067812f));
  return y;
}

// Rotates one head in place (arXiv 2104.09864, half-split); `turn` holds rotary_dim / 2 cosines, then as many sines.
KVR_INLINE void rotate(float* head, const float* turn, int rotary_dim) {
  int half = rotary_dim / 2, whole = half / kLanes * kLanes;
  float* other = head + half;
  const float* sines = turn + half;
  for (int i = 0; i < whole; i += kLanes) {
    V a = load(head + i), b = load(other + i), c = load(turn + i), s = load(sines + i);
    store(head + i, a * c - b * s);
    store(other + i, b * c + a * s);
  }
  for (int i = whole; i < half; i++) {
    float a = head[i], b = other[i];
    head[i] = a * turn[i] - b * sines[i];
    other[i] = b * turn[i] + a * sines[i];
  }
}

inline void fill_turn(const kvr::Rope& rope, int position, float* turn) {
  int half = rope.rotary_dim / 2;
  for (int i = 0; i < half; i++) {
    float angle = float(position) * rope.frequencies[i];
    turn[i] = cosf(angle) * rope.attention_factor;
    turn[half + i] = sinf(angle) * rope.attention_factor;
  }
}

template <class P>
KVR_INLINE void copy_row(const float* from, P* to, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; i++) narrow(to + i, from[i]);
}

template <class P>
KVR_INLINE void widen_row(const P* from, float* to, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = widen(from[i]);
}

}  // namespace
