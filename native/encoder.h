// A whole transformer encoder: from embeddings to the last hidden state without going back to Python.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "matrix.h"

namespace pinscher {

using Vector = std::vector<float>;

struct Linear {
  std::shared_ptr<const Matrix> matrix;
  Vector bias;  // may be empty
  const float* start() const { return bias.empty() ? nullptr : bias.data(); }  // of its sums
};

struct LayerNorm {
  Vector weight, bias;
  float epsilon;
  Norm view() const { return {weight.data(), bias.empty() ? nullptr : bias.data(), epsilon}; }
};

// Attention, residual, norm, MLP, residual, norm: what BERT and its family do in every layer.
struct Layer {
  Linear qkv;  // outputs: queries, keys, values, head by head
  Linear out;
  LayerNorm after_attention;
  Linear up, down;
  LayerNorm after_mlp;
};

// Rows of all tables are added up and normalised, and projected if they are not as wide as the layers; one index for each
// token and table.
struct Embeddings {
  struct Table {
    const float* values;  // [rows, width], not ours
    size_t rows;
  };
  std::vector<Table> tables;
  size_t width = 0;
  LayerNorm norm;
  Linear projection;  // may have no matrix
};

// Keys and values of some tokens as int16, head by head.
struct Memory {
  Array<int32_t> keys;
  Array<int16_t> values;
  Array<float> worth;
  size_t stride = 0;
  void shape(size_t tokens, size_t heads, size_t head_width);  // what was there is gone
  KeysValues head(size_t number, size_t head_width);
};

// Some tokens that lie one behind the other. Where `hidden` is not 0 the first one only asks: nobody attends to it, and it
// stands `hidden` places before the second.
struct Row {
  size_t length;
  size_t hidden = 0;
  size_t keys() const { return hidden ? length - 1 : length; }
};

class Encoder {
 public:
  Encoder(size_t width, size_t heads, Activation activation, std::vector<Layer> layers);

  size_t width, heads, head_width;
  Activation activation;
  std::vector<Layer> layers;
  // Added to the scores, [heads][2 · reach - 1]: what a query gets for a key `d` places before it is at [reach - 1 + d].
  Vector relative;
  size_t reach = 0;

  Embeddings embeddings;  // may have no tables

  // What goes in: hidden states [tokens, width], or an index [tokens] for each table.
  struct Input {
    size_t tokens;
    const float* hidden;
    std::vector<const int64_t*> indices;
  };
  struct Output {
    float* last;      // the last hidden states [tokens, width], or [sequences, width] if only of first tokens
    float* every;     // if any, gets [layers + 1][tokens, width]
    bool only_first;  // of each sequence, without `every`: most of the last layer is not computed then
  };
  // Rows lie one behind the other; their lengths sum to tokens. Safe from several threads at once.
  void run(Pool& pool, const Kernels& use, const Input& in, const std::vector<Row>& rows, const Output& out) const;

 private:
  struct Scratch {
    Array<float> numbers;
    Memory memory;  // of one head
  };
  // What one forward pass, or a slice of it, needs; kept for the calling thread's next one.
  struct Room {
    Activations hidden, wide, context, middle, firsts;
    Operand operand, more;
    std::vector<Scratch> scratch;  // of each thread
  };
  static Room& own_room();  // of the calling thread

  // Where the keys of a row are, which of its tokens ask, and where what they get is put.
  struct Sequence {
    size_t start, count;  // keys
    size_t asks, queries, place;
    std::ptrdiff_t apart;  // how far behind the first key the first query stands
  };
  // Queries, keys and values of the tokens from `start` on; keys and values also as int16, which all of a layer's sources
  // have, or none.
  struct Source {
    size_t start;
    const Activations* wide;
    Memory* memory;
  };
  struct Part;
  struct Slice;

  void run_together(Team& team, const Kernels& use, const Input& in, const std::vector<Row>& rows, Room& room,
                    const Output& out) const;
  const Form* after(size_t number) const;  // in which what this layer makes is multiplied
  void enter(Team& team, const Kernels& use, const Input& in, Room& room) const;
  void embed(Team& team, const Kernels& use, const Input& in, Activations& out) const;
  void attend(const Kernels& use, bool shorts, size_t head, const Sequence& one, const std::vector<Source>& sources,
              Activations& context, Scratch& scratch) const;
  void remember(const Kernels& use, const Activations& wide, Memory& memory) const;
  void make_room(size_t threads, const std::vector<Sequence>& sequences, size_t made, const Form& next,
                 Room& room) const;
  void attend_all(Team& team, const Kernels& use, const Linear& qkv, const Form& next,
                  const std::vector<Sequence>& sequences, size_t made, Room& room) const;
  void attend_heads(Team& team, const Kernels& use, bool shorts, const Form& next,
                    const std::vector<Sequence>& sequences, const std::vector<Source>& sources, Room& room) const;
  void apply_mlp(Team& team, const Kernels& use, const Layer& layer, Room& room) const;
  void finish(Team& team, const Kernels& use, const Layer& layer, const Form* next, const Activations& residual,
              Room& room) const;

  static void ask_of(const Row& row, size_t start, size_t begin, size_t end, size_t place, std::vector<Sequence>& to);
  Input some_of(const Input& in, size_t start, size_t tokens) const;
  static std::vector<Part> parts_of(const std::vector<Row>& rows, size_t tokens, size_t threads);
  void run_part(const Kernels& use, const Input& in, const std::vector<Row>& rows, const Output& out,
                const Part& part) const;
  static void cut(const std::vector<Row>& rows, size_t tokens, size_t count, std::vector<Slice>& slices);
  void run_slices(Team& team, const Kernels& use, const Input& in, const std::vector<Row>& rows,
                  const Output& out) const;
  void ask(const Kernels& use, size_t number, Slice& own) const;
  void step(const Kernels& use, size_t number, const std::vector<Source>& sources, size_t tokens, const Output& out,
            Slice& own) const;
  void finish_firsts(Team& team, const Kernels& use, const std::vector<Source>& sources, const std::vector<Slice>& slices,
                     const Output& out) const;
};

// Rows [tokens, width] as tiles, and back.
void to_tiles(Team& team, const float* rows, Activations& out);
void to_rows(Team& team, const Activations& in, float* rows);

}  // namespace pinscher
