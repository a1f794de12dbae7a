#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <mutex>

namespace pinscher {
namespace {

constexpr size_t SHARE = 256;      // tokens that one thread takes through all layers: more do not stay near it
constexpr double TOGETHER = 0.85;  // of its speed that a thread keeps where all share in every step

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

// The first token of each sequence.
void pick(const Activations& from, const std::vector<size_t>& lengths, Activations& to) {
  to.shape(lengths.size(), from.features);
  for (size_t s = 0, start = 0; s < lengths.size(); start += lengths[s++]) {
    const float* in = from.tile(start / TILE) + start % TILE;
    float* out = to.tile(s / TILE) + s % TILE;
    for (size_t k = 0; k < from.features; ++k) out[k * TILE] = in[k * TILE];
  }
}

// Adds the residual and normalises, and makes at once what `next` will multiply.
void normalise(Team& team, const Kernels& use, Activations& x, const Activations& residual, const LayerNorm& norm,
               const Matrix* next, Shorts& shorts) {
  if (next) next->make_room(x.tokens, shorts);
  team.each(blocks(x.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t tile = strip * STRIP / TILE, first = strip * STRIP % TILE;
    use.norm(x.tile(tile) + first, residual.tile(tile) + first, x.features, norm.view());
    if (next) next->narrow_strip(use, x, strip, shorts);
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

// What one forward pass needs; kept for the thread's next one.
struct Encoder::Room {
  Activations hidden, wide, context, middle, firsts;
  Shorts shorts, more_shorts;
  std::vector<Array<float>> scratch;  // of each thread
};

Encoder::Room& Encoder::own_room() {
  thread_local Room room;
  return room;
}

// Where a sequence's tokens are, how many of them ask, and where what they get is put.
struct Encoder::Sequence {
  size_t start, count, queries, place;
};

// One head of one sequence: from queries, keys and values in room.wide to room.context.
void Encoder::attend(const Kernels& use, bool shorts, size_t head, const Sequence& one, Room& room,
                     float* scratch) const {
  const auto [start, count, queries, place] = one;
  const size_t stride = blocks(count, STRIP) * STRIP, feature = head * head_width;
  float *q = scratch, *k = q + head_width * stride, *v = k + head_width * stride, *out = v + head_width * stride;
  gather(room.wide, feature, head_width, start, queries, 1.0f / std::sqrt(static_cast<float>(head_width)), q, stride);
  gather(room.wide, width + feature, head_width, start, count, 1.0f, k, stride);
  gather(room.wide, 2 * width + feature, head_width, start, count, 1.0f, v, stride);
  const float* extra = reach ? relative.data() + head * (2 * reach - 1) + (reach - count) : nullptr;
  const auto attention = shorts && count <= MOST_KEYS ? use.attention_i16 : use.attention;
  attention(q, k, v, out, stride, queries, count, head_width, extra, out + head_width * stride);
  scatter(out, stride, head_width, room.context, feature, place, queries);
}

// From room.hidden to room.context, of all tokens or the first ones, and what `next` will multiply to room.more_shorts.
void Encoder::attend_all(Team& team, const Kernels& use, const Linear& qkv, const Matrix& next,
                         const std::vector<size_t>& lengths, bool only_first, Room& room) const {
  std::vector<Sequence> sequences;
  for (size_t s = 0, start = 0; s < lengths.size(); start += lengths[s++])
    sequences.push_back({start, lengths[s], only_first ? 1 : lengths[s], only_first ? s : start});
  const size_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const size_t stride = blocks(longest, STRIP) * STRIP;
  const size_t tokens = room.hidden.tokens, made = only_first ? lengths.size() : tokens;
  room.context.shape(made, width);
  room.scratch.resize(std::max(room.scratch.size(), team.threads()));
  for (auto& some : room.scratch) some.reserve(4 * head_width * stride + attention_room(stride, head_width));
  next.make_room(made, room.more_shorts);
  const Matrix& matrix = *qkv.matrix;
  const bool shorts = matrix.kind == Kind::i8;
  const size_t groups = width / BLOCK_N, in_group = BLOCK_N / head_width;
  // Where the heads of a block of rows are whole, whoever made their queries, keys and values goes on with them.
  const bool whole = width % BLOCK_N == 0 && BLOCK_N % head_width == 0;
  if (whole && groups >= 3 * team.threads() && matrix.stays_near(room.hidden)) {
    room.wide.shape(tokens, matrix.rows);
    matrix.count_work(tokens);
    team.each(groups, [&](size_t group, size_t thread) {
      for (size_t part = 0; part < 3; ++part)
        matrix.multiply_block(use, room.hidden, room.shorts, part * groups + group, bias_of(qkv), Activation::none,
                              room.wide);
      for (size_t head = group * in_group; head < (group + 1) * in_group; ++head)
        for (const Sequence& one : sequences) attend(use, shorts, head, one, room, room.scratch[thread].data());
      next.narrow_features(use, room.context, group, room.more_shorts);
    });
  } else {
    matrix.multiply(team, use, room.hidden, room.shorts, bias_of(qkv), Activation::none, room.wide);
    team.each(sequences.size() * heads, [&](size_t item, size_t thread) {
      attend(use, shorts, item % heads, sequences[item / heads], room, room.scratch[thread].data());
    });
    team.each(blocks(width, BLOCK_N),
              [&](size_t block, size_t) { next.narrow_features(use, room.context, block, room.more_shorts); });
  }
  next.settle(team, use, made, room.more_shorts);
}

// From room.middle, whose int16 form is in room.shorts, to room.hidden.
void Encoder::apply_mlp(Team& team, const Kernels& use, const Layer& layer, Room& room) const {
  const Matrix &up = *layer.up.matrix, &down = *layer.down.matrix;
  const Shorts* shorts = &room.shorts;
  if (up.kind == Kind::i8 && down.kind == Kind::i8) {
    room.wide.shape(room.middle.tokens, up.rows);
    up.multiply_short(team, use, room.middle, room.shorts, bias_of(layer.up), activation, down, room.more_shorts);
    shorts = &room.more_shorts;
  } else {
    up.multiply(team, use, room.middle, room.shorts, bias_of(layer.up), activation, room.wide);
    down.narrow(team, use, room.wide, room.shorts);
  }
  down.multiply(team, use, room.wide, *shorts, bias_of(layer.down), Activation::none, room.hidden);
}

// Some sequences, one behind the other, that one thread takes through all layers.
struct Encoder::Part {
  size_t sequence, count;  // the first one, and how many
  size_t start, tokens;
};

// Threads that go through all layers by themselves never wait for each other. Parts are as large as lets every thread
// have equally many of them, but not below a tile; there are none if the last to finish would take longer than all do
// together.
std::vector<Encoder::Part> Encoder::parts_of(const std::vector<size_t>& lengths, size_t tokens, size_t threads) {
  const size_t for_each = std::max<size_t>(1, blocks(tokens, threads * SHARE));
  const size_t wanted = std::max(WIDE, blocks(tokens, threads * for_each));
  std::vector<Part> parts;
  for (size_t s = 0, start = 0; s < lengths.size(); start += lengths[s++]) {
    if (parts.empty() || parts.back().tokens + lengths[s] / 2 > wanted) parts.push_back({s, 0, start, 0});
    ++parts.back().count;
    parts.back().tokens += lengths[s];
  }
  if (threads == 1) return parts;
  std::vector<size_t> load(threads, 0);
  for (const Part& part : parts) *std::min_element(load.begin(), load.end()) += blocks(part.tokens, STRIP) * STRIP;
  const size_t longest = *std::max_element(load.begin(), load.end());
  if (static_cast<double>(longest * threads) * TOGETHER > static_cast<double>(tokens)) parts.clear();
  return parts;
}

void Encoder::run_part(const Kernels& use, const Input& in, const std::vector<size_t>& lengths, const Output& out,
                       const Part& part) const {
  Team alone;
  Input some{part.tokens, in.hidden ? in.hidden + part.start * width : nullptr, {}};
  for (const int64_t* index : in.indices) some.indices.push_back(index + part.start);
  const auto from = lengths.begin() + static_cast<std::ptrdiff_t>(part.sequence);
  const size_t row = out.only_first ? part.sequence : part.start;
  run(alone, use, some, {from, from + static_cast<std::ptrdiff_t>(part.count)}, own_room(),
      {out.last + row * width, nullptr, out.only_first});
}

void Encoder::run(Pool& pool, const Kernels& use, const Input& in, const std::vector<size_t>& lengths,
                  const Output& out) const {
  Team team(pool);
  const auto parts = out.every ? std::vector<Part>() : parts_of(lengths, in.tokens, team.threads());
  if (parts.size() > 1) {
    std::vector<std::exception_ptr> failures(parts.size());  // nothing may be thrown through the pool
    team.each(parts.size(), [&](size_t number, size_t) {
      try {
        run_part(use, in, lengths, out, parts[number]);
      } catch (...) {
        failures[number] = std::current_exception();
      }
    });
    for (const auto& failure : failures)
      if (failure) std::rethrow_exception(failure);
    return;
  }
  Room& room = own_room();
  team.together([&] { run(team, use, in, lengths, room, out); });
}

void Encoder::run(Team& team, const Kernels& use, const Input& in, const std::vector<size_t>& lengths, Room& room,
                  const Output& out) const {
  room.hidden.shape(in.tokens, width);
  if (in.hidden)
    to_tiles(team, in.hidden, room.hidden);
  else
    embed(team, use, in, room.hidden);
  if (out.every) to_rows(team, room.hidden, out.every);
  if (!layers.empty()) layers[0].qkv.matrix->narrow(team, use, room.hidden, room.shorts);
  for (size_t number = 0; number < layers.size(); ++number) {
    const Layer& layer = layers[number];
    const Matrix* next = number + 1 < layers.size() ? layers[number + 1].qkv.matrix.get() : nullptr;
    const Matrix& out_by = *layer.out.matrix;
    const bool only_first = out.only_first && !next;
    attend_all(team, use, layer.qkv, out_by, lengths, only_first, room);
    if (only_first) pick(room.hidden, lengths, room.firsts);
    out_by.multiply(team, use, room.context, room.more_shorts, bias_of(layer.out), Activation::none, room.middle);
    normalise(team, use, room.middle, only_first ? room.firsts : room.hidden, layer.after_attention, layer.up.matrix.get(),
              room.shorts);
    apply_mlp(team, use, layer, room);
    normalise(team, use, room.hidden, room.middle, layer.after_mlp, next, room.shorts);
    if (out.every) to_rows(team, room.hidden, out.every + (number + 1) * in.tokens * width);
  }
  to_rows(team, room.hidden, out.last);
}

}  // namespace pinscher
