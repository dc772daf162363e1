// Tables of GF(2^8) / 0x11D and CRC32C, computed by the compiler.
//
// Everything is in an anonymous namespace: each kernel file gets its own copy, compiled with its
// own flags, and none can leak into another. Tables are constexpr so that no start-up code runs
// with instructions that the CPU may lack.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ecckpt {
namespace {

constexpr std::uint8_t gf_product(unsigned a, unsigned b) {
    unsigned product = 0;
    for (; b != 0; b >>= 1) {
        if (b & 1) product ^= a;
        a <<= 1;
        if (a & 0x100) a ^= 0x11D;
    }
    return static_cast<std::uint8_t>(product);
}

// The CRC32C polynomial with reflected bits: bit 31 is the coefficient of x^0, bit 0 of x^31.
constexpr std::uint32_t crc_polynomial = 0x82F63B78;

// x^degree modulo the polynomial, reflected.
constexpr std::uint32_t crc_power(unsigned degree) {
    std::uint32_t value = 0x80000000;
    for (unsigned step = 0; step < degree; ++step)
        value = (value >> 1) ^ ((value & 1) ? crc_polynomial : 0);
    return value;
}

// The register that 32 zero bits turn into `value`: the division by x^32.
constexpr std::uint32_t crc_before_32_zeros(std::uint32_t value) {
    for (int step = 0; step < 32; ++step)
        value = (value & 0x80000000) ? ((value ^ crc_polynomial) << 1) | 1 : value << 1;
    return value;
}

}  // namespace
}  // namespace ecckpt
