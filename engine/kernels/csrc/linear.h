// Linear layers over packed weights. An item of work is a group of two panels (64 outputs) for a block of rows; whoever takes
// it streams the group's weights once and hands finished rows of 64 outputs to the stage that follows (bias, residual,
// activation, …) while they are still in the first cache.
#pragma once
#include "abi.h"
#include "team.h"
#include "tiles.h"

namespace {

using kvr::kPanel;
using kvr::Linear;

constexpr int kGroupPanels = 2;
constexpr int kGroup = kGroupPanels * kPanel;
constexpr int kRowBlock = 16 * kMaxRows;  // with kDepth inputs each they stay in the second-level cache
constexpr int kDepth = 768;               // inputs of a panel that are widened at a time
constexpr int kWidenFromRows = 40;        // where one pass that widens a panel costs less than widening it in every tile

// What a linear layer with weights of type W reads.
template <class W>
struct InputOf {
  using type = float;
};
#if defined(KVR_BF16_DOT)
template <>
struct InputOf<bf16> {
  using type = bf16;
};
#endif
template <class W>
using Input = typename InputOf<W>::type;

KVR_INLINE int64_t padded(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }  // every row buffer's stride

// Per thread: results of one item (twice: gate and up), and one widened piece of a panel.
constexpr int64_t kLinearScratchFloats = 2 * int64_t(kRowBlock) * kGroup + kDepth * kPanel;

inline void widen_panel(const uint8_t* panel, int pairs, float* out) {
  for (int k = 0; k < pairs; k++) {
    for (int n = 0; n < kPanel; n += kLanes) {
      U pair = load_bits(panel + k * 4 * kPanel + n * 4);
      store(out + 2 * k * kPanel + n, widen_first(pair));
      store(out + (2 * k + 1) * kPanel + n, widen_second(pair));
    }
  }
}

// Few rows, or weights that need no widening: c[rows][64] = x × group, tile by tile out of the panels.
template <class X>
inline void stream_group(const uint8_t* w, int64_t panel_bytes, int pairs, int outputs, const X* x, int64_t x_row, int rows,
                         float* c, int limit) {
  int tiles = ceil_div(rows, limit);
  for (int t = 0; t < tiles; t++) {
    int first = rows * t / tiles, end = rows * (t + 1) / tiles;
    with_rows(end - first, [&](auto count) {
      constexpr int R = decltype(count)::value;
      // Few rows take more outputs at once, so that enough independent sums hide the multiplier's latency.
      constexpr int kWide = kLanes == 16 ? (R <= 3 ? 4 : 2) : (R == 1 ? 8 : R == 2 ? 4 : 2);
      // The first tile, which waits for memory, fetches the next group for the tiles that follow; those find theirs in the cache.
      int64_t ahead = t == 0 ? outputs / kPanel * panel_bytes : 0;
      int n = 0;
      for (; n + kWide * kLanes <= outputs; n += kWide * kLanes)
        tile<R, kWide>(x + first * x_row, x_row, w + n / kPanel * panel_bytes + n % kPanel * 4, panel_bytes, pairs,
                       ahead, c + first * kGroup + n, kGroup);
      for (; n < outputs; n += 2 * kLanes)
        tile<R, 2>(x + first * x_row, x_row, w + n / kPanel * panel_bytes + n % kPanel * 4, panel_bytes, pairs,
                   ahead, c + first * kGroup + n, kGroup);
    });
  }
}

inline void group_product(const Linear& l, int panel, int panels, const float* x, int64_t x_row, int rows, float* c,
                          float* widened, float) {
  const float* w = static_cast<const float*>(l.weight) + int64_t(panel) * l.in * kPanel;
  int64_t next = int64_t(l.in) * kPanel;
  if (rows <= 2 && panels == 2) {
    with_rows(rows, [&](auto count) {
      constexpr int R = decltype(count)::value <= 2 ? decltype(count)::value : 1;
      constexpr int kWide = kLanes == 16 ? 4 : R == 1 ? 8 : 4;
      for (int n = 0; n < kGroup; n += kWide * kLanes)
        tile<R, kWide>(x, x_row, 1, w + n / kPanel * next + n % kPanel, kPanel, next, l.in, c + n, kGroup, false);
    });
    return;
  }
  (void)widened;
  for (int p = 0; p < panels; p++)
    for (int k = 0; k < l.in; k += kDepth)
      multiply(x + k, x_row, 1, w + p * next + int64_t(k) * kPanel, kPanel, min_of(kDepth, l.in - k), c + p * kPanel,
               kGroup, rows, k > 0);
}

template <class X>
inline void group_product(const Linear& l, int panel, int panels, const X* x, int64_t x_row, int rows, float* c,
                          float* widened, bf16) {
  int pairs = ceil_div(l.in, 2);
  int64_t panel_bytes = int64_t(pairs) * 4 * kPanel;
  const uint8_t* w = static_cast<const uint8_t*>(l.weight) + panel * panel_bytes;
  if constexpr (sizeof(X) == 4) {
    if (rows >= kWidenFromRows) {
      for (int p = 0; p < panels; p++)
        for (int k = 0; k < pairs; k += kDepth / 2) {
          int now = min_of(kDepth / 2, pairs - k);
          widen_panel(w + p * panel_bytes + int64_t(k) * 4 * kPanel, now, widened);
          multiply(x + 2 * k, x_row, 1, widened, kPanel, 2 * now, c + p * kPanel, kGroup, rows, k > 0);
        }
      return;
    }
    stream_group(w, panel_bytes, pairs, panels * kPanel, x, x_row, rows, c, kLanes == 16 ? 12 : 5);
  } else {
    stream_group(w, panel_bytes, pairs, panels * kPanel, x, x_row, rows, c, kMaxRows);
  }
}

KVR_INLINE void add_bias(const Linear& l, int first, int outputs, int rows, float* c) {
  if (!l.bias) return;
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < outputs; n += kLanes)
      store(c + r * kGroup + n, load(c + r * kGroup + n) + load(l.bias + first + n));
}

