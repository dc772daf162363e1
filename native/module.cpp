// The Python module: checks the arguments, releases the GIL and calls the native code.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "checksums.h"
#include "coding.h"
#include "copying.h"

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
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
        require(array.shape(0) == length, "buffers have different lengths");
        found.push_back(array.data());
    }
    return found;
}

// Returns one pointer per input, or an empty vector if nothing is copied.
std::vector<std::uint8_t *> copy_pointers(const std::vector<std::optional<Output>> &copies,
                                          std::size_t input_count, std::size_t length) {
    require(copies.empty() || copies.size() == input_count, "one copy, or None, per input");
    std::vector<std::uint8_t *> found;
    for (const std::optional<Output> &copy : copies) {
        require(!copy || copy->shape(0) == length, "buffers have different lengths");
        found.push_back(copy ? copy->data() : nullptr);
    }
    return found;
}

std::uint32_t *checksums(std::optional<Table> &table, std::size_t count, std::size_t rows) {
    if (!table) return nullptr;
    require(table->shape(0) == count && table->shape(1) == rows,
            "a checksum table of the wrong shape");
    return table->data();
}

void code(const std::string &engine_name, nb::bytes coefficients, const std::vector<Input> &inputs,
          std::size_t coded_count, const std::vector<std::optional<Output>> &copies,
          const std::vector<Output> &outputs, std::size_t block_bytes,
          std::optional<Table> input_checksums, std::optional<Table> output_checksums,
          std::size_t threads) {
    const ecckpt::Engine &engine = engine_named(engine_name);
    require(!inputs.empty() && inputs.size() <= ecckpt::max_fragments, "1 to 256 inputs");
    require(coded_count >= 1 && coded_count <= inputs.size(), "coded_count is 1 to the inputs");
    require(outputs.size() <= ecckpt::max_fragments, "at most 256 outputs");
    require(coefficients.size() == coded_count * outputs.size(), "outputs x coded coefficients");
    require(block_bytes > 0, "block_bytes is 0");
    require(threads > 0, "threads is 0");
    require(input_checksums.has_value() == output_checksums.has_value(), "one table without other");
    const std::size_t length = inputs[0].shape(0);
    const std::size_t rows = length / block_bytes + (length % block_bytes != 0);
    const auto sources = pointers<const std::uint8_t *>(inputs, length);
    const auto targets = pointers<std::uint8_t *>(outputs, length);
    const auto copied = copy_pointers(copies, inputs.size(), length);
    const ecckpt::CodingJob job = {
        .inputs = sources.data(),
        .input_count = sources.size(),
        .coded_count = coded_count,
        .copies = copied.empty() ? nullptr : copied.data(),
        .outputs = targets.data(),
        .output_count = targets.size(),
        .coefficients = reinterpret_cast<const std::uint8_t *>(coefficients.c_str()),
        .length = length,
        .block_bytes = block_bytes,
        .input_checksums = checksums(input_checksums, inputs.size(), rows),
        .output_checksums = checksums(output_checksums, outputs.size(), rows),
        .threads = threads,
    };
    nb::gil_scoped_release released;
    ecckpt::code_fragments(engine, job);
}

void copy_ranges(const std::string &engine_name, Ranges ranges, std::size_t threads) {
    const ecckpt::Engine &engine = engine_named(engine_name);
    static_assert(sizeof(ecckpt::CopyRange) == 3 * sizeof(std::int64_t));
    require(threads > 0, "threads is 0");
    const auto *rows = reinterpret_cast<const ecckpt::CopyRange *>(ranges.data());
    const std::size_t count = ranges.shape(0);
    for (std::size_t row = 0; row < count; ++row)
        require(rows[row].length >= 0, "a range of negative length");
    nb::gil_scoped_release released;
    ecckpt::copy_ranges(engine, rows, count, threads);
}

void checksum_spans(const std::string &engine_name, Spans spans, Sums sums, std::size_t threads) {
    const ecckpt::Engine &engine = engine_named(engine_name);
    static_assert(sizeof(ecckpt::Span) == 2 * sizeof(std::int64_t));
    require(threads > 0, "threads is 0");
    require(spans.shape(0) == sums.shape(0), "one checksum per range");
    const auto *rows = reinterpret_cast<const ecckpt::Span *>(spans.data());
    const std::size_t count = spans.shape(0);
    for (std::size_t row = 0; row < count; ++row)
        require(rows[row].length >= 0, "a range of negative length");
    nb::gil_scoped_release released;
    ecckpt::checksum_spans(engine, rows, count, sums.data(), threads);
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Native engines of ecckpt; use ecckpt.codec and ecckpt.copying.";
    module.def("engine_names", &engine_names);
    module.def("code", &code, nb::arg("engine"), nb::arg("coefficients"), nb::arg("inputs"),
               nb::arg("coded_count"), nb::arg("copies"), nb::arg("outputs"),
               nb::arg("block_bytes"), nb::arg("input_checksums").none(),
               nb::arg("output_checksums").none(), nb::arg("threads"));
    module.def("copy_ranges", &copy_ranges, nb::arg("engine"), nb::arg("ranges"),
               nb::arg("threads"));
    module.def("checksum_spans", &checksum_spans, nb::arg("engine"), nb::arg("spans"),
               nb::arg("sums"), nb::arg("threads"));
}
