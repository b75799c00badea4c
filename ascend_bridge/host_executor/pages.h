// Moving keys and values: into pages, and from page to page.
#pragma once

#include <cstdint>

namespace pagedjax {

// Stores row t of `from` [T, row_bytes] at place offsets[t] of page pages[t] of `held`
// [N, page_size, row_bytes]; a page or an offset that does not exist is skipped.
void write_rows(char* held, const char* from, const int32_t* pages, const int32_t* offsets,
                int64_t num_tokens, int64_t num_pages, int64_t page_size, int64_t row_bytes);

// Copies page src[i] to page dst[i] in every layer of `held` [L * N, page_bytes]; a pair
// with a page outside [0, N) is skipped.
void copy_pages(char* held, const int32_t* src, const int32_t* dst, int64_t count,
                int64_t num_layers, int64_t num_pages, int64_t page_bytes);

}  // namespace pagedjax
