// Attention over the paged pool, for any mixture of decode rows, prompt chunks and chunks behind cached prefixes.
//
// Softmax is online (FlashAttention, arXiv 2205.14135) over runs of 64 keys, in float32. Work is shared out by sequence, KV head
// (with all its query heads) and
//   - a tile of a chunk's queries: queries are the vector's lanes. Keys × queries and values × weights are the same register
//     tile as a linear layer's, with keys and values in the place of activations: nothing of the pool is transposed;
//   - a range of 256 keys of a decode row (split-K); a second stage puts the ranges together.
// The cut of a sequence depends on nothing but that sequence, so that its results do not depend on its batch.
#pragma once
#include "decode_row.h"
#include "linear.h"
#include "ops.h"

namespace {

constexpr int kSplit = 256;       // keys of one decode item
constexpr int kTileLanes = 128;   // query rows (queries × query heads of a KV head) of one tile

struct Item {
  int32_t sequence, index, partial;  // index: which tile or split; partial: number of the split's partial result, or -1
};

template <class P, class O>
struct Attention {
  const kvr::Pool& pool;
  const kvr::Sequence* sequences;
  const int32_t* block_ids;
  const float* q;  // [rows, heads, dim], scaled; row stride q_row
  int64_t q_row;
  O* output;  // [rows, heads, dim], row stride output_row
  int64_t output_row;
  float* partials;
  int layer, window, group;
  float softcap;

  int dim() const { return pool.dim; }
  int64_t stride() const { return padded(pool.dim); }
  int64_t partial_floats() const { return padded(2 * group) + group * stride(); }

  const P* rows_of(int block, int key_or_value) const {
    int64_t plane = (int64_t(block) * pool.num_layers + layer) * 2 + key_or_value;
    return static_cast<const P*>(pool.blocks) + plane * pool.block_size * pool.kv_heads * pool.dim;
  }

  // Widens keys or values of positions [first, end) of one head into `out`, padded with zeros to `stride`.
  void gather(const kvr::Sequence& s, int key_or_value, int kv_head, int first, int end, float* out) const {
    int64_t token = int64_t(pool.kv_heads) * pool.dim;
    for (int t = first; t < end;) {
      int slot = t % pool.block_size, now = min_of(end - t, pool.block_size - slot);
      const P* from = rows_of(block_ids[s.first_block + t / pool.block_size], key_or_value) + slot * token +
                      int64_t(kv_head) * pool.dim;
      for (int i = 0; i < now; i++, from += token, out += stride()) {
        widen_row(from, out, pool.dim);
        for (int d = pool.dim; d < stride(); d++) out[d] = 0;
      }
      t += now;
    }
  }


  static int64_t scratch_floats(int dim, int group) {
    int64_t d = padded(dim);
    int64_t tile = 2 * int64_t(kTileLanes) * d + int64_t(kKeys) * kPanel + 3 * kTileLanes;
    int64_t decode = 2 * int64_t(group) * d + DecodeRow::scratch_floats(group);
    return 2 * kKeys * d + (tile > decode ? tile : decode) + 4 * kPanel;
  }

  // -- prompt chunks ------------------------------------------------------------------------------------------------

  static int tile_queries(int group) { return max_of(1, kTileLanes / group); }

