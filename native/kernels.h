// The seam between the instruction sets and everything else.
//
// One Engine is one way to run the same two loops: `code` makes outputs out of inputs, takes the
// CRC32C of both and copies the inputs on the way, `copy` moves bytes past the caches. Every engine
// gives the same bytes.
// The kernel files use no templates or inline functions of the standard library: those would be
// emitted as weak symbols with that file's instructions, and the linker might choose them for all.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#define ECCKPT_X86 1
#else
#define ECCKPT_X86 0
#endif

#if defined(__aarch64__)
#define ECCKPT_ARM 1
#else
#define ECCKPT_ARM 0
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read bytes as little-endian words"
#endif

namespace ecckpt {

constexpr std::size_t max_fragments = 256;
constexpr std::size_t line_bytes = 64;

// One pass over the same `length` bytes, at `offset`, of every input and every output.
// output[r] = sum over j < coded_count of coefficients[r * coded_count + j] * input[j],
// in GF(2^8) / 0x11D.
struct Pass {
    const std::uint8_t *const *inputs;
    std::size_t input_count;  // 1 .. max_fragments
    std::size_t coded_count;  // inputs from here on are checksummed and copied, but not coded
    // Where each input goes as well, or nullptr: nowhere. No copies at all: nullptr.
    std::uint8_t *const *copies;
    std::uint8_t *const *outputs;
    std::size_t output_count;  // 0 .. Engine::pass_outputs
    std::size_t offset;
    std::size_t length;
    const std::uint8_t *coefficients;
    // Each CRC32C is read as that of the bytes before this pass (0: none) and replaced by that of
    // these bytes appended. nullptr: not wanted. Those of inputs come only with those of outputs.
    std::uint32_t *input_crcs;
    std::uint32_t *output_crcs;
    // Outputs and copies will not be read soon and start, at `offset`, on a cache line: store them
    // past the caches.
    bool streaming;
};

struct Engine {
    const char *name;
    std::size_t pass_outputs;  // how many outputs fit the registers of one pass
    bool (*supported)();       // this CPU and this OS have every feature the file is compiled with
    void (*code)(const Pass &);
    // Copies between buffers that do not overlap. Stores may be weakly ordered: the caller fences.
    void (*copy)(const std::uint8_t *source, std::uint8_t *target, std::size_t length);
};

extern const Engine scalar_engine;
#if ECCKPT_X86
extern const Engine avx2_engine;
extern const Engine gfni_engine;
#endif
#if ECCKPT_ARM
extern const Engine neon_engine;
#endif

// -- dispatch.cpp ---------------------------------------------------------------------------------

constexpr std::size_t max_engines = 3;

// Fills `found` with the engines usable here, best first, and returns how many.
std::size_t usable_engines(const Engine *found[max_engines]);

// Waits until streaming stores of this thread are visible to others.
void fence_streaming_stores();

}  // namespace ecckpt
