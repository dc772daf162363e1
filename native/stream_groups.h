// The order in which a pass goes round its inputs, and what each step prefetches.
//
// Up to 16 streams advance together, column by column: the hardware prefetchers follow all of them.
// More streams with many outputs do better in groups. A tile of a few columns is done for one group
// after the other while its sums wait in the L1 cache, and each group prefetches the same tile of
// the next one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace ecckpt {
namespace {

constexpr std::size_t most_together = 16;
constexpr std::size_t group_streams = 8;  // at most, if there are groups
constexpr std::size_t grouped_outputs = 5;  // with fewer the streams go together, however many
constexpr std::size_t tile_bytes = 1024;

// What is prefetched and not yet used waits in the L1 cache, for all streams together: the more of
// it the better memory is hidden, up to a quarter of the smallest L1 around (48 KiB). Stores to as
// many streams as are read need the same buffers as prefetches: then far ahead is too far.
constexpr std::size_t window_bytes = 12 << 10;
constexpr std::size_t least_ahead_bytes = 768, most_ahead_bytes = 2048;
constexpr std::size_t copying_ahead_bytes = 256;

enum class Crcs { none, outputs, all };

struct Stream {
    const std::uint8_t *bytes;
    const std::uint8_t *ahead;  // what to prefetch when `bytes` are taken
    std::uint8_t *copy;
};

// The streams `begin` .. `end`; those from `coded_end` on are not coded.
struct Group {
    std::size_t begin, coded_end, end;
    bool first, last;
};

// Groups of nearly equal size: the larger ones stand first.
struct Groups {
    std::size_t count, size, larger, coded_count, input_count;

    std::size_t begin(std::size_t g) const { return g * size + (g < larger ? g : larger); }

    Group of(std::size_t g) const {
        const bool last = g + 1 == count;
        return {begin(g), begin(g + 1), last ? input_count : begin(g + 1), g == 0, last};
    }
};

inline Groups grouped(const Pass &pass) {
    const bool together =
        pass.coded_count <= most_together || pass.output_count < grouped_outputs;
    const std::size_t count =
        together ? 1 : (pass.coded_count + group_streams - 1) / group_streams;
    return {count, pass.coded_count / count, pass.coded_count % count, pass.coded_count,
            pass.input_count};
}

// How far ahead of its use each stream is prefetched; whole lines.
inline std::size_t ahead_bytes(const Pass &pass) {
    if (pass.copies) return copying_ahead_bytes;
    const std::size_t share = window_bytes / pass.input_count / line_bytes * line_bytes;
    if (share < least_ahead_bytes) return least_ahead_bytes;
    return share < most_ahead_bytes ? share : most_ahead_bytes;
}

// Fills `streams` for a walk in which all of them advance together. A prefetch may point past the
// end of a buffer: it never faults.
inline void point_ahead(const Pass &pass, Stream *streams) {
    const std::size_t ahead = ahead_bytes(pass);
    for (std::size_t j = 0; j < pass.input_count; ++j)
        streams[j] = {pass.inputs[j], pass.inputs[j] + ahead,
                      pass.copies ? pass.copies[j] : nullptr};
}

// The same for a walk in groups: the next group's streams stand for those of this one.
inline void point_ahead(const Pass &pass, const Groups &groups, Stream *streams) {
    point_ahead(pass, streams);
    for (std::size_t g = 0; groups.count > 1 && g < groups.count; ++g) {
        const Group here = groups.of(g), next = groups.of(here.last ? 0 : g + 1);
        for (std::size_t j = here.begin; j < here.coded_end; ++j) {
            std::size_t other = next.begin + (j - here.begin);
            if (other >= next.coded_end) other = next.coded_end - 1;
            streams[j].ahead = pass.inputs[other] + (here.last ? tile_bytes : 0);
        }
    }
}

}  // namespace
}  // namespace ecckpt
