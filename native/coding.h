// Coding of whole fragments: block after block, in as many passes as the engine needs.
#pragma once

#include "kernels.h"

namespace ecckpt {

struct CodingJob {
    const std::uint8_t *const *inputs;
    std::size_t input_count;  // 1 .. max_fragments
    std::uint8_t *const *outputs;
    std::size_t output_count;           // 0 .. max_fragments
    const std::uint8_t *coefficients;   // output_count x input_count
    std::size_t length;                 // of every input and output
    std::size_t block_bytes;            // a checksum covers this much; the last block may be short
    std::uint32_t *input_checksums;     // input_count x rows, rows = ceil(length / block_bytes)
    std::uint32_t *output_checksums;    // output_count x rows
};

void code_fragments(const Engine &engine, const CodingJob &job);

}  // namespace ecckpt
