// The inner loops, once for each instruction set: kernels.inc is their one source, kernels_<isa>.cpp compile it.
//
// Activations are feature-major: a tile holds 64 tokens, and the tokens of a feature lie side by side. A product y = W x
// walks the nonzeros of W; each multiplies one feature of up to 64 tokens and adds to one output.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pinscher {

constexpr size_t TILE = 64;       // tokens of a tile
constexpr size_t BLOCK_N = 128;   // outputs of one piece of work
constexpr size_t CHUNK = 768;     // inputs summed in int16 before the sum becomes fp32
constexpr size_t STRIP = 32;      // tokens normalised or narrowed together
constexpr size_t PANEL = 6;       // rows of a dense matrix multiplied together
constexpr size_t QUAD = 4;        // neighbouring inputs whose bytes lie side by side: a group
constexpr size_t GROUPS = 96;     // groups of inputs whose tile of bytes stays in the first cache
constexpr size_t FEW_ROWS = 4;    // rows of a dense matrix of bytes multiplied together

constexpr float FULL = 32766;        // the length of a vector of int16, none of which can leave its range
constexpr size_t MOST_INPUTS = 131072;  // 128 · 127 times which stays within int32: sums of bytes never overflow
constexpr size_t MOST_KEYS = 16384;  // whose rounded weights times values stay within int32

// Floats that attention needs beside what goes in and out, in fp32 or int16.
inline size_t attention_room(size_t stride, size_t width) { return ((width + 1) / 2 + TILE + 1) * stride; }

// The weights of one output for a group of inputs.
struct Quad {
  int8_t weight[QUAD];
};

// Inputs whose tile stays in the first cache; an index into them, or into their groups, is a byte.
template <typename Value>
constexpr size_t BLOCK_K = 128;
template <>
inline constexpr size_t BLOCK_K<int8_t> = 256;  // they multiply int16
template <>
inline constexpr size_t BLOCK_K<Quad> = GROUPS * QUAD;  // they multiply int8

// One output row of a block, and how many nonzeros it has there; rows come sorted by that count.
struct Line {
  uint16_t row, count;
};

// The nonzeros of up to BLOCK_N rows and BLOCK_K columns, line by line.
template <typename Value>
struct Block {
  const Line* lines;
  size_t count;
  const uint8_t* at;  // column, or group of them, local
  const Value* values;
};

enum class Activation : int { none, gelu, gelu_tanh, relu, silu, gelu_short };  // the last: for what becomes int16

// Keys and values of one head as int16, each token at scales of its own. Rows are `stride`, a multiple of TILE, apart.
struct KeysValues {
  int32_t* keys;    // two features in one number: [width / 2, rounded up][stride]
  int16_t* values;  // [width][stride]
  float *key_worth, *value_worth;  // of a unit, for each token
  size_t stride;
};

// The ends of a token's range of numbers and what a unit of its int16 is worth, for one part of the features; [TILE] each.
struct Range {
  float *low, *high, *worth;
};

// What turns sums of bytes into outputs: row · (sum · scale[token] + middle[token] · total) + start, where `total` is the sum
// of the row's weights.
struct Rows {
  const float *scale, *start;  // no start: nothing is added
  const int32_t* total;
};

struct Norm {
  const float *weight, *bias;  // no bias: root mean square only
  float epsilon;
};

// What a criterion looks at; `steps`: whether the score is that of the weight after a step of plain descent.
struct Scored {
  const float *weight, *grad;
  float lr;
  bool steps;
};

struct Window {
  float length, mean_share, spread_share;  // shares of the new in the averages, below a half
};

struct Kernels {
  const char* name;
  bool (*supported)();

