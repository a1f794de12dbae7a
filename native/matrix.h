// Weight matrices in the layouts of the kernels, and their products with activations.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "operand.h"

namespace pinscher {

// What a matrix does with its weights and with what it multiplies, and where: matrices.cpp.
//
//   f32     fp32, nonzero by nonzero
//   dense   fp32, all of them
//   i8      int8, nonzero by nonzero; int16 activations
//   groups  int8, by groups of four neighbouring inputs of an output, of which one at least is not zero; int8 activations
//   dense8  int8, all of them, in the same way
enum class Kind { f32, dense, i8, groups, dense8 };
constexpr Kind KINDS[] = {Kind::f32, Kind::dense, Kind::i8, Kind::groups, Kind::dense8};
const char* name_of(Kind);

class Matrix {
 public:
  virtual ~Matrix() = default;
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const size_t rows, columns;
  const Kind kind;
  size_t nonzeros = 0;                    // or all weights, where zeros are multiplied too
  size_t units = 0;                       // of what its cost is counted in: see isas.inc
  mutable std::atomic<uint64_t> work{0};  // nonzeros times tokens so far
  virtual size_t bytes() const = 0;
  virtual const Form& form() const = 0;  // in which it wants what it multiplies
  void count_work(size_t tokens) const { work.fetch_add(nonzeros * tokens, std::memory_order_relaxed); }

  // y = W x + bias (bias may be null), then the activation; `operand` is x in this matrix' form.
  void multiply(Team& team, const Kernels& use, const Activations& x, const Operand& operand, const float* bias,
                Activation then, Activations& y) const;
  // The same for BLOCK_N rows of y, whose shape is there already.
  void multiply_block(const Kernels& use, const Activations& x, const Operand& operand, size_t row_block,
                      const float* bias, Activation then, Activations& y) const;
  // y = W x + bias and the activation in a narrow form, without ever keeping all of y in fp32.
  void multiply_to(Team& team, const Kernels& use, const Activations& x, const Operand& operand, const float* bias,
                   Activation then, const Form& form, Operand& y) const;
  // Whether x is small enough to stay in the second cache while some of the rows are multiplied.
  bool stays_near(const Activations& x) const;
  // One token: x [columns], y [rows].
  void multiply_one(Team& team, const float* x, const float* bias, float* y) const;

 protected:
  Matrix(Kind kind, size_t rows, size_t columns) : rows(rows), columns(columns), kind(kind) {}
  size_t rows_of(size_t row_block) const { return std::min(BLOCK_N, rows - row_block * BLOCK_N); }

  // BLOCK_N rows of a tile: y [rows][TILE]; `bias`, if any, is that of all rows.
  virtual void multiply_tile(const Kernels& use, const Activations& x, const Operand& operand, size_t row_block,
                             size_t tile, const float* bias, Activation then, float* y) const = 0;
  // BLOCK_N rows of one token, whose x has zeros behind it up to a multiple of QUAD
  virtual void multiply_one_block(size_t row_block, const float* x, float* y) const = 0;
};

// Row-major weights [rows, columns].
std::shared_ptr<Matrix> matrix_of(const float* weights, size_t rows, size_t columns, Kind kind);
// The same as codes, of which -128 is none, with a scale for each row.
std::shared_ptr<Matrix> matrix_of(const int8_t* codes, const float* scale, size_t rows, size_t columns, Kind kind);

}  // namespace pinscher
