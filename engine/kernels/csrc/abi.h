// What crosses the border between Python and C: plain structs, mirrored field by field in engine/kernels/structs.py.
//
// A weight matrix [out, in] is packed into panels of 32 outputs, so that it is read as one stream:
//
//   float32     [panel][in]     [32]        a row of 32 outputs for each input
//   bfloat16    [panel][in / 2] [32][2]     two neighbouring inputs of an output share 32 bits: what AVX-512 BF16 multiplies,
//                                           and what a shift and a mask widen to float32 elsewhere
//
// The last panel is padded with zero outputs, and an odd number of inputs with a zero input.
#pragma once
#include <cstdint>

namespace kvr {

constexpr int kPanel = 32;

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };
enum NormKind : int32_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };
enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };
enum QkNorm : int32_t { kNoQkNorm = 0, kHeadNorm = 1, kFullNorm = 2 };

struct Linear {
  const void* weight;  // packed; null where the family has no such layer
  const float* bias;   // [out padded to panels], or null
  int32_t in, out;
};

struct Norm {
  const float* weight;
  const float* bias;  // of kLayerNorm
  float eps;
  int32_t kind;
};

struct Rope {
  const float* frequencies;  // [rotary_dim / 2] radians per position
  int32_t rotary_dim;
  float attention_factor;  // multiplies cosine and sine
};

struct Layer {
  Linear qkv, attention_output, gate, up, down;  // without gate the MLP is down(activation(up(x)))
  Norm attention_norm, attention_output_norm, mlp_norm, mlp_output_norm, query_norm, key_norm;
  int32_t rope;    // index into Model.ropes; -1: no rotation
  int32_t window;  // tokens that a query sees; 0: all
};

struct Model {
  const Layer* layers;
  const Rope* ropes;
  const void* embedding;      // [vocab, hidden] of `dtype`
  const void* position_rows;  // [position, hidden] of `dtype`, or null
  Linear head;
  Norm norm;
  int32_t dtype;  // of weights and KV pool
  int32_t num_layers, num_ropes, hidden, intermediate, heads, kv_heads, dim, vocab;
  int32_t activation, qk_norm;
  float attention_scale, attention_softcap, logit_softcap;  // a cap of 0: none
  float embedding_scale, residual_scale, logit_divisor;
};

struct Pool {
  void* blocks;  // [block, layer, k/v, token, kv_head, dim]
  int32_t num_layers, block_size, kv_heads, dim;
};

// One sequence's part of a step, as in engine.attention.SequenceRows.
struct Sequence {
  int32_t first_row, num_tokens, start, first_block;  // first_block: index into Step.block_ids
};

struct Step {
  const int32_t* token_ids;    // [rows]
  const int32_t* positions;    // [rows]
  const Sequence* sequences;   // [num_sequences]
  const int32_t* block_ids;    // all sequences' block tables, end to end
  const int32_t* logit_rows;   // [num_logit_rows] rows whose logits are wanted
  float* logits;               // [num_logit_rows, vocab]
  int32_t* best;               // [num_logit_rows] lowest id of the largest logit; -1 where a logit is NaN or +inf
  void* workspace;             // workspace_bytes(model, step), 64-byte aligned; its content is of no meaning between steps
  int32_t rows, num_sequences, num_logit_rows, threads;
};

// One layer's attention alone: for tests, and for models whose layers run elsewhere.
struct AttentionCall {
  const float* q;  // [rows, heads, dim]
  const float* k;  // [rows, kv_heads, dim]
  const float* v;
  float* output;  // [rows, heads, dim]
  int32_t layer, window, heads;
  float scale, softcap;
};

}  // namespace kvr
