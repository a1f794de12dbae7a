// What Python sees of the runtime. Every array is checked here; whatever computes releases the GIL.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>

#include "encoder.h"
#include "tail.h"

namespace {

using pinscher::Activation;
using pinscher::Activations;
using pinscher::Kernels;
using Weights = pinscher::Matrix;
template <typename T>
using Rows = Matrix<T>;
using MaybeVector = std::optional<Vector<float>>;

const Kernels& kernels_named(const std::string& name) {
  const Kernels* found = pinscher::kernels(name.empty() ? nullptr : name.c_str());
  if (!found) throw nb::value_error("no such instruction set on this machine");
  return *found;
}

Activation activation_named(const std::string& name) {
  const char* const names[] = {"none", "gelu", "gelu_tanh", "relu", "silu", "gelu_short"};
  for (int i = 0; i < 6; ++i)
    if (name == names[i]) return static_cast<Activation>(i);
  throw nb::value_error("no such activation");
}

std::vector<std::string> isas(bool all) {
  std::vector<std::string> names;
  for (const pinscher::Isa& some : pinscher::all_isas())
    if (all || some.kernels.supported()) names.push_back(some.kernels.name);
  return names;
}

nb::dict costs(const std::string& isa) {
  for (const pinscher::Isa& some : pinscher::all_isas()) {
    if (isa != some.kernels.name) continue;
    nb::dict found;
    found["f32"] = some.costs.f32;
    found["dense"] = 1.0;
    found["i8"] = some.costs.i8;
    found["groups"] = some.costs.groups;
    found["dense8"] = some.costs.dense8;
    return found;
  }
  throw nb::value_error("no such instruction set");
}

pinscher::Vector numbers(const MaybeVector& some, size_t count) {
  if (!some) return {};
  if (some->shape(0) != count) throw nb::value_error("a bias or norm does not fit its matrix");
  return {some->data(), some->data() + count};
}

pinscher::Kind kind_named(const std::string& name) {
  for (const pinscher::Kind kind : pinscher::KINDS)
    if (name == pinscher::name_of(kind)) return kind;
  throw nb::value_error("no such kind of matrix");
}

std::shared_ptr<Weights> from_f32(Rows<const float> weights, const std::string& name) {
  const pinscher::Kind kind = kind_named(name);
  nb::gil_scoped_release release;
  return pinscher::matrix_of(weights.data(), weights.shape(0), weights.shape(1), kind);
}

std::shared_ptr<Weights> from_i8(Rows<const int8_t> codes, Vector<float> scale, const std::string& name) {
  const pinscher::Kind kind = kind_named(name);
  if (scale.shape(0) != codes.shape(0)) throw nb::value_error("codes and scales do not fit");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < codes.size(); ++i)
    if (codes.data()[i] == -128) throw std::invalid_argument("a code is below -127");
  return pinscher::matrix_of(codes.data(), scale.data(), codes.shape(0), codes.shape(1), kind);
}

void activate_in_place(const Kernels& use, Activation kind, float* values, size_t count) {
  using pinscher::TILE;
  const size_t rows = pinscher::blocks(count, TILE);
  pinscher::Array<float> padded(rows * TILE);
  std::copy_n(values, count, padded.data());
  use.activate(kind, padded.data(), rows, TILE);
  std::copy_n(padded.data(), count, values);
}

void multiply(const Weights& weights, pinscher::Pool& pool, const std::string& isa, Rows<const float> x,
              const MaybeVector& bias, const std::string& then, Rows<float> out) {
  const size_t tokens = x.shape(0);
  if (x.shape(1) != weights.columns || out.shape(0) != tokens || out.shape(1) != weights.rows)
    throw nb::value_error("the activations do not fit the matrix");
  if (bias && bias->shape(0) != weights.rows) throw nb::value_error("the bias does not fit the matrix");
  const Kernels& use = kernels_named(isa);
  const Activation activation = activation_named(then);
  const float* add = bias ? bias->data() : nullptr;
  nb::gil_scoped_release release;
  pinscher::Team team(pool);
  if (tokens == 1) {
    weights.multiply_one(team, x.data(), add, out.data());
    if (activation == Activation::none) return;
    activate_in_place(use, activation, out.data(), weights.rows);
    return;
  }
  thread_local Activations in, result;
  thread_local pinscher::Operand operand;
  in.shape(tokens, weights.columns);
  pinscher::to_tiles(team, x.data(), in);
  weights.form().narrow(team, use, in, operand);
  weights.multiply(team, use, in, operand, add, activation, result);
  pinscher::to_rows(team, result, out.data());
}

