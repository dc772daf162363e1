// Copies many separate ranges in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"

namespace ecckpt {

struct CopyRange {
    std::int64_t source_address;
    std::int64_t target_address;
    std::int64_t length;
};

// Copies every range. Lengths are at least 0; ranges do not overlap. Up to `threads` threads (at
// least 1) take equal numbers of bytes, even if one range has most of them.
void copy_ranges(const Engine &engine, const CopyRange *ranges, std::size_t count,
                 std::size_t threads);

}  // namespace ecckpt
