// The decoding side of the entropy codec, beside src/pinscher/store/entropy.py, which says what the bytes mean.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pinscher {

// How the places of a matrix are grouped. A place (r, c) has mask level row_class[r] + column_class[c].
struct Shape {
  size_t rows, columns;
  const uint8_t *row_class, *column_class;  // of the mask
  const uint8_t *row_size, *column_size;    // of the values
};

enum class Outcome : int { fine = 0, index_out_of_range = 1, values_do_not_fit = 2 };

// One mask level: the gaps between its ones, or between its zeros if those are fewer, as integers of 1, 2 or 4 bytes.
struct Gaps {
  const void* data;
  size_t count, width, ones;
};

// The values of one value level, in the order of their places.
template <typename Value>
struct Values {
  const Value* data;
  size_t count;
};

// Writes values to the kept places of `out` [rows, columns], which is all zero before; with scales, each value times
// its row's. Nothing is read or written out of bounds whatever the numbers say.
template <typename Value, typename Out>
Outcome scatter(const Shape& shape, const std::vector<Gaps>& mask, const std::vector<Values<Value>>& values,
                const float* scale, Out* out);

// out[i, j] = codes[i, j] * scale[i]
void dequantize(const int8_t* codes, const float* scale, size_t rows, size_t columns, float* out);

}  // namespace pinscher