// A layer as Python gives it: four matrices, their biases, two norms.
struct Described {
  std::vector<std::shared_ptr<Weights>> matrices;  // qkv, out, up, down
  std::vector<MaybeVector> biases;
  std::vector<Vector<float>> norms;  // weight, bias, weight, bias
  float epsilon;
};

pinscher::Layer layer_of(const Described& from, size_t width) {
  if (from.matrices.size() != 4 || from.biases.size() != 4 || from.norms.size() != 4)
    throw nb::value_error("a layer has four matrices, four biases and two norms");
  const size_t middle = from.matrices[2]->rows;
  const size_t shapes[4][2] = {{3 * width, width}, {width, width}, {middle, width}, {width, middle}};
  pinscher::Linear linear[4];
  for (int i = 0; i < 4; ++i) {
    const auto& matrix = from.matrices[i];
    if (matrix->rows != shapes[i][0] || matrix->columns != shapes[i][1])
      throw nb::value_error("a matrix has another shape than its layer");
    linear[i] = {matrix, numbers(from.biases[i], matrix->rows)};
  }
  pinscher::LayerNorm norms[2];
  for (int i = 0; i < 2; ++i)
    norms[i] = {numbers(from.norms[2 * i], width), numbers(from.norms[2 * i + 1], width), from.epsilon};
  return {linear[0], linear[1], norms[0], linear[2], linear[3], norms[1]};
}

pinscher::Encoder* new_encoder(size_t width, size_t heads, const std::string& activation,
                               const std::vector<Described*>& layers) {
  if (!heads || !width || width % heads) throw nb::value_error("the width is no multiple of the heads");
  std::vector<pinscher::Layer> made;
  for (const Described* layer : layers) made.push_back(layer_of(*layer, width));
  return new pinscher::Encoder(width, heads, activation_named(activation), std::move(made));
}

void set_relative(pinscher::Encoder& encoder, Rows<const float> table) {
  const size_t places = table.shape(1);
  if (table.shape(0) != encoder.heads || places % 2 == 0) throw nb::value_error("the table does not fit the heads");
  encoder.relative.assign(table.data(), table.data() + table.size());
  encoder.relative.resize(table.size() + 64);  // what a wide load may touch
  encoder.reach = (places + 1) / 2;
}

// `hidden`, if any, says for each row how far its first token stands before the others if nobody attends to it, else 0.
std::vector<pinscher::Row> rows_of(const std::vector<size_t>& lengths, const std::vector<size_t>& hidden,
                                   const pinscher::Encoder& encoder, size_t tokens) {
  if (!hidden.empty() && hidden.size() != lengths.size())
    throw nb::value_error("one number is needed for each row's first token");
  std::vector<pinscher::Row> rows;
  size_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const pinscher::Row row{lengths[i], hidden.empty() ? 0 : hidden[i]};
    if (row.length > tokens - total) throw nb::value_error("the lengths do not add up to the tokens");
    if (!row.length || !row.keys()) throw nb::value_error("a sequence is empty");
    if (encoder.reach && (row.keys() > encoder.reach || row.hidden > encoder.reach - row.keys()))
      throw nb::value_error("a sequence is too long");
    total += row.length;
    rows.push_back(row);
  }
  if (total != tokens) throw nb::value_error("the lengths do not add up to the tokens");
  return rows;
}

