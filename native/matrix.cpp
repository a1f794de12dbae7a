#include "matrix.h"

#include <algorithm>
#include <cmath>

namespace pinscher {
namespace {

constexpr size_t NEAR = 640 << 10;         // bytes of activations that stay in the second cache beside the weights
constexpr size_t SOME = 16;                // rows widened and activated together
constexpr float UNIT = 257.0f / 32768.0f;  // what a code and an int16 of 1 multiply to

}  // namespace

void Activations::shape(size_t new_tokens, size_t new_features) {
  tokens = new_tokens;
  features = new_features;
  values.reserve(tiles() * TILE * features);
}

Matrix::Matrix(const float* weights, size_t rows, size_t columns, bool sparse)
    : rows(rows), columns(columns), kind(sparse ? Kind::f32 : Kind::dense) {
  if (sparse) {
    pack(weights, f32_);
    return;
  }
  nonzeros = rows * columns;
  panels_.resize(blocks(rows, PANEL) * PANEL * columns);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c)
      panels_[((r / PANEL) * columns + c) * PANEL + r % PANEL] = weights[r * columns + c];
}

Matrix::Matrix(const int8_t* codes, const float* scale, size_t rows, size_t columns)
    : rows(rows), columns(columns), kind(Kind::i8), scale_(scale, scale + rows) {
  pack(codes, i8_);
  bound_sums(codes);
  for (float& s : scale_) s /= UNIT;
  for (int8_t& code : i8_) code = static_cast<int8_t>(code < 0 ? code - 1 : code);  // see twice(): 257 w - 1 there
}

template <typename Value, typename Source>
void Matrix::pack(const Source* source, std::vector<Value>& values) {
  nonzeros = static_cast<size_t>(
      std::count_if(source, source + rows * columns, [](Source value) { return value != 0; }));
  at_.reserve(nonzeros);
  values.reserve(nonzeros);
  line_start_.assign(1, 0);
  value_start_.assign(1, 0);
  for (size_t top = 0; top < rows; top += BLOCK_N)
    for (size_t left = 0; left < columns; left += BLOCK_K<Value>) {
      const size_t bottom = std::min(rows, top + BLOCK_N), right = std::min(columns, left + BLOCK_K<Value>);
      std::vector<Line> found;
      for (size_t r = top; r < bottom; ++r) {
        const Source* row = source + r * columns;
        const auto count = std::count_if(row + left, row + right, [](Source value) { return value != 0; });
        // The first block of a chunk starts the sums: it has every row.
        if (count || left % CHUNK == 0) found.push_back({static_cast<uint16_t>(r - top), static_cast<uint16_t>(count)});
      }
      // Equal counts in a row let the processor foresee where the inner loop ends.
      std::stable_sort(found.begin(), found.end(), [](Line a, Line b) { return a.count > b.count; });
      for (const Line line : found)
        for (size_t c = left; c < right; ++c)
          if (const Source value = source[(top + line.row) * columns + c]; value != 0) {
            at_.push_back(static_cast<uint8_t>(c - left));
            values.push_back(value);
          }
      lines_.insert(lines_.end(), found.begin(), found.end());
      line_start_.push_back(lines_.size());
      value_start_.push_back(at_.size());
    }
}

// |Σ| ≤ (‖x‖ + ½√n) · ‖257 w + 1‖ / 2^15 + ½n for n inputs, the second terms for rounding: solved for ‖x‖.
void Matrix::bound_sums(const int8_t* codes) {
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
    bound_.push_back(static_cast<float>(std::clamp(room, 1.0, 32766.0)));
  }
}

size_t Matrix::bytes() const {
  return at_.size() + 4 * f32_.size() + i8_.size() + 4 * panels_.size() + sizeof(Line) * lines_.size() +
         16 * line_start_.size();
}

template <typename Value>
Block<Value> Matrix::block(size_t row_block, size_t column_block, const std::vector<Value>& values) const {
  const size_t number = row_block * blocks(columns, BLOCK_K<Value>) + column_block;
  return {lines_.data() + line_start_[number], line_start_[number + 1] - line_start_[number],
          at_.data() + value_start_[number], values.data() + value_start_[number]};
}

void Matrix::tile_f32(const Kernels& use, const Activations& x, size_t row_block, size_t tile, float* y) const {
  const size_t first = row_block * BLOCK_N, count = std::min(BLOCK_N, rows - first);
  const float* in = x.tile(tile);
  if (kind == Kind::f32) {
    for (size_t b = 0; b < blocks(columns, BLOCK_K<float>); ++b)
      use.spmm_f32(block(row_block, b, f32_), in + b * BLOCK_K<float> * TILE, y, x.in_tile(tile));
    return;
  }
  // Rows of a block start anywhere in a panel: whole panels are kept together by rounding the block's edges.
  for (size_t r = first; r < first + count;) {
    const size_t panel = r / PANEL, offset = r % PANEL, some = std::min(PANEL - offset, first + count - r);
    use.dense(panels_.data() + panel * columns * PANEL + offset, some, columns, in, y + (r - first) * TILE,
              x.in_tile(tile));
    r += some;
  }
}

