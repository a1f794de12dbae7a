// The kinds of matrices: how each lays out its weights, and which kernels it calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "matrix.h"

namespace pinscher {
namespace {

constexpr size_t SOME = 16;                // rows widened and activated together
constexpr float UNIT = 257.0f / 32768.0f;  // what a code and an int16 of 1 multiply to
constexpr float NOTHING[BLOCK_N] = {};

// Beside the rounding of weights that of a shorter function is not seen.
Activation shorter(Activation then) { return then == Activation::gelu ? Activation::gelu_short : then; }

// ------------------------------------------------------------ what is kept of a sparse matrix

template <typename Value>
struct Entry {  // one number
  static constexpr size_t WIDTH = 1;
  static Value at(const Value* source, size_t) { return *source; }
  static bool is_kept(Value value) { return value != 0; }
};
template <>
struct Entry<Quad> {  // a group, whose last inputs may be missing
  static constexpr size_t WIDTH = QUAD;
  static Quad at(const int8_t* source, size_t left) {
    Quad made{};
    std::copy_n(source, std::min(QUAD, left), made.weight);
    return made;
  }
  static bool is_kept(const Quad& group) { return std::any_of(group.weight, group.weight + QUAD, [](int8_t w) { return w; }); }
};

template <typename Value>
class Kept {
 public:
  // `chunk`: inputs whose sums are started anew
  template <typename Source>
  Kept(const Source* source, size_t rows, size_t columns, size_t chunk) : row_(blocks(columns, BLOCK_K<Value>)) {
    for (size_t top = 0; top < rows; top += BLOCK_N)
      for (size_t left = 0; left < columns; left += BLOCK_K<Value>)
        add_block(source, columns, top, std::min(rows, top + BLOCK_N), left, left % chunk == 0);
  }
  Block<Value> block(size_t row_block, size_t column_block) const {
    const size_t number = row_block * row_ + column_block;
    return {lines_.data() + line_start_[number], line_start_[number + 1] - line_start_[number],
            at_.data() + value_start_[number], values.data() + value_start_[number]};
  }
  size_t in_row() const { return row_; }  // blocks
  size_t bytes() const {
    return at_.size() + sizeof(Value) * values.size() + sizeof(Line) * lines_.size() + 16 * line_start_.size();
  }

  std::vector<Value> values;

 private:
  template <typename Source>
  void add_block(const Source* source, size_t columns, size_t top, size_t bottom, size_t left, bool starts) {
    constexpr size_t STEP = Entry<Value>::WIDTH;
    const size_t right = std::min(columns, left + BLOCK_K<Value>);
    const auto entry = [&](size_t r, size_t c) { return Entry<Value>::at(source + r * columns + c, columns - c); };
    std::vector<Line> found;
    for (size_t r = top; r < bottom; ++r) {
      size_t count = 0;
      for (size_t c = left; c < right; c += STEP) count += Entry<Value>::is_kept(entry(r, c));
      // A block that starts the sums has every row.
      if (count || starts) found.push_back({static_cast<uint16_t>(r - top), static_cast<uint16_t>(count)});
    }
    // Equal counts in a row let the processor foresee where the inner loop ends.
    std::stable_sort(found.begin(), found.end(), [](Line a, Line b) { return a.count > b.count; });
    for (const Line line : found)
      for (size_t c = left; c < right; c += STEP)
        if (const Value value = entry(top + line.row, c); Entry<Value>::is_kept(value)) {
          at_.push_back(static_cast<uint8_t>((c - left) / STEP));
          values.push_back(value);
        }
    lines_.insert(lines_.end(), found.begin(), found.end());
    line_start_.push_back(lines_.size());
    value_start_.push_back(at_.size());
  }

