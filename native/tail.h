// What comes after the last layer: one vector of each row, or all of its tokens; a few dense layers; unit length.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "encoder.h"

namespace pinscher {

// What is taken of a row's hidden states. Means and maxima leave out a first token that nobody attends to.
enum class Pooling { none, first, last, mean, mean_sqrt, max };

// A dense layer of a head, and what follows it.
struct Step {
  std::shared_ptr<const Matrix> matrix;
  Vector bias;  // may be empty
  Activation activation;
  bool tanh;  // instead of an activation
};

class Tail {
 public:
  Tail(size_t width, Pooling pooling, std::vector<Step> steps, bool normalise);

  const size_t width;  // of the hidden states
  const Pooling pooling;
  const std::vector<Step> steps;
  const bool normalise;
  size_t features() const { return steps.empty() ? width : steps.back().matrix->rows; }
  // Vectors that come of rows, one behind the other, whose lengths sum to `tokens`.
  size_t vectors(size_t rows, size_t tokens) const { return pooling == Pooling::none ? tokens : rows; }

  // From hidden states [tokens, width] to out [vectors, features]. What a row gets does not depend on the other rows.
  void run(Pool& pool, const Kernels& use, const float* hidden, const std::vector<Row>& rows, size_t tokens,
           float* out) const;
  // The same from what is pooled already.
  void run_pooled(Pool& pool, const Kernels& use, const float* pooled, size_t count, float* out) const;

 private:
  void pool_row(const float* hidden, const Row& row, float* out) const;
};

}  // namespace pinscher
