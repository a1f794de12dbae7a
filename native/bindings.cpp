// What Python sees of the native code. Every array is checked here; the functions below release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "scatter.h"

namespace nb = nanobind;
using namespace nb::literals;

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Value>
int scatter(Vector<uint32_t> gaps, Vector<int64_t> ones, Vector<uint8_t> row_class, Vector<uint8_t> column_class,
            Vector<uint8_t> row_size, Vector<uint8_t> column_size, Vector<Value> values, Vector<int64_t> counts,
            Matrix<Value> out) {
  const size_t rows = out.shape(0), columns = out.shape(1);
  if (row_class.shape(0) != rows || row_size.shape(0) != rows || column_class.shape(0) != columns ||
      column_size.shape(0) != columns)
    throw nb::value_error("the classes do not fit the matrix");
  if (rows > UINT32_MAX || columns > UINT32_MAX) throw nb::value_error("the matrix is too large");
  const pinscher::Shape shape{rows, columns, row_class.data(), column_class.data(), row_size.data(), column_size.data()};
  nb::gil_scoped_release release;
  return static_cast<int>(pinscher::scatter<Value>(shape, gaps.data(), gaps.shape(0), ones.data(), ones.shape(0),
                                                   values.data(), values.shape(0), counts.data(), counts.shape(0),
                                                   out.data()));
}

void dequantize(Matrix<const int8_t> codes, Vector<float> scale, Matrix<float> out) {
  if (codes.shape(0) != out.shape(0) || codes.shape(1) != out.shape(1) || scale.shape(0) != out.shape(0))
    throw nb::value_error("codes, scales and output do not fit");
  nb::gil_scoped_release release;
  pinscher::dequantize(codes.data(), scale.data(), codes.shape(0), codes.shape(1), out.data());
}

template <typename Value>
void bind_scatter(nb::module_& module) {
  module.def("scatter", &scatter<Value>, "gaps"_a.noconvert(), "ones"_a.noconvert(), "row_class"_a.noconvert(),
             "column_class"_a.noconvert(), "row_size"_a.noconvert(), "column_size"_a.noconvert(),
             "values"_a.noconvert(), "counts"_a.noconvert(), "out"_a.noconvert());
}

NB_MODULE(_native, module) {
  bind_scatter<int8_t>(module);
  bind_scatter<int16_t>(module);
  bind_scatter<int32_t>(module);
  bind_scatter<int64_t>(module);
  module.def("dequantize", &dequantize, "codes"_a.noconvert(), "scale"_a.noconvert(), "out"_a.noconvert());
}
