// What stands for <<<blocks, nullptr, stream>>> in the simulator build.
#pragma once

#include <cstdint>
#include <functional>

namespace pagedjax_ascend {

// Hands a run of the kernel on `blocks` simulated cores to the stream; see launch.h.
int start_simulated(uint32_t blocks, void* stream, std::function<void()> kernel);

}  // namespace pagedjax_ascend

#define PAGEDJAX_START(kernel, blocks, stream, ...) \
  pagedjax_ascend::start_simulated(blocks, stream, [=] { kernel(__VA_ARGS__); })