  void tile_item(const kvr::Sequence& s, int index, int kv_head, float* scratch) const {
    int first = index * tile_queries(group), count = min_of(tile_queries(group), s.num_tokens - first);
    int lanes = count * group, panels = ceil_div(lanes, kPanel);
    float* keys = scratch;                            // [64][stride]
    float* values = keys + kKeys * stride();          // [64][stride]
    float* queries = values + kKeys * stride();       // [panel][dim][32]
    float* sums = queries + kTileLanes * stride();    // [panel][dim][32]
    float* scores = sums + kTileLanes * stride();     // [64][32]
    float* best = scores + kKeys * kPanel;            // [lane]
    float* mass = best + kTileLanes;                  // [lane]
    int32_t* position = reinterpret_cast<int32_t*>(mass + kTileLanes);  // [lane]
    for (int lane = 0; lane < panels * kPanel; lane++) {
      int at = min_of(lane, lanes - 1);  // lanes past the last repeat it
      const float* from = q + (s.first_row + first + at / group) * q_row + (int64_t(kv_head) * group + at % group) * dim();
      float* to = queries + int64_t(lane / kPanel) * dim() * kPanel + lane % kPanel;
      for (int d = 0; d < dim(); d++) to[d * kPanel] = from[d];
      best[lane] = kHidden;
      mass[lane] = 0;
      position[lane] = s.start + first + at / group;
    }
    for (int64_t i = 0; i < int64_t(panels) * dim() * kPanel; i += kLanes) store(sums + i, V{});
    int low = s.start + first, high = low + count;  // positions of the tile's queries
    for (int t = window > 0 ? max_of(0, low - window + 1) : 0; t < high; t += kKeys) {
      int now = min_of(kKeys, high - t);
      gather(s, 0, kv_head, t, t + now, keys);
      gather(s, 1, kv_head, t, t + now, values);
      bool masked = t + now - 1 > low || (window > 0 && t <= high - 1 - window);
      for (int p = 0; p < panels; p++) {
        float* panel_sums = sums + int64_t(p) * dim() * kPanel;
        multiply(keys, stride(), 1, queries + int64_t(p) * dim() * kPanel, kPanel, dim(), scores, kPanel, now, false);
        for (int n = 0; n < kPanel; n += kLanes)
          weigh(scores + n, now, t, masked, position + p * kPanel + n, best + p * kPanel + n, mass + p * kPanel + n,
                panel_sums + n);
        multiply(values, 1, stride(), scores, kPanel, now, panel_sums, kPanel, dim(), true);
      }
    }
    for (int lane = 0; lane < lanes; lane++) {
      const float* from = sums + int64_t(lane / kPanel) * dim() * kPanel + lane % kPanel;
      O* to = output + (s.first_row + first + lane / group) * output_row +
              (int64_t(kv_head) * group + lane % group) * dim();
      float factor = 1.0f / mass[lane];
      for (int d = 0; d < dim(); d++) narrow(to + d, from[d * kPanel] * factor);
    }
  }

  // Turns one vector of lanes' scores [now][32] into weights, and rescales what was summed before.
  void weigh(float* scores, int now, int first_key, bool masked, const int32_t* position, float* best, float* mass,
             float* sums) const {
    V top = load(best), before = top;
    for (int k = 0; k < now; k++) {
      V score = soft_cap(load(scores + k * kPanel), softcap);
      if (masked) {
        I at = (I)load_bits(position), key = I{} + (first_key + k);
        I hidden = key > at;
        if (window > 0) hidden |= key <= at - window;
        score = select(hidden, splat(kHidden), score);
      }
      if (masked || softcap > 0) store(scores + k * kPanel, score);
      top = max(top, score);
    }
    V kept = exp(before - top), total = load(mass) * kept;
    for (int k = 0; k < now; k++) {
      V weight = exp(load(scores + k * kPanel) - top);
      total += weight;
      store(scores + k * kPanel, weight);
    }
    for (int d = 0; d < dim(); d++) store(sums + d * kPanel, load(sums + d * kPanel) * kept);
    store(best, top);
    store(mass, total);
  }

  // -- decode rows --------------------------------------------------------------------------------------------------

  void decode_item(const kvr::Sequence& s, int index, int partial, int kv_head, float* scratch) const {
    int64_t width = stride();
    float* queries = scratch + 2 * kKeys * width;  // [group][width]
    float* sums = queries + group * width;         // [group][width]
    int end = min_of(s.start + 1, (index + 1) * kSplit), first = index * kSplit;
    if (window > 0) first = max_of(first, s.start - window + 1);
    const float* from = q + s.first_row * q_row + int64_t(kv_head) * group * dim();
    bool whole = dim() == width;  // else rows are padded first, so that the loops need no tails
    for (int64_t i = 0; i < group * width; i++) queries[i] = sums[i] = 0;
    for (int g = 0; g < group; g++)
      for (int d = 0; d < dim(); d++) queries[g * width + (whole ? place_of<P>(d) : d)] = from[g * dim() + d];
    DecodeRow row{group, int(width), softcap, queries, sums, sums + group * width};
    row.begin();
    const P* rows[2][kKeys];  // keys of this run, and of the next one; a value lies one plane behind its key
    int64_t plane = int64_t(pool.block_size) * pool.kv_heads * pool.dim;
    for (int t = first, run = 0; t < end; t += kKeys, run ^= 1) {
      int now = min_of(kKeys, end - t);
      if (whole) {
        if (t == first) point(s, kv_head, t, now, rows[run]);
        int next = max_of(0, min_of(kKeys, end - t - kKeys));
        point(s, kv_head, t + kKeys, next, rows[run ^ 1]);
        row.add(rows[run], plane, now, rows[run ^ 1], next);
      } else {
        const float* padded_rows[kKeys];
        for (int i = 0; i < kKeys; i++) padded_rows[i] = scratch + i * width;
        gather(s, 0, kv_head, t, t + now, scratch);
        gather(s, 1, kv_head, t, t + now, scratch + kKeys * width);
        row.add(padded_rows, kKeys * width, now, padded_rows, 0);
      }
    }
    if (partial < 0) {
      for (int g = 0; g < group; g++)
        write(sums + g * width, 1.0f / row.mass()[g], s.first_row, kv_head * group + g);
      return;
    }
    float* to = partials + (int64_t(partial) * pool.kv_heads + kv_head) * partial_floats();
    for (int g = 0; g < group; g++) {
      to[2 * g] = row.best()[g];
      to[2 * g + 1] = row.mass()[g];
      copy_row(sums + g * width, to + padded(2 * group) + g * width, int(width));
    }
  }

