#include "scatter.h"

#include <algorithm>
#include <type_traits>
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

size_t places(const Sorted& rows, const Sorted& columns, size_t level) {
  size_t total = 0;
  for (size_t a = 0; a < rows.groups() && a <= level; ++a) total += rows.size(a) * columns.size(level - a);
  return total;
}

// Takes values level by level and puts them where they belong.
template <typename Value, typename Out>
class Writer {
 public:
  Writer(const Shape& shape, const std::vector<Values<Value>>& values, const float* scale, Out* out)
      : shape_(shape), scale_(scale), out_(out) {
    for (const auto& level : values) {
      next_.push_back(level.data);
      end_.push_back(level.data + level.count);
    }
  }
  void open(uint32_t row) {
    line_ = out_ + row * shape_.columns;
    factor_ = scale_ ? scale_[row] : 1.0f;
    base_ = shape_.row_size[row];
  }
  bool put(uint32_t column) {
    const size_t level = base_ + shape_.column_size[column];
    if (level >= next_.size() || next_[level] == end_[level]) return false;
    const Value value = *next_[level]++;
    if constexpr (std::is_same_v<Value, Out>)
      line_[column] = value;
    else
      line_[column] = static_cast<Out>(value) * factor_;
    return true;
  }
  bool finished() const { return next_ == end_; }

 private:
  const Shape& shape_;
  const float* scale_;
  Out *out_, *line_ = nullptr;
  float factor_ = 1;
  size_t base_ = 0;
  std::vector<const Value*> next_, end_;
};

// Walks forward through the places of one level: blocks of (row class a, column class level - a), row by row.
template <typename Writer>
class Walk {
 public:
  Walk(const Sorted& rows, const Sorted& columns, size_t level, Writer& writer)
      : rows_(rows), columns_(columns), level_(level), writer_(writer) {
    open(0);
  }
  // Moves `steps` places on, which the caller knows the level to have, and puts a value there.
  bool put(size_t steps) {
    at_ += steps;
    while (at_ >= size_) {
      at_ -= size_;
      open(group_ + 1);
    }
    // A quotient by multiplication, exact for numbers below 2^52: counting rows one by one would cost a wrong guess of
    // the processor at every row.
    const auto row = static_cast<size_t>((static_cast<double>(at_) + 0.5) * share_);
    writer_.open(order_of_rows_[row]);
    return writer_.put(order_of_columns_[at_ - row * width_]);
  }

 private:
  void open(size_t group) {
    while (group < rows_.groups() && group <= level_ && !(rows_.size(group) && columns_.size(level_ - group))) ++group;
    group_ = group;
    if (group >= rows_.groups() || group > level_) {  // past the end: never asked for again
      size_ = SIZE_MAX;
      return;
    }
    width_ = columns_.size(level_ - group);
    size_ = rows_.size(group) * width_;
    share_ = 1.0 / static_cast<double>(width_);
    order_of_rows_ = rows_.order.data() + rows_.start[group];
    order_of_columns_ = columns_.order.data() + columns_.start[level_ - group];
  }
  const Sorted &rows_, &columns_;
  size_t level_;
  Writer& writer_;
  size_t group_ = 0, at_ = 0, size_ = 0, width_ = 0;
  double share_ = 0;
  const uint32_t *order_of_rows_ = nullptr, *order_of_columns_ = nullptr;
};

template <typename Gap, typename Writer>
Outcome fill(const Gap* gap, const Gaps& level, size_t places, Walk<Writer> walk) {
  const bool rare = level.ones * 2 <= places;
  size_t left = places;  // places not yet passed
  size_t steps = 0;      // not yet taken: the walk is only moved onto kept places
  for (const Gap* end = gap + level.count; gap != end; ++gap) {
    const size_t skip = *gap;
    if (skip >= left) return Outcome::index_out_of_range;
    left -= skip + 1;
    if (rare) {
      if (!walk.put(steps + skip)) return Outcome::values_do_not_fit;
      steps = 1;
      continue;
    }
    for (size_t k = 0; k < skip; ++k, steps = 1)
      if (!walk.put(steps)) return Outcome::values_do_not_fit;
    ++steps;
  }
  if (!rare)
    for (size_t k = 0; k < left; ++k, steps = 1)
      if (!walk.put(steps)) return Outcome::values_do_not_fit;
  return Outcome::fine;
}

}  // namespace

template <typename Value, typename Out>
Outcome scatter(const Shape& shape, const std::vector<Gaps>& mask, const std::vector<Values<Value>>& values,
                const float* scale, Out* out) {
  const Sorted rows(shape.row_class, shape.rows), columns(shape.column_class, shape.columns);
  Writer<Value, Out> writer(shape, values, scale, out);
  for (size_t number = 0; number < mask.size(); ++number) {
    const Gaps& level = mask[number];
    const size_t all = places(rows, columns, number);
    if (level.ones > all || level.count != std::min(level.ones, all - level.ones)) return Outcome::index_out_of_range;
    const Walk<Writer<Value, Out>> walk(rows, columns, number, writer);
    Outcome outcome = Outcome::index_out_of_range;
    if (level.width == 1) outcome = fill(static_cast<const uint8_t*>(level.data), level, all, walk);
    if (level.width == 2) outcome = fill(static_cast<const uint16_t*>(level.data), level, all, walk);
    if (level.width == 4) outcome = fill(static_cast<const uint32_t*>(level.data), level, all, walk);
    if (outcome != Outcome::fine) return outcome;
  }
  return writer.finished() ? Outcome::fine : Outcome::values_do_not_fit;
}

#define INSTANCE(Value, Out)                                                                          \
  template Outcome scatter<Value, Out>(const Shape&, const std::vector<Gaps>&,                        \
                                       const std::vector<Values<Value>>&, const float*, Out*);
INSTANCE(int8_t, float)
INSTANCE(int8_t, int8_t)
INSTANCE(int16_t, int16_t)
INSTANCE(int32_t, int32_t)
INSTANCE(int64_t, int64_t)

void dequantize(const int8_t* codes, const float* scale, size_t rows, size_t columns, float* out) {
  for (size_t i = 0; i < rows; ++i) {
    const float s = scale[i];
    for (size_t j = 0; j < columns; ++j) out[i * columns + j] = static_cast<float>(codes[i * columns + j]) * s;
  }
}

}  // namespace pinscher