// Calls finish(row, first output, number of outputs (a multiple of 32), their values, group) for every row and group.
// With `second`, a layer of the same shape, values of both come together: finish(…, values, second values, group).
template <class W, class Finish>
inline void linear_stage(Team& team, const Linear& l, const Linear* second, const Input<W>* x, int64_t x_row, int rows,
                         Finish finish) {
  int panels = ceil_div(l.out, kPanel), groups = ceil_div(panels, kGroupPanels);
  int blocks = ceil_div(rows, kRowBlock);
  int block_rows = ceil_div(ceil_div(rows, blocks), kMaxRows) * kMaxRows;
  blocks = ceil_div(rows, block_rows);
  float* c = reinterpret_cast<float*>(team.scratch);
  float* c2 = c + int64_t(kRowBlock) * kGroup;
  float* widened = c2 + int64_t(kRowBlock) * kGroup;
  team.share(blocks * groups, [&](int item) {
    int group = item % groups, first_row = item / groups * block_rows;
    int now = min_of(block_rows, rows - first_row);
    int panel = group * kGroupPanels, count = min_of(kGroupPanels, panels - panel);
    const Input<W>* block = x + first_row * x_row;
    group_product(l, panel, count, block, x_row, now, c, widened, W{});
    add_bias(l, panel * kPanel, count * kPanel, now, c);
    if (second) {
      group_product(*second, panel, count, block, x_row, now, c2, widened, W{});
      add_bias(*second, panel * kPanel, count * kPanel, now, c2);
    }
    for (int r = 0; r < now; r++)
      finish(first_row + r, panel * kPanel, count * kPanel, c + r * kGroup, c2 + r * kGroup, group);
  });
}

}  // namespace
