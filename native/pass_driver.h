// Runs one pass with the operations of one instruction set: what the SIMD kernels have in common.
//
// A kernel file describes its instruction set by a type `Simd` with these members:
//
//   column_bytes          the bytes of a column: whole cache lines
//   pass_outputs          the number of outputs whose sums fit the registers
//   pairs_inputs          whether add_products() takes two inputs at once
//   Column                a column in registers
//   Coefficient           a coefficient in the form that the multiplication takes
//   CrcState              the CRC32C of the columns so far
//
//   coefficient(c)        returns the Coefficient for a byte
//   zero(), load(bytes), store(streaming, bytes, column)
//   add_products<outputs>(sums, coefficients, x)
//       adds coefficients[r] * x to sums[r], for each r < outputs
//   add_products<outputs>(sums, coefficients, x, y)
//       the same, and adds coefficients[outputs + r] * y; needed only where pairs_inputs is true
//   crc_state(raw), crc_register(state)
//       convert from and to the raw register (the CRC with all bits inverted)
//   append(state, column, source)
//       appends a column to a CRC; `source` is where load() found the column
//   append(state, column)
//       the same for a column that is not in memory
//
// Each kernel file compiles this code with its own flags. The anonymous namespace guarantees that
// the linker does not use one file's instance for another file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine.h"
#include "hardware_crc.h"
#include "stream_groups.h"