// The tables stay where they are: the binding keeps the list alive.
void set_embeddings(pinscher::Encoder& encoder, const std::vector<Rows<const float>>& tables, const Vector<float>& weight,
                    const Vector<float>& bias, float epsilon, std::shared_ptr<Weights> projection,
                    const MaybeVector& projection_bias) {
  pinscher::Embeddings made;
  made.width = projection ? projection->columns : encoder.width;
  if (projection && projection->rows != encoder.width)
    throw nb::value_error("the projection has another width than the encoder");
  for (const auto& table : tables) {
    if (table.shape(1) != made.width) throw nb::value_error("an embedding has another width than the encoder");
    made.tables.push_back({table.data(), table.shape(0)});
  }
  made.norm = {numbers(weight, made.width), numbers(bias, made.width), epsilon};
  if (projection) made.projection = {projection, numbers(projection_bias, projection->rows)};
  encoder.embeddings = std::move(made);
}

pinscher::Encoder::Input input_of(const pinscher::Encoder& encoder, const std::optional<Rows<const float>>& hidden,
                                  const std::vector<Vector<int64_t>>& indices) {
  if (hidden) {
    if (hidden->shape(1) != encoder.width) throw nb::value_error("the hidden states do not fit the encoder");
    return {hidden->shape(0), hidden->data(), {}};
  }
  const auto& tables = encoder.embeddings.tables;
  if (indices.empty() || indices.size() != tables.size()) throw nb::value_error("one index for each table is needed");
  pinscher::Encoder::Input in{indices[0].shape(0), nullptr, {}};
  for (size_t i = 0; i < tables.size(); ++i) {
    if (indices[i].shape(0) != in.tokens) throw nb::value_error("one index for each token is needed");
    for (size_t t = 0; t < in.tokens; ++t)
      if (indices[i].data()[t] < 0 || static_cast<size_t>(indices[i].data()[t]) >= tables[i].rows)
        throw nb::index_error("a token, position or type is out of range");
    in.indices.push_back(indices[i].data());
  }
  return in;
}

// ------------------------------------------------------------ after the last layer

pinscher::Tail* new_tail(size_t width, const std::string& pooling, const std::vector<std::shared_ptr<Weights>>& matrices,
                         const std::vector<MaybeVector>& biases, const std::vector<std::string>& activations,
                         bool normalise) {
  const char* const names[] = {"none", "first", "last", "mean", "mean_sqrt", "max"};
  const size_t kind = std::find(std::begin(names), std::end(names), pooling) - std::begin(names);
  if (kind == std::size(names)) throw nb::value_error("no such pooling");
  if (biases.size() != matrices.size() || activations.size() != matrices.size())
    throw nb::value_error("a bias and an activation are needed for each matrix");
  std::vector<pinscher::Step> steps;
  size_t features = width;
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (!matrices[i] || matrices[i]->columns != features) throw nb::value_error("a head's matrices do not fit");
    features = matrices[i]->rows;
    const bool tanh = activations[i] == "tanh";
    const Activation activation = activation_named(tanh ? "none" : activations[i]);
    steps.push_back({matrices[i], numbers(biases[i], features), activation, tanh});
  }
  return new pinscher::Tail(width, static_cast<pinscher::Pooling>(kind), std::move(steps), normalise);
}

void check_tail(const pinscher::Tail* tail, size_t width, bool first) {
  if (!tail) return;
  if (tail->width != width) throw nb::value_error("the tail does not fit the encoder");
  if (first && tail->pooling != pinscher::Pooling::first)
    throw nb::value_error("first tokens alone are enough for what takes the first only");
}

void run_tail(const pinscher::Tail& tail, pinscher::Pool& pool, const std::string& isa, Rows<const float> pooled,
              Rows<float> out) {
  if (pooled.shape(1) != tail.width || out.shape(0) != pooled.shape(0) || out.shape(1) != tail.features())
    throw nb::value_error("the vectors do not fit the tail");
  const Kernels& use = kernels_named(isa);
  nb::gil_scoped_release release;
  tail.run_pooled(pool, use, pooled.data(), pooled.shape(0), out.data());
}

