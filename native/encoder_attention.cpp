// The encoder's attention: heads gathered from tiles, and what they give put back.
#include <algorithm>
#include <cmath>

#include "encoder.h"

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

template <typename Sources>
void gather_all(const Sources& from, size_t feature, size_t width, size_t start, size_t count, float factor, float* to,
                size_t stride) {
  for (const auto& one : from) {
    const size_t begin = std::max(start, one.start), end = std::min(start + count, one.start + one.wide->tokens);
    if (begin < end)
      gather(*one.wide, feature, width, begin - one.start, end - begin, factor, to + (begin - start), stride);
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

}  // namespace

// One head of one sequence: from queries, keys and values to `context`.
void Encoder::attend(const Kernels& use, bool shorts, size_t head, const Sequence& one,
                     const std::vector<Source>& sources, Activations& context, float* scratch) const {
  const auto [start, count, first, queries, place] = one;
  const size_t stride = blocks(count, STRIP) * STRIP, feature = head * head_width;
  float *q = scratch, *k = q + head_width * stride, *v = k + head_width * stride, *out = v + head_width * stride;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_width));
  gather_all(sources, feature, head_width, start + first, queries, scale, q, stride);
  gather_all(sources, width + feature, head_width, start, count, 1.0f, k, stride);
  gather_all(sources, 2 * width + feature, head_width, start, count, 1.0f, v, stride);
  const float* extra = reach ? relative.data() + head * (2 * reach - 1) + (reach - count) + first : nullptr;
  const auto attention = shorts && count <= MOST_KEYS ? use.attention_i16 : use.attention;
  attention(q, k, v, out, stride, queries, count, head_width, extra, out + head_width * stride);
  scatter(out, stride, head_width, context, feature, place, queries);
}

// For what `made` tokens get from these sequences, and for what `next` multiplies then.
void Encoder::make_room(size_t threads, const std::vector<Sequence>& sequences, size_t made, const Matrix& next,
                        Room& room) const {
  size_t longest = 0;
  for (const Sequence& one : sequences) longest = std::max(longest, one.count);
  const size_t stride = blocks(longest, STRIP) * STRIP;
  room.context.shape(made, width);
  room.scratch.resize(std::max(room.scratch.size(), threads));
  for (auto& some : room.scratch) some.reserve(4 * head_width * stride + attention_room(stride, head_width));
  next.make_room(made, room.more_shorts);
}

// From room.hidden to room.context, of all tokens or the first ones, and what `next` will multiply to room.more_shorts.
void Encoder::attend_all(Team& team, const Kernels& use, const Linear& qkv, const Matrix& next,
                         const std::vector<Sequence>& sequences, size_t made, Room& room) const {
  make_room(team.threads(), sequences, made, next, room);
  const Matrix& matrix = *qkv.matrix;
  const bool shorts = matrix.kind == Kind::i8;
  const std::vector<Source> sources{{0, &room.wide}};
  const size_t groups = width / BLOCK_N, in_group = BLOCK_N / head_width;
  // Where the heads of a block of rows are whole, whoever made their queries, keys and values goes on with them.
  const bool whole = width % BLOCK_N == 0 && BLOCK_N % head_width == 0;
  if (whole && groups >= 3 * team.threads() && matrix.stays_near(room.hidden)) {
    room.wide.shape(room.hidden.tokens, matrix.rows);
    matrix.count_work(room.hidden.tokens);
    team.each(groups, [&](size_t group, size_t thread) {
      for (size_t part = 0; part < 3; ++part)
        matrix.multiply_block(use, room.hidden, room.shorts, part * groups + group, qkv.start(), Activation::none,
                              room.wide);
      for (size_t head = group * in_group; head < (group + 1) * in_group; ++head)
        for (const Sequence& one : sequences)
          attend(use, shorts, head, one, sources, room.context, room.scratch[thread].data());
      next.narrow_features(use, room.context, group, room.more_shorts);
    });
    next.settle(team, use, made, room.more_shorts);
  } else {
    matrix.multiply(team, use, room.hidden, room.shorts, qkv.start(), Activation::none, room.wide);
    attend_heads(team, use, shorts, next, sequences, sources, room);
  }
}

// The same where queries, keys and values are there, and room is made.
void Encoder::attend_heads(Team& team, const Kernels& use, bool shorts, const Matrix& next,
                           const std::vector<Sequence>& sequences, const std::vector<Source>& sources,
                           Room& room) const {
  team.each(sequences.size() * heads, [&](size_t item, size_t thread) {
    attend(use, shorts, item % heads, sequences[item / heads], sources, room.context, room.scratch[thread].data());
  });
  team.each(blocks(width, BLOCK_N),
            [&](size_t block, size_t) { next.narrow_features(use, room.context, block, room.more_shorts); });
  next.settle(team, use, room.context.tokens, room.more_shorts);
}

}  // namespace pinscher
