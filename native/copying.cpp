// Implements copying.h.

#include "copying.h"

#include <algorithm>
#include <cstring>

#include "parallel_for.h"

namespace ecckpt {
namespace {

// From this total on, stores bypass the caches, even if each range is small. The targets would
// evict each other, and every ordinary store would first read the line that it overwrites.
constexpr std::size_t streaming_total_bytes = std::size_t{4} << 20;

using Copy = void (*)(const std::uint8_t *, std::uint8_t *, std::size_t);

void copy_cached(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    if (length > 0) std::memcpy(target, source, length);
}

// Copies the bytes `begin` .. `end` of the concatenation of all ranges.
void copy_share(Copy copy, const CopyRange *ranges, std::size_t begin, std::size_t end) {
    for (std::size_t at = 0; at < end; ++ranges) {
        const auto length = static_cast<std::size_t>(ranges->length);
        const std::size_t skipped = begin > at ? std::min(begin - at, length) : 0;
        const std::size_t stop = std::min(end - at, length);
        if (stop > skipped)
            copy(reinterpret_cast<const std::uint8_t *>(ranges->source_address) + skipped,
                 reinterpret_cast<std::uint8_t *>(ranges->target_address) + skipped,
                 stop - skipped);
        at += length;
    }
    fence_streaming_stores();
}

}  // namespace

void copy_ranges(const Engine &engine, const CopyRange *ranges, std::size_t count,
                 std::size_t threads) {
    std::size_t total = 0;
    for (std::size_t row = 0; row < count; ++row)
        total += static_cast<std::size_t>(ranges[row].length);
    const Copy copy = total >= streaming_total_bytes ? engine.copy : copy_cached;
    parallel_for(total, least_share_bytes, threads,
                 [copy, ranges](std::size_t begin, std::size_t end) {
                     copy_share(copy, ranges, begin, end);
                 });
}

}  // namespace ecckpt
