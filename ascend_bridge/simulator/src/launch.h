// What the cores of one launch share. For the sources of the simulator only.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "sim_core.h"

namespace simulator {

struct Region {
  uintptr_t at;
  size_t bytes;
  std::string name;
};

struct Launch {
  std::vector<Region> regions;  // by address
  std::vector<std::string> errors;
  std::set<std::string> seen;  // place and rule of the errors
  std::vector<GmAccess> reads, writes;
  uint32_t blocks = 1;
  int64_t instructions = 0;

  const Region* find(uintptr_t at) const;
  void report(const std::string& place, const char* api, const char* rule,
              const std::string& text);
  void find_races_of_cores();
};

// Calls f(from, to) for each range of addresses without a gap.
template <class F>
inline void for_pieces(const Blocks& blocks, F f) {
  if (blocks.step == blocks.bytes) {
    f(blocks.at, blocks.at + uintptr_t(blocks.bytes * blocks.count));
    return;
  }
  for (int64_t i = 0; i < blocks.count; ++i) {
    const uintptr_t at = blocks.at + uintptr_t(i * blocks.step);
    f(at, at + uintptr_t(blocks.bytes));
  }
}

std::string place_of(Where at);

}  // namespace simulator
