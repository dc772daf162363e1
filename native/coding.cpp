#include "coding.h"

#include <algorithm>

namespace ecckpt {
namespace {

// Outputs of a job larger than this go past the caches: a store that first reads its line costs a
// third of the memory bandwidth, and so much data would be evicted before anyone reads it.
constexpr std::size_t streaming_job_bytes = std::size_t{2} << 20;

// With more outputs than fit one pass, the inputs are read again for each pass: in pieces that are
// still in the L2 cache by then.
constexpr std::size_t repeated_pass_bytes = std::size_t{256} << 10;

std::size_t pass_bytes(const Engine &engine, const CodingJob &job) {
    if (job.output_count <= engine.pass_outputs) return job.block_bytes;
    // Whole pages, so that the pieces of aligned outputs stay aligned.
    return std::max<std::size_t>(repeated_pass_bytes / job.input_count / 4096, 1) * 4096;
}

bool on_lines(std::uint8_t *const *outputs, std::size_t count, std::size_t offset) {
    return std::all_of(outputs, outputs + count, [offset](const std::uint8_t *output) {
        return reinterpret_cast<std::uintptr_t>(output + offset) % line_bytes == 0;
    });
}

// Codes the bytes `offset` .. `offset + length` of all fragments, which lie in one block.
void code_piece(const Engine &engine, const CodingJob &job, std::size_t offset, std::size_t length,
                bool streaming, std::uint32_t *crcs) {
    std::uint32_t *input_crcs = crcs;
    std::size_t first = 0;
    do {  // at least once: the inputs are checksummed even when there is nothing to make
        const std::size_t count = std::min(engine.pass_outputs, job.output_count - first);
        std::uint8_t *const *outputs = job.outputs + first;
        engine.code({job.inputs, job.input_count, outputs, count, offset, length,
                     job.coefficients + first * job.input_count, input_crcs,
                     crcs + job.input_count + first,
                     streaming && on_lines(outputs, count, offset)});
        input_crcs = nullptr;
        first += count;
    } while (first < job.output_count);
}

}  // namespace

void code_fragments(const Engine &engine, const CodingJob &job) {
    const std::size_t fragments = job.input_count + job.output_count;
    const bool streaming = job.length > streaming_job_bytes / fragments;
    const std::size_t step = pass_bytes(engine, job);
    const std::size_t rows = job.length / job.block_bytes + (job.length % job.block_bytes != 0);
    for (std::size_t row = 0; row < rows; ++row) {
        std::uint32_t crcs[2 * max_fragments] = {};  // of the inputs, then of the outputs
        const std::size_t start = row * job.block_bytes;
        const std::size_t end = start + std::min(job.block_bytes, job.length - start);
        for (std::size_t at = start; at < end; at += step)
            code_piece(engine, job, at, std::min(step, end - at), streaming, crcs);
        for (std::size_t j = 0; j < job.input_count; ++j)
            job.input_checksums[j * rows + row] = crcs[j];
        for (std::size_t r = 0; r < job.output_count; ++r)
            job.output_checksums[r * rows + row] = crcs[job.input_count + r];
    }
    fence_streaming_stores();
}

}  // namespace ecckpt