void run(const pinscher::Encoder& encoder, pinscher::Pool& pool, const std::string& isa,
         std::optional<Rows<const float>> hidden, const std::vector<Vector<int64_t>>& indices,
         const std::vector<size_t>& lengths, Rows<float> out, std::optional<Rows<float>> every, bool first,
         const std::vector<size_t>& hides, const pinscher::Tail* tail) {
  const pinscher::Encoder::Input in = input_of(encoder, hidden, indices);
  const std::vector<pinscher::Row> rows = rows_of(lengths, hides, encoder, in.tokens);
  if (first && (every || encoder.layers.empty()))
    throw nb::value_error("first tokens alone need a layer, and come without the states of the others");
  const size_t computed = first ? rows.size() : in.tokens;
  check_tail(tail, encoder.width, first);
  const size_t made = tail ? (first ? computed : tail->vectors(rows.size(), in.tokens)) : computed;
  if (out.shape(0) != made || out.shape(1) != (tail ? tail->features() : encoder.width) ||
      (every && (every->shape(0) != in.tokens * (encoder.layers.size() + 1) || every->shape(1) != encoder.width)))
    throw nb::value_error("the hidden states do not fit the encoder");
  const Kernels& use = kernels_named(isa);
  nb::gil_scoped_release release;
  float* states = every ? every->data() : nullptr;
  if (!tail) return encoder.run(pool, use, in, rows, {out.data(), states, first});
  thread_local std::vector<float> last;  // kept: memory that is taken anew costs more than the work
  last.resize(computed * encoder.width);
  encoder.run(pool, use, in, rows, {last.data(), states, first});
  if (first)
    tail->run_pooled(pool, use, last.data(), computed, out.data());
  else
    tail->run(pool, use, last.data(), rows, in.tokens, out.data());
}

// ------------------------------------------------------------ the pruner's threshold

