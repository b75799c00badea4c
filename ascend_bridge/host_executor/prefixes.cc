#include "prefixes.h"

#include <algorithm>
#include <numeric>

namespace pagedjax {

std::vector<SharedRun> find_shared_runs(const std::vector<QueryRow>& rows, int64_t page_size) {
  struct Group {
    std::vector<int64_t> rows;
    int64_t depth;  // pages known to be equal
  };
  std::vector<SharedRun> runs;
  std::vector<Group> todo(1);
  todo[0].depth = 0;
  for (int64_t i = 0; i < (int64_t)rows.size(); ++i) {
    if (rows[i].high >= page_size) todo[0].rows.push_back(i);
  }
  for (size_t next = 0; next < todo.size(); ++next) {
    const int64_t depth = todo[next].depth;
    std::vector<int64_t> group = std::move(todo[next].rows);
    const auto page = [&](int64_t row) { return rows[row].pages[depth]; };
    std::stable_sort(group.begin(), group.end(),
                     [&](int64_t a, int64_t b) { return page(a) < page(b); });
    for (size_t first = 0, last; first < group.size(); first = last) {
      last = first + 1;
      while (last < group.size() && page(group[last]) == page(group[first])) ++last;
      if (last - first < 2) continue;
      const int32_t* pages = rows[group[first]].pages;
      int64_t equal = rows[group[first]].high / page_size;
      for (size_t i = first + 1; i < last; ++i) {
        const QueryRow& row = rows[group[i]];
        equal = std::min(equal, row.high / page_size);
        for (int64_t j = depth; j < equal; ++j) {
          if (row.pages[j] != pages[j]) equal = j;
        }
      }
      Group rest;
      rest.depth = equal;
      for (size_t i = first; i < last; ++i) {
        if (rows[group[i]].high / page_size > equal) rest.rows.push_back(group[i]);
      }
      runs.push_back({{group.begin() + first, group.begin() + last}, depth, equal});
      if (rest.rows.size() > 1) todo.push_back(std::move(rest));
    }
  }
  return runs;
}

}  // namespace pagedjax
