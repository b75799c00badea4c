#include "pages.h"

#include <cstring>

namespace pagedjax {

void write_rows(char* held, const char* from, const int32_t* pages, const int32_t* offsets,
                int64_t num_tokens, int64_t num_pages, int64_t page_size, int64_t row_bytes) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (pages[t] < 0 || pages[t] >= num_pages) continue;
    if (offsets[t] < 0 || offsets[t] >= page_size) continue;
    std::memcpy(held + (pages[t] * page_size + offsets[t]) * row_bytes, from + t * row_bytes,
                row_bytes);
  }
}

void copy_pages(char* held, const int32_t* src, const int32_t* dst, int64_t count,
                int64_t num_layers, int64_t num_pages, int64_t page_bytes) {
  for (int64_t i = 0; i < count; ++i) {
    if (src[i] < 0 || src[i] >= num_pages || dst[i] < 0 || dst[i] >= num_pages) continue;
    if (src[i] == dst[i]) continue;
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      char* base = held + layer * num_pages * page_bytes;
      std::memcpy(base + dst[i] * page_bytes, base + src[i] * page_bytes, page_bytes);
    }
  }
}

}  // namespace pagedjax
