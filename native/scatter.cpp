#include "scatter.h"

#include <algorithm>
#include <vector>

namespace pinscher {
namespace {

// Rows (or columns) sorted by class, and where each class starts.
struct Sorted {
  std::vector<uint32_t> order;
  std::vector<size_t> start;  // [classes + 1]

  Sorted(const uint8_t* classes, size_t count) {
    size_t groups = 1;
    for (size_t i = 0; i < count; ++i) groups = std::max<size_t>(groups, classes[i] + 1u);
    start.assign(groups + 1, 0);
    for (size_t i = 0; i < count; ++i) ++start[classes[i] + 1u];
    for (size_t g = 0; g < groups; ++g) start[g + 1] += start[g];
    order.resize(count);
    std::vector<size_t> next(start.begin(), start.end() - 1);
    for (size_t i = 0; i < count; ++i) order[next[classes[i]]++] = static_cast<uint32_t>(i);
  }
  size_t groups() const { return start.size() - 1; }
  size_t size(size_t group) const { return group < groups() ? start[group + 1] - start[group] : 0; }
};

// Walks forward through the places of one level: blocks of (row class a, column class level - a), row by row.
class Walk {
 public:
  Walk(const Sorted& rows, const Sorted& columns, size_t level) : rows_(rows), columns_(columns), level_(level) {
    open(0);
  }
  // Moves `steps` places on; the caller knows that the level has so many.
  void forward(size_t steps) {
    at_ += steps;
    while (at_ >= width_) {
      at_ -= width_;
      if (++row_ == height_) open(group_ + 1);
    }
  }
  uint32_t row() const { return rows_.order[rows_.start[group_] + row_]; }
  uint32_t column() const { return columns_.order[left_ + at_]; }

  static size_t places(const Sorted& rows, const Sorted& columns, size_t level) {
    size_t total = 0;
    for (size_t a = 0; a < rows.groups() && a <= level; ++a) total += rows.size(a) * columns.size(level - a);
    return total;
  }

 private:
  void open(size_t group) {
    while (group < rows_.groups() && group <= level_ && !(rows_.size(group) && columns_.size(level_ - group))) ++group;
    group_ = group;
    row_ = 0;
    if (group >= rows_.groups() || group > level_) {  // past the end: never asked for again
      height_ = width_ = SIZE_MAX;
      left_ = 0;
      return;
    }
    height_ = rows_.size(group);
    width_ = columns_.size(level_ - group);
    left_ = columns_.start[level_ - group];
  }
  const Sorted &rows_, &columns_;
  size_t level_, group_ = 0, row_ = 0, at_ = 0, height_ = 0, width_ = 0, left_ = 0;
};

}  // namespace

template <typename Value>
Outcome scatter(const Shape& shape, const uint32_t* gaps, size_t gap_count, const int64_t* ones, size_t mask_levels,
                const Value* values, size_t value_count, const int64_t* counts, size_t value_levels, Value* out) {
  const Sorted rows(shape.row_class, shape.rows), columns(shape.column_class, shape.columns);
  std::vector<const Value*> next(value_levels), end(value_levels);
  size_t total = 0;
  for (size_t level = 0; level < value_levels; ++level) {
    if (counts[level] < 0 || static_cast<size_t>(counts[level]) > value_count - total) return Outcome::values_do_not_fit;
    next[level] = values + total;
    total += static_cast<size_t>(counts[level]);
    end[level] = values + total;
  }
  auto put = [&](uint32_t row, uint32_t column) {
    const size_t level = size_t{shape.row_size[row]} + shape.column_size[column];
    if (level >= value_levels || next[level] == end[level]) return false;
    out[row * shape.columns + column] = *next[level]++;
    return true;
  };
  const uint32_t *gap = gaps, *last = gaps + gap_count;
  for (size_t level = 0; level < mask_levels; ++level) {
    const size_t places = Walk::places(rows, columns, level);
    if (ones[level] < 0 || static_cast<size_t>(ones[level]) > places) return Outcome::index_out_of_range;
    const size_t kept = static_cast<size_t>(ones[level]);
    const bool rare = kept * 2 <= places;
    const size_t listed = rare ? kept : places - kept;
    if (listed > static_cast<size_t>(last - gap)) return Outcome::index_out_of_range;
    Walk walk(rows, columns, level);
    size_t left = places;    // places not yet passed
    size_t pending = 0;      // steps not yet taken: the walk is only moved onto kept places
    auto emit = [&] {
      walk.forward(pending);
      pending = 1;
      return put(walk.row(), walk.column());
    };
    for (size_t i = 0; i < listed; ++i) {
      const size_t skip = *gap++;
      if (skip >= left) return Outcome::index_out_of_range;
      left -= skip + 1;
      if (rare) {
        pending += skip;
        if (!emit()) return Outcome::values_do_not_fit;
      } else {
        for (size_t k = 0; k < skip; ++k)
          if (!emit()) return Outcome::values_do_not_fit;
        ++pending;
      }
    }
    if (!rare)
      for (size_t k = 0; k < left; ++k)
        if (!emit()) return Outcome::values_do_not_fit;
  }
  if (gap != last) return Outcome::index_out_of_range;
  for (size_t level = 0; level < value_levels; ++level)
    if (next[level] != end[level]) return Outcome::values_do_not_fit;
  return total == value_count ? Outcome::fine : Outcome::values_do_not_fit;
}

#define INSTANCE(Value)                                                                                          \
  template Outcome scatter<Value>(const Shape&, const uint32_t*, size_t, const int64_t*, size_t, const Value*,   \
                                  size_t, const int64_t*, size_t, Value*);
INSTANCE(int8_t)
INSTANCE(int16_t)
INSTANCE(int32_t)
INSTANCE(int64_t)

void dequantize(const int8_t* codes, const float* scale, size_t rows, size_t columns, float* out) {
  for (size_t i = 0; i < rows; ++i) {
    const float s = scale[i];
    for (size_t j = 0; j < columns; ++j) out[i * columns + j] = static_cast<float>(codes[i * columns + j]) * s;
  }
}

}  // namespace pinscher
