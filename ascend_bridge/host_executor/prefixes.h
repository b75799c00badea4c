// Rows that begin with the same pages.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedjax {

// One query with its table row and the keys [low, high) it sees.
struct QueryRow {
  int64_t token;
  const int32_t* pages;
  int64_t low, high;
};

// Rows (indices into the list given) that name the same pages in [begin, end).
struct SharedRun {
  std::vector<int64_t> rows;
  int64_t begin, end;  // pages
};

// Finds the runs of equal leading pages, whole pages only, outermost first: a tree, as
// forks of forks make one.
//
//   row 0:  4 7 2 9        {0, 1, 2} share [0, 2): 4 7
//   row 1:  4 7 2 5   ->   {0, 1}    share [2, 3): 2
//   row 2:  4 7 8
std::vector<SharedRun> find_shared_runs(const std::vector<QueryRow>& rows, int64_t page_size);

}  // namespace pagedjax
