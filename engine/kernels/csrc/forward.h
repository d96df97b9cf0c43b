// A whole step: embedding, all layers, and the wanted rows' logits, in one parallel region.
//
//     x ─ norm ─▶ y ─ qkv ─▶ rows ─ (qk-norm, rotation, write to the pool) ─ attention ─▶ attended ─ output ─▶ x += …
//     x ─ norm ─▶ y ─ gate, up ─ activation ─▶ inner ─ down ─▶ x += …
//
// The residual stream and everything between two products stay in float32 for bfloat16 weights too.
#pragma once
#include "attention.h"

namespace {

using kvr::Layer;
using kvr::Model;
using kvr::Step;

// Where the parts of the workspace lie; Python asks for the total.
struct Workspace {
  int64_t end = 0;
  int64_t counters, turns, x, y, rows, attended, inner, branch, best, items, partials, scratch, scratch_bytes;
  int64_t counter_bytes;

  int64_t take(int64_t bytes) {
    int64_t at = end;
    end += (bytes + 63) / 64 * 64;
    return at;
  }

  Workspace(const Model& m, const Step& s) {
    int group = m.heads / m.kv_heads, rows_now = s.rows, num_items = 0, num_partials = 0;
    for (int i = 0; i < s.num_sequences; i++) {
      const kvr::Sequence& q = s.sequences[i];
      int splits = ceil_div(q.start + 1, kSplit);
      num_items += q.num_tokens == 1 ? splits : ceil_div(q.num_tokens, max_of(1, kTileLanes / group));
      num_partials += q.num_tokens == 1 ? splits : 0;
    }
    int64_t turn_floats = 0;
    for (int i = 0; i < m.num_ropes; i++) turn_floats += int64_t(rows_now) * m.ropes[i].rotary_dim;
    counter_bytes = int64_t(m.num_layers * 12 + 12) * kStageCounters * 4;
    counters = take(counter_bytes);
    turns = take(turn_floats * 4);
    x = take(rows_now * padded(m.hidden) * 4);
    y = take(int64_t(max_of(rows_now, s.num_logit_rows)) * padded(m.hidden) * 4);
    rows = take(rows_now * row_stride(m) * 4);
    attended = take(rows_now * padded(m.heads * m.dim) * 4);
    inner = take(rows_now * padded(m.intermediate) * 4);
    branch = take(rows_now * padded(m.hidden) * 4);
    best = take(int64_t(s.num_logit_rows) * ceil_div(m.vocab, kGroup) * 8);
    items = take(int64_t(num_items) * sizeof(Item));
    partials = take(int64_t(num_partials) * m.kv_heads * (padded(2 * group) + group * padded(m.dim)) * 4);
    int64_t attention = Attention<float, float>::scratch_floats(m.dim, group);
    scratch_bytes = 64 + 4 * (kLinearScratchFloats > attention ? kLinearScratchFloats : attention);
    scratch_bytes = (scratch_bytes + 63) / 64 * 64;
    scratch = take(scratch_bytes * s.threads);
  }

  static int64_t row_stride(const Model& m) { return padded((m.heads + 2 * m.kv_heads) * m.dim); }
};

struct Best {
  float value;
  int32_t index;
};

template <class W>
struct Forward {
  using In = Input<W>;
  const Model& m;
  const kvr::Pool& pool;
  const Step& s;
  Workspace at;
  uint8_t* base;
  int num_items = 0, num_partials = 0;

  Forward(const Model& model, const kvr::Pool& kv_pool, const Step& step)
      : m(model), pool(kv_pool), s(step), at(model, step), base(static_cast<uint8_t*>(step.workspace)) {
    num_items = list_items(s.sequences, s.num_sequences, m.heads / m.kv_heads, part<Item>(at.items), &num_partials);
    __builtin_memset(base + at.counters, 0, at.counter_bytes);
  }

  template <class T>
  T* part(int64_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }

  void run() {
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
    {
#if defined(_OPENMP)
      Team team{omp_get_thread_num(), omp_get_num_threads(), part<int32_t>(at.counters), nullptr};
#else
      Team team{0, 1, part<int32_t>(at.counters), nullptr};
#endif
      team.scratch = base + at.scratch + team.rank * at.scratch_bytes;
      embed(team);
      for (int i = 0; i < m.num_layers; i++) layer(team, m.layers[i], i);
      if (s.num_logit_rows > 0) head(team);
    }
  }

