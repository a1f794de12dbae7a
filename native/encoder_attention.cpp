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

// Calls take(source, where its tokens start there, where here, how many) for what each has of a sequence's tokens.
template <typename Sources, typename Take>
void each_part(const Sources& from, size_t start, size_t count, Take&& take) {
  for (const auto& one : from) {
    const size_t begin = std::max(start, one.start), end = std::min(start + count, one.start + one.wide->tokens);
    if (begin < end) take(one, begin - one.start, begin - start, end - begin);
  }
}

template <typename Sources>
void gather_all(const Sources& from, size_t feature, size_t width, size_t start, size_t count, float factor, float* to,
                size_t stride) {
  each_part(from, start, count, [&](const auto& one, size_t there, size_t here, size_t some) {
    gather(*one.wide, feature, width, there, some, factor, to + here, stride);
  });
}

// One head's keys and values of a sequence, from what others have made of them.
template <typename Sources>
void recall(const Sources& from, size_t head, size_t width, size_t start, size_t count, const KeysValues& to) {
  each_part(from, start, count, [&](const auto& one, size_t there, size_t here, size_t some) {
    const KeysValues in = one.memory->head(head, width);
    for (size_t d = 0; d < (width + 1) / 2; ++d)
      std::copy_n(in.keys + d * in.stride + there, some, to.keys + d * to.stride + here);
    for (size_t d = 0; d < width; ++d)
      std::copy_n(in.values + d * in.stride + there, some, to.values + d * to.stride + here);
    std::copy_n(in.key_worth + there, some, to.key_worth + here);
    std::copy_n(in.value_worth + there, some, to.value_worth + here);
  });
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

void Memory::shape(size_t tokens, size_t heads, size_t head_width) {
  stride = blocks(tokens, TILE) * TILE;
  keys.reserve(heads * ((head_width + 1) / 2) * stride);
  values.reserve(heads * head_width * stride);
  worth.reserve(2 * heads * stride);
}

KeysValues Memory::head(size_t number, size_t head_width) {
  float* units = worth.data() + 2 * number * stride;
  return {keys.data() + number * ((head_width + 1) / 2) * stride, values.data() + number * head_width * stride, units,
          units + stride, stride};
}

// Keys and values as int16, for whoever attends to these tokens.
void Encoder::remember(const Kernels& use, const Activations& wide, Memory& memory) const {
  memory.shape(wide.tokens, heads, head_width);
  for (size_t tile = 0; tile < wide.tiles(); ++tile)
    for (size_t head = 0; head < heads; ++head) {
      KeysValues to = memory.head(head, head_width);
      const size_t first = tile * TILE;
      const float* k = wide.tile(tile) + (width + head * head_width) * TILE;
      to = {to.keys + first, to.values + first, to.key_worth + first, to.value_worth + first, to.stride};
      use.shorten(k, k + width * TILE, TILE, head_width, wide.in_tile(tile), to);
    }
}

// One head of one sequence: from queries, keys and values to `context`.
void Encoder::attend(const Kernels& use, bool shorts, size_t head, const Sequence& one,
                     const std::vector<Source>& sources, Activations& context, Scratch& scratch) const {
  const auto [start, count, asks, queries, place, apart] = one;
  const size_t stride = blocks(count, TILE) * TILE, feature = head * head_width, part = head_width * stride;
  float *q = scratch.numbers.data(), *out = q + part, *k = out + part, *v = k + part, *more = v + part;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_width));
  const float* extra = reach ? relative.data() + head * (2 * reach - 1) + (reach - count) + apart : nullptr;
  shorts = shorts && count <= MOST_KEYS;
  const bool remembered = shorts && sources.front().memory;
  gather_all(sources, feature, head_width, asks, queries, scale, q, stride);
  if (!remembered) {
    gather_all(sources, width + feature, head_width, start, count, 1.0f, k, stride);
    gather_all(sources, 2 * width + feature, head_width, start, count, 1.0f, v, stride);
  }
  if (shorts) {
    scratch.memory.shape(count, 1, head_width);
    const KeysValues own = scratch.memory.head(0, head_width);
    if (remembered)
      recall(sources, head, head_width, start, count, own);
    else
      use.shorten(k, v, stride, head_width, count, own);
    use.attention_i16(q, own, out, queries, count, head_width, extra, more);
  } else {
    use.attention(q, k, v, out, stride, queries, count, head_width, extra, more);
  }
  scatter(out, stride, head_width, context, feature, place, queries);
}

// For what `made` tokens get from these sequences, and for what `next` multiplies then.
void Encoder::make_room(size_t threads, const std::vector<Sequence>& sequences, size_t made, const Form& next,
                        Room& room) const {
  size_t longest = 0;
  for (const Sequence& one : sequences) longest = std::max(longest, one.count);
  const size_t stride = blocks(longest, TILE) * TILE;
  room.context.shape(made, width);
  room.scratch.resize(std::max(room.scratch.size(), threads));
  for (Scratch& some : room.scratch) {
    some.numbers.reserve(4 * head_width * stride + attention_room(stride, head_width));
    some.memory.shape(longest, 1, head_width);
  }
  next.make_room(made, room.more);
}

// From room.hidden to room.context, of all tokens or the first ones, and what `next` will multiply to room.more.
void Encoder::attend_all(Team& team, const Kernels& use, const Linear& qkv, const Form& next,
                         const std::vector<Sequence>& sequences, size_t made, Room& room) const {
  make_room(team.threads(), sequences, made, next, room);
  const Matrix& matrix = *qkv.matrix;
  const bool shorts = matrix.form().is_narrow();
  const std::vector<Source> sources{{0, &room.wide, nullptr}};
  const size_t groups = width / BLOCK_N, in_group = BLOCK_N / head_width;
  // Where the heads of a block of rows are whole, whoever made their queries, keys and values goes on with them.
  const bool whole = width % BLOCK_N == 0 && BLOCK_N % head_width == 0;
  if (whole && groups >= 3 * team.threads() && matrix.stays_near(room.hidden)) {
    room.wide.shape(room.hidden.tokens, matrix.rows);
    matrix.count_work(room.hidden.tokens);
    team.each(groups, [&](size_t group, size_t thread) {
      for (size_t part = 0; part < 3; ++part)
        matrix.multiply_block(use, room.hidden, room.operand, part * groups + group, qkv.start(), Activation::none,
                              room.wide);
      for (size_t head = group * in_group; head < (group + 1) * in_group; ++head)
        for (const Sequence& one : sequences)
          attend(use, shorts, head, one, sources, room.context, room.scratch[thread]);
      next.narrow_features(use, room.context, group, room.more);
    });
    next.settle(team, use, made, room.more);
  } else {
    matrix.multiply(team, use, room.hidden, room.operand, qkv.start(), Activation::none, room.wide);
    attend_heads(team, use, shorts, next, sequences, sources, room);
  }
}

// The same where queries, keys and values are there, and room is made.
void Encoder::attend_heads(Team& team, const Kernels& use, bool shorts, const Form& next,
                           const std::vector<Sequence>& sequences, const std::vector<Source>& sources,
                           Room& room) const {
  team.each(sequences.size() * heads, [&](size_t item, size_t thread) {
    attend(use, shorts, item % heads, sequences[item / heads], sources, room.context, room.scratch[thread]);
  });
  team.each(blocks(width, BLOCK_N),
            [&](size_t block, size_t) { next.narrow_features(use, room.context, block, room.more); });
  next.settle(team, use, room.context.tokens, room.more);
}

}  // namespace pinscher