void Matrix::tile_i8(const Kernels& use, size_t tokens, const Shorts& shorts, size_t row_block, size_t tile,
                     const float* bias, Activation then, float* y) const {
  constexpr size_t WIDTH = BLOCK_K<int8_t>;
  static constexpr float nothing[BLOCK_N] = {};
  const size_t first = row_block * BLOCK_N, count = std::min(BLOCK_N, rows - first);
  const size_t chunks = blocks(columns, CHUNK);
  if (then == Activation::gelu) then = Activation::gelu_short;
  const int16_t* in = shorts.values.data() + tile * columns * TILE;
  alignas(LINE) int16_t sum[BLOCK_N * TILE];
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    const size_t begin = chunk * (CHUNK / WIDTH);
    const size_t end = std::min(blocks(columns, WIDTH), (chunk + 1) * (CHUNK / WIDTH));
    for (size_t b = begin; b < end; ++b)
      use.spmm_i16(block(row_block, b, i8_), in + b * WIDTH * TILE, sum, tokens, b == begin);
    // A few rows at a time, so that what widen writes is still near when it is activated.
    for (size_t r = 0; r < count; r += SOME) {
      const size_t some = std::min(SOME, count - r);
      const float* start = chunk ? nullptr : (bias ? bias + first : nothing) + r;
      use.widen(sum + r * TILE, some, scale_.data() + first + r, shorts.scale.data() + (tile * chunks + chunk) * TILE,
                start, y + r * TILE, tokens);
      if (chunk + 1 == chunks) use.activate(then, y + r * TILE, some * TILE);
    }
  }
}

void Matrix::make_room(size_t tokens, Shorts& out) const {
  if (kind != Kind::i8) return;
  const size_t tiles = blocks(tokens, TILE);
  out.values.reserve(tiles * columns * TILE);
  out.scale.reserve(tiles * blocks(columns, CHUNK) * TILE);
  out.worth.reserve(tiles * blocks(columns, BLOCK_N) * TILE);
}

void Matrix::narrow_strip(const Kernels& use, const Activations& x, size_t strip, Shorts& out) const {
  if (kind != Kind::i8) return;
  const size_t token = strip * STRIP, tile = token / TILE, place = token % TILE;
  use.narrow(x.tile(token / TILE) + token % TILE, columns, bound_.data(),
             out.values.data() + tile * columns * TILE + place,
             out.scale.data() + tile * blocks(columns, CHUNK) * TILE + place);
}

void Matrix::narrow(Team& team, const Kernels& use, const Activations& x, Shorts& out) const {
  if (kind != Kind::i8) return;
  make_room(x.tokens, out);
  team.each(blocks(x.tokens, STRIP), [&](size_t strip, size_t) { narrow_strip(use, x, strip, out); });
}

void Matrix::narrow_block(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                          Shorts& out) const {
  const size_t first = block * BLOCK_N, count = std::min(BLOCK_N, columns - first);
  for (size_t t = 0; t < tokens; t += STRIP)
    use.narrow(part + t, count, &FULL, out.values.data() + (tile * columns + first) * TILE + t,
               out.worth.data() + (tile * blocks(columns, BLOCK_N) + block) * TILE + t);
}

void Matrix::narrow_features(const Kernels& use, const Activations& x, size_t block, Shorts& out) const {
  if (kind != Kind::i8) return;
  for (size_t tile = 0; tile < x.tiles(); ++tile)
    narrow_block(use, tile, x.in_tile(tile), block, x.tile(tile) + block * BLOCK_N * TILE, out);
}

void Matrix::settle(Team& team, const Kernels& use, size_t tokens, Shorts& out) const {
  if (kind != Kind::i8) return;
  team.each(blocks(tokens, STRIP), [&](size_t strip, size_t) {
    const size_t tile = strip * STRIP / TILE, place = strip * STRIP % TILE;
    use.settle(out.values.data() + tile * columns * TILE + place, columns,
               out.worth.data() + tile * blocks(columns, BLOCK_N) * TILE + place, bound_.data(),
               out.scale.data() + tile * blocks(columns, CHUNK) * TILE + place);
  });
}

bool Matrix::stays_near(const Activations& x) const {
  return x.tiles() * columns * TILE * (kind == Kind::i8 ? sizeof(int16_t) : sizeof(float)) <= NEAR;
}