  size_t row_;
  std::vector<size_t> line_start_{0}, value_start_{0};  // [row blocks × column blocks + 1]
  std::vector<Line> lines_;
  std::vector<uint8_t> at_;
};

template <typename Value>
size_t count_of(const Value* values, size_t count) {
  return static_cast<size_t>(std::count_if(values, values + count, [](Value value) { return value != 0; }));
}

// Σ value(i) · x[at[i]], in four sums side by side.
template <typename Value>
float gathered(const uint8_t* at, size_t count, const float* x, Value&& value) {
  float sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (size_t s = 0; s < 4; ++s) sums[s] += value(i + s) * x[at[i + s]];
  for (; i < count; ++i) sums[0] += value(i) * x[at[i]];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Calls each_line(row, how many, their places, their values, x of the block) for all lines of some rows.
template <typename Value, typename Take>
void each_line(const Kept<Value>& kept, size_t row_block, const float* x, Take&& take) {
  for (size_t b = 0; b < kept.in_row(); ++b) {
    const Block<Value> some = kept.block(row_block, b);
    size_t at = 0;
    for (size_t l = 0; l < some.count; at += some.lines[l++].count)
      take(some.lines[l].row, some.lines[l].count, some.at + at, some.values + at, x + b * BLOCK_K<Value>);
  }
}

// ------------------------------------------------------------ fp32

class WithFloats : public Matrix {
 public:
  WithFloats(Kind kind, size_t rows, size_t columns) : Matrix(kind, rows, columns), form_(columns) {}
  const Form& form() const override { return form_; }

 protected:
  void multiply_tile(const Kernels& use, const Activations& x, const Operand&, size_t row_block, size_t tile,
                     const float* bias, Activation then, float* y) const override {
    const size_t first = row_block * BLOCK_N, count = rows_of(row_block);
    for (size_t r = 0; r < count; ++r) std::fill_n(y + r * TILE, TILE, bias ? bias[first + r] : 0.0f);
    add_tile(use, x.tile(tile), row_block, x.in_tile(tile), y);
    use.activate(then, y, count, x.in_tile(tile));
  }
  virtual void add_tile(const Kernels& use, const float* x, size_t row_block, size_t tokens, float* y) const = 0;

 private:
  const Floats form_;
};

class SparseFloats : public WithFloats {
 public:
  SparseFloats(const float* weights, size_t rows, size_t columns)
      : WithFloats(Kind::f32, rows, columns), kept_(weights, rows, columns, columns) {
    units = nonzeros = count_of(weights, rows * columns);
  }
  size_t bytes() const override { return kept_.bytes(); }

 protected:
  void add_tile(const Kernels& use, const float* x, size_t row_block, size_t tokens, float* y) const override {
    for (size_t b = 0; b < kept_.in_row(); ++b)
      use.spmm_f32(kept_.block(row_block, b), x + b * BLOCK_K<float> * TILE, y, tokens);
  }
  void multiply_one_block(size_t row_block, const float* x, float* y) const override {
    std::fill_n(y, rows_of(row_block), 0.0f);
    each_line(kept_, row_block, x, [&](size_t row, size_t count, const uint8_t* at, const float* w, const float* in) {
      y[row] += gathered(at, count, in, [&](size_t i) { return w[i]; });
    });
  }

 private:
  Kept<float> kept_;
};

class DenseFloats : public WithFloats {
 public:
  DenseFloats(const float* weights, size_t rows, size_t columns)
      : WithFloats(Kind::dense, rows, columns), panels_(blocks(rows, PANEL) * PANEL * columns) {
    units = nonzeros = rows * columns;
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = 0; c < columns; ++c)
        panels_[((r / PANEL) * columns + c) * PANEL + r % PANEL] = weights[r * columns + c];
  }
  size_t bytes() const override { return sizeof(float) * panels_.size(); }

 protected:
  // Rows of a block start anywhere in a panel: whole panels are kept together by rounding the block's edges.
  void add_tile(const Kernels& use, const float* x, size_t row_block, size_t tokens, float* y) const override {
    const size_t first = row_block * BLOCK_N, end = first + rows_of(row_block);
    for (size_t r = first; r < end;) {
      const size_t panel = r / PANEL, offset = r % PANEL, some = std::min(PANEL - offset, end - r);
      use.dense(panels_.data() + panel * columns * PANEL + offset, some, columns, x, y + (r - first) * TILE, tokens);
      r += some;
    }
  }
  void multiply_one_block(size_t row_block, const float* x, float* y) const override {
    const size_t first = row_block * BLOCK_N;
    for (size_t r = 0; r < rows_of(row_block); ++r) {
      const float* panel = panels_.data() + (first + r) / PANEL * columns * PANEL + (first + r) % PANEL;
      y[r] = 0;
      for (size_t k = 0; k < columns; ++k) y[r] += panel[k * PANEL] * x[k];
    }
  }

 private:
  Array<float> panels_;  // [rows / PANEL][columns][PANEL]
};

// ------------------------------------------------------------ codes that multiply int16

class SparseCodes : public Matrix {
 public:
  SparseCodes(const int8_t* codes, const float* scale, size_t rows, size_t columns)
      : Matrix(Kind::i8, rows, columns), kept_(codes, rows, columns, CHUNK), scale_(scale, scale + rows),
        form_(columns, bounds(codes, rows, columns)) {
    units = nonzeros = kept_.values.size();
    for (float& s : scale_) s /= UNIT;
    // See twice(): a byte below zero acts as 257 w - 1 there.
    for (int8_t& code : kept_.values) code = static_cast<int8_t>(code < 0 ? code - 1 : code);
  }
  size_t bytes() const override { return kept_.bytes(); }
  const Form& form() const override { return form_; }

