// The Python face of the engines: checks pointers and sizes, drops the GIL, calls.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "coding.h"
#include "copying.h"

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ranges = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> engine_names() {
    const ecckpt::Engine *found[ecckpt::max_engines];
    const std::size_t count = ecckpt::usable_engines(found);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) names.emplace_back(found[i]->name);
    return names;
}

const ecckpt::Engine &engine_named(const std::string &name) {
    const ecckpt::Engine *found[ecckpt::max_engines];
    const std::size_t count = ecckpt::usable_engines(found);
    for (std::size_t i = 0; i < count; ++i)
        if (name == found[i]->name) return *found[i];
    throw std::invalid_argument("no engine " + name + " on this machine");
}

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
}

template <class Pointer, class Array>
std::vector<Pointer> pointers(const std::vector<Array> &arrays, std::size_t length) {
    std::vector<Pointer> found;
    found.reserve(arrays.size());
    for (const Array &array : arrays) {
        require(array.shape(0) == length, "inputs and outputs have different lengths");
        found.push_back(array.data());
    }
    return found;
}

void code(const std::string &engine_name, nb::bytes coefficients, const std::vector<Input> &inputs,
          const std::vector<Output> &outputs, std::size_t block_bytes, Table input_checksums,
          Table output_checksums) {
    const ecckpt::Engine &engine = engine_named(engine_name);
    require(!inputs.empty() && inputs.size() <= ecckpt::max_fragments, "1 to 256 inputs");
    require(outputs.size() <= ecckpt::max_fragments, "at most 256 outputs");
    require(coefficients.size() == inputs.size() * outputs.size(), "outputs x inputs coefficients");
    require(block_bytes > 0, "block_bytes is 0");
    const std::size_t length = inputs[0].shape(0);
    const std::size_t rows = length / block_bytes + (length % block_bytes != 0);
    require(input_checksums.shape(0) == inputs.size() && input_checksums.shape(1) == rows &&
                output_checksums.shape(0) == outputs.size() && output_checksums.shape(1) == rows,
            "a checksum table of the wrong shape");
    const auto sources = pointers<const std::uint8_t *>(inputs, length);
    const auto targets = pointers<std::uint8_t *>(outputs, length);
    const ecckpt::CodingJob job = {
        sources.data(),
        sources.size(),
        targets.data(),
        targets.size(),
        reinterpret_cast<const std::uint8_t *>(coefficients.c_str()),
        length,
        block_bytes,
        input_checksums.data(),
        output_checksums.data(),
    };
    nb::gil_scoped_release released;
    ecckpt::code_fragments(engine, job);
}

void copy_ranges(Ranges ranges, std::size_t threads) {
    static_assert(sizeof(ecckpt::Range) == 3 * sizeof(std::int64_t));
    require(threads > 0, "threads is 0");
    const auto *rows = reinterpret_cast<const ecckpt::Range *>(ranges.data());
    const std::size_t count = ranges.shape(0);
    for (std::size_t row = 0; row < count; ++row)
        require(rows[row].length >= 0, "a range of negative length");
    const ecckpt::Engine *found[ecckpt::max_engines];
    ecckpt::usable_engines(found);
    nb::gil_scoped_release released;
    ecckpt::copy_ranges(*found[0], rows, count, threads);
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Native engines of ecckpt; use ecckpt.codec and ecckpt.copying.";
    module.def("engine_names", &engine_names);
    module.def("code", &code, nb::arg("engine"), nb::arg("coefficients"), nb::arg("inputs"),
               nb::arg("outputs"), nb::arg("block_bytes"), nb::arg("input_checksums"),
               nb::arg("output_checksums"));
    module.def("copy_ranges", &copy_ranges, nb::arg("ranges"), nb::arg("threads"));
}
