// The library's entry points: each takes the instruction set to run with, and `best_isa` says which one this CPU is for.
#include "abi.h"

using namespace kvr;

#define KVR_FOR_EACH_ISA(use) KVR_ISAS(use)

#define KVR_DECLARE(name, number)                                                                           \
  int64_t workspace_bytes_##name(const Model*, const Step*);                                               \
  void forward_##name(const Model*, const Pool*, const Step*);                                             \
  void attention_##name(const Pool*, const Step*, const AttentionCall*, int32_t);                          \
  void linear_##name(const Linear*, int32_t, const float*, float*, int32_t, void*);                        \
  int64_t linear_scratch_bytes_##name(const Linear*, int32_t);

#if defined(__x86_64__)
#define KVR_ISAS(use) use(plain, 0) use(avx2, 1) use(avx512, 2) use(avx512bf16, 3)
#else
#define KVR_ISAS(use) use(plain, 0)
#endif

extern "C" {

KVR_FOR_EACH_ISA(KVR_DECLARE)

// 0: the compiler's baseline, 1: AVX2 and FMA, 2: AVX-512 (F, BW, DQ, VL), 3: with BF16 products as well.
int32_t kvr_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide && __builtin_cpu_supports("avx512bf16")) return 3;
  if (wide) return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int64_t kvr_workspace_bytes(int32_t isa, const Model* model, const Step* step) {
  switch (isa) {
#define KVR_USE(name, number) case number: return workspace_bytes_##name(model, step);
    KVR_FOR_EACH_ISA(KVR_USE)
#undef KVR_USE
  }
  return -1;
}

void kvr_forward(int32_t isa, const Model* model, const Pool* pool, const Step* step) {
  switch (isa) {
#define KVR_USE(name, number) case number: return forward_##name(model, pool, step);
    KVR_FOR_EACH_ISA(KVR_USE)
#undef KVR_USE
  }
}

void kvr_attention(int32_t isa, const Pool* pool, const Step* step, const AttentionCall* call, int32_t dtype) {
  switch (isa) {
#define KVR_USE(name, number) case number: return attention_##name(pool, step, call, dtype);
    KVR_FOR_EACH_ISA(KVR_USE)
#undef KVR_USE
  }
}

void kvr_linear(int32_t isa, const Linear* l, int32_t dtype, const float* x, float* out, int32_t rows, void* scratch) {
  switch (isa) {
#define KVR_USE(name, number) case number: return linear_##name(l, dtype, x, out, rows, scratch);
    KVR_FOR_EACH_ISA(KVR_USE)
#undef KVR_USE
  }
}

int64_t kvr_linear_scratch_bytes(int32_t isa, const Linear* l, int32_t rows) {
  switch (isa) {
#define KVR_USE(name, number) case number: return linear_scratch_bytes_##name(l, rows);
    KVR_FOR_EACH_ISA(KVR_USE)
#undef KVR_USE
  }
  return -1;
}

// Sizes of the structs, in the order of abi.h: Python compares them with its own before it passes any.
void kvr_struct_sizes(int32_t* sizes) {
  const int32_t all[] = {sizeof(Linear), sizeof(Norm), sizeof(Rope), sizeof(Layer), sizeof(Model),
                         sizeof(Pool), sizeof(Step), sizeof(AttentionCall)};
  for (int i = 0; i < 8; i++) sizes[i] = all[i];
}

// weight: [out, in] row by row -> packed (see abi.h), which holds padded(out) × padded(in) elements and is zeroed.
void kvr_pack(const void* weight, void* packed, int32_t out, int32_t in, int32_t dtype) {
  if (dtype == kBfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(weight);
    int64_t panel = int64_t((in + 1) / 2) * 2 * kPanel;
    for (int32_t n = 0; n < out; n++) {
      uint16_t* to = static_cast<uint16_t*>(packed) + n / kPanel * panel + n % kPanel * 2;
      for (int32_t k = 0; k < in; k++) to[int64_t(k / 2) * 2 * kPanel + k % 2] = from[int64_t(n) * in + k];
    }
    return;
  }
  const float* from = static_cast<const float*>(weight);
  for (int32_t n = 0; n < out; n++) {
    float* to = static_cast<float*>(packed) + int64_t(n / kPanel) * in * kPanel + n % kPanel;
    for (int32_t k = 0; k < in; k++) to[int64_t(k) * kPanel] = from[int64_t(n) * in + k];
  }
}
}