namespace ecckpt {
namespace {

// Which checksums a pass takes. Those of inputs are never taken without those of outputs.
enum class Crcs { none, outputs, all };

// The working memory of a pass.
template <class Simd>
struct Workspace {
    Stream streams[max_fragments];
    // By input, then by output: the order in which the loops use them.
    typename Simd::Coefficient coefficients[max_fragments * Simd::pass_outputs];
    // Of the inputs, then of the outputs; too many for the registers. A loop visits every other
    // stream before it appends to the same CRC again, which hides the latency of the instructions.
    typename Simd::CrcState crcs[max_fragments + Simd::pass_outputs];
    // The sums of a tile, between two groups of streams.
    static constexpr bool has_groups = Simd::pass_outputs >= grouped_outputs;
    typename Simd::Column
        sums[has_groups ? Simd::pass_outputs * tile_bytes / Simd::column_bytes : 1];
};

// -- whole columns --------------------------------------------------------------------------------

// Takes a column of one input: prefetches a later one, loads, copies, appends to the CRC.
template <class Simd, bool copies, bool crcs>
inline typename Simd::Column take(bool streaming, const Stream &stream, std::size_t at,
                                  typename Simd::CrcState &crc) {
    for (std::size_t line = 0; line < Simd::column_bytes; line += line_bytes)
        __builtin_prefetch(stream.ahead + at + line);
    const typename Simd::Column x = Simd::load(stream.bytes + at);
    if (copies && stream.copy != nullptr) Simd::store(streaming, stream.copy + at, x);
    if (crcs) crc = Simd::append(crc, x, stream.bytes + at);
    return x;
}

// Codes the whole columns from `begin` to `end` of one group of streams.
template <class Simd, int outputs, bool copies, Crcs crcs>
void code_group(const Pass &pass, Workspace<Simd> &space, Group group, std::size_t begin,
                std::size_t end) {
    using Column = typename Simd::Column;
    constexpr bool in_groups = outputs >= grouped_outputs;
    constexpr bool input_crcs = crcs == Crcs::all;
    const bool streaming = pass.streaming;
    const auto take_input = [&](std::size_t j, std::size_t at) {
        return take<Simd, copies, input_crcs>(streaming, space.streams[j], at, space.crcs[j]);
    };
    std::size_t saved = 0;  // where the sums of this column are in space.sums
    for (std::size_t at = begin; at < end; at += Simd::column_bytes, saved += outputs) {
        Column sums[outputs ? outputs : 1];
        for (int r = 0; r < outputs; ++r)
            sums[r] = (!in_groups || group.first) ? Simd::zero() : space.sums[saved + r];
        const typename Simd::Coefficient *coefficients = space.coefficients + group.begin * outputs;
        std::size_t j = group.begin;
        if constexpr (Simd::pairs_inputs)
            for (; j + 1 < group.coded_end; j += 2, coefficients += 2 * outputs) {
                const Column x = take_input(j, at);
                const Column y = take_input(j + 1, at);
                Simd::template add_products<outputs>(sums, coefficients, x, y);
            }
        for (; j < group.coded_end; ++j, coefficients += outputs)
            Simd::template add_products<outputs>(sums, coefficients, take_input(j, at));
        for (; j < group.end; ++j) take_input(j, at);
        for (int r = 0; in_groups && r < outputs && !group.last; ++r)
            space.sums[saved + r] = sums[r];
        for (int r = 0; r < outputs && (!in_groups || group.last); ++r) {
            Simd::store(streaming, pass.outputs[r] + at, sums[r]);
            typename Simd::CrcState &crc = space.crcs[pass.input_count + r];
            if (crcs != Crcs::none) crc = Simd::append(crc, sums[r]);
        }
    }
}

// Codes the first `length` bytes of the pass: whole columns.
template <class Simd, int outputs, bool copies, Crcs crcs>
void code_columns(const Pass &pass, const Groups &groups, Workspace<Simd> &space,
                  std::size_t length) {
    const std::size_t end = pass.offset + length;
    const std::size_t step = outputs >= grouped_outputs && groups.count > 1 ? tile_bytes : length;
    const std::size_t count = outputs >= grouped_outputs ? groups.count : 1;
    for (std::size_t at = pass.offset; at < end; at += step)
        for (std::size_t g = 0; g < count; ++g)
            code_group<Simd, outputs, copies, crcs>(pass, space, groups.of(g), at,
                                                    at + step < end ? at + step : end);
}

// -- choice of the loop ---------------------------------------------------------------------------

template <class Simd>
using ColumnLoop = void (*)(const Pass &, const Groups &, Workspace<Simd> &, std::size_t);

// The number of outputs is a template argument, so that the compiler keeps the sums in registers.
template <class Simd, bool copies, Crcs crcs, int outputs = Simd::pass_outputs>
ColumnLoop<Simd> loop_by_outputs(const Pass &pass) {
    if constexpr (outputs > 0)
        if (pass.output_count < outputs)
            return loop_by_outputs<Simd, copies, crcs, outputs - 1>(pass);
    return code_columns<Simd, outputs, copies, crcs>;
}

template <class Simd, bool copies>
ColumnLoop<Simd> loop_by_crcs(const Pass &pass) {
    if (pass.input_crcs) return loop_by_outputs<Simd, copies, Crcs::all>(pass);
    if (pass.output_crcs) return loop_by_outputs<Simd, copies, Crcs::outputs>(pass);
    return loop_by_outputs<Simd, copies, Crcs::none>(pass);
}

template <class Simd>
ColumnLoop<Simd> column_loop(const Pass &pass) {
    return pass.copies ? loop_by_crcs<Simd, true>(pass) : loop_by_crcs<Simd, false>(pass);
}

// -- the remainder --------------------------------------------------------------------------------

// Codes the bytes after the first `done` of the pass, which are less than a column. It copies them
// to a padded column, because loads and stores of whole columns would go past the buffers.
template <class Simd>
void code_remainder(const Pass &pass, const Workspace<Simd> &space, std::size_t done) {
    const std::size_t at = pass.offset + done, length = pass.length - done;
    if (length == 0) return;
    alignas(line_bytes) std::uint8_t padded[Simd::column_bytes] = {};
    typename Simd::Column sums[Simd::pass_outputs];
    for (std::size_t r = 0; r < pass.output_count; ++r) sums[r] = Simd::zero();
    const typename Simd::Coefficient *coefficient = space.coefficients;
    for (std::size_t j = 0; j < pass.coded_count; ++j) {
        std::memcpy(padded, pass.inputs[j] + at, length);
        const typename Simd::Column x = Simd::load(padded);
        for (std::size_t r = 0; r < pass.output_count; ++r)
            Simd::template add_products<1>(&sums[r], coefficient++, x);
    }
    for (std::size_t r = 0; r < pass.output_count; ++r) {
        Simd::store(false, padded, sums[r]);
        std::memcpy(pass.outputs[r] + at, padded, length);
    }
    for (std::size_t j = 0; pass.copies && j < pass.input_count; ++j)
        if (pass.copies[j]) std::memcpy(pass.copies[j] + at, pass.inputs[j] + at, length);
}

// -- the pass -------------------------------------------------------------------------------------

template <class Simd>
void start_crcs(const std::uint32_t *crcs, std::size_t count, typename Simd::CrcState *states) {
    for (std::size_t i = 0; crcs && i < count; ++i) states[i] = Simd::crc_state(~crcs[i]);
}

// Appends the remainder, `length` bytes at `at` of each buffer, and writes the complete CRCs.
template <class Simd>
void finish_crcs(const typename Simd::CrcState *states, const std::uint8_t *const *buffers,
                 std::size_t at, std::size_t length, std::uint32_t *crcs, std::size_t count) {
    for (std::size_t i = 0; crcs && i < count; ++i)
        crcs[i] = ~crc_bytes(Simd::crc_register(states[i]), buffers[i] + at, length);
}

// The `code` of an Engine.
template <class Simd>
void code_pass(const Pass &pass) {
    Workspace<Simd> space;
    for (std::size_t j = 0; j < pass.coded_count; ++j)
        for (std::size_t r = 0; r < pass.output_count; ++r)
            space.coefficients[j * pass.output_count + r] =
                Simd::coefficient(pass.coefficients[r * pass.coded_count + j]);
    const Groups groups = grouped(pass);
    point_ahead(pass, groups, space.streams);
    typename Simd::CrcState *output_crcs = space.crcs + pass.input_count;
    start_crcs<Simd>(pass.input_crcs, pass.input_count, space.crcs);
    start_crcs<Simd>(pass.output_crcs, pass.output_count, output_crcs);

    const std::size_t whole = pass.length / Simd::column_bytes * Simd::column_bytes;
    const std::size_t rest = pass.length - whole, at = pass.offset + whole;
    column_loop<Simd>(pass)(pass, groups, space, whole);
    code_remainder<Simd>(pass, space, whole);

    finish_crcs<Simd>(space.crcs, pass.inputs, at, rest, pass.input_crcs, pass.input_count);
    finish_crcs<Simd>(output_crcs, pass.outputs, at, rest, pass.output_crcs, pass.output_count);
}

}  // namespace
}  // namespace ecckpt
