#include "encoder.h"

#include <algorithm>
#include <exception>

namespace pinscher {
namespace {

constexpr size_t SHARE = 256;      // tokens that one thread takes through all layers: more do not stay near it
constexpr double TOGETHER = 0.85;  // of its speed that a thread keeps where all share in every step
constexpr double SLICED = 0.95;    // and where each has a slice of the tokens; an estimate
constexpr size_t SLICE = 64;       // tokens for each thread from which on there are slices: each reads all weights
constexpr size_t EVEN = 16;        // tokens that slices are cut at multiples of

// The first token that asks of each sequence, to its place in `to`, whose shape is there already; `from` holds the tokens from
// `start` on.
template <typename Sequences>
void pick(const Activations& from, size_t start, const Sequences& sequences, Activations& to) {
  for (const auto& one : sequences) {
    const size_t token = one.asks - start;
    const float* in = from.tile(token / TILE) + token % TILE;
    float* out = to.tile(one.place / TILE) + one.place % TILE;
    for (size_t k = 0; k < from.features; ++k) out[k * TILE] = in[k * TILE];
  }
}

// What an item throws is thrown when all are done, since nothing may go through the pool.
template <typename Work>
void each_or_throw(Team& team, size_t items, Work&& work) {
  std::vector<std::exception_ptr> failures(items);
  team.each_own(items, [&](size_t item) {
    try {
      work(item);
    } catch (...) {
      failures[item] = std::current_exception();
    }
  });
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

// Adds the residual and normalises, and makes at once what `next` will multiply.
void normalise(Team& team, const Kernels& use, Activations& x, const Activations& residual, const LayerNorm& norm,
               const Form* next, Operand& operand) {
  if (next) next->make_room(x.tokens, operand);
  team.each(blocks(x.tokens, STRIP), [&](size_t strip, size_t) {
    const size_t tile = strip * STRIP / TILE, first = strip * STRIP % TILE;
    use.norm(x.tile(tile) + first, residual.tile(tile) + first, x.features, norm.view());
    if (next) next->narrow_strip(use, x, strip, operand);
  });
}

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
  const size_t width = embeddings.width;
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

Encoder::Room& Encoder::own_room() {
  thread_local Room room;
  return room;
}

// From room.middle, whose form for this layer is in room.operand, to room.hidden.
void Encoder::apply_mlp(Team& team, const Kernels& use, const Layer& layer, Room& room) const {
  const Matrix &up = *layer.up.matrix, &down = *layer.down.matrix;
  if (down.form().is_narrow()) {
    room.wide.tokens = room.middle.tokens;  // only that is asked of it: the numbers are in the narrow form
    up.multiply_to(team, use, room.middle, room.operand, layer.up.start(), activation, down.form(), room.more);
  } else {
    up.multiply(team, use, room.middle, room.operand, layer.up.start(), activation, room.wide);
  }
  down.multiply(team, use, room.wide, room.more, layer.down.start(), Activation::none, room.hidden);
}

// From room.context, whose form is in room.more, to room.hidden: what a layer does after attention, and the form for the
// next one.
void Encoder::finish(Team& team, const Kernels& use, const Layer& layer, const Form* next, const Activations& residual,
                     Room& room) const {
  layer.out.matrix->multiply(team, use, room.context, room.more, layer.out.start(), Activation::none, room.middle);
  normalise(team, use, room.middle, residual, layer.after_attention, &layer.up.matrix->form(), room.operand);
  apply_mlp(team, use, layer, room);
  normalise(team, use, room.hidden, room.middle, layer.after_mlp, next, room.operand);
}

// Some sequences, one behind the other, that one thread takes through all layers.
struct Encoder::Part {
  size_t sequence, count;  // the first one, and how many
  size_t start, tokens;
};

// Threads that go through all layers by themselves never wait for each other. Parts are as large as lets every thread
// have equally many of them, but not below a tile; there are none if the last to finish would take longer than all do
// together.
std::vector<Encoder::Part> Encoder::parts_of(const std::vector<Row>& rows, size_t tokens, size_t threads) {
  const size_t for_each = std::max<size_t>(1, blocks(tokens, threads * SHARE));
  const size_t wanted = std::max(TILE, blocks(tokens, threads * for_each));
  std::vector<Part> parts;
  for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length) {
    if (parts.empty() || parts.back().tokens + rows[s].length / 2 > wanted) parts.push_back({s, 0, start, 0});
    ++parts.back().count;
    parts.back().tokens += rows[s].length;
  }
  if (threads == 1) return parts;
  std::vector<size_t> load(threads, 0);
  for (const Part& part : parts) *std::min_element(load.begin(), load.end()) += blocks(part.tokens, STRIP) * STRIP;
  const size_t longest = *std::max_element(load.begin(), load.end());
  const double kept = tokens >= threads * SLICE ? SLICED : TOGETHER;
  if (static_cast<double>(longest * threads) * kept > static_cast<double>(tokens)) parts.clear();
  return parts;
}

Encoder::Input Encoder::some_of(const Input& in, size_t start, size_t tokens) const {
  Input some{tokens, in.hidden ? in.hidden + start * width : nullptr, {}};
  for (const int64_t* index : in.indices) some.indices.push_back(index + start);
  return some;
}

void Encoder::run_part(const Kernels& use, const Input& in, const std::vector<Row>& rows, const Output& out,
                       const Part& part) const {
  Team alone;
  const auto from = rows.begin() + static_cast<std::ptrdiff_t>(part.sequence);
  const size_t row = out.only_first ? part.sequence : part.start;
  run_together(alone, use, some_of(in, part.start, part.tokens), {from, from + static_cast<std::ptrdiff_t>(part.count)},
               own_room(), {out.last + row * width, nullptr, out.only_first});
}

void Encoder::run(Pool& pool, const Kernels& use, const Input& in, const std::vector<Row>& rows,
                  const Output& out) const {
  Team team(pool);
  const auto parts = out.every ? std::vector<Part>() : parts_of(rows, in.tokens, team.threads());
  if (parts.size() > 1)
    each_or_throw(team, parts.size(), [&](size_t number) { run_part(use, in, rows, out, parts[number]); });
  else if (team.threads() > 1 && in.tokens >= team.threads() * SLICE && !layers.empty())
    team.together([&] { run_slices(team, use, in, rows, out); });
  else
    team.together([&] { run_together(team, use, in, rows, own_room(), out); });
}

// To room.hidden, and its form for the first layer.
void Encoder::enter(Team& team, const Kernels& use, const Input& in, Room& room) const {
  room.hidden.shape(in.tokens, width);
  const Linear& projection = embeddings.projection;
  if (in.hidden) {
    to_tiles(team, in.hidden, room.hidden);
  } else if (projection.matrix) {
    room.wide.shape(in.tokens, embeddings.width);
    embed(team, use, in, room.wide);
    projection.matrix->form().narrow(team, use, room.wide, room.operand);
    projection.matrix->multiply(team, use, room.wide, room.operand, projection.start(), Activation::none, room.hidden);
  } else {
    embed(team, use, in, room.hidden);
  }
  if (!layers.empty()) layers[0].qkv.matrix->form().narrow(team, use, room.hidden, room.operand);
}

const Form* Encoder::after(size_t number) const {
  return number + 1 < layers.size() ? &layers[number + 1].qkv.matrix->form() : nullptr;
}

// Adds what the tokens from `begin` to `end` ask, of a row that starts at `start`; what they get is put at `place`. A hidden
// one asks by itself, since it stands elsewhere.
void Encoder::ask_of(const Row& row, size_t start, size_t begin, size_t end, size_t place, std::vector<Sequence>& to) {
  const size_t first = start + (row.length - row.keys());
  if (begin < first) {
    to.push_back({first, row.keys(), begin, 1, place, -static_cast<std::ptrdiff_t>(row.hidden)});
    ++begin;
    ++place;
  }
  if (begin < end)
    to.push_back({first, row.keys(), begin, end - begin, place, static_cast<std::ptrdiff_t>(begin - first)});
}

// All threads share in every step.
void Encoder::run_together(Team& team, const Kernels& use, const Input& in, const std::vector<Row>& rows, Room& room,
                           const Output& out) const {
  std::vector<Sequence> all, firsts;
  for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length) {
    ask_of(rows[s], start, start, start + rows[s].length, start, all);
    ask_of(rows[s], start, start, start + 1, s, firsts);
  }
  enter(team, use, in, room);
  if (out.every) to_rows(team, room.hidden, out.every);
  for (size_t number = 0; number < layers.size(); ++number) {
    const Layer& layer = layers[number];
    const Form* next = after(number);
    const bool only_first = out.only_first && !next;
    attend_all(team, use, layer.qkv, layer.out.matrix->form(), only_first ? firsts : all,
               only_first ? firsts.size() : in.tokens, room);
    if (only_first) {
      room.firsts.shape(firsts.size(), width);
      pick(room.hidden, 0, firsts, room.firsts);
    }
    finish(team, use, layer, next, only_first ? room.firsts : room.hidden, room);
    if (out.every) to_rows(team, room.hidden, out.every + (number + 1) * in.tokens * width);
  }
  to_rows(team, room.hidden, out.last);
}

// ------------------------------------------------------------ slices

// Some tokens that one thread takes through all layers, but the end of the last one where only first tokens matter; only
// keys and values go from one to the other. Where all share in every step most of what one reads others have made, which
// costs dearly if cores have no cache in common.
struct Encoder::Slice {
  size_t start, tokens;
  std::vector<Sequence> all, firsts;  // what its tokens ask, and what the first ones of sequences do
  Room room;
  // Of a layer, which the others may still read, and of the next one. They read less where there is a memory.
  Activations qkv[2];
  Memory memory[2];
};

void Encoder::cut(const std::vector<Row>& rows, size_t tokens, size_t count, std::vector<Slice>& slices) {
  for (size_t i = 0; i < count; ++i) {
    Slice& one = slices[i];
    one.start = i * tokens / count / EVEN * EVEN;
    one.tokens = (i + 1 < count ? (i + 1) * tokens / count / EVEN * EVEN : tokens) - one.start;
    one.all.clear();
    one.firsts.clear();
    for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length) {
      const size_t begin = std::max(start, one.start), end = std::min(start + rows[s].length, one.start + one.tokens);
      if (begin >= end) continue;
      ask_of(rows[s], start, begin, end, begin - one.start, one.all);
      if (begin == start) ask_of(rows[s], start, start, start + 1, s, one.firsts);
    }
  }
}

