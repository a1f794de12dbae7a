#include "tail.h"

#include <algorithm>
#include <cmath>

namespace pinscher {

Tail::Tail(size_t width, Pooling pooling, std::vector<Step> steps, bool normalise)
    : width(width), pooling(pooling), steps(std::move(steps)), normalise(normalise) {}

void Tail::pool_row(const float* hidden, const Row& row, float* out) const {
  if (pooling == Pooling::first || pooling == Pooling::last) {
    std::copy_n(hidden + (pooling == Pooling::first ? 0 : row.length - 1) * width, width, out);
    return;
  }
  const float* token = hidden + (row.length - row.keys()) * width;
  std::copy_n(token, width, out);
  for (size_t t = 1; t < row.keys(); ++t) {
    token += width;
    for (size_t k = 0; k < width; ++k) out[k] = pooling == Pooling::max ? std::max(out[k], token[k]) : out[k] + token[k];
  }
  if (pooling == Pooling::max) return;
  const float count = static_cast<float>(row.keys());
  const float share = 1 / (pooling == Pooling::mean ? count : std::sqrt(count));
  for (size_t k = 0; k < width; ++k) out[k] *= share;
}

void Tail::run(Pool& pool, const Kernels& use, const float* hidden, const std::vector<Row>& rows, size_t tokens,
               float* out) const {
  if (pooling == Pooling::none) return run_pooled(pool, use, hidden, tokens, out);
  thread_local std::vector<float> pooled;
  pooled.resize(rows.size() * width);
  size_t start = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    pool_row(hidden + start * width, rows[i], pooled.data() + i * width);
    start += rows[i].length;
  }
  run_pooled(pool, use, pooled.data(), rows.size(), out);
}

void Tail::run_pooled(Pool& pool, const Kernels& use, const float* pooled, size_t count, float* out) const {
  if (!count) return;
  Team team(pool);
  const size_t made = features();
  if (steps.empty()) {
    std::copy_n(pooled, count * width, out);
  } else {
    thread_local Activations in, result;
    thread_local Operand operand;
    in.shape(count, width);
    to_tiles(team, pooled, in);
    for (const Step& step : steps) {
      step.matrix->form().narrow(team, use, in, operand);
      step.matrix->multiply(team, use, in, operand, step.bias.empty() ? nullptr : step.bias.data(), step.activation,
                            result);
      if (step.tanh)
        for (size_t tile = 0; tile < result.tiles(); ++tile)
          for (size_t k = 0; k < result.features; ++k)
            for (size_t t = 0; t < result.in_tile(tile); ++t) {
              float& value = result.tile(tile)[k * TILE + t];
              value = std::tanh(value);
            }
      std::swap(in, result);
    }
    to_rows(team, in, out);
  }
  if (!normalise) return;
  for (size_t i = 0; i < count; ++i) {
    float* row = out + i * made;
    float sum = 0;
    for (size_t k = 0; k < made; ++k) sum += row[k] * row[k];
    const float length = std::max(std::sqrt(sum), 1e-12f);
    for (size_t k = 0; k < made; ++k) row[k] /= length;
  }
}

}  // namespace pinscher
