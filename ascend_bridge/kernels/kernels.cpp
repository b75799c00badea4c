// The kernels of the library and the C functions that start them. One translation unit:
// the vendor's compiler takes kernel and launch from the same file.
#include "block_copy.h"
#include "combine.h"
#include "launch.h"
#include "paged_attention.h"
#include "reshape_and_cache.h"

#if defined(PJ_SIMULATOR)
#include "simulated_launch.h"
#elif defined(PAGEDJAX_ASCEND_SYNTAX_ONLY)
// A compiler that is not the vendor's has no launch syntax.
#define PAGEDJAX_START(kernel, blocks, stream, ...) (kernel(__VA_ARGS__), 0)
#else
#define PAGEDJAX_START(kernel, blocks, stream, ...) \
  (kernel<<<blocks, 0, stream>>>(__VA_ARGS__), 0)
#endif

using pagedjax_ascend::BlockCopy;
using pagedjax_ascend::Combine;
using pagedjax_ascend::PagedAttention;
using pagedjax_ascend::ReshapeAndCache;

PAGEDJAX_KERNEL void pagedjax_attend_f16(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR table,
                                         GM_ADDR lens, GM_ADDR workspace, GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  PagedAttention<half> kernel;
  kernel.init(&pipe, q, k, v, table, lens, workspace, tiling);
  kernel.process();
}

PAGEDJAX_KERNEL void pagedjax_combine_f16(GM_ADDR workspace, GM_ADDR out, GM_ADDR lse,
                                          GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  Combine<half> kernel;
  kernel.init(&pipe, workspace, out, lse, tiling);
  kernel.process();
}

#if PAGEDJAX_ASCEND_ARCH == 2201
PAGEDJAX_KERNEL void pagedjax_attend_bf16(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR table,
                                          GM_ADDR lens, GM_ADDR workspace, GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  PagedAttention<bfloat16_t> kernel;
  kernel.init(&pipe, q, k, v, table, lens, workspace, tiling);
  kernel.process();
}

PAGEDJAX_KERNEL void pagedjax_combine_bf16(GM_ADDR workspace, GM_ADDR out, GM_ADDR lse,
                                           GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  Combine<bfloat16_t> kernel;
  kernel.init(&pipe, workspace, out, lse, tiling);
  kernel.process();
}
#endif

PAGEDJAX_KERNEL void pagedjax_write_rows(GM_ADDR k_new, GM_ADDR v_new, GM_ADDR k, GM_ADDR v,
                                         GM_ADDR slots, GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  ReshapeAndCache kernel;
  kernel.init(&pipe, k_new, v_new, k, v, slots, tiling);
  kernel.process();
}

PAGEDJAX_KERNEL void pagedjax_copy_blocks(GM_ADDR k, GM_ADDR v, GM_ADDR src, GM_ADDR dst,
                                          GM_ADDR cumsum, GM_ADDR tiling) {
  PAGEDJAX_VECTOR_ONLY();
  AscendC::TPipe pipe;
  BlockCopy kernel;
  kernel.init(&pipe, k, v, src, dst, cumsum, tiling);
  kernel.process();
}

// ---- Host ---------------------------------------------------------------------------

static GM_ADDR gm(void* address) { return static_cast<GM_ADDR>(address); }

int pagedjax_ascend_version(void) { return PAGEDJAX_ASCEND_VERSION; }

int pagedjax_ascend_arch(void) { return PAGEDJAX_ASCEND_ARCH; }

int pagedjax_ascend_is_simulated(void) {
#if defined(PJ_SIMULATOR)
  return 1;
#else
  return 0;
#endif
}

int pagedjax_ascend_paged_attention(int32_t dtype, uint32_t blocks, void* stream, void* q,
                                    void* k, void* v, void* table, void* lens,
                                    void* workspace, void* tiling) {
  if (dtype == pagedjax_ascend::kFloat16) {
    return PAGEDJAX_START(pagedjax_attend_f16, blocks, stream, gm(q), gm(k), gm(v), gm(table),
                          gm(lens), gm(workspace), gm(tiling));
  }
#if PAGEDJAX_ASCEND_ARCH == 2201
  if (dtype == pagedjax_ascend::kBFloat16) {
    return PAGEDJAX_START(pagedjax_attend_bf16, blocks, stream, gm(q), gm(k), gm(v),
                          gm(table), gm(lens), gm(workspace), gm(tiling));
  }
#endif
  return 1;
}

int pagedjax_ascend_combine(int32_t dtype, uint32_t blocks, void* stream, void* workspace,
                            void* out, void* lse, void* tiling) {
  if (dtype == pagedjax_ascend::kFloat16) {
    return PAGEDJAX_START(pagedjax_combine_f16, blocks, stream, gm(workspace), gm(out),
                          gm(lse), gm(tiling));
  }
#if PAGEDJAX_ASCEND_ARCH == 2201
  if (dtype == pagedjax_ascend::kBFloat16) {
    return PAGEDJAX_START(pagedjax_combine_bf16, blocks, stream, gm(workspace), gm(out),
                          gm(lse), gm(tiling));
  }
#endif
  return 1;
}

int pagedjax_ascend_reshape_and_cache(uint32_t blocks, void* stream, void* k_new,
                                      void* v_new, void* k, void* v, void* slots,
                                      void* tiling) {
  return PAGEDJAX_START(pagedjax_write_rows, blocks, stream, gm(k_new), gm(v_new), gm(k),
                        gm(v), gm(slots), gm(tiling));
}

int pagedjax_ascend_block_copy(uint32_t blocks, void* stream, void* k, void* v, void* src,
                               void* dst, void* cumsum, void* tiling) {
  return PAGEDJAX_START(pagedjax_copy_blocks, blocks, stream, gm(k), gm(v), gm(src), gm(dst),
                        gm(cumsum), gm(tiling));
}
