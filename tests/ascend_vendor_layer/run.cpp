// The kernels on the vendor's headers as a library that ascend_kernels.py can drive: the
// launch functions run the cores one after another, and the simulator's are empty.
#define pagedjax_ascend_paged_attention core_paged_attention
#define pagedjax_ascend_combine core_combine
#define pagedjax_ascend_reshape_and_cache core_reshape_and_cache
#define pagedjax_ascend_block_copy core_block_copy
#include "kernels.cpp"
#undef pagedjax_ascend_paged_attention
#undef pagedjax_ascend_combine
#undef pagedjax_ascend_reshape_and_cache
#undef pagedjax_ascend_block_copy

template <class F>
static int on_each_core(uint32_t blocks, F kernel) {
  block_num = blocks;
  for (block_idx = 0; block_idx < block_num; ++block_idx) {
    set_mask_norm();
    set_vector_mask(~uint64_t{0}, ~uint64_t{0});
    if (int status = kernel()) return status;
  }
  return 0;
}

extern "C" {

int pagedjax_ascend_paged_attention(int32_t dtype, uint32_t blocks, void* stream, void* q,
                                    void* k, void* v, void* table, void* lens,
                                    void* workspace, void* tiling) {
  return on_each_core(blocks, [=] {
    return core_paged_attention(dtype, blocks, stream, q, k, v, table, lens, workspace,
                                tiling);
  });
}

int pagedjax_ascend_combine(int32_t dtype, uint32_t blocks, void* stream, void* workspace,
                            void* out, void* lse, void* tiling) {
  return on_each_core(blocks, [=] {
    return core_combine(dtype, blocks, stream, workspace, out, lse, tiling);
  });
}

int pagedjax_ascend_reshape_and_cache(uint32_t blocks, void* stream, void* k_new,
                                      void* v_new, void* k, void* v, void* slots,
                                      void* tiling) {
  return on_each_core(blocks, [=] {
    return core_reshape_and_cache(blocks, stream, k_new, v_new, k, v, slots, tiling);
  });
}

int pagedjax_ascend_block_copy(uint32_t blocks, void* stream, void* k, void* v, void* src,
                               void* dst, void* cumsum, void* tiling) {
  return on_each_core(blocks, [=] {
    return core_block_copy(blocks, stream, k, v, src, dst, cumsum, tiling);
  });
}

void pagedjax_sim_set_seed(uint64_t) {}
void pagedjax_sim_clear_errors() {}
int pagedjax_sim_error_count() { return 0; }
const char* pagedjax_sim_error(int) { return ""; }
int64_t pagedjax_sim_instructions() { return 0; }
void pagedjax_sim_clear_regions() {}
void pagedjax_sim_add_region(const void*, size_t, const char*) {}
}
