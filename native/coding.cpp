// Implements coding.h. The threads take ranges of bytes, the same of every fragment; a thread codes
// its range block by block, and each block in the passes that its outputs need.

#include "coding.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "crc_combine.h"
#include "parallel_for.h"

namespace ecckpt {
namespace {

// Stores of a job larger than this (about an L2 cache) bypass the caches. An ordinary store first
// reads its line, which costs a third of the memory bandwidth, and so much data would be evicted
// before it is read.
constexpr std::size_t streaming_job_bytes = std::size_t{2} << 20;

// With more outputs than one pass can make, each pass reads the inputs again. The passes then take
// the inputs in pieces. All pieces together have this size and stay in the L2 cache between passes.
constexpr std::size_t repeated_pass_bytes = std::size_t{256} << 10;

struct Checksums {
    std::uint32_t of[2 * max_fragments];  // of the inputs, then of the outputs
};

// A part of a row, where the border between two threads divides the row. A row is one block of
// every fragment.
struct PartOfRow {
    std::size_t row, begin, end;
    Checksums checksums;
};

// The number of bytes from `offset` to a cache line, if it is the same for all buffers; else
// line_bytes.
std::size_t bytes_to_lines(std::uint8_t *const *outputs, std::size_t output_count,
                           std::uint8_t *const *copies, std::size_t copy_count,
                           std::size_t offset) {
    std::size_t distance = line_bytes;
    bool together = true;
    const auto include = [&](const std::uint8_t *buffer) {
        const auto address = reinterpret_cast<std::uintptr_t>(buffer) + offset;
        const std::size_t own = (0 - address) % line_bytes;
        together = together && (distance == line_bytes || distance == own);
        distance = own;
    };
    for (std::size_t r = 0; r < output_count; ++r) include(outputs[r]);
    for (std::size_t j = 0; copies && j < copy_count; ++j)
        if (copies[j]) include(copies[j]);
    return together ? distance : line_bytes;
}

class Coder {
public:
    Coder(const Engine &engine, const CodingJob &job) : engine_(engine), job_(job) {
        const std::size_t written = job.output_count + (job.copies ? job.input_count : 0);
        streaming_ = job.length > streaming_job_bytes / (job.input_count + written);
        rows_ = job.length / job.block_bytes + (job.length % job.block_bytes != 0);
        piece_bytes_ = std::max(job.block_bytes, page_bytes);
        if (job.output_count > engine.pass_outputs)
            piece_bytes_ =
                std::max(repeated_pass_bytes / job.input_count / page_bytes, std::size_t{1}) *
                page_bytes;
    }

    void code_all() {
        const std::size_t streams = job_.input_count + job_.output_count;
        parallel_for(job_.length, std::max<std::size_t>(least_share_bytes / streams, 1),
                     job_.threads,
                     [this](std::size_t begin, std::size_t end) { code_span(begin, end); });
        combine_parts();
    }

private:
    // Codes the bytes `begin` .. `end` of all fragments. The first row and the last may be parts.
    void code_span(std::size_t begin, std::size_t end) {
        while (begin < end) {
            const std::size_t row = begin / job_.block_bytes, start = row * job_.block_bytes;
            const std::size_t stop = start + std::min(job_.block_bytes, job_.length - start);
            PartOfRow part = {
                .row = row, .begin = begin, .end = std::min(end, stop), .checksums = {}};
            for (std::size_t at = begin; at < part.end; at += piece_bytes_)
                code_piece(at, std::min(piece_bytes_, part.end - at), part.checksums.of);
            if (begin == start && part.end == stop) {
                store_checksums(row, part.checksums);
            } else {
                const std::lock_guard<std::mutex> lock(parts_mutex_);
                parts_.push_back(part);
            }
            begin = part.end;
        }
        fence_streaming_stores();
    }

    // Codes bytes of one block, in as many passes as the outputs need.
    void code_piece(std::size_t offset, std::size_t length, std::uint32_t *crcs) const {
        std::uint32_t *output_crcs = job_.output_checksums ? crcs + job_.input_count : nullptr;
        Pass pass = {
            .inputs = job_.inputs,
            .input_count = job_.input_count,
            .coded_count = job_.coded_count,
            .copies = job_.copies,
            .outputs = job_.outputs,
            .output_count = 0,
            .offset = offset,
            .length = length,
            .coefficients = job_.coefficients,
            .input_crcs = job_.input_checksums ? crcs : nullptr,
            .output_crcs = output_crcs,
            .streaming = false,
        };
        std::size_t done = 0;
        do {  // at least once: inputs are checksummed and copied even if there are no outputs
            pass.output_count = std::min(engine_.pass_outputs, job_.output_count - done);
            run(pass);
            done += pass.output_count;
            pass.outputs = job_.outputs + done;
            pass.coefficients = job_.coefficients + done * job_.coded_count;
            if (output_crcs) pass.output_crcs = output_crcs + done;
            // The first pass has checksummed and copied the inputs.
            pass.input_count = job_.coded_count;
            pass.copies = nullptr;
            pass.input_crcs = nullptr;
        } while (done < job_.output_count);
    }

    // Runs a pass with streaming stores from the first cache line on, if all buffers that it
    // writes reach a cache line at the same offset.
    void run(Pass pass) const {
        const std::size_t head = bytes_to_lines(pass.outputs, pass.output_count, pass.copies,
                                                pass.input_count, pass.offset);
        if (!streaming_ || head == line_bytes || head >= pass.length) {
            engine_.code(pass);
            return;
        }
        const std::size_t length = pass.length;
        if (head > 0) {
            pass.length = head;
            engine_.code(pass);
            pass.offset += head;
            pass.length = length - head;
        }
        pass.streaming = true;
        engine_.code(pass);
    }

    void store_checksums(std::size_t row, const Checksums &checksums) const {
        if (job_.input_checksums == nullptr) return;
        for (std::size_t j = 0; j < job_.input_count; ++j)
            job_.input_checksums[j * rows_ + row] = checksums.of[j];
        for (std::size_t r = 0; r < job_.output_count; ++r)
            job_.output_checksums[r * rows_ + row] = checksums.of[job_.input_count + r];
    }

    void combine_parts() {
        std::sort(parts_.begin(), parts_.end(),
                  [](const PartOfRow &a, const PartOfRow &b) { return a.begin < b.begin; });
        for (std::size_t at = 0; at < parts_.size();) {
            PartOfRow whole = parts_[at];
            while (++at < parts_.size() && parts_[at].row == whole.row)
                for (std::size_t i = 0; i < job_.input_count + job_.output_count; ++i)
                    whole.checksums.of[i] =
                        combined_crc(whole.checksums.of[i], parts_[at].checksums.of[i],
                                     parts_[at].end - parts_[at].begin);
            store_checksums(whole.row, whole.checksums);
        }
    }

    const Engine &engine_;
    const CodingJob &job_;
    bool streaming_;
    std::size_t rows_, piece_bytes_;
    std::mutex parts_mutex_;
    std::vector<PartOfRow> parts_;
};

}  // namespace

void code_fragments(const Engine &engine, const CodingJob &job) { Coder(engine, job).code_all(); }

}  // namespace ecckpt