// A slice's own queries, keys and values of a layer.
void Encoder::ask(const Kernels& use, size_t number, Slice& own) const {
  Team alone;
  const Linear& qkv = layers[number].qkv;
  Activations& made = own.qkv[number % 2];
  qkv.matrix->multiply(alone, use, own.room.hidden, own.room.operand, qkv.start(), Activation::none, made);
  if (qkv.matrix->form().is_narrow()) remember(use, made, own.memory[number % 2]);
}

// One layer of one slice: from the queries, keys and values of all to its own of the next layer.
void Encoder::step(const Kernels& use, size_t number, const std::vector<Source>& sources, size_t tokens,
                   const Output& out, Slice& own) const {
  Team alone;
  Room& room = own.room;
  const Layer& layer = layers[number];
  const Form* next = after(number);
  make_room(1, own.all, own.tokens, layer.out.matrix->form(), room);
  attend_heads(alone, use, layer.qkv.matrix->form().is_narrow(), layer.out.matrix->form(), own.all, sources, room);
  finish(alone, use, layer, next, room.hidden, room);
  if (out.every) to_rows(alone, room.hidden, out.every + ((number + 1) * tokens + own.start) * width);
  if (next)
    ask(use, number + 1, own);
  else
    to_rows(alone, room.hidden, out.last + own.start * width);
}

