// Arithmetic of polynomials over GF(2): products in GF(2^8) / 0x11D, and powers of x modulo the
// polynomial of CRC32C.
//
// The functions are constexpr, so that the compiler computes the kernels' tables. Start-up code
// would run on every CPU, with instructions that some lack. The anonymous namespace gives each
// kernel file its own instance, compiled with its own flags.
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

// The register that becomes `value` after 32 zero bits: value / x^32.
constexpr std::uint32_t crc_before_32_zeros(std::uint32_t value) {
    for (int step = 0; step < 32; ++step)
        value = (value & 0x80000000) ? ((value ^ crc_polynomial) << 1) | 1 : value << 1;
    return value;
}

}  // namespace
}  // namespace ecckpt
