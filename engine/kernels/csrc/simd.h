// Vectors of the widest kind that this translation unit may use, in the compiler's own vector syntax, so that one source
// serves every instruction set. No function of the standard library may be instantiated here: the linker keeps one copy of
// it for all translation units, and that one could need instructions that the CPU lacks.
#pragma once
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVectorBytes = kLanes * 4;

#define KVR_INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(kVectorBytes), may_alias));
typedef float VUnaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(kVectorBytes), may_alias));
typedef uint32_t UUnaligned __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
typedef int32_t I __attribute__((vector_size(kVectorBytes), may_alias));
typedef uint16_t H __attribute__((vector_size(kVectorBytes / 2), may_alias));
typedef uint16_t HUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

KVR_INLINE V splat(float s) {
#if defined(__AVX512F__)
  return V{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s};
#elif defined(__AVX2__)
  return V{s, s, s, s, s, s, s, s};
#else
  return V{s, s, s, s};
#endif
}

KVR_INLINE V load(const float* p) { return *reinterpret_cast<const VUnaligned*>(p); }
KVR_INLINE void store(float* p, V v) { *reinterpret_cast<VUnaligned*>(p) = v; }
KVR_INLINE U load_bits(const void* p) { return *static_cast<const UUnaligned*>(p); }

// Two neighbouring bfloat16 in 32 bits, each as float32.
KVR_INLINE V widen_first(U pair) { return (V)(pair << 16); }
KVR_INLINE V widen_second(U pair) { return (V)(pair & 0xffff0000u); }

KVR_INLINE V load(const bf16* p) {
  return (V)(__builtin_convertvector(*reinterpret_cast<const HUnaligned*>(p), U) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
KVR_INLINE void store(bf16* p, V v) {
  U bits = (U)v;
  U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U nan = (U)(v != v);
  rounded = (rounded & ~nan) | (nan & 0x7fc0u);
  *reinterpret_cast<HUnaligned*>(p) = __builtin_convertvector(rounded, H);
}

KVR_INLINE float widen(float x) { return x; }
KVR_INLINE float widen(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }
KVR_INLINE void narrow(float* p, float x) { *p = x; }
KVR_INLINE void narrow(bf16* p, float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  p->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

KVR_INLINE V select(I mask, V yes, V no) { return mask ? yes : no; }
KVR_INLINE V max(V a, V b) { return a > b ? a : b; }
KVR_INLINE int min_of(int a, int b) { return a < b ? a : b; }
KVR_INLINE int max_of(int a, int b) { return a > b ? a : b; }
KVR_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

KVR_INLINE float sum(V v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

KVR_INLINE float largest(V v) {
  float best = v[0];
  for (int i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x to about 1 ulp (the polynomial is Cephes'); below -87 it stays at 1e-38, so masked scores of -1e30 weigh nothing.
KVR_INLINE V exp(V x) {
  x = x > splat(88.0f) ? splat(88.0f) : x;
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const V magic = splat(12582912.0f);  // 1.5 × 2^23: adding it rounds to an integer
  V n = x * splat(1.44269504f) + magic;
  I exponent = (I)n;
  n = n - magic;
  V r = x - n * splat(0.693359375f);
  r = r + n * splat(2.12194440e-4f);
  V p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  return (V)((I)p + (exponent << 23));
}

KVR_INLINE V tanh(V x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }
KVR_INLINE V logistic(V x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

}  // namespace
