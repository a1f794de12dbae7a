#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace pinscher {
namespace {

// A head's part of the tokens of one sequence, [width][stride], gathered from tiles, and back.
void gather(const Activations& from, size_t feature, size_t width, size_t start, size_t count, float factor, float* to,
            size_t stride) {
  for (size_t done = 0; done < count;) {
    const size_t tile = (start + done) / TILE, at = (start + done) % TILE, some = std::min(TILE - at, count - done);
    const float* in = from.tile(tile) + feature * TILE + at;
    for (size_t d = 0; d < width; ++d)
      for (size_t i = 0; i < some; ++i) to[d * stride + done + i] = in[d * TILE + i] * factor;
    done += some;
  }
}

void scatter(const float* from, size_t stride, size_t width, Activations& to, size_t feature, size_t start,
             size_t count) {
  for (size_t done = 0; done < count;) {
    const size_t tile = (start + done) / TILE, at = (start + done) % TILE, some = std::min(TILE - at, count - done);
    float* out = to.tile(tile) + feature * TILE + at;
    for (size_t d = 0; d < width; ++d) std::copy_n(from + d * stride + done, some, out + d * TILE);
    done += some;
  }
}

void normalise(Team& team, const Kernels& use, Activations& x, const Activations* residual, const LayerNorm& norm) {
  team.each(blocks(x.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t tile = strip * STRIP / TILE, first = strip * STRIP % TILE;
    use.norm(x.tile(tile) + first, residual ? residual->tile(tile) + first : nullptr, x.features, norm.view());
  });
}

const float* bias_of(const Linear& linear) { return linear.bias.empty() ? nullptr : linear.bias.data(); }

}  // namespace

void to_tiles(Team& team, const float* rows, Activations& out) {
  const size_t width = out.features;
  team.each(blocks(out.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t start = strip * STRIP, end = std::min(out.tokens, start + STRIP);
    float* to = out.tile(start / TILE) + start % TILE;
    for (size_t k = 0; k < width; ++k)
      for (size_t t = start; t < end; ++t) to[k * TILE + t - start] = rows[t * width + k];
  });
}

void to_rows(Team& team, const Activations& in, float* rows) {
  const size_t width = in.features;
  team.each(blocks(in.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t start = strip * STRIP, end = std::min(in.tokens, start + STRIP);
    const float* from = in.tile(start / TILE) + start % TILE;
    constexpr size_t SOME = 16;  // features at a time, so that lines of both sides stay in the first cache
    for (size_t k = 0; k < width; k += SOME)
      for (size_t t = start; t < end; ++t)
        for (size_t j = k; j < std::min(width, k + SOME); ++j) rows[t * width + j] = from[j * TILE + t - start];
  });
}

Encoder::Encoder(size_t width, size_t heads, Activation activation, std::vector<Layer> layers)
    : width(width), heads(heads), head_width(width / heads), activation(activation), layers(std::move(layers)) {}

void Encoder::embed(Team& team, const Kernels& use, const Input& in, Activations& out) const {
  constexpr size_t SOME = 16;  // features at a time, so that lines of both sides stay in the first cache
  team.each(blocks(out.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t start = strip * STRIP, count = std::min(STRIP, out.tokens - start);
    float* to = out.tile(start / TILE) + start % TILE;
    for (size_t k = 0; k < width; k += SOME)
      for (size_t t = 0; t < count; ++t) {
        float sum[SOME] = {};
        const size_t some = std::min(SOME, width - k);
        for (size_t i = 0; i < in.indices.size(); ++i) {
          const float* row = embeddings.tables[i].values + static_cast<size_t>(in.indices[i][start + t]) * width + k;
          for (size_t j = 0; j < some; ++j) sum[j] += row[j];
        }
        for (size_t j = 0; j < some; ++j) to[(k + j) * TILE + t] = sum[j];
      }
    use.norm(to, nullptr, width, embeddings.norm.view());
  });
}

// What one forward pass needs; kept for the next one of the same thread's size.
struct Encoder::Room {
  Activations hidden, wide, context, middle;
  Shorts shorts;
  std::vector<Array<float>> scratch;  // of each thread
};

void Encoder::attend(Team& team, const Kernels& use, const std::vector<size_t>& lengths, Room& room) const {
  std::vector<size_t> start(lengths.size() + 1, 0);
  for (size_t s = 0; s < lengths.size(); ++s) start[s + 1] = start[s] + lengths[s];
  const size_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const size_t stride = blocks(longest, STRIP) * STRIP;
  room.context.shape(room.wide.tokens, width);
  room.scratch.resize(std::max(room.scratch.size(), team.threads()));
  for (auto& some : room.scratch) some.reserve(4 * head_width * stride + stride * TILE);
  team.each(lengths.size() * heads, [&](size_t item, size_t thread) {
    const size_t sequence = item / heads, head = item % heads, count = lengths[sequence], from = start[sequence];
    float* q = room.scratch[thread].data();
    float *k = q + head_width * stride, *v = k + head_width * stride, *out = v + head_width * stride;
    const size_t feature = head * head_width;
    gather(room.wide, feature, head_width, from, count, 1.0f / std::sqrt(static_cast<float>(head_width)), q, stride);
    gather(room.wide, width + feature, head_width, from, count, 1.0f, k, stride);
    gather(room.wide, 2 * width + feature, head_width, from, count, 1.0f, v, stride);
    const float* extra = reach ? relative.data() + head * (2 * reach - 1) + (reach - count) : nullptr;
    use.attention(q, k, v, out, stride, count, count, head_width, extra, out + head_width * stride);
    scatter(out, stride, head_width, room.context, feature, from, count);
  });
}

void Encoder::run(Pool& pool, const Kernels& use, const Input& in, const std::vector<size_t>& lengths, float* out,
                  float* every) const {
  thread_local Room room;
  size_t tokens = 0;
  for (const size_t length : lengths) tokens += length;
  Team team(pool);
  room.hidden.shape(tokens, width);
  if (in.hidden)
    to_tiles(team, in.hidden, room.hidden);
  else
    embed(team, use, in, room.hidden);
  if (every) to_rows(team, room.hidden, every);
  for (size_t number = 0; number < layers.size(); ++number) {
    const Layer& layer = layers[number];
    layer.qkv.matrix->multiply(team, use, room.hidden, bias_of(layer.qkv), Activation::none, room.shorts, room.wide);
    attend(team, use, lengths, room);
    layer.out.matrix->multiply(team, use, room.context, bias_of(layer.out), Activation::none, room.shorts, room.middle);
    normalise(team, use, room.middle, &room.hidden, layer.after_attention);
    layer.up.matrix->multiply(team, use, room.middle, bias_of(layer.up), activation, room.shorts, room.wide);
    layer.down.matrix->multiply(team, use, room.wide, bias_of(layer.down), Activation::none, room.shorts, room.hidden);
    normalise(team, use, room.hidden, &room.middle, layer.after_mlp);
    if (every) to_rows(team, room.hidden, every + (number + 1) * tokens * width);
  }
  to_rows(team, room.hidden, out);
}

}  // namespace pinscher
