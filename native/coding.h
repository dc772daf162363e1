// Coding of whole fragments: block after block, in as many passes as the engine needs.
#pragma once

#include "kernels.h"

namespace ecckpt {

struct CodingJob {
    const std::uint8_t *const *inputs;
    std::size_t input_count;  // 1 .. max_fragments
    std::size_t coded_count;  // 1 .. input_count: the others are only checksummed and copied
    std::uint8_t *const *copies;  // nullptr, or one per input, which may be nullptr
    std::uint8_t *const *outputs;
    std::size_t output_count;          // 0 .. max_fragments
    const std::uint8_t *coefficients;  // output_count x coded_count
    std::size_t length;                // of every input, copy and output
    std::size_t block_bytes;           // a checksum covers this much; the last block may be short
    std::uint32_t *input_checksums;    // nullptr, or input_count x rows
    std::uint32_t *output_checksums;   // output_count x rows; nullptr just if the other one is
    std::size_t threads;               // at most so many share the columns, the caller being one
};

// rows = ceil(length / block_bytes). What comes out does not depend on the number of threads.
void code_fragments(const Engine &engine, const CodingJob &job);

}  // namespace ecckpt
