// Implements crc_combine.h by multiplication of polynomials.

#include "crc_combine.h"

#include "polynomials.h"

namespace ecckpt {
namespace {

// The product of two polynomials modulo that of CRC32C. All have reflected bits.
std::uint32_t crc_product(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? crc_polynomial : 0);
    }
    return product;
}

}  // namespace

// The second piece follows the first, which multiplies the CRC of the first by
// x^(8 * second_bytes). The start values and the final inversions of the two CRCs cancel out.
std::uint32_t combined_crc(std::uint32_t first, std::uint32_t second, std::size_t second_bytes) {
    std::uint32_t square = crc_power(8);
    for (; second_bytes != 0; second_bytes >>= 1) {
        if (second_bytes & 1) first = crc_product(first, square);
        square = crc_product(square, square);
    }
    return first ^ second;
}

}  // namespace ecckpt
