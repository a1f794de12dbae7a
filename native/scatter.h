// The decoding side of the entropy codec, beside src/pinscher/store/entropy.py, which says what the bytes mean.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pinscher {

// How the places of a matrix are grouped. A place (r, c) has mask level row_class[r] + column_class[c].
struct Shape {
  size_t rows, columns;
  const uint8_t *row_class, *column_class;  // of the mask
  const uint8_t *row_size, *column_size;    // of the values
};

enum class Outcome : int { fine = 0, index_out_of_range = 1, values_do_not_fit = 2 };

// Writes values to the kept places of `out` [rows, columns], which is all zero before.
//   gaps, ones     for each mask level the gaps between its ones, or between its zeros if those are fewer; ones[level] of them
//   values, counts the values of every value level one after the other; counts[level] of each
// Nothing is read or written out of bounds whatever the numbers say.
template <typename Value>
Outcome scatter(const Shape& shape, const uint32_t* gaps, size_t gap_count, const int64_t* ones, size_t mask_levels,
                const Value* values, size_t value_count, const int64_t* counts, size_t value_levels, Value* out);

// out[i, j] = codes[i, j] * scale[i]
void dequantize(const int8_t* codes, const float* scale, size_t rows, size_t columns, float* out);

}  // namespace pinscher
