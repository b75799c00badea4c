// The plans as C functions of the library. Host code only.
#include "plan.h"

int pagedjax_ascend_plan_paged_attention(
    const pagedjax_ascend::PagedAttentionProblem* problem,
    pagedjax_ascend::PagedAttentionPlan* plan) {
  return pagedjax_ascend::plan_paged_attention(*problem, plan);
}

int pagedjax_ascend_plan_reshape_and_cache(int32_t arch, int32_t cores, int32_t dtype,
                                           int32_t tokens, int32_t num_pages,
                                           int32_t page_size, int32_t kv_heads,
                                           int32_t head_dim,
                                           pagedjax_ascend::ReshapeAndCachePlan* plan) {
  return pagedjax_ascend::plan_reshape_and_cache(arch, cores, dtype, tokens, num_pages,
                                                 page_size, kv_heads, head_dim, plan);
}

int pagedjax_ascend_plan_block_copy(int32_t arch, int32_t cores, int32_t dtype,
                                    int32_t num_sources, int32_t num_dests,
                                    int32_t num_pages, int32_t page_size, int32_t kv_heads,
                                    int32_t head_dim, pagedjax_ascend::BlockCopyPlan* plan) {
  return pagedjax_ascend::plan_block_copy(arch, cores, dtype, num_sources, num_dests,
                                          num_pages, page_size, kv_heads, head_dim, plan);
}
