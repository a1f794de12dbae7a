#include "operand.h"

namespace pinscher {
namespace {

struct Strip {
  size_t tile, token;  // the first one, in the tile
  explicit Strip(size_t number) : tile(number * STRIP / TILE), token(number * STRIP % TILE) {}
};

}  // namespace

void Activations::shape(size_t new_tokens, size_t new_features) {
  tokens = new_tokens;
  features = new_features;
  values.reserve(tiles() * TILE * features);
}

void Form::narrow(Team& team, const Kernels& use, const Activations& x, Operand& out) const {
  if (!is_narrow()) return;
  make_room(x.tokens, out);
  team.each(blocks(x.tokens, STRIP), [&](size_t strip, size_t) { narrow_strip(use, x, strip, out); });
}

void Form::narrow_features(const Kernels& use, const Activations& x, size_t block, Operand& out) const {
  for (size_t tile = 0; tile < x.tiles(); ++tile)
    narrow_part(use, tile, x.in_tile(tile), block, x.tile(tile) + block * BLOCK_N * TILE, out);
}

void Form::settle(Team& team, const Kernels& use, size_t tokens, Operand& out) const {
  if (!is_narrow()) return;
  team.each(blocks(tokens, STRIP), [&](size_t strip, size_t) { settle_strip(use, strip, out); });
}

// ------------------------------------------------------------ int16

void Shorts::make_room(size_t tokens, Operand& out) const {
  const size_t tiles = blocks(tokens, TILE);
  out.shorts.reserve(tiles * features * TILE);
  out.scale.reserve(tiles * blocks(features, CHUNK) * TILE);
  out.parts.reserve(tiles * blocks(features, BLOCK_N) * TILE);
}

void Shorts::narrow_strip(const Kernels& use, const Activations& x, size_t strip, Operand& out) const {
  const Strip at(strip);
  use.narrow(x.tile(at.tile) + at.token, features, bound_.data(),
             out.shorts.data() + at.tile * features * TILE + at.token,
             out.scale.data() + at.tile * blocks(features, CHUNK) * TILE + at.token);
}

void Shorts::narrow_part(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                         Operand& out) const {
  const size_t first = block * BLOCK_N, count = std::min(BLOCK_N, features - first);
  for (size_t t = 0; t < tokens; t += STRIP)
    use.narrow(part + t, count, &FULL, out.shorts.data() + (tile * features + first) * TILE + t,
               out.parts.data() + (tile * blocks(features, BLOCK_N) + block) * TILE + t);
}

void Shorts::settle_strip(const Kernels& use, size_t strip, Operand& out) const {
  const Strip at(strip);
  use.settle(out.shorts.data() + at.tile * features * TILE + at.token, features,
             out.parts.data() + at.tile * blocks(features, BLOCK_N) * TILE + at.token, bound_.data(),
             out.scale.data() + at.tile * blocks(features, CHUNK) * TILE + at.token);
}

// ------------------------------------------------------------ int8

void Bytes::make_room(size_t tokens, Operand& out) const {
  const size_t tiles = blocks(tokens, TILE);
  out.bytes.reserve(tiles * in_tile());
  out.scale.reserve(tiles * 2 * TILE);
  out.shorts.reserve(tiles * features * TILE);
  out.parts.reserve(tiles * blocks(features, BLOCK_N) * 3 * TILE);
}

Range Bytes::range(size_t tile, size_t block, Operand& out) const {
  float* first = out.parts.data() + (tile * blocks(features, BLOCK_N) + block) * 3 * TILE;
  return {first, first + TILE, first + 2 * TILE};
}

void Bytes::narrow_strip(const Kernels& use, const Activations& x, size_t strip, Operand& out) const {
  const Strip at(strip);
  float* scale = out.scale.data() + at.tile * 2 * TILE + at.token;
  use.narrow_bytes(x.tile(at.tile) + at.token, features, out.bytes.data() + at.tile * in_tile() + at.token * QUAD, scale,
                   scale + TILE);
}

void Bytes::narrow_part(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                        Operand& out) const {
  const size_t first = block * BLOCK_N, count = std::min(BLOCK_N, features - first);
  const Range all = range(tile, block, out);
  for (size_t t = 0; t < tokens; t += STRIP)
    use.narrow_part(part + t, count, out.shorts.data() + (tile * features + first) * TILE + t,
                    {all.low + t, all.high + t, all.worth + t});
}

void Bytes::settle_strip(const Kernels& use, size_t strip, Operand& out) const {
  const Strip at(strip);
  const Range all = range(at.tile, 0, out);
  float* scale = out.scale.data() + at.tile * 2 * TILE + at.token;
  use.settle_bytes(out.shorts.data() + at.tile * features * TILE + at.token, features,
                   {all.low + at.token, all.high + at.token, all.worth + at.token},
                   out.bytes.data() + at.tile * in_tile() + at.token * QUAD, scale, scale + TILE);
}

}  // namespace pinscher