  void embed(Team& team) {
    int64_t hidden = padded(m.hidden);
    float* x = part<float>(at.x);
    team.share(ceil_div(s.rows, 4), [&](int block) {
      for (int r = block * 4; r < min_of(s.rows, block * 4 + 4); r++) {
        float* row = x + r * hidden;
        const W* from = static_cast<const W*>(m.embedding) + int64_t(s.token_ids[r]) * m.hidden;
        const W* shift = static_cast<const W*>(m.position_rows);
        widen_row(from, row, m.hidden);
        for (int i = m.hidden; i < hidden; i++) row[i] = 0;
        if (m.embedding_scale != 1.0f)
          for (int i = 0; i < hidden; i += kLanes) store(row + i, load(row + i) * splat(m.embedding_scale));
        if (shift)
          for (int i = 0; i < m.hidden; i++) row[i] += widen(shift[int64_t(s.positions[r]) * m.hidden + i]);
        float* turn = part<float>(at.turns);
        for (int rope = 0; rope < m.num_ropes; rope++) {
          fill_turn(m.ropes[rope], s.positions[r], turn + int64_t(r) * m.ropes[rope].rotary_dim);
          turn += int64_t(s.rows) * m.ropes[rope].rotary_dim;
        }
      }
    });
  }

  void layer(Team& team, const Layer& l, int index) {
    int64_t hidden = padded(m.hidden), attended_row = padded(m.heads * m.dim), inner_row = padded(m.intermediate);
    float* rows = part<float>(at.rows);
    int64_t rows_row = Workspace::row_stride(m);
    const In* y = norm_stage(team, l.attention_norm);
    linear_stage<W>(team, l.qkv, nullptr, y, hidden, s.rows, [&](int r, int first, int n, float* c, float*, int) {
      copy_row(c, rows + r * rows_row + first, n);
    });
    place_stage(team, l, index);
    Attention<W, In> attention{pool,           s.sequences, s.block_ids, rows,     rows_row, part<In>(at.attended), attended_row,
                               part<float>(at.partials), index, l.window, m.heads / m.kv_heads, m.attention_softcap};
    attention_stage(team, attention, part<Item>(at.items), num_items, num_partials > 0);
    residual_stage(team, l.attention_output, l.attention_output_norm, part<In>(at.attended), attended_row);
    y = norm_stage(team, l.mlp_norm);
    In* inner = part<In>(at.inner);
    const kvr::Linear* up = l.gate.weight ? &l.up : nullptr;
    linear_stage<W>(team, up ? l.gate : l.up, up, y, hidden, s.rows, [&](int r, int first, int n, float* c, float* u, int) {
      for (int i = 0; i < n; i += kLanes) {
        V v = activate(load(c + i), m.activation);
        store(inner + r * inner_row + first + i, up ? v * load(u + i) : v);
      }
    });
    residual_stage(team, l.down, l.mlp_output_norm, inner, inner_row);
  }

  // y = norm(x), or x itself as the products' input type.
  const In* norm_stage(Team& team, const kvr::Norm& norm) {
    int64_t hidden = padded(m.hidden);
    float* x = part<float>(at.x);
    In* y = part<In>(at.y);
    team.share(ceil_div(s.rows, 4), [&](int block) {
      for (int r = block * 4; r < min_of(s.rows, block * 4 + 4); r++)
        norm_row(x + r * hidden, y + r * hidden, norm);
    });
    return y;
  }

  void norm_row(const float* x, In* y, const kvr::Norm& norm) {
    if (norm.kind == kvr::kNoNorm)
      copy_row(x, y, int(padded(m.hidden)));
    else
      normalise(x, y, norm, m.hidden);
    for (int64_t i = m.hidden; i < padded(m.hidden); i++) narrow(y + i, 0.0f);
  }

  // x += scale × l(input), with a norm in between where the family has one.
  void residual_stage(Team& team, const kvr::Linear& l, const kvr::Norm& norm, const In* input, int64_t input_row) {
    int64_t hidden = padded(m.hidden);
    float* x = part<float>(at.x);
    bool direct = norm.kind == kvr::kNoNorm;
    float* branch = part<float>(at.branch);
    V scale = splat(m.residual_scale);
    linear_stage<W>(team, l, nullptr, input, input_row, s.rows, [&](int r, int first, int n, float* c, float*, int) {
      float* to = (direct ? x : branch) + r * hidden + first;
      for (int i = 0; i < n; i += kLanes) store(to + i, direct ? load(to + i) + scale * load(c + i) : load(c + i));
    });
    if (direct) return;
    team.share(s.rows, [&](int r) {
      float* row = branch + r * hidden;
      normalise(row, row, norm, m.hidden);
      for (int i = 0; i < hidden; i += kLanes) store(x + r * hidden + i, load(x + r * hidden + i) + scale * load(row + i));
    });
  }

