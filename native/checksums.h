// Computes the CRC32C of many separate ranges in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"

namespace ecckpt {

struct Span {
    std::int64_t address;
    std::int64_t length;
};

// Writes the CRC32C of each span to `checksums`. Lengths are at least 0. Up to `threads` threads
// (at least 1) take equal numbers of bytes, even if one span has most of them.
void checksum_spans(const Engine &engine, const Span *spans, std::size_t count,
                    std::uint32_t *checksums, std::size_t threads);

}  // namespace ecckpt
