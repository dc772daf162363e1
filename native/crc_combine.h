// Computes the CRC32C of two pieces together from the CRC32C of each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ecckpt {

// Both CRCs are complete ones; `second_bytes` is the length of the second piece.
std::uint32_t combined_crc(std::uint32_t first, std::uint32_t second, std::size_t second_bytes);

}  // namespace ecckpt
