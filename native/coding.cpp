#include "coding.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "crc_joining.h"
#include "sharing.h"

namespace ecckpt {
namespace {

// Outputs of a job larger than this (about an L2 cache) go past the caches: a store that first
// reads its line costs a third of the memory bandwidth, and so much data would be evicted before
// anyone reads it.
constexpr std::size_t streaming_job_bytes = std::size_t{2} << 20;

// With more outputs than fit one pass, the inputs are read again for each pass: in pieces that are
// still in the L2 cache by then.
constexpr std::size_t repeated_pass_bytes = std::size_t{256} << 10;

// Starting a thread costs as much as coding about this much.
constexpr std::size_t least_share_bytes = std::size_t{1} << 20;

// Pieces start at multiples of this, so that those of aligned buffers stay aligned.
constexpr std::size_t page_bytes = 4096;

struct Checksums {
    std::uint32_t of[2 * max_fragments];  // of the inputs, then of the outputs
};

// A row that the border between two threads cuts in two or more.
struct CutRow {
    std::size_t row, begin, end;
    Checksums checksums;
};

// How many bytes after `offset` all buffers reach a cache line together; line_bytes: never.
std::size_t bytes_to_lines(std::uint8_t *const *outputs, std::size_t output_count,
                           std::uint8_t *const *copies, std::size_t copy_count,
                           std::size_t offset) {
    std::size_t distance = line_bytes;
    bool together = true;
    const auto look = [&](const std::uint8_t *buffer) {
        const auto address = reinterpret_cast<std::uintptr_t>(buffer) + offset;
        const std::size_t own = (0 - address) % line_bytes;
        together = together && (distance == line_bytes || distance == own);
        distance = own;
    };
    for (std::size_t r = 0; r < output_count; ++r) look(outputs[r]);
    for (std::size_t j = 0; copies && j < copy_count; ++j)
        if (copies[j]) look(copies[j]);
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
            piece_bytes_ = std::max(repeated_pass_bytes / job.input_count / page_bytes,
                                    std::size_t{1}) * page_bytes;
    }

    void code_all() {
        const std::size_t streams = job_.input_count + job_.output_count;
        share_out(job_.length, page_bytes, std::max<std::size_t>(least_share_bytes / streams, 1),
                  job_.threads,
                  [this](std::size_t begin, std::size_t end) { code_span(begin, end); });
        join_cut_rows();
    }

private:
    // Codes the bytes `begin` .. `end` of all fragments: whole rows, or parts of them at the ends.
    void code_span(std::size_t begin, std::size_t end) {
        while (begin < end) {
            const std::size_t row = begin / job_.block_bytes, start = row * job_.block_bytes;
            const std::size_t stop = start + std::min(job_.block_bytes, job_.length - start);
            CutRow part = {row, begin, std::min(end, stop), {}};
            for (std::size_t at = begin; at < part.end; at += piece_bytes_)
                code_piece(at, std::min(piece_bytes_, part.end - at), part.checksums.of);
            if (begin == start && part.end == stop) {
                put(row, part.checksums);
            } else {
                const std::lock_guard<std::mutex> lock(cut_rows_mutex_);
                cut_rows_.push_back(part);
            }
            begin = part.end;
        }
        fence_streaming_stores();
    }

    // Codes bytes of one block, in as many passes as the outputs need.
    void code_piece(std::size_t offset, std::size_t length, std::uint32_t *crcs) const {
        std::uint32_t *output_crcs = job_.output_checksums ? crcs + job_.input_count : nullptr;
        Pass pass = {job_.inputs, job_.input_count, job_.coded_count, job_.copies, job_.outputs, 0,
                     offset, length, job_.coefficients, job_.input_checksums ? crcs : nullptr,
                     output_crcs, false};
        std::size_t done = 0;
        do {  // at least once: the inputs have their turn even when there is nothing to make
            pass.output_count = std::min(engine_.pass_outputs, job_.output_count - done);
            run(pass);
            done += pass.output_count;
            pass.outputs = job_.outputs + done;
            pass.coefficients = job_.coefficients + done * job_.coded_count;
            if (output_crcs) pass.output_crcs = output_crcs + done;
            pass.input_count = job_.coded_count;
            pass.copies = nullptr;
            pass.input_crcs = nullptr;
        } while (done < job_.output_count);
    }

    // Runs a pass past the caches from the first cache line on, if its buffers allow that.
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

    void put(std::size_t row, const Checksums &checksums) const {
        if (job_.input_checksums == nullptr) return;
        for (std::size_t j = 0; j < job_.input_count; ++j)
            job_.input_checksums[j * rows_ + row] = checksums.of[j];
        for (std::size_t r = 0; r < job_.output_count; ++r)
            job_.output_checksums[r * rows_ + row] = checksums.of[job_.input_count + r];
    }

    void join_cut_rows() {
        std::sort(cut_rows_.begin(), cut_rows_.end(),
                  [](const CutRow &a, const CutRow &b) { return a.begin < b.begin; });
        for (std::size_t at = 0; at < cut_rows_.size();) {
            CutRow whole = cut_rows_[at];
            while (++at < cut_rows_.size() && cut_rows_[at].row == whole.row)
                for (std::size_t i = 0; i < job_.input_count + job_.output_count; ++i)
                    whole.checksums.of[i] =
                        joined_crc(whole.checksums.of[i], cut_rows_[at].checksums.of[i],
                                   cut_rows_[at].end - cut_rows_[at].begin);
            put(whole.row, whole.checksums);
        }
    }

    const Engine &engine_;
    const CodingJob &job_;
    bool streaming_;
    std::size_t rows_, piece_bytes_;
    std::mutex cut_rows_mutex_;
    std::vector<CutRow> cut_rows_;
};

}  // namespace

void code_fragments(const Engine &engine, const CodingJob &job) {
    Coder(engine, job).code_all();
}

}  // namespace ecckpt
