// A weight matrix in the layout of the kernels, and its product with activations.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace pinscher {

inline size_t blocks(size_t count, size_t size) { return (count + size - 1) / size; }

// Activations of `tokens` tokens: tiles of [features][TILE].
struct Activations {
  size_t tokens = 0, features = 0;
  Array<float> values;
  void shape(size_t new_tokens, size_t new_features);  // what was there is gone
  size_t tiles() const { return blocks(tokens, TILE); }
  size_t in_tile(size_t tile) const { return tokens - tile * TILE < TILE ? tokens - tile * TILE : TILE; }
  float* tile(size_t number) { return values.data() + number * features * TILE; }
  const float* tile(size_t number) const { return values.data() + number * features * TILE; }
};

// The same as int16, and what one unit of each token is worth in each chunk.
struct Shorts {
  Array<int16_t> values;
  Array<float> scale;  // [tile][chunk][TILE]
  Array<float> worth;  // of a unit before chunks have one scale: [tile][block of BLOCK_N features][TILE]
};

enum class Kind { f32, i8, dense };

class Matrix {
 public:
  // Row-major weights [rows, columns]; zeros are left out.
  Matrix(const float* weights, size_t rows, size_t columns, bool sparse);
  // The same as codes, of which -128 is none, with a scale for each row.
  Matrix(const int8_t* codes, const float* scale, size_t rows, size_t columns);

  size_t rows, columns, nonzeros = 0;
  Kind kind;
  mutable std::atomic<uint64_t> work{0};  // nonzeros times tokens so far
  size_t bytes() const;
  void count_work(size_t tokens) const { work.fetch_add(nonzeros * tokens, std::memory_order_relaxed); }

  // y = W x + bias (bias may be null), then the activation; `shorts` is the int16 form of x, made by narrow.
  void multiply(Team& team, const Kernels& use, const Activations& x, const Shorts& shorts, const float* bias,
                Activation then, Activations& y) const;
  // The same for BLOCK_N rows of y, whose shape is there already.
  void multiply_block(const Kernels& use, const Activations& x, const Shorts& shorts, size_t row_block,
                      const float* bias, Activation then, Activations& y) const;
  // The int16 form of x made where x is made: BLOCK_N features of a tile at a time, and when all are there, one scale for
  // each chunk.
  void narrow_block(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part, Shorts& out) const;
  void narrow_features(const Kernels& use, const Activations& x, size_t block, Shorts& out) const;  // of all tiles
  void settle(Team& team, const Kernels& use, size_t tokens, Shorts& out) const;
  // y = W x + bias and the activation as int16 for `next`, both int8, without ever keeping all of y in fp32.
  void multiply_short(Team& team, const Kernels& use, const Activations& x, const Shorts& shorts, const float* bias,
                      Activation then, const Matrix& next, Shorts& y) const;
  // Whether x is small enough to stay in the second cache while some of the rows are multiplied.
  bool stays_near(const Activations& x) const;
  // One token: x [columns], y [rows].
  void multiply_one(Team& team, const float* x, const float* bias, float* y) const;
  // Makes the int16 form of x, if this matrix needs one: all of it, or STRIP tokens of it where `out` has room already.
  void narrow(Team& team, const Kernels& use, const Activations& x, Shorts& out) const;
  void narrow_strip(const Kernels& use, const Activations& x, size_t strip, Shorts& out) const;
  void make_room(size_t tokens, Shorts& out) const;

 private:
  template <typename Value, typename Source>
  void pack(const Source* source, std::vector<Value>& values);
  template <typename Value>
  Block<Value> block(size_t row_block, size_t column_block, const std::vector<Value>& values) const;
  void bound_sums(const int8_t* codes);
  void multiply_tile(const Kernels& use, const Activations& x, const Shorts& shorts, size_t row_block, size_t tile,
                     const float* bias, Activation then, Activations& y) const;
  void one_block(size_t row_block, size_t column_block, const float* x, float* sums) const;
  void tile_f32(const Kernels& use, const Activations& x, size_t row_block, size_t tile, float* y) const;
  void tile_i8(const Kernels& use, size_t tokens, const Shorts& shorts, size_t row_block, size_t tile,
               const float* bias, Activation then, float* y) const;

  std::vector<size_t> line_start_, value_start_;  // [row blocks × column blocks + 1]
  std::vector<Line> lines_;
  std::vector<uint8_t> at_;
  std::vector<float> f32_;
  std::vector<int8_t> i8_;
  std::vector<float> scale_, bound_;  // of i8: a row's scale, a chunk's bound
  Array<float> panels_;               // of dense: [rows / PANEL][columns][PANEL]
};

}  // namespace pinscher
