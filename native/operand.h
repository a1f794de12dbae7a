// Activations, and the forms in which matrices want to multiply them.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace pinscher {

inline size_t blocks(size_t count, size_t size) { return (count + size - 1) / size; }

// Activations of `tokens` tokens: tiles of [features][TILE].
struct Activations {
  size_t tokens = 0, features = 0;
  Array<float> values;
  void shape(size_t new_tokens, size_t new_features);  // what was there is gone
  size_t tiles() const { return blocks(tokens, TILE); }
  size_t in_tile(size_t tile) const { return tokens - tile * TILE < TILE ? tokens - tile * TILE : TILE; }
  float* tile(size_t number) { return values.data() + number * features * TILE; }
  const float* tile(size_t number) const { return values.data() + number * features * TILE; }
};

// The same in the form that a matrix wants. What is in here, and how it lies, only that form knows.
struct Operand {
  Array<int16_t> shorts;
  Array<int8_t> bytes;
  Array<float> scale;  // what it takes to get from sums back to numbers
  Array<float> parts;  // what is known of the parts of a token before all of them are there
};

// A form. Whoever makes activations also makes the form in which they are multiplied next: a strip of tokens at a time
// where it has all of their features, or else BLOCK_N features of a tile at a time, which are settled when all are there.
class Form {
 public:
  explicit Form(size_t features) : features(features) {}
  virtual ~Form() = default;
  Form(const Form&) = delete;
  Form& operator=(const Form&) = delete;

  const size_t features;
  virtual size_t width() const = 0;                            // bytes of a number
  virtual bool is_narrow() const { return true; }              // otherwise the fp32 numbers are multiplied as they are
  virtual void make_room(size_t tokens, Operand& out) const = 0;
  virtual void narrow_strip(const Kernels& use, const Activations& x, size_t strip, Operand& out) const = 0;
  virtual void narrow_part(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                           Operand& out) const = 0;
  virtual void settle_strip(const Kernels& use, size_t strip, Operand& out) const = 0;

  void narrow(Team& team, const Kernels& use, const Activations& x, Operand& out) const;  // room and all
  void narrow_features(const Kernels& use, const Activations& x, size_t block, Operand& out) const;  // of all tiles
  void settle(Team& team, const Kernels& use, size_t tokens, Operand& out) const;
};

class Floats : public Form {
 public:
  using Form::Form;
  size_t width() const override { return sizeof(float); }
  bool is_narrow() const override { return false; }
  void make_room(size_t, Operand&) const override {}
  void narrow_strip(const Kernels&, const Activations&, size_t, Operand&) const override {}
  void narrow_part(const Kernels&, size_t, size_t, size_t, const float*, Operand&) const override {}
  void settle_strip(const Kernels&, size_t, Operand&) const override {}
};

// int16 [features][TILE]; scale: [tile][chunk][TILE], what a unit of each token is worth.
class Shorts : public Form {
 public:
  Shorts(size_t features, std::vector<float> bound) : Form(features), bound_(std::move(bound)) {}
  size_t width() const override { return sizeof(int16_t); }
  void make_room(size_t tokens, Operand& out) const override;
  void narrow_strip(const Kernels& use, const Activations& x, size_t strip, Operand& out) const override;
  void narrow_part(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                   Operand& out) const override;
  void settle_strip(const Kernels& use, size_t strip, Operand& out) const override;

 private:
  const std::vector<float> bound_;  // of each chunk's length: see SparseCodes
};

// int8 [groups][TILE][QUAD]; scale: [tile][2][TILE], a token's scale and middle.
class Bytes : public Form {
 public:
  using Form::Form;
  size_t width() const override { return sizeof(int8_t); }
  void make_room(size_t tokens, Operand& out) const override;
  void narrow_strip(const Kernels& use, const Activations& x, size_t strip, Operand& out) const override;
  void narrow_part(const Kernels& use, size_t tile, size_t tokens, size_t block, const float* part,
                   Operand& out) const override;
  void settle_strip(const Kernels& use, size_t strip, Operand& out) const override;

 private:
  size_t in_tile() const { return blocks(features, QUAD) * QUAD * TILE; }  // bytes of one
  Range range(size_t tile, size_t block, Operand& out) const;
};

}  // namespace pinscher
