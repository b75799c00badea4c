// The checks of an instruction's accesses to the unified buffer.
#include "sim_core.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "launch.h"

namespace simulator {

namespace {
constexpr int64_t kPart = 2;  // bytes told apart within a block
}  // namespace

std::string number(int64_t value) { return std::to_string(value); }

Core::Core(Launch* launch, int index, uint64_t seed)
    : launch_(launch),
      index_(index),
      ub_(size_t(kProduct.ub_bytes), 0xff),  // NaN in every format
      written_(size_t(kProduct.ub_bytes), 0),
      records_(size_t(kProduct.ub_bytes / kBlock)),
      parts_(size_t(kProduct.ub_bytes / kBlock)),
      flags_(13 * 8),
      in_order_(seed == 0),
      laziness_(seed % 3 == 1   ? 8
                : seed % 3 == 2 ? 7
                                : 4),
      random_{seed * 1000003 + uint64_t(index)},
      raised_(13 * 8) {}

Core::~Core() = default;

void Core::error(Where at, const char* api, const char* rule, const std::string& text) {
  launch_->report(place_of(at), api, rule, text + " (core " + number(index_) + ")");
}

void Core::stop(Where at, const char* api, const char* rule, const std::string& text) {
  error(at, api, rule, text);
  throw Stopped{};
}

// Accesses ----------------------------------------------------------------------------

void Core::begin(Pipe pipe, const char* api, Where at) {
  pipe_ = pipe;
  api_ = api;
  at_ = at;
  tick_ = ++ticks_[pipe];
  if (pipe == kScalar) clocks_[kScalar][kScalar] = tick_;
  place_ = uint16_t(place_index(at));
  ++launch_->instructions;
}

bool Core::check_view(const View& view) {
  const std::string role = view.role;
  if (view.hi <= view.lo) {
    error(at_, api_, "queue-protocol", role + " is a tensor that was never allocated");
    return false;
  }
  if (view.buffer >= 0) {
    const QueueBuffer& buffer = buffers_[size_t(view.buffer)];
    if (buffer.generation != view.generation || buffer.state == QueueBuffer::kFree) {
      error(at_, api_, "use-after-free", role + " was given back by FreeTensor");
      return false;
    }
    if (buffer.state == QueueBuffer::kQueued) {
      error(at_, api_, "queue-protocol",
            role + " is in its queue: take it out with DeQue before using it");
      return false;
    }
  }
  if (view.at % view.align != 0) {
    error(at_, api_, "ub-align",
          role + " is at UB address " + number(view.at) +
              ", which is not a multiple of " + number(view.align));
    return false;
  }
  return true;
}

bool Core::use(const View& view, int64_t lo, int64_t hi, bool write) {
  if (lo < view.lo || hi > view.hi) {
    error(at_, api_, "ub-bounds",
          std::string(view.role) + (write ? " writes" : " reads") + " bytes " +
              number(lo - view.lo) + " to " + number(hi - view.lo) +
              " of a buffer of " + number(view.hi - view.lo));
    return false;
  }
  return mark(lo, hi, write);
}

void Core::forget(int64_t lo, int64_t hi) {
  std::fill(written_.begin() + lo, written_.begin() + hi, uint8_t(0));
}

inline bool Core::touch(Record& record, bool write, int64_t at) {
  bool good = true;
  const bool own = record.writer == pipe_ && record.write == tick_;
  if (!own && !known(record.writer, record.write)) {
    error(at_, api_, "race-ub",
          std::string(name_of(pipe_)) + (write ? " writes" : " reads") +
              " UB address " + number(at) + " which " + name_of(Pipe(record.writer)) +
              " writes at " + place_of(places_[record.line]) +
              (record.writer == pipe_ ? ", with no PipeBarrier between"
                                      : ", with no wait between"));
    good = false;
  }
  if (!write) {
    record.read[pipe_] = tick_;
    return good;
  }
  // What one pipe reads it has read before its next instruction writes, and the scalar
  // unit has a value before it goes on: only reads of other pipes can be too late.
  for (uint8_t pipe = kVector; pipe < kPipes; ++pipe) {
    if (pipe == pipe_ || known(pipe, record.read[pipe])) continue;
    error(at_, api_, "race-ub",
          std::string(name_of(pipe_)) + " writes UB address " + number(at) + " while " +
              name_of(Pipe(pipe)) + " may still read it: no wait between");
    good = false;
  }
  record = Record{};
  record.write = tick_;
  record.writer = pipe_;
  record.line = place_;
  return good;
}

bool Core::mark(int64_t lo, int64_t hi, bool write) {
  bool good = true;
  if (write) {
    std::fill(written_.begin() + lo, written_.begin() + hi, uint8_t(1));
  } else {
    const auto stop = written_.begin() + hi;
    const auto hole = std::find(written_.begin() + lo, stop, uint8_t(0));
    if (hole != stop) {
      error(at_, api_, "uninitialised",
            "reads UB bytes " + number(lo) + " to " + number(hi) + ", of which byte " +
                number(hole - written_.begin()) + " was never written");
      good = false;
    }
  }
  for (int64_t at = lo; at < hi;) {
    const int64_t block = at / kBlock;
    const int64_t end = std::min(hi, (block + 1) * kBlock);
    auto& parts = parts_[size_t(block)];
    Record& whole = records_[size_t(block)];
    if (end - at == kBlock) {
      if (parts == nullptr) {
        good &= touch(whole, write, at);
      } else {
        for (Record& part : *parts) good &= touch(part, write, at);
        if (write) {
          whole = (*parts)[0];
          parts.reset();
        }
      }
    } else {
      if (parts == nullptr) {
        parts = std::make_unique<std::array<Record, 16>>();
        parts->fill(whole);
      }
      const int64_t first = at % kBlock / kPart;
      const int64_t last = (end - 1) % kBlock / kPart;
      for (int64_t i = first; i <= last; ++i) {
        good &= touch((*parts)[size_t(i)], write, at);
      }
    }
    at = end;
  }
  return good;
}

int Core::place_index(Where at) {
  if (places_.empty() || places_.back().line != at.line ||
      places_.back().file != at.file) {
    for (size_t i = places_.size(); i-- > 0;) {
      if (places_[i].line == at.line && places_[i].file == at.file) return int(i);
    }
    places_.push_back(at);
  }
  return int(places_.size()) - 1;
}

void Core::scalar_access(const View& view, int64_t at, int64_t bytes, bool write,
                         const char* api, Where where) {
  begin(kScalar, api, where);
  View one = view;
  one.align = 1;
  one.role = "the tensor";
  if (check_view(one)) use(one, at, at + bytes, write);
}

// Vector instructions -----------------------------------------------------------------

namespace {

// The runs of bytes of one repeat, from its own start: (offset, bytes).
struct Runs {
  int count = 0;
  std::array<std::pair<int64_t, int64_t>, 128> run;
};

Runs runs_of_repeat(const Lanes& lanes, const View& view, int64_t repeat) {
  Runs runs;
  const int64_t origin = address(view, repeat, 0);
  for (int64_t i = 0; i < lanes.per_repeat; ++i) {
    if (!is_active(lanes, repeat, i)) continue;
    const int64_t at = address(view, repeat, i) - origin;
    auto* const last = runs.count > 0 ? &runs.run[size_t(runs.count - 1)] : nullptr;
    if (last != nullptr && last->first + last->second == at) {
      last->second += view.esize;
    } else {
      runs.run[size_t(runs.count++)] = {at, view.esize};
    }
  }
  return runs;
}

// Calls f(lo, hi, repeat) for the bytes that an operand's elements take.
template <class F>
void for_runs(const Lanes& lanes, const View& view, F f) {
  const int64_t repeats = total_repeats(lanes);
  if (repeats == 0) return;
  // All repeats are alike, but for the last one of counter mode.
  Runs runs = runs_of_repeat(lanes, view, 0);
  for (int64_t r = 0; r < repeats; ++r) {
    if (r > 0 && r == repeats - 1 && lanes.count >= 0) {
      runs = runs_of_repeat(lanes, view, r);
    }
    const int64_t origin = address(view, r, 0);
    for (int n = 0; n < runs.count; ++n) {
      const int64_t lo = origin + runs.run[size_t(n)].first;
      f(lo, lo + runs.run[size_t(n)].second, r);
    }
  }
}

}  // namespace

namespace {

int64_t last_lane(const Lanes& lanes) {
  if (lanes.count >= 0) return std::min(lanes.count, lanes.per_repeat) - 1;
  for (int64_t i = lanes.per_repeat; i-- > 0;) {
    if (is_active(lanes, 0, i)) return i;
  }
  return 0;
}

// Whether an instruction may add up in its second source: from one repeat to the next.
bool accumulates(const char* api, const View& dst, const View& src) {
  for (const char* one : {"Add", "Sub", "Mul", "Max", "Min"}) {
    if (std::strcmp(api, one) == 0) {
      return std::strcmp(src.role, "src1") == 0 && (dst.rep == 0 || src.rep == 0);
    }
  }
  return false;
}

}  // namespace

// Within a repeat a source is the destination or apart from it, and no repeat reads
// what an earlier one has written.
bool Core::overlap(const Lanes& lanes, const View& dst, const View& src) {
  const int64_t repeats = total_repeats(lanes);
  const int64_t last = last_lane(lanes);
  if (dst.lo != src.lo || repeats == 0 || last < 0) return true;
  const int64_t dst_end = address(dst, repeats - 1, last) + dst.esize;
  const int64_t src_end = address(src, repeats - 1, last) + src.esize;
  if (dst.at >= src_end || src.at >= dst_end) return true;
  const bool same = dst.esize == src.esize && dst.blk == src.blk && dst.at == src.at &&
                    dst.rep == src.rep;
  if (same && (repeats == 1 || dst.rep > last * dst.esize / kBlock * dst.blk))
    return true;
  struct Piece {
    int64_t lo, hi, repeat;
  };
  std::vector<Piece> pieces;
  int64_t longest = 0;
  for_runs(lanes, dst, [&](int64_t lo, int64_t hi, int64_t r) {
    pieces.push_back(Piece{lo, hi, r});
    longest = std::max(longest, hi - lo);
  });
  const auto before = [](const Piece& a, const Piece& b) { return a.lo < b.lo; };
  if (!std::is_sorted(pieces.begin(), pieces.end(), before)) {
    std::sort(pieces.begin(), pieces.end(), before);
  }
  const bool may_add_up = accumulates(api_, dst, src);
  bool good = true;
  for_runs(lanes, src, [&](int64_t lo, int64_t hi, int64_t r) {
    auto it = std::lower_bound(
        pieces.begin(), pieces.end(), lo - longest + 1,
        [](const Piece& piece, int64_t value) { return piece.lo < value; });
    for (; good && it != pieces.end() && it->lo < hi; ++it) {
      if (it->hi <= lo) continue;
      const bool earlier = it->repeat < r && !may_add_up;
      const bool partly =
          it->repeat == r && (dst.esize != src.esize || dst.blk != src.blk ||
                              address(dst, r, 0) != address(src, r, 0));
      if (!earlier && !partly) continue;
      error(
          at_, api_, "overlap",
          std::string(src.role) +
              (partly ? " overlaps dst in part" : " is what an earlier repeat writes") +
              ", at UB address " + number(std::max(lo, it->lo)));
      good = false;
    }
  });
  return good;
}

bool Core::vector(const char* api, Where at, const Lanes& lanes, const View* dst,
                  int dsts, const View* src, int srcs) {
  begin(kVector, api, at);
  bool good = true;
  if (lanes.count < 0) {
    if (lanes.repeats < 0 || lanes.repeats > 255) {
      error(
          at, api, "repeat",
          number(lanes.repeats) + " repeats, of at most 255: the device keeps 8 bits");
      return false;
    }
  }
  for (int i = 0; i < dsts + srcs; ++i) {
    const View& view = i < dsts ? dst[i] : src[i - dsts];
    if (view.blk < 0 || view.blk > 65535 || view.rep < 0 || view.rep > 65535) {
      error(at, api, "repeat",
            std::string(view.role) + " has strides " + number(view.blk) + " and " +
                number(view.rep));
      return false;
    }
    good &= check_view(view);
  }
  if (!good) return false;
  for (int i = 0; i < srcs; ++i) {
    for (int j = 0; j < dsts; ++j) good &= overlap(lanes, dst[j], src[i]);
  }
  bool inside = true;
  for (int i = 0; i < srcs + dsts && inside; ++i) {
    const bool write = i >= srcs;
    const View& view = write ? dst[i - srcs] : src[i];
    for_runs(lanes, view, [&](int64_t lo, int64_t hi, int64_t) {
      if (!inside) return;
      if (lo < view.lo || hi > view.hi) {
        use(view, lo, hi, write);
        inside = false;
      } else {
        good &= use(view, lo, hi, write);
      }
    });
  }
  return inside;
}

}  // namespace simulator
