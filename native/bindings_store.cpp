// What Python sees of decoding. Every array is checked here; the functions below release the GIL.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "scatter.h"

namespace {

using Numbers = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<pinscher::Gaps> gaps_of(const std::vector<Numbers>& gaps, const std::vector<size_t>& ones) {
  if (gaps.size() != ones.size()) throw nb::value_error("as many counts as levels are needed");
  std::vector<pinscher::Gaps> mask;
  for (size_t level = 0; level < gaps.size(); ++level) {
    const Numbers& some = gaps[level];
    if (some.dtype().code != static_cast<uint8_t>(nb::dlpack::dtype_code::UInt))
      throw nb::type_error("gaps are unsigned integers");
    mask.push_back({some.data(), some.shape(0), some.itemsize(), ones[level]});
  }
  return mask;
}

template <typename Value, typename Out>
int scatter(std::vector<Numbers> gaps, std::vector<size_t> ones, Vector<uint8_t> row_class,
            Vector<uint8_t> column_class, Vector<uint8_t> row_size, Vector<uint8_t> column_size,
            std::vector<Vector<Value>> values, std::optional<Vector<float>> scale, Matrix<Out> out) {
  const size_t rows = out.shape(0), columns = out.shape(1);
  if (row_class.shape(0) != rows || row_size.shape(0) != rows || column_class.shape(0) != columns ||
      column_size.shape(0) != columns || (scale && scale->shape(0) != rows))
    throw nb::value_error("the classes or scales do not fit the matrix");
  if (rows > UINT32_MAX || columns > UINT32_MAX) throw nb::value_error("the matrix is too large");
  if (std::is_same_v<Value, Out> == scale.has_value()) throw nb::type_error("scales and fp32 go together");
  const pinscher::Shape shape{rows, columns, row_class.data(), column_class.data(), row_size.data(), column_size.data()};
  const auto mask = gaps_of(gaps, ones);
  std::vector<pinscher::Values<Value>> parts;
  for (const auto& part : values) parts.push_back({part.data(), part.shape(0)});
  nb::gil_scoped_release release;
  return static_cast<int>(
      pinscher::scatter<Value, Out>(shape, mask, parts, scale ? scale->data() : nullptr, out.data()));
}

void dequantize(Matrix<const int8_t> codes, Vector<float> scale, Matrix<float> out) {
  if (codes.shape(0) != out.shape(0) || codes.shape(1) != out.shape(1) || scale.shape(0) != out.shape(0))
    throw nb::value_error("codes, scales and output do not fit");
  nb::gil_scoped_release release;
  pinscher::dequantize(codes.data(), scale.data(), codes.shape(0), codes.shape(1), out.data());
}

template <typename Value, typename Out>
void bind_scatter(nb::module_& module) {
  module.def("scatter", &scatter<Value, Out>, "gaps"_a, "ones"_a, "row_class"_a.noconvert(),
             "column_class"_a.noconvert(), "row_size"_a.noconvert(), "column_size"_a.noconvert(),
             "values"_a.noconvert(), "scale"_a.noconvert().none(), "out"_a.noconvert());
}

}  // namespace

void bind_store(nb::module_& module) {
  bind_scatter<int8_t, float>(module);
  bind_scatter<int8_t, int8_t>(module);
  bind_scatter<int16_t, int16_t>(module);
  bind_scatter<int32_t, int32_t>(module);
  bind_scatter<int64_t, int64_t>(module);
  module.def("dequantize", &dequantize, "codes"_a.noconvert(), "scale"_a.noconvert(), "out"_a.noconvert());
}
