// The order in which a pass visits its inputs, and the distance of its prefetches.
//
// A pass reads each input as a stream. Up to 16 streams advance together, column by column, and the
// hardware prefetchers follow all of them. More streams with many outputs are faster in groups: the
// pass codes a tile of a few columns for one group after the other. The sums of the tile wait in
// the L1 cache meanwhile, and each group prefetches the same tile of the next group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"

namespace ecckpt {
namespace {

constexpr std::size_t most_together = 16;  // more streams may be divided into groups
constexpr std::size_t group_streams = 8;   // the most streams of a group
constexpr int grouped_outputs = 5;         // with fewer outputs groups are no faster
constexpr std::size_t tile_bytes = 1024;

// The prefetched bytes of all streams wait in the L1 cache until they are used. The more there are,
// the better they hide the latency of memory. This limit is a quarter of an L1 cache of 48 KiB.
constexpr std::size_t window_bytes = 12 << 10;
constexpr std::size_t least_ahead_bytes = 768, most_ahead_bytes = 2048;

// Stores to copies occupy the same line buffers as prefetches: a short distance is faster then.
constexpr std::size_t copying_ahead_bytes = 256;

struct Stream {
    const std::uint8_t *bytes;
    const std::uint8_t *ahead;  // prefetched, at the same offset, when `bytes` are loaded
    std::uint8_t *copy;         // nullptr: not copied
};

// The streams `begin` .. `end` - 1. Those from `coded_end` on are not coded.
struct Group {
    std::size_t begin, coded_end, end;
    bool first, last;
};

// Groups of `size` streams; the first `larger` groups have one more.
struct Groups {
    std::size_t count, size, larger, input_count;

    std::size_t begin(std::size_t g) const { return g * size + (g < larger ? g : larger); }

    Group of(std::size_t g) const {
        const bool last = g + 1 == count;
        return {
            .begin = begin(g),
            .coded_end = begin(g + 1),
            .end = last ? input_count : begin(g + 1),
            .first = g == 0,
            .last = last,
        };
    }
};

inline Groups grouped(const Pass &pass) {
    const bool together =
        pass.coded_count <= most_together || pass.output_count < std::size_t{grouped_outputs};
    const std::size_t count = together ? 1 : (pass.coded_count + group_streams - 1) / group_streams;
    return {
        .count = count,
        .size = pass.coded_count / count,
        .larger = pass.coded_count % count,
        .input_count = pass.input_count,
    };
}

// The distance between what a stream prefetches and what it loads: whole cache lines.
inline std::size_t ahead_bytes(const Pass &pass) {
    if (pass.copies) return copying_ahead_bytes;
    const std::size_t share = window_bytes / pass.input_count / line_bytes * line_bytes;
    if (share < least_ahead_bytes) return least_ahead_bytes;
    return share < most_ahead_bytes ? share : most_ahead_bytes;
}

// Fills `streams` for a pass in which all of them advance together. A prefetch may point past the
// end of a buffer: the CPU ignores a prefetch that would fault.
inline void point_ahead(const Pass &pass, Stream *streams) {
    const std::size_t ahead = ahead_bytes(pass);
    for (std::size_t j = 0; j < pass.input_count; ++j)
        streams[j] = {
            .bytes = pass.inputs[j],
            .ahead = pass.inputs[j] + ahead,
            .copy = pass.copies ? pass.copies[j] : nullptr,
        };
}

// Fills `streams` for a pass in groups. Each stream prefetches a stream of the next group, and
// those of the last group prefetch the next tile of the first group.
inline void point_ahead(const Pass &pass, const Groups &groups, Stream *streams) {
    point_ahead(pass, streams);
    for (std::size_t g = 0; groups.count > 1 && g < groups.count; ++g) {
        const Group here = groups.of(g), next = groups.of(here.last ? 0 : g + 1);
        for (std::size_t j = here.begin; j < here.coded_end; ++j) {
            std::size_t other = next.begin + (j - here.begin);
            // The next group may have one stream less.
            if (other >= next.coded_end) other = next.coded_end - 1;
            streams[j].ahead = pass.inputs[other] + (here.last ? tile_bytes : 0);
        }
    }
}

}  // namespace
}  // namespace ecckpt