// How many scores are above `low`, and those of them that are at most `high`, in order; None if one is NaN or there are
// more than `room`.
nb::object bracket(pinscher::Pool& pool, const std::string& isa, Vector<float> scores, float low, float high,
                   size_t room) {
  constexpr size_t PIECE = 1 << 17;
  const Kernels& use = kernels_named(isa);
  const size_t count = scores.shape(0), pieces = pinscher::blocks(count, PIECE);
  auto* inside = new std::vector<float>();
  nb::capsule owner(inside, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  size_t above = 0;
  std::atomic<bool> fine{true};
  {
    nb::gil_scoped_release release;
    std::vector<std::vector<float>> parts(pieces);
    std::vector<size_t> larger(pieces, 0);
    pinscher::Team team(pool);
    team.each(pieces, [&](size_t piece, size_t) {
      thread_local std::vector<float> scratch(PIECE + 64);  // kept: memory that is taken anew costs more than the work
      size_t found = 0;
      const size_t start = piece * PIECE, some = std::min(PIECE, count - start);
      if (use.bracket(scores.data() + start, some, low, high, scratch.data(), scratch.size(), &larger[piece], &found))
        parts[piece].assign(scratch.begin(), scratch.begin() + static_cast<std::ptrdiff_t>(found));
      else
        fine = false;
    });
    for (size_t piece = 0; piece < pieces && fine; ++piece) {
      above += larger[piece];
      if (parts[piece].size() > room - inside->size()) fine = false;
      else inside->insert(inside->end(), parts[piece].begin(), parts[piece].end());
    }
  }
  if (!fine) return nb::none();
  return nb::make_tuple(above, nb::ndarray<nb::numpy, float, nb::ndim<1>>(inside->data(), {inside->size()}, owner));
}

// ------------------------------------------------------------ the pruner's scores

using Numbers = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls work(start, count) for whole vectors, in parallel; gives how many numbers at the end are left over.
template <typename Work>
size_t in_pieces(pinscher::Pool& pool, size_t count, Work&& work) {
  constexpr size_t PIECE = 1 << 15, VECTOR = 16;
  const size_t whole = count / VECTOR * VECTOR;
  pinscher::Team team(pool);
  team.each(pinscher::blocks(whole, PIECE), [&](size_t piece, size_t) {
    work(piece * PIECE, std::min(PIECE, whole - piece * PIECE));
  });
  return count - whole;
}

void check_sizes(const Vector<float>& weight, const Vector<float>& grad, std::initializer_list<const Numbers*> states) {
  bool fits = grad.shape(0) == weight.shape(0);
  for (const Numbers* state : states) fits = fits && state->shape(0) == weight.shape(0);
  if (!fits) throw nb::value_error("weights, gradients and state do not fit");
}

size_t observe(pinscher::Pool& pool, const std::string& isa, Vector<float> weight, Vector<float> grad, float lr,
               bool steps, Numbers sum) {
  check_sizes(weight, grad, {&sum});
  const Kernels& use = kernels_named(isa);
  nb::gil_scoped_release release;
  return in_pieces(pool, weight.shape(0), [&](size_t at, size_t count) {
    use.observe({weight.data() + at, grad.data() + at, lr, steps}, sum.data() + at, count);
  });
}

size_t fold(pinscher::Pool& pool, const std::string& isa, Vector<float> weight, Vector<float> grad, float lr, bool steps,
            Numbers sum, Numbers mean, Numbers spread, float length, float mean_share, float spread_share) {
  check_sizes(weight, grad, {&sum, &mean, &spread});
  const Kernels& use = kernels_named(isa);
  const pinscher::Window window{length, mean_share, spread_share};
  nb::gil_scoped_release release;
  return in_pieces(pool, weight.shape(0), [&](size_t at, size_t count) {
    use.fold({weight.data() + at, grad.data() + at, lr, steps}, window, sum.data() + at, mean.data() + at,
             spread.data() + at, count);
  });
}

// ------------------------------------------------------------ single kernels, for the tests

void activate(const std::string& isa, const std::string& name, nb::ndarray<float, nb::ndim<1>, nb::c_contig> values) {
  activate_in_place(kernels_named(isa), activation_named(name), values.data(), values.shape(0));
}

// Queries, keys and values are [width, tokens]; `relative`, if any, [2 · keys - 1] as the kernel wants it.
void attention(const std::string& isa, bool shorts, Rows<const float> q, Rows<const float> k, Rows<const float> v,
               const MaybeVector& relative, Rows<float> out) {
  const size_t width = q.shape(0), queries = q.shape(1), keys = k.shape(1);
  const bool fits = k.shape(0) == width && v.shape(0) == width && v.shape(1) == keys && out.shape(0) == width;
  if (!fits || out.shape(1) != queries || !width || !keys || keys > pinscher::MOST_KEYS)
    throw nb::value_error("queries, keys and values do not fit");
  if (relative && (queries != keys || relative->shape(0) != 2 * keys - 1))
    throw nb::value_error("what is added to the scores does not fit them");
  const Kernels& use = kernels_named(isa);
  const size_t stride = pinscher::blocks(std::max(queries, keys), pinscher::TILE) * pinscher::TILE, part = width * stride;
  pinscher::Array<float> room(4 * part + pinscher::attention_room(stride, width)), extra(2 * keys + 2 * pinscher::TILE);
  const auto copy = [&](const Rows<const float>& from, float* to) {
    for (size_t d = 0; d < width; ++d) std::copy_n(from.data() + d * from.shape(1), from.shape(1), to + d * stride);
  };
  std::fill_n(room.data(), 4 * part, std::numeric_limits<float>::quiet_NaN());  // nothing may depend on what is behind
  copy(q, room.data());
  copy(k, room.data() + part);
  copy(v, room.data() + 2 * part);
  if (relative) std::copy_n(relative->data(), 2 * keys - 1, extra.data());
  float* made = room.data() + 3 * part;
  const float *query = room.data(), *key = query + part, *value = key + part, *added = relative ? extra.data() : nullptr;
  if (shorts) {
    pinscher::Memory memory;
    memory.shape(stride, 1, width);
    use.shorten(key, value, stride, width, keys, memory.head(0, width));
    use.attention_i16(query, memory.head(0, width), made, queries, keys, width, added, made + part);
  } else {
    use.attention(query, key, value, made, stride, queries, keys, width, added, made + part);
  }
  for (size_t d = 0; d < width; ++d) std::copy_n(made + d * stride, queries, out.data() + d * queries);
}

}  // namespace

