#include "matrix.h"

#include <algorithm>

namespace pinscher {
namespace {

constexpr size_t NEAR = 640 << 10;  // bytes of activations that stay in the second cache beside the weights

}  // namespace

bool Matrix::stays_near(const Activations& x) const { return x.tiles() * columns * TILE * form().width() <= NEAR; }

void Matrix::multiply_block(const Kernels& use, const Activations& x, const Operand& operand, size_t row_block,
                            const float* bias, Activation then, Activations& y) const {
  for (size_t tile = 0; tile < x.tiles(); ++tile)
    multiply_tile(use, x, operand, row_block, tile, bias, then, y.tile(tile) + row_block * BLOCK_N * TILE);
}

void Matrix::multiply(Team& team, const Kernels& use, const Activations& x, const Operand& operand, const float* bias,
                      Activation then, Activations& y) const {
  y.shape(x.tokens, rows);
  count_work(x.tokens);
  const size_t row_blocks = blocks(rows, BLOCK_N);
  // Either all tiles of some rows together, whose weights then come from far away only once, or all rows of a tile one
  // after the other, if the tiles do not stay in the second cache together, or there are too few rows to go round.
  if (stays_near(x) && row_blocks >= 3 * team.threads())
    team.each(row_blocks, [&](size_t block, size_t) { multiply_block(use, x, operand, block, bias, then, y); });
  else
    team.each(row_blocks * x.tiles(), [&](size_t item, size_t) {
      const size_t tile = item / row_blocks, row_block = item % row_blocks;
      multiply_tile(use, x, operand, row_block, tile, bias, then, y.tile(tile) + row_block * BLOCK_N * TILE);
    });
}

void Matrix::multiply_to(Team& team, const Kernels& use, const Activations& x, const Operand& operand,
                         const float* bias, Activation then, const Form& form, Operand& y) const {
  const size_t tiles = x.tiles(), row_blocks = blocks(rows, BLOCK_N);
  form.make_room(x.tokens, y);
  count_work(x.tokens);
  const bool near = stays_near(x);  // as in multiply
  team.each(row_blocks * tiles, [&](size_t item, size_t) {
    const size_t tile = near ? item % tiles : item / row_blocks, row_block = near ? item / tiles : item % row_blocks;
    alignas(LINE) float made[BLOCK_N * TILE];
    multiply_tile(use, x, operand, row_block, tile, bias, then, made);
    form.narrow_part(use, tile, x.in_tile(tile), row_block, made, y);
  });
  form.settle(team, use, x.tokens, y);
}

void Matrix::multiply_one(Team& team, const float* x, const float* bias, float* y) const {
  count_work(1);
  std::vector<float> whole;
  if (columns % QUAD) {
    whole.assign(blocks(columns, QUAD) * QUAD, 0.0f);
    std::copy_n(x, columns, whole.data());
    x = whole.data();
  }
  team.each(blocks(rows, BLOCK_N), [&](size_t row_block, size_t) {
    const size_t first = row_block * BLOCK_N;
    multiply_one_block(row_block, x, y + first);
    for (size_t r = 0; bias && r < rows_of(row_block); ++r) y[first + r] += bias[first + r];
  });
}

}  // namespace pinscher