 protected:
  void multiply_tile(const Kernels& use, const Activations& x, const Operand& operand, size_t row_block, size_t tile,
                     const float* bias, Activation then, float* y) const override {
    constexpr size_t WIDTH = BLOCK_K<int8_t>, IN_CHUNK = CHUNK / WIDTH;
    const size_t first = row_block * BLOCK_N, count = rows_of(row_block), tokens = x.in_tile(tile);
    const size_t chunks = blocks(columns, CHUNK);
    const int16_t* in = operand.shorts.data() + tile * columns * TILE;
    alignas(LINE) int16_t sum[BLOCK_N * TILE];
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      const size_t begin = chunk * IN_CHUNK, end = std::min(kept_.in_row(), begin + IN_CHUNK);
      for (size_t b = begin; b < end; ++b)
        use.spmm_i16(kept_.block(row_block, b), in + b * WIDTH * TILE, sum, tokens, b == begin);
      // A few rows at a time, so that what widen writes is still near when it is activated.
      for (size_t r = 0; r < count; r += SOME) {
        const size_t some = std::min(SOME, count - r);
        const float* start = chunk ? nullptr : (bias ? bias + first : NOTHING) + r;
        use.widen(sum + r * TILE, some, scale_.data() + first + r,
                  operand.scale.data() + (tile * chunks + chunk) * TILE, start, y + r * TILE, tokens);
        if (chunk + 1 == chunks) use.activate(shorter(then), y + r * TILE, some, tokens);
      }
    }
  }
  void multiply_one_block(size_t row_block, const float* x, float* y) const override {
    std::fill_n(y, rows_of(row_block), 0.0f);
    each_line(kept_, row_block, x, [&](size_t row, size_t count, const uint8_t* at, const int8_t* w, const float* in) {
      y[row] += gathered(at, count, in, [&](size_t i) { return static_cast<float>(w[i] - (w[i] >> 7)); });
    });
    for (size_t r = 0; r < rows_of(row_block); ++r) y[r] *= scale_[row_block * BLOCK_N + r] * UNIT;
  }

