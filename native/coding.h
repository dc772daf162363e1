// Codes whole fragments: divides them among threads, into blocks and into passes of an engine.
#pragma once

#include "engine.h"

namespace ecckpt {

struct CodingJob {
    const std::uint8_t *const *inputs;
    std::size_t input_count;  // 1 .. max_fragments
    std::size_t coded_count;  // 1 .. input_count; inputs from here on are checksummed and copied
    std::uint8_t *const *copies;  // nullptr: none; else one per input, nullptr: not copied
    std::uint8_t *const *outputs;
    std::size_t output_count;          // 0 .. max_fragments
    const std::uint8_t *coefficients;  // output_count x coded_count
    std::size_t length;                // of every input, copy and output
    std::size_t block_bytes;           // what a checksum covers; the last block may be shorter
    std::uint32_t *input_checksums;    // input_count x rows, or nullptr: no checksums
    std::uint32_t *output_checksums;   // output_count x rows; nullptr if and only if the above is
    std::size_t threads;               // the most threads to use, the calling one included
};

// rows = ceil(length / block_bytes). The result does not depend on the number of threads.
void code_fragments(const Engine &engine, const CodingJob &job);

}  // namespace ecckpt