  // Where each position's key lies.
  void point(const kvr::Sequence& s, int kv_head, int first, int count, const P** rows) const {
    int64_t token = int64_t(pool.kv_heads) * pool.dim;
    for (int done = 0; done < count;) {
      int slot = (first + done) % pool.block_size, now = min_of(count - done, pool.block_size - slot);
      const P* from = rows_of(block_ids[s.first_block + (first + done) / pool.block_size], 0) + slot * token +
                      int64_t(kv_head) * pool.dim;
      for (int end = done + now; done < end; done++, from += token) rows[done] = from;
    }
  }

  // `sums` are in the order in which the pool's rows are widened.
  void write(const float* sums, float factor, int row, int head) const {
    O* to = output + row * output_row + int64_t(head) * dim();
    bool whole = dim() == stride();
    for (int d = 0; d < dim(); d++) narrow(to + d, sums[whole ? place_of<P>(d) : d] * factor);
  }

  // Puts the splits of one decode row and KV head together.
  void combine(const kvr::Sequence& s, int partial, int splits, int kv_head, float* scratch) const {
    const float* first = partials + (int64_t(partial) * pool.kv_heads + kv_head) * partial_floats();
    int64_t next = pool.kv_heads * partial_floats();
    for (int g = 0; g < group; g++) {
      float top = kHidden, mass = 0;
      for (int i = 0; i < splits; i++) top = first[i * next + 2 * g] > top ? first[i * next + 2 * g] : top;
      for (int d = 0; d < stride(); d++) scratch[d] = 0;
      for (int i = 0; i < splits; i++) {
        const float* part = first + i * next;
        V factor = exp(splat(part[2 * g] - top));
        mass += factor[0] * part[2 * g + 1];
        const float* part_sums = part + padded(2 * group) + g * stride();
        for (int d = 0; d < stride(); d += kLanes) store(scratch + d, load(scratch + d) + factor * load(part_sums + d));
      }
      write(scratch, 1.0f / mass, s.first_row, kv_head * group + g);
    }
  }
};

// The step's items, the same for every layer. Returns their number.
inline int list_items(const kvr::Sequence* sequences, int count, int group, Item* items, int* num_partials) {
  int n = 0, partials = 0;
  for (int i = 0; i < count; i++) {
    const kvr::Sequence& s = sequences[i];
    bool decode = s.num_tokens == 1;
    int parts = decode ? ceil_div(s.start + 1, kSplit) : ceil_div(s.num_tokens, max_of(1, kTileLanes / group));
    for (int part = 0; part < parts; part++)
      // The last tiles of a chunk see the most keys: they go first, so that no thread waits long for the last one.
      items[n++] = Item{i, decode ? part : parts - 1 - part, decode && parts > 1 ? partials++ : -1};
  }
  *num_partials = partials;
  return n;
}

template <class P, class O>
inline void attention_stage(Team& team, const Attention<P, O>& a, const Item* items, int count, bool any_partial) {
  int kv_heads = a.pool.kv_heads;
  float* scratch = reinterpret_cast<float*>(team.scratch);
  team.share(count * kv_heads, [&](int n) {
    const Item& item = items[n / kv_heads];
    const kvr::Sequence& s = a.sequences[item.sequence];
    if (s.num_tokens == 1)
      a.decode_item(s, item.index, item.partial, n % kv_heads, scratch);
    else
      a.tile_item(s, item.index, n % kv_heads, scratch);
  });
  if (!any_partial) return;
  team.share(count * kv_heads, [&](int n) {
    const Item& item = items[n / kv_heads];
    if (item.partial < 0 || item.index > 0) return;
    const kvr::Sequence& s = a.sequences[item.sequence];
    a.combine(s, item.partial, ceil_div(s.start + 1, kSplit), n % kv_heads, scratch);
  });
}

}  // namespace