 private:
  // |Σ| ≤ (‖x‖ + ½√n) · ‖257 w + 1‖ / 2^15 + ½n for n inputs, the second terms for rounding: solved for ‖x‖, chunk by chunk.
  static std::vector<float> bounds(const int8_t* codes, size_t rows, size_t columns) {
    std::vector<float> found;
    for (size_t start = 0; start < columns; start += CHUNK) {
      const size_t end = std::min(columns, start + CHUNK);
      double longest = 1, most = 1;
      for (size_t r = 0; r < rows; ++r) {
        double square = 0, count = 0;
        for (size_t c = start; c < end; ++c)
          if (const int code = codes[r * columns + c]; code != 0) {
            square += std::pow(257.0 * std::abs(code) + 1, 2);
            ++count;
          }
        longest = std::max(longest, std::sqrt(square));
        most = std::max(most, count);
      }
      const double room = (32767 - 0.5 * most) * 32768 / longest - 0.5 * std::sqrt(static_cast<double>(end - start));
      found.push_back(static_cast<float>(std::clamp(room, 1.0, 32766.0)));
    }
    return found;
  }

  Kept<int8_t> kept_;
  std::vector<float> scale_;
  const Shorts form_;
};

// ------------------------------------------------------------ codes that multiply int8

class WithBytes : public Matrix {
 public:
  WithBytes(Kind kind, const int8_t* codes, const float* scale, size_t rows, size_t columns)
      : Matrix(kind, rows, columns), scale_(scale, scale + rows), form_(columns) {
    if (columns > MOST_INPUTS) throw std::invalid_argument("a matrix has too many inputs for sums of bytes");
    for (size_t r = 0; r < rows; ++r) {
      int32_t total = 0;
      for (size_t c = 0; c < columns; ++c) total += codes[r * columns + c];
      total_.push_back(total);
    }
  }
  const Form& form() const override { return form_; }

 protected:
  void multiply_tile(const Kernels& use, const Activations& x, const Operand& operand, size_t row_block, size_t tile,
                     const float* bias, Activation then, float* y) const override {
    const size_t first = row_block * BLOCK_N, count = rows_of(row_block), tokens = x.in_tile(tile);
    const size_t groups = blocks(columns, QUAD);
    const float* scale = operand.scale.data() + tile * 2 * TILE;
    alignas(LINE) int32_t sum[BLOCK_N * TILE];
    for (size_t g = 0; g < groups; g += GROUPS)
      sum_block(use, row_block, g / GROUPS, operand.bytes.data() + (tile * groups + g) * QUAD * TILE, sum, tokens,
                g ? nullptr : total_.data() + first);
    // A few rows at a time, so that what is written is still near when it is activated.
    for (size_t r = 0; r < count; r += SOME) {
      const size_t some = std::min(SOME, count - r);
      const Rows of{scale_.data() + first + r, bias ? bias + first + r : nullptr, total_.data() + first + r};
      use.widen_bytes(sum + r * TILE, some, of, scale, scale + TILE, y + r * TILE, tokens);
      use.activate(shorter(then), y + r * TILE, some, tokens);
    }
  }
  void multiply_one_block(size_t row_block, const float* x, float* y) const override {
    std::fill_n(y, rows_of(row_block), 0.0f);
    add_one(row_block, x, y);
    for (size_t r = 0; r < rows_of(row_block); ++r) y[r] *= scale_[row_block * BLOCK_N + r];
  }
  static float product(const Quad& w, const float* x) {
    float sum = 0;
    for (size_t q = 0; q < QUAD; ++q) sum += w.weight[q] * x[q];
    return sum;
  }

  virtual void sum_block(const Kernels& use, size_t row_block, size_t column_block, const int8_t* x, int32_t* sum,
                         size_t tokens, const int32_t* totals) const = 0;
  virtual void add_one(size_t row_block, const float* x, float* y) const = 0;
  size_t own_bytes() const { return (sizeof(float) + sizeof(int32_t)) * rows; }

 private:
  std::vector<float> scale_;
  std::vector<int32_t> total_;
  const Bytes form_;
};

class Groups : public WithBytes {
 public:
  Groups(const int8_t* codes, const float* scale, size_t rows, size_t columns)
      : WithBytes(Kind::groups, codes, scale, rows, columns), kept_(codes, rows, columns, columns) {
    nonzeros = count_of(codes, rows * columns);
    units = kept_.values.size();
  }
  size_t bytes() const override { return kept_.bytes() + own_bytes(); }