// The end of the last layer where only first tokens matter: too few to be cut in slices.
void Encoder::finish_firsts(Team& team, const Kernels& use, const std::vector<Source>& sources,
                            const std::vector<Slice>& slices, const Output& out) const {
  Room& room = own_room();
  const Layer& layer = layers.back();
  std::vector<Sequence> firsts;
  for (size_t i = 0; i < sources.size(); ++i)  // there may be more slices, of an earlier call
    firsts.insert(firsts.end(), slices[i].firsts.begin(), slices[i].firsts.end());
  room.firsts.shape(firsts.size(), width);
  for (size_t i = 0; i < sources.size(); ++i)
    pick(slices[i].room.hidden, slices[i].start, slices[i].firsts, room.firsts);
  make_room(team.threads(), firsts, firsts.size(), layer.out.matrix->form(), room);
  attend_heads(team, use, layer.qkv.matrix->form().is_narrow(), layer.out.matrix->form(), firsts, sources, room);
  finish(team, use, layer, nullptr, room.firsts, room);
  to_rows(team, room.hidden, out.last);
}

void Encoder::run_slices(Team& team, const Kernels& use, const Input& in, const std::vector<Row>& rows,
                         const Output& out) const {
  thread_local std::vector<Slice> kept;
  std::vector<Slice>& slices = kept;  // the others must not see theirs
  const size_t count = team.threads(), sliced = layers.size() - (out.only_first ? 1 : 0);
  if (slices.size() < count) slices.resize(count);
  cut(rows, in.tokens, count, slices);
  const auto sources_of = [&](size_t number) {
    const bool shorts = layers[number].qkv.matrix->form().is_narrow();
    std::vector<Source> sources;
    for (size_t i = 0; i < count; ++i)
      sources.push_back({slices[i].start, &slices[i].qkv[number % 2], shorts ? &slices[i].memory[number % 2] : nullptr});
    return sources;
  };
  each_or_throw(team, count, [&](size_t number) {
    Team alone;
    Slice& own = slices[number];
    enter(alone, use, some_of(in, own.start, own.tokens), own.room);
    if (out.every) to_rows(alone, own.room.hidden, out.every + own.start * width);
    ask(use, 0, own);
  });
  for (size_t number = 0; number < sliced; ++number) {
    const auto sources = sources_of(number);
    each_or_throw(team, count, [&](size_t slice) { step(use, number, sources, in.tokens, out, slices[slice]); });
  }
  if (out.only_first) finish_firsts(team, use, sources_of(sliced), slices, out);
}

}  // namespace pinscher