void Matrix::multiply_block(const Kernels& use, const Activations& x, const Shorts& shorts, size_t row_block,
                            const float* bias, Activation then, Activations& y) const {
  for (size_t tile = 0; tile < x.tiles(); ++tile) multiply_tile(use, x, shorts, row_block, tile, bias, then, y);
}

void Matrix::multiply(Team& team, const Kernels& use, const Activations& x, const Shorts& shorts, const float* bias,
                      Activation then, Activations& y) const {
  y.shape(x.tokens, rows);
  count_work(x.tokens);
  const size_t row_blocks = blocks(rows, BLOCK_N);
  // Either all tiles of some rows together, whose weights then come from far away only once, or all rows of a tile one
  // after the other, if the tiles do not stay in the second cache together, or there are too few rows to go round.
  if (stays_near(x) && row_blocks >= 3 * team.threads())
    team.each(row_blocks, [&](size_t block, size_t) { multiply_block(use, x, shorts, block, bias, then, y); });
  else
    team.each(row_blocks * x.tiles(), [&](size_t item, size_t) {
      multiply_tile(use, x, shorts, item % row_blocks, item / row_blocks, bias, then, y);
    });
}

void Matrix::multiply_tile(const Kernels& use, const Activations& x, const Shorts& shorts, size_t row_block, size_t tile,
                           const float* bias, Activation then, Activations& y) const {
  const size_t first = row_block * BLOCK_N, count = std::min(BLOCK_N, rows - first);
  float* out = y.tile(tile) + first * TILE;
  if (kind == Kind::i8) {
    tile_i8(use, x.in_tile(tile), shorts, row_block, tile, bias, then, out);
  } else {
    for (size_t r = 0; r < count; ++r) std::fill_n(out + r * TILE, TILE, bias ? bias[first + r] : 0.0f);
    tile_f32(use, x, row_block, tile, out);
    use.activate(then, out, count * TILE);
  }
}

void Matrix::multiply_short(Team& team, const Kernels& use, const Activations& x, const Shorts& shorts,
                            const float* bias, Activation then, const Matrix& next, Shorts& y) const {
  const size_t tiles = x.tiles(), row_blocks = blocks(rows, BLOCK_N);
  next.make_room(x.tokens, y);
  count_work(x.tokens);
  const bool near = stays_near(x);  // as in multiply
  team.each(row_blocks * tiles, [&](size_t item, size_t) {
    const size_t tile = near ? item % tiles : item / row_blocks, row_block = near ? item / tiles : item % row_blocks;
    alignas(LINE) float made[BLOCK_N * TILE];
    tile_i8(use, x.in_tile(tile), shorts, row_block, tile, bias, then, made);
    next.narrow_block(use, tile, x.in_tile(tile), row_block, made, y);
  });
  next.settle(team, use, x.tokens, y);
}

namespace {

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

}  // namespace

void Matrix::multiply_one(Team& team, const float* x, const float* bias, float* y) const {
  count_work(1);
  team.each(blocks(rows, BLOCK_N), [&](size_t row_block, size_t) {
    const size_t first = row_block * BLOCK_N, count = std::min(BLOCK_N, rows - first);
    float sums[BLOCK_N] = {};
    if (kind == Kind::dense) {
      for (size_t r = 0; r < count; ++r) {
        const float* panel = panels_.data() + (first + r) / PANEL * columns * PANEL + (first + r) % PANEL;
        for (size_t k = 0; k < columns; ++k) sums[r] += panel[k * PANEL] * x[k];
      }
    } else {
      const size_t width = kind == Kind::i8 ? BLOCK_K<int8_t> : BLOCK_K<float>;
      for (size_t b = 0; b < blocks(columns, width); ++b) one_block(row_block, b, x + b * width, sums);
    }
    for (size_t r = 0; r < count; ++r) {
      const float value = kind == Kind::i8 ? sums[r] * (scale_[first + r] * UNIT) : sums[r];
      y[first + r] = value + (bias ? bias[first + r] : 0.0f);
    }
  });
}

void Matrix::one_block(size_t row_block, size_t column_block, const float* x, float* sums) const {
  auto each = [&](const auto& some, auto&& value) {
    size_t at = 0;
    for (size_t l = 0; l < some.count; ++l) {
      const Line line = some.lines[l];
      sums[line.row] += gathered(some.at + at, line.count, x, [&](size_t i) { return value(some.values[at + i]); });
      at += line.count;
    }
  };
  if (kind == Kind::f32)
    each(block(row_block, column_block, f32_), [](float value) { return value; });
  else  // w is stored, or w - 1 below zero
    each(block(row_block, column_block, i8_), [](int stored) { return static_cast<float>(stored - (stored >> 7)); });
}

}  // namespace pinscher
