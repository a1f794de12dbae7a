// A whole transformer encoder: from embeddings to the last hidden state without going back to Python.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "matrix.h"

namespace pinscher {

using Vector = std::vector<float>;

struct Linear {
  std::shared_ptr<const Matrix> matrix;
  Vector bias;  // may be empty
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

// Rows of all tables are added up and normalised; one index for each token and table.
struct Embeddings {
  struct Table {
    const float* values;  // [rows, width], not ours
    size_t rows;
  };
  std::vector<Table> tables;
  LayerNorm norm;
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
  // Sequences lie one behind the other; lengths sum to tokens. Safe from several threads at once.
  void run(Pool& pool, const Kernels& use, const Input& in, const std::vector<size_t>& lengths, const Output& out) const;

 private:
  struct Room;
  static Room& own_room();  // of the calling thread
  struct Part;
  static std::vector<Part> parts_of(const std::vector<size_t>& lengths, size_t tokens, size_t threads);
  void run_part(const Kernels& use, const Input& in, const std::vector<size_t>& lengths, const Output& out,
                const Part& part) const;
  void run(Team& team, const Kernels& use, const Input& in, const std::vector<size_t>& lengths, Room& room,
           const Output& out) const;
  void embed(Team& team, const Kernels& use, const Input& in, Activations& out) const;
  struct Sequence;
  void attend(const Kernels& use, bool shorts, size_t head, const Sequence& one, Room& room, float* scratch) const;
  void apply_mlp(Team& team, const Kernels& use, const Layer& layer, Room& room) const;
  void attend_all(Team& team, const Kernels& use, const Linear& qkv, const Matrix& next,
                  const std::vector<size_t>& lengths, bool only_first, Room& room) const;
};

// Rows [tokens, width] as tiles, and back.
void to_tiles(Team& team, const float* rows, Activations& out);
void to_rows(Team& team, const Activations& in, float* rows);

}  // namespace pinscher
