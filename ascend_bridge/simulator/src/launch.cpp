// Launches: regions of global memory, the cores of a launch, and races between them.
#include "launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "simulator.h"

namespace simulator {

namespace {

constexpr size_t kMaxErrors = 200;

struct Shared {
  std::mutex regions_mutex, launch_mutex, errors_mutex;
  std::map<uintptr_t, Region> regions;
  std::vector<std::string> errors;  // of the C interface
  uint64_t seed = 0;
  int64_t instructions = 0;
};

Shared& shared() {
  static Shared* const made = new Shared;  // lives as long as the process
  return *made;
}

thread_local Core* current = nullptr;
thread_local uint32_t current_blocks = 0;

}  // namespace

Core& core() {
  if (current == nullptr) {
    throw std::logic_error("the Ascend C API was called outside a simulated kernel");
  }
  return *current;
}

std::string place_of(Where at) {
  const std::string file = at.file;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" +
         number(at.line);
}

const Region* Launch::find(uintptr_t at) const {
  auto it = std::upper_bound(
      regions.begin(), regions.end(), at,
      [](uintptr_t value, const Region& region) { return value < region.at; });
  if (it == regions.begin()) return nullptr;
  --it;
  return at < it->at + it->bytes ? &*it : nullptr;
}

void Launch::report(const std::string& place, const char* api, const char* rule,
                    const std::string& text) {
  if (errors.size() >= kMaxErrors || !seen.insert(place + rule).second) return;
  errors.push_back(place + ": " + api + ": " + text + " [" + rule + "]");
}

namespace {

struct Piece {
  uintptr_t lo, hi;
  const GmAccess* access;
};

// The ranges of some accesses, by address. A scalar store leaves the cache with its
// whole line, and with it what the core takes the rest of the line to be.
std::vector<Piece> pieces_of(const std::vector<GmAccess>& accesses, bool by_lines) {
  constexpr uintptr_t kLine = 64;
  std::vector<Piece> pieces;
  for (const GmAccess& access : accesses) {
    const uintptr_t line = by_lines && access.pipe == kCache ? kLine : 1;
    for_pieces(access.blocks, [&](uintptr_t lo, uintptr_t hi) {
      pieces.push_back(Piece{lo / line * line, (hi + line - 1) / line * line, &access});
    });
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.lo < b.lo; });
  return pieces;
}

}  // namespace

// Cores run at once on the device: a write and another access of the same bytes by two
// of them have no order within a launch.
void Launch::find_races_of_cores() {
  const auto check = [&](const std::vector<Piece>& some,
                         const std::vector<Piece>& written, const char* does) {
    uintptr_t longest = 0;
    for (const Piece& write : written) longest = std::max(longest, write.hi - write.lo);
    for (const Piece& one : some) {
      auto it = std::lower_bound(
          written.begin(), written.end(), one.lo > longest ? one.lo - longest : 0,
          [](const Piece& piece, uintptr_t value) { return piece.lo < value; });
      for (; it != written.end() && it->lo < one.hi; ++it) {
        if (it->hi <= one.lo || it->access->core == one.access->core) continue;
        const uintptr_t place = std::max(one.lo, it->lo);
        const Region* region = find(place);  // a line may stick out of it
        report(place_of(one.access->at), "launch", "race-cores",
               "core " + number(one.access->core) + does + " byte " +
                   (region == nullptr
                        ? std::string("of a cache line")
                        : number(int64_t(place - region->at)) + " of " + region->name) +
                   ", which core " + number(it->access->core) + " writes at " +
                   place_of(it->access->at));
        break;
      }
    }
  };
  const std::vector<Piece> lines = pieces_of(writes, true);
  check(lines, lines, " writes");
  check(pieces_of(reads, false), pieces_of(writes, false), " reads");
}

void add_region(const void* address, size_t bytes, const std::string& name) {
  const std::lock_guard<std::mutex> lock(shared().regions_mutex);
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  shared().regions[at] = Region{at, bytes, name};
}

void remove_region(const void* address) {
  const std::lock_guard<std::mutex> lock(shared().regions_mutex);
  shared().regions.erase(reinterpret_cast<uintptr_t>(address));
}

void clear_regions() {
  const std::lock_guard<std::mutex> lock(shared().regions_mutex);
  shared().regions.clear();
}

Report launch(uint32_t blocks, uint64_t seed, const std::function<void()>& kernel) {
  const std::lock_guard<std::mutex> one(shared().launch_mutex);
  Launch launch;
  launch.blocks = blocks;
  {
    const std::lock_guard<std::mutex> lock(shared().regions_mutex);
    for (const auto& entry : shared().regions) launch.regions.push_back(entry.second);
  }
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  if (seed != 0) {
    Random random{seed};
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[random() % i]);
  }
  current_blocks = blocks;
  for (const int index : order) {
    Core core(&launch, index, seed);
    current = &core;
    try {
      kernel();
      core.finish();
    } catch (const Stopped&) {
      // Recorded where it was thrown; what this core had queued is lost.
    } catch (const std::exception& error) {
      launch.report("kernel:0", "launch", "exception", error.what());
    }
    current = nullptr;
  }
  launch.find_races_of_cores();
  return Report{std::move(launch.errors), launch.instructions};
}

}  // namespace simulator

namespace AscendC {

int64_t GetBlockIdx() { return simulator::core().index(); }

int64_t GetBlockNum() {
  simulator::core();
  return simulator::current_blocks;
}

}  // namespace AscendC

// The interface for ctypes ------------------------------------------------------------

using simulator::shared;

void pagedjax_sim_add_region(const void* address, size_t bytes, const char* name) {
  simulator::add_region(address, bytes, name);
}

void pagedjax_sim_remove_region(const void* address) {
  simulator::remove_region(address);
}

void pagedjax_sim_clear_regions() { simulator::clear_regions(); }

void pagedjax_sim_set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  shared().seed = seed;
}

int pagedjax_sim_launch(uint32_t blocks, void (*kernel)(void*), void* argument) {
  uint64_t seed;
  {
    const std::lock_guard<std::mutex> lock(shared().errors_mutex);
    seed = shared().seed;
  }
  const simulator::Report report =
      simulator::launch(blocks, seed, [&] { kernel(argument); });
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  shared().instructions = report.instructions;
  for (const std::string& error : report.errors) shared().errors.push_back(error);
  return int(report.errors.size());
}

int pagedjax_sim_error_count() {
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  return int(shared().errors.size());
}

const char* pagedjax_sim_error(int index) {
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  if (index < 0 || size_t(index) >= shared().errors.size()) return "";
  return shared().errors[size_t(index)].c_str();
}

void pagedjax_sim_clear_errors() {
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  shared().errors.clear();
}

int64_t pagedjax_sim_instructions() {
  const std::lock_guard<std::mutex> lock(shared().errors_mutex);
  return shared().instructions;
}

int pagedjax_sim_arch() { return __NPU_ARCH__; }
