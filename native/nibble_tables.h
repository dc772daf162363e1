// Tables that multiply by look-ups of 16 entries: c * x = c * (low nibble of x) + c * (high nibble
// of x). For instruction sets whose shuffles look up that many.
#pragma once

#include <cstdint>

#include "polynomials.h"

namespace ecckpt {
namespace {

struct NibbleTable {
    std::uint8_t low[16];   // c * 0x00 .. c * 0x0F
    std::uint8_t high[16];  // c * 0x00 .. c * 0xF0
};

struct NibbleTables {
    NibbleTable of[256];  // by c
};

constexpr NibbleTables make_nibble_tables() {
    NibbleTables tables{};
    for (unsigned c = 0; c < 256; ++c)
        for (unsigned x = 0; x < 16; ++x) {
            tables.of[c].low[x] = gf_product(c, x);
            tables.of[c].high[x] = gf_product(c, x << 4);
        }
    return tables;
}

constexpr NibbleTables nibble_tables = make_nibble_tables();

}  // namespace
}  // namespace ecckpt
