// The list of engines that this build has, in order of preference, and the choice of those that the
// machine can run.

#include "engine.h"

#if ECCKPT_X86
#include <xmmintrin.h>
#endif

namespace ecckpt {
namespace {

const Engine *const engines[] = {
#if ECCKPT_X86
    &gfni_engine,
    &avx2_engine,
#endif
#if ECCKPT_ARM
    &neon_engine,
#endif
    &scalar_engine,
};

}  // namespace

std::size_t usable_engines(const Engine *found[max_engines]) {
    std::size_t count = 0;
    for (const Engine *engine : engines)
        if (engine->supported()) found[count++] = engine;
    return count;
}

void fence_streaming_stores() {
#if ECCKPT_X86
    _mm_sfence();
#endif
}

}  // namespace ecckpt