  // Queries and keys get their norm and rotation, queries their scale; keys and values go into the pool.
  void place_stage(Team& team, const Layer& l, int index) {
    const float* turns = part<float>(at.turns);
    for (int i = 0; i < l.rope; i++) turns += int64_t(s.rows) * m.ropes[i].rotary_dim;
    team.share(s.num_sequences == s.rows ? ceil_div(s.rows, 4) : s.num_sequences * 64, [&](int item) {
      if (s.num_sequences == s.rows) {
        for (int i = item * 4; i < min_of(s.rows, item * 4 + 4); i++) place(l, index, s.sequences[i], 0, 1, turns);
        return;
      }
      const kvr::Sequence& q = s.sequences[item / 64];
      int part = item % 64;
      place(l, index, q, int(int64_t(q.num_tokens) * part / 64), int(int64_t(q.num_tokens) * (part + 1) / 64), turns);
    });
  }

  void place(const Layer& l, int index, const kvr::Sequence& q, int first, int end, const float* turns) {
    int64_t row_stride = Workspace::row_stride(m);
    int queries = m.heads * m.dim, keys = m.kv_heads * m.dim;
    for (int i = first; i < end; i++) {
      float* row = part<float>(at.rows) + (q.first_row + i) * row_stride;
      if (m.qk_norm == kvr::kFullNorm) {
        normalise(row, row, l.query_norm, queries);
        normalise(row + queries, row + queries, l.key_norm, keys);
      } else if (m.qk_norm == kvr::kHeadNorm) {
        for (int h = 0; h < m.heads; h++) normalise(row + h * m.dim, row + h * m.dim, l.query_norm, m.dim);
        for (int h = m.heads; h < m.heads + m.kv_heads; h++) normalise(row + h * m.dim, row + h * m.dim, l.key_norm, m.dim);
      }
      if (l.rope >= 0) {
        int rotary = m.ropes[l.rope].rotary_dim;
        for (int h = 0; h < m.heads + m.kv_heads; h++)
          rotate(row + h * m.dim, turns + int64_t(q.first_row + i) * rotary, rotary);
      }
      for (int d = 0; d < queries; d++) row[d] *= m.attention_scale;
      int position = q.start + i, block = s.block_ids[q.first_block + position / pool.block_size];
      int64_t plane = (int64_t(block) * pool.num_layers + index) * 2 * pool.block_size + position % pool.block_size;
      W* to = static_cast<W*>(pool.blocks) + plane * keys;
      copy_row(row + queries, to, keys);
      copy_row(row + queries + keys, to + int64_t(pool.block_size) * keys, keys);
    }
  }

  void head(Team& team) {
    int64_t hidden = padded(m.hidden);
    const float* x = part<float>(at.x);
    In* y = part<In>(at.y);
    team.share(s.num_logit_rows, [&](int r) { norm_row(x + s.logit_rows[r] * hidden, y + r * hidden, m.norm); });
    int groups = ceil_div(m.vocab, kGroup);
    Best* best = part<Best>(at.best);
    V divisor = splat(m.logit_divisor), cap = splat(m.logit_softcap);
    linear_stage<W>(team, m.head, nullptr, y, hidden, s.num_logit_rows,
                    [&](int r, int first, int n, float* c, float*, int group) {
      for (int i = 0; i < n; i += kLanes) {
        V v = load(c + i);
        if (m.logit_divisor != 1.0f) v = v / divisor;
        if (m.logit_softcap > 0) v = cap * tanh(v / cap);
        store(c + i, v);
      }
      int count = min_of(n, m.vocab - first);
      copy_row(c, s.logits + int64_t(r) * m.vocab + first, count);
      best[int64_t(r) * groups + group] = best_of(c, first, count);
    });
    team.share(s.num_logit_rows, [&](int r) {
      Best chosen = best[int64_t(r) * groups];
      for (int i = 1; i < groups; i++) {
        Best other = best[int64_t(r) * groups + i];
        if (other.value > chosen.value) chosen = other;
        if (other.index < 0 || chosen.index < 0) chosen = Best{0, -1};
      }
      s.best[r] = chosen.index;
    });
  }

  // The lowest index of the largest value; index -1 if a value is NaN or +inf.
  static Best best_of(const float* c, int first, int count) {
    V top = splat(c[0]);
    I bad{};
    int whole = count / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) {
      V v = load(c + i);
      top = max(top, v);
      bad |= ~(v < splat(__builtin_inff()));
    }
    float value = largest(top);
    bool broken = false;
    for (int i = whole; i < count; i++) {
      value = c[i] > value ? c[i] : value;
      broken |= !(c[i] < __builtin_inff());
    }
    for (int i = 0; i < kLanes; i++) broken |= bad[i] != 0;
    if (broken) return Best{0, -1};
    int at = 0;
    while (at < count - 1 && c[at] != value) at++;
    return Best{value, first + at};
  }
};

}  // namespace