 protected:
  void sum_block(const Kernels& use, size_t row_block, size_t column_block, const int8_t* x, int32_t* sum,
                 size_t tokens, const int32_t* totals) const override {
    use.spmm_bytes(kept_.block(row_block, column_block), x, sum, tokens, totals);
  }
  void add_one(size_t row_block, const float* x, float* y) const override {
    each_line(kept_, row_block, x, [&](size_t row, size_t count, const uint8_t* at, const Quad* w, const float* in) {
      float sums[2] = {};
      for (size_t i = 0; i < count; ++i) sums[i % 2] += product(w[i], in + at[i] * QUAD);
      y[row] += sums[0] + sums[1];
    });
  }

 private:
  Kept<Quad> kept_;
};

class DenseCodes : public WithBytes {
 public:
  DenseCodes(const int8_t* codes, const float* scale, size_t rows, size_t columns)
      : WithBytes(Kind::dense8, codes, scale, rows, columns), groups_(blocks(columns, QUAD)),
        panels_(blocks(rows, FEW_ROWS) * FEW_ROWS * groups_) {
    nonzeros = rows * columns;
    units = rows * groups_;
    for (size_t r = 0; r < rows; ++r)
      for (size_t g = 0; g < groups_; ++g)
        panels_[panel(r, g)] = Entry<Quad>::at(codes + r * columns + g * QUAD, columns - g * QUAD);
  }
  size_t bytes() const override { return sizeof(Quad) * panels_.size() + own_bytes(); }

 protected:
  void sum_block(const Kernels& use, size_t row_block, size_t column_block, const int8_t* x, int32_t* sum,
                 size_t tokens, const int32_t* totals) const override {
    const size_t group = column_block * GROUPS;
    use.dense_bytes(panels_.data() + panel(row_block * BLOCK_N, group), groups_, rows_of(row_block),
                    std::min(GROUPS, groups_ - group), x, sum, tokens, totals);
  }
  void add_one(size_t row_block, const float* x, float* y) const override {
    const size_t first = row_block * BLOCK_N, count = rows_of(row_block);
    for (size_t g = 0; g < groups_; ++g)
      for (size_t r = 0; r < count; ++r) y[r] += product(panels_[panel(first + r, g)], x + g * QUAD);
  }

 private:
  size_t panel(size_t row, size_t group) const {
    return (row / FEW_ROWS * groups_ + group) * FEW_ROWS + row % FEW_ROWS;
  }

  const size_t groups_;
  Array<Quad> panels_;  // [rows / FEW_ROWS][groups][FEW_ROWS]
};

}  // namespace

const char* name_of(Kind kind) {
  const char* const names[] = {"f32", "dense", "i8", "groups", "dense8"};
  return names[static_cast<int>(kind)];
}

std::shared_ptr<Matrix> matrix_of(const float* weights, size_t rows, size_t columns, Kind kind) {
  switch (kind) {
    case Kind::f32: return std::make_shared<SparseFloats>(weights, rows, columns);
    case Kind::dense: return std::make_shared<DenseFloats>(weights, rows, columns);
    default: throw std::invalid_argument("a matrix of this kind is made of codes");
  }
}

std::shared_ptr<Matrix> matrix_of(const int8_t* codes, const float* scale, size_t rows, size_t columns, Kind kind) {
  switch (kind) {
    case Kind::i8: return std::make_shared<SparseCodes>(codes, scale, rows, columns);
    case Kind::groups: return std::make_shared<Groups>(codes, scale, rows, columns);
    case Kind::dense8: return std::make_shared<DenseCodes>(codes, scale, rows, columns);
    default: throw std::invalid_argument("a matrix of this kind is made of numbers, not of codes");
  }
}

}  // namespace pinscher