void bind_runtime(nb::module_& module) {
  module.def("isas", &isas, "all"_a = false);
  module.def("costs", &costs, "isa"_a);
  module.attr("MOST_INPUTS") = pinscher::MOST_INPUTS;
  module.def("activate", &activate, "isa"_a, "name"_a, "values"_a.noconvert());
  module.def("attention", &attention, "isa"_a, "shorts"_a, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
             "relative"_a.noconvert().none(), "out"_a.noconvert());
  module.def("bracket", &bracket, "pool"_a, "isa"_a, "scores"_a.noconvert(), "low"_a, "high"_a, "room"_a);
  module.def("observe", &observe, "pool"_a, "isa"_a, "weight"_a.noconvert(), "grad"_a.noconvert(), "lr"_a, "steps"_a,
             "sum"_a.noconvert());
  module.def("fold", &fold, "pool"_a, "isa"_a, "weight"_a.noconvert(), "grad"_a.noconvert(), "lr"_a, "steps"_a,
             "sum"_a.noconvert(), "mean"_a.noconvert(), "spread"_a.noconvert(), "length"_a, "mean_share"_a,
             "spread_share"_a);
  nb::class_<pinscher::Pool>(module, "Pool")
      .def(nb::init<size_t>(), "threads"_a)
      .def_prop_ro("threads", &pinscher::Pool::threads);
  nb::class_<Weights>(module, "Matrix")
      .def_static("from_f32", &from_f32, "weights"_a.noconvert(), "kind"_a)
      .def_static("from_i8", &from_i8, "codes"_a.noconvert(), "scale"_a.noconvert(), "kind"_a)
      .def_ro("rows", &Weights::rows)
      .def_ro("columns", &Weights::columns)
      .def_ro("nonzeros", &Weights::nonzeros)
      .def_ro("units", &Weights::units)
      .def_prop_ro("bytes", &Weights::bytes)
      .def_prop_ro("work", [](const Weights& m) { return m.work.load(); })
      .def_prop_ro("kind", [](const Weights& m) { return pinscher::name_of(m.kind); })
      .def("multiply", &multiply, "pool"_a, "isa"_a, "x"_a.noconvert(), "bias"_a.noconvert().none(), "then"_a,
           "out"_a.noconvert());
  nb::class_<Described>(module, "Layer")
      .def("__init__",
           [](Described* self, std::vector<std::shared_ptr<Weights>> matrices, std::vector<MaybeVector> biases,
              std::vector<Vector<float>> norms,
              float epsilon) { new (self) Described{std::move(matrices), std::move(biases), std::move(norms), epsilon}; },
           "matrices"_a, "biases"_a, "norms"_a, "epsilon"_a);
  nb::class_<pinscher::Encoder>(module, "Encoder")
      .def(nb::new_(&new_encoder), "width"_a, "heads"_a, "activation"_a, "layers"_a)
      .def("set_relative", &set_relative, "table"_a.noconvert())
      .def("set_embeddings", &set_embeddings, nb::keep_alive<1, 2>(), "tables"_a, "weight"_a.noconvert(),
           "bias"_a.noconvert(), "epsilon"_a, "projection"_a = nb::none(), "projection_bias"_a = nb::none())
      .def("run", &run, "pool"_a, "isa"_a, "hidden"_a.noconvert().none(), "indices"_a, "lengths"_a, "out"_a.noconvert(),
           "every"_a.noconvert().none(), "first"_a, "hides"_a = std::vector<size_t>(), "tail"_a = nb::none());
  nb::class_<pinscher::Tail>(module, "Tail")
      .def(nb::new_(&new_tail), "width"_a, "pooling"_a, "matrices"_a, "biases"_a, "activations"_a, "normalise"_a)
      .def_prop_ro("features", &pinscher::Tail::features)
      .def("run", &run_tail, "pool"_a, "isa"_a, "pooled"_a.noconvert(), "out"_a.noconvert());
}
