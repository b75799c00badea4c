// The C interface of the kernel library, which the executor loads with dlopen.
//
// The same functions are built twice: with CANN they start the kernels on an NPU stream;
// in the simulator build they hand a simulated run to the stream of the mock runtime.
//
//   executor --dlopen--> libpagedjax_ascend_kernels.so --<<<>>>--> NPU stream
//                        (simulator build)             --enqueue--> stream of the mock
//
// All pointers are device memory. The unit of a copy is 32 bytes, so `table` and `slots`
// must be readable up to a whole multiple of them, and `lse` must have room for S * H
// rounded up to 8 floats. Device allocators round up to at least that.
//
// Plans (plan.h) are functions of the host and part of the same library.
//
// Results: 0, or 1 for a dtype that this build has no kernel for. A launch is
// asynchronous; what goes wrong on the device shows at the next synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#define PAGEDJAX_ASCEND_API extern "C" __attribute__((visibility("default")))

// Changes when an argument or a struct of tiling.h or plan.h does, or what a field means.
#define PAGEDJAX_ASCEND_VERSION 2

PAGEDJAX_ASCEND_API int pagedjax_ascend_version(void);
// 1001 or 2201, what the kernels were compiled for.
PAGEDJAX_ASCEND_API int pagedjax_ascend_arch(void);
// 1 in the simulator build.
PAGEDJAX_ASCEND_API int pagedjax_ascend_is_simulated(void);

// Decode attention, first half: partial results of every split into the workspace.
// q [S, H, D], k and v [N, page_size, K, D], table int32[S, P], lens int32[S], of which what
// is over P * page_size counts as that and what is negative as 0;
// `tiling` is a PagedAttentionTiling; `blocks` is plan.blocks.
PAGEDJAX_ASCEND_API int pagedjax_ascend_paged_attention(
    int32_t dtype, uint32_t blocks, void* stream, void* q, void* k, void* v, void* table,
    void* lens, void* workspace, void* tiling);
// Second half, on the same stream: out [S, H, D] and, if tiling.return_lse, lse float32
// [S, H]. `blocks` is plan.combine_blocks.
PAGEDJAX_ASCEND_API int pagedjax_ascend_combine(int32_t dtype, uint32_t blocks, void* stream,
                                                void* workspace, void* out, void* lse,
                                                void* tiling);
// Writes k_new and v_new [T, K, D] at slots int32[T], slot = page * page_size + offset;
// a slot outside the pool (so a negative one) is skipped. 16-bit dtypes, as bits.
PAGEDJAX_ASCEND_API int pagedjax_ascend_reshape_and_cache(uint32_t blocks, void* stream,
                                                          void* k_new, void* v_new, void* k,
                                                          void* v, void* slots,
                                                          void* tiling);
// Copies page src[i] to each of dst[cumsum[i-1] .. cumsum[i]), in k and in v. Pages
// outside the pool are skipped. No page may be both source and destination.
PAGEDJAX_ASCEND_API int pagedjax_ascend_block_copy(uint32_t blocks, void* stream, void* k,
                                                   void* v, void* src, void* dst,
                                                   void* cumsum, void* tiling);

// ---- Simulator build only -----------------------------------------------------------
//
// A launch makes a job. Who runs it:
//   1. the function set with pagedjax_sim_set_enqueue, if any;
//   2. else `pagedjax_sim_enqueue` of the loaded runtime (searched in the process, then
//      in the library that PAGEDJAX_ACL_LIBRARY names, which must be loaded already);
//   3. else it is run at once, and a launch with errors returns 2.
// The enqueuer calls run(job, message, size) exactly once, or drop(job): run returns the
// number of errors the simulator found (0 = a clean run) and puts the first into message.
//
// Seeds, errors and memory regions: ../simulator/include/simulator.h, whose functions are
// part of the library. A runtime may name its device memory itself, with
//   void pagedjax_sim_regions(void (*add)(const void* start, size_t bytes))
// which is called at the start of each run, found as above.
typedef int (*pagedjax_sim_run)(void* job, char* message, size_t size);
typedef void (*pagedjax_sim_drop)(void* job);
// Result: 0 if taken. Anything else is what the launch returns, and the job is dropped.
typedef int (*pagedjax_sim_enqueue_fn)(void* stream, pagedjax_sim_run run,
                                       pagedjax_sim_drop drop, void* job);
PAGEDJAX_ASCEND_API void pagedjax_sim_set_enqueue(pagedjax_sim_enqueue_fn enqueue);
