// Products by two look-ups: c * x = c * (low half of x) + c * (high half of x). For the engines
// whose shuffles take 16 entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "field.h"
#include "kernels.h"

namespace ecckpt {
namespace {

struct Halves {
    std::uint8_t low[16];   // c * 0x00 .. c * 0x0F
    std::uint8_t high[16];  // c * 0x00 .. c * 0xF0
};

struct HalvesTable {
    Halves of[256];
};

constexpr HalvesTable make_halves() {
    HalvesTable table{};
    for (unsigned c = 0; c < 256; ++c)
        for (unsigned x = 0; x < 16; ++x) {
            table.of[c].low[x] = gf_product(c, x);
            table.of[c].high[x] = gf_product(c, x << 4);
        }
    return table;
}

constexpr HalvesTable halves = make_halves();

// Fills `tables` with the coefficients of a pass, by input, then by output.
inline void lay_out_tables(const Pass &pass, Halves *tables) {
    for (std::size_t j = 0; j < pass.coded_count; ++j)
        for (std::size_t r = 0; r < pass.output_count; ++r)
            tables[j * pass.output_count + r] =
                halves.of[pass.coefficients[r * pass.coded_count + j]];
}

// Copies and codes what is left after the last whole column, byte by byte.
inline void code_rest(const Pass &pass, std::size_t done, const Halves *tables) {
    const std::size_t at = pass.offset + done, length = pass.length - done;
    for (std::size_t j = 0; pass.copies && length > 0 && j < pass.input_count; ++j)
        if (pass.copies[j]) std::memcpy(pass.copies[j] + at, pass.inputs[j] + at, length);
    for (std::size_t r = 0; r < pass.output_count; ++r)
        for (std::size_t i = at; i < at + length; ++i) {
            unsigned sum = 0;
            for (std::size_t j = 0; j < pass.coded_count; ++j) {
                const Halves &table = tables[j * pass.output_count + r];
                sum ^= table.low[pass.inputs[j][i] & 15] ^ table.high[pass.inputs[j][i] >> 4];
            }
            pass.outputs[r][i] = static_cast<std::uint8_t>(sum);
        }
}

}  // namespace
}  // namespace ecckpt
