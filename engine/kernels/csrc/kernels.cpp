// Compiled once for each instruction set, with KVR_NAME as the suffix of its entry points.
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "forward.h"

#define KVR_JOIN_(a, b) a##b
#define KVR_JOIN(a, b) KVR_JOIN_(a, b)
#define KVR_ENTRY(name) KVR_JOIN(name, KVR_NAME)

namespace {

template <class W>
void run_attention(const kvr::Pool& pool, const Step& s, const kvr::AttentionCall& call) {
  Model model{};
  Layer layer{};
  layer.rope = -1;
  model.heads = call.heads;
  model.kv_heads = pool.kv_heads;
  model.dim = pool.dim;
  Forward<W> forward(model, pool, s);
  model.attention_scale = call.scale;
  int64_t row = Workspace::row_stride(model), queries = int64_t(call.heads) * pool.dim, keys = pool.kv_heads * pool.dim;
  float* rows = forward.template part<float>(forward.at.rows);
  for (int r = 0; r < s.rows; r++) {
    copy_row(call.q + r * queries, rows + r * row, int(queries));
    copy_row(call.k + r * keys, rows + r * row + queries, int(keys));
    copy_row(call.v + r * keys, rows + r * row + queries + keys, int(keys));
  }
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
#if defined(_OPENMP)
    Team team{omp_get_thread_num(), omp_get_num_threads(), forward.template part<int32_t>(forward.at.counters), nullptr};
#else
    Team team{0, 1, forward.template part<int32_t>(forward.at.counters), nullptr};
#endif
    team.scratch = forward.base + forward.at.scratch + team.rank * forward.at.scratch_bytes;
    forward.place_stage(team, layer, call.layer);
    Attention<W, float> attention{pool,        s.sequences, s.block_ids, rows, row, call.output, queries,
                                  forward.template part<float>(forward.at.partials), call.layer, call.window,
                                  call.heads / pool.kv_heads, call.softcap};
    attention_stage(team, attention, forward.template part<Item>(forward.at.items), forward.num_items,
                    forward.num_partials > 0);
  }
}

template <class W>
void run_linear(const kvr::Linear& l, const float* x, float* out, int rows, void* scratch) {
  Team team{0, 1, nullptr, static_cast<uint8_t*>(scratch)};
  int64_t x_row = padded(l.in);
  Input<W>* input = reinterpret_cast<Input<W>*>(team.scratch + kLinearScratchFloats * 4);
  for (int r = 0; r < rows; r++) {
    copy_row(x + int64_t(r) * l.in, input + r * x_row, l.in);
    for (int64_t i = l.in; i < x_row; i++) narrow(input + r * x_row + i, 0.0f);
  }
  linear_stage<W>(team, l, nullptr, input, x_row, rows, [&](int r, int first, int n, float* c, float*, int) {
    copy_row(c, out + int64_t(r) * l.out + first, min_of(n, l.out - first));
  });
}

}  // namespace

extern "C" {

int64_t KVR_ENTRY(workspace_bytes_)(const Model* model, const Step* step) { return Workspace(*model, *step).end; }

void KVR_ENTRY(forward_)(const Model* model, const kvr::Pool* pool, const Step* step) {
  if (model->dtype == kvr::kBfloat16)
    Forward<bf16>(*model, *pool, *step).run();
  else
    Forward<float>(*model, *pool, *step).run();
}

void KVR_ENTRY(attention_)(const kvr::Pool* pool, const Step* step, const kvr::AttentionCall* call, int32_t dtype) {
  if (dtype == kvr::kBfloat16)
    run_attention<bf16>(*pool, *step, *call);
  else
    run_attention<float>(*pool, *step, *call);
}

void KVR_ENTRY(linear_)(const kvr::Linear* l, int32_t dtype, const float* x, float* out, int32_t rows, void* scratch) {
  if (dtype == kvr::kBfloat16)
    run_linear<bf16>(*l, x, out, rows, scratch);
  else
    run_linear<float>(*l, x, out, rows, scratch);
}

int64_t KVR_ENTRY(linear_scratch_bytes_)(const kvr::Linear* l, int32_t rows) {
  return (kLinearScratchFloats + rows * padded(l->in)) * 4;
}
}