  // y[row][token] += Σ value · x[at][token], for the first `tokens` of a tile
  void (*spmm_f32)(const Block<float>&, const float* x, float* y, size_t tokens);
  // The same in int16: products are (257 · value · x + 2^14) >> 15. Sums wrap around. `fresh`: y need not be zero before,
  // and the block has a line for each row, even of no nonzeros.
  void (*spmm_i16)(const Block<int8_t>&, const int16_t* x, int16_t* y, size_t tokens, bool fresh);
  // out[row][token] = sum[row][token] · row_scale[row] · token_scale[token] + start[row], in fp32; without a start it is
  // added to what is there
  void (*widen)(const int16_t* sum, size_t rows, const float* row_scale, const float* token_scale, const float* start,
                float* out, size_t tokens);
  // A strip of a tile as int16; scale[chunk][TILE] is what widen wants. `bound` per chunk: see Matrix::bound_sums.
  void (*narrow)(const float* tile, size_t features, const float* bound, int16_t* out, float* scale);
  // Tokens of a strip whose features were narrowed BLOCK_N by BLOCK_N to the length FULL, as by narrow, get one scale for
  // each chunk, in place; worth[block][TILE] is what a unit was worth.
  void (*settle)(int16_t* tile, size_t features, const float* worth, const float* bound, float* scale);
  // Bytes of activations lie as [group][TILE][QUAD]; a byte b of a token stands for middle + b · scale, |b| ≤ 127. Some sets
  // keep them 128 higher, as their instruction wants them: only these functions know.
  //
  // y[row][token] += Σ weights · bytes. `totals`, the sums of the rows' weights: y need not be zero before, and the block
  // has a line for each row, even of no groups.
  void (*spmm_bytes)(const Block<Quad>&, const int8_t* x, int32_t* y, size_t tokens, const int32_t* totals);
  // The same for `rows` rows of all `groups`: panels of FEW_ROWS rows, [panel][of_all][FEW_ROWS], of whose groups x has some.
  void (*dense_bytes)(const Quad* panels, size_t of_all, size_t rows, size_t groups, const int8_t* x, int32_t* y,
                      size_t tokens, const int32_t* totals);
  // out[row][token] in fp32; see Rows
  void (*widen_bytes)(const int32_t* sum, size_t rows, const Rows&, const float* scale, const float* middle, float* out,
                      size_t tokens);
  // A strip of a tile as bytes. A token that is not finite gets the scale NaN, so that its outputs become NaN.
  void (*narrow_bytes)(const float* tile, size_t features, int8_t* out, float* scale, float* middle);
  // Some features of a strip as int16 at a scale of their own, [feature][TILE]; and when all are there, BLOCK_N by BLOCK_N,
  // as bytes. `parts`: the first part's Range, the next ones' lie 3 · TILE floats apart.
  void (*narrow_part)(const float* part, size_t features, int16_t* out, const Range&);
  void (*settle_bytes)(const int16_t* tile, size_t features, const Range& parts, int8_t* out, float* scale, float* middle);
  // y[row][token] += Σ_k panel[k][row] · x[k][token] for `rows` ≤ PANEL
  void (*dense)(const float* panel, size_t rows, size_t features, const float* x, float* y, size_t tokens);
  void (*activate)(Activation, float* values, size_t rows, size_t tokens);  // of a tile
  // tile[feature][token] = norm(tile + residual) over the features, for a strip of a tile; residual may be null
  void (*norm)(float* tile, const float* residual, size_t features, const Norm&);
  // out[d][i] = Σ_j v[d][j] · softmax_j(Σ_d k[d][j] · q[d][i]) for keys j, queries i; rows are `stride` floats apart.
  // `relative`, if any, holds what is added to the score of (i, j) at [i - j + keys - 1]. scratch: keys * 64 floats.
  void (*attention)(const float* q, const float* k, const float* v, float* out, size_t stride, size_t queries,
                    size_t keys, size_t width, const float* relative, float* scratch);
  // Keys and values [width][stride] as int16, whole strips of tokens at a time
  void (*shorten)(const float* k, const float* v, size_t stride, size_t width, size_t tokens, const KeysValues& out);
  // The same attention with int16 products, for at most MOST_KEYS keys; q and out have the stride of keys and values.
  // scratch: attention_room(stride, width) floats.
  void (*attention_i16)(const float* q, const KeysValues&, float* out, size_t queries, size_t keys, size_t width,
                        const float* relative, float* scratch);
  // How many of `count` scores are above `low`; those of them that are at most `high` are written to `inside`, which has
  // room for `room` of them, and counted. False if that is too little by a vector, or a score is NaN.
  bool (*bracket)(const float* scores, size_t count, float low, float high, float* inside, size_t room, size_t* above,
                  size_t* found);
  // One step of a window of scores: sum += |grad · weight|, or |grad · (weight - lr · grad)|
  void (*observe)(const Scored&, float* sum, size_t count);
  // Its last step: the mean over the window goes into the two averages, and the sum starts anew.
  void (*fold)(const Scored&, const Window&, float* sum, float* mean, float* spread, size_t count);
};

// What kinds of matrices cost; see isas.inc.
struct Costs {
  double f32, i8, groups, dense8;
};

// A row of isas.inc.
struct Isa {
  const Kernels& kernels;
  Costs costs;
};

#define ISA(name, ...) extern const Kernels name##_kernels;
#include "isas.inc"
#undef ISA

// Every set that was compiled, in the order of isas.inc.
const std::vector<Isa>& all_isas();
// The widest that this machine runs, or the one that is asked for (null if it is not there or cannot run).
const Kernels* kernels(const char* name = nullptr);

}  // namespace pinscher

#define KERNELS(isa)                                                                                               \
  {#isa, isa::supported, isa::spmm_f32, isa::spmm_i16, isa::widen, isa::narrow, isa::settle, isa::spmm_bytes, \
   isa::dense_bytes, isa::widen_bytes, isa::narrow_bytes, isa::narrow_part, isa::settle_bytes, isa::dense, isa::activate, isa::norm, \
   isa::attention, isa::shorten, isa::attention_i16, isa::bracket, isa::observe, isa::fold}
