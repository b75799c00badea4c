// Masks, the types each product's instructions take, rounding, and the accesses of
// reductions, comparisons and selections.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "kernel_operator.h"

namespace simulator {

namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case kInt8: return "int8_t";
    case kUint8: return "uint8_t";
    case kInt16: return "int16_t";
    case kUint16: return "uint16_t";
    case kHalf: return "half";
    case kBfloat16: return "bfloat16_t";
    case kInt32: return "int32_t";
    case kUint32: return "uint32_t";
    case kFloat: return "float";
    default: return "an integer of 8 bytes";
  }
}

Lanes by_register(int64_t per_repeat, int64_t repeats) {
  const MaskState& mask = core().mask();
  if (mask.counter) return counted(per_repeat, int64_t(mask.bits[0]));
  return Lanes{per_repeat, repeats, -1, {mask.bits[0], mask.bits[1]}};
}

}  // namespace

void require(Where at, const char* api, Kind kind, uint32_t on_2201, uint32_t on_1001) {
  const uint32_t kinds = __NPU_ARCH__ == 2201 ? on_2201 : on_1001;
  if (kinds & kind) return;
  core().error(at, api, "product",
               std::string(kProduct.name) + " has no " + api +
                   (kinds == 0 ? "" : std::string(" of ") + name_of(kind)));
}

Lanes masked(Where at, const char* api, int64_t per_repeat, uint64_t mask,
             int64_t repeats, bool set) {
  if (!set) return by_register(per_repeat, repeats);
  if (core().mask().counter) return counted(per_repeat, int64_t(mask));
  if (mask < 1 || mask > uint64_t(per_repeat)) {
    core().error(at, api, "mask",
                 "a mask of " + number(int64_t(mask)) + " elements, of 1 to " +
                     number(per_repeat));
  }
  const uint64_t all = ~uint64_t(0);
  const uint64_t n = std::min(mask, uint64_t(per_repeat));
  Lanes lanes{per_repeat, repeats, -1, {all, 0}};
  if (n < 64) lanes.bits[0] = (uint64_t(1) << n) - 1;
  if (n > 64) lanes.bits[1] = n >= 128 ? all : (uint64_t(1) << (n - 64)) - 1;
  return lanes;
}

Lanes masked(Where at, const char* api, int64_t per_repeat, const uint64_t mask[],
             int64_t repeats, bool set) {
  if (!set) return by_register(per_repeat, repeats);
  const Lanes lanes{per_repeat, repeats, -1, {mask[0], per_repeat > 64 ? mask[1] : 0}};
  if (lanes.bits[0] == 0 && lanes.bits[1] == 0) {
    core().error(at, api, "mask", "the mask selects nothing");
  }
  return lanes;
}

// Rounding ----------------------------------------------------------------------------

double round_to_integer(double value, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR: return std::floor(value);
    case RoundMode::CAST_CEIL: return std::ceil(value);
    case RoundMode::CAST_ROUND: return std::round(value);  // ties away from zero
    case RoundMode::CAST_TRUNC: return std::trunc(value);
    default: return std::nearbyint(value);  // ties to even
  }
}

namespace {

// A value whose magnitude lies between two neighbours of a 16-bit format, as their bits
// without the sign, and how far between in 2^-32.
uint16_t choose(uint16_t below, uint32_t beyond, bool negative, RoundMode mode) {
  bool up = false;
  switch (mode) {
    case RoundMode::CAST_FLOOR: up = negative && beyond != 0; break;
    case RoundMode::CAST_CEIL: up = !negative && beyond != 0; break;
    case RoundMode::CAST_TRUNC: break;
    case RoundMode::CAST_ODD: return uint16_t(below | (beyond != 0));
    case RoundMode::CAST_ROUND: up = beyond >= 0x80000000u; break;
    default: up = beyond > 0x80000000u || (beyond == 0x80000000u && (below & 1));
  }
  return uint16_t(below + up);
}

}  // namespace

uint16_t to_half(float value, RoundMode mode) {
  const uint32_t magnitude = float_bits(value) & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return half_bits(value);
  uint32_t beyond;
  const uint16_t below = half_truncated(magnitude, &beyond);
  const uint16_t sign = uint16_t(float_bits(value) >> 16 & 0x8000);
  return uint16_t(sign | choose(below, beyond, sign != 0, mode));
}

uint16_t to_bfloat16(float value, RoundMode mode) {
  const uint32_t magnitude = float_bits(value) & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return bfloat16_bits(value);
  const uint16_t sign = uint16_t(float_bits(value) >> 16 & 0x8000);
  return uint16_t(sign |
                  choose(uint16_t(magnitude >> 16), magnitude << 16, sign != 0, mode));
}

namespace {

constexpr uint32_t bit(RoundMode mode) { return 1u << int(mode); }
constexpr uint32_t kNone = bit(RoundMode::CAST_NONE);
constexpr uint32_t kRint = bit(RoundMode::CAST_RINT);
constexpr uint32_t kDirected = bit(RoundMode::CAST_FLOOR) | bit(RoundMode::CAST_CEIL) |
                               bit(RoundMode::CAST_ROUND) | bit(RoundMode::CAST_TRUNC);
constexpr uint32_t kFive = kRint | kDirected;
constexpr uint32_t kOdd = bit(RoundMode::CAST_ODD);

struct CastRule {
  Kind from, to;
  uint32_t on_2201, on_1001;  // rounding modes
};

// From the tables of the Cast page of the API reference.
constexpr CastRule kCasts[] = {
    {kInt8, kHalf, kNone, kNone},
    {kUint8, kHalf, kNone, kNone},
    {kInt16, kHalf, kFive | kNone, kNone},
    {kInt16, kFloat, kNone, 0},
    {kHalf, kInt8, kFive | kNone, kDirected | kNone},
    {kHalf, kUint8, kFive | kNone, kDirected | kNone},
    {kHalf, kInt16, kFive, 0},
    {kHalf, kInt32, kFive, kFive},
    {kHalf, kFloat, kNone, kNone},
    {kBfloat16, kInt32, kFive, 0},
    {kBfloat16, kFloat, kNone, 0},
    {kInt32, kInt16, kNone, 0},
    {kInt32, kFloat, kFive | kNone, kNone},
    {kInt32, kInt64, kNone, 0},
    {kFloat, kInt16, kFive, 0},
    {kFloat, kHalf, kFive | kOdd | kNone, kOdd | kNone},
    {kFloat, kBfloat16, kFive, 0},
    {kFloat, kInt32, kFive, 0},
    {kFloat, kFloat, kFive, 0},
    {kFloat, kInt64, kFive, kFive},
    {kInt64, kInt32, kNone, 0},
    {kInt64, kFloat, kFive, 0},
};

}  // namespace

void require_cast(Where at, Kind to, Kind from, RoundMode mode) {
  constexpr const char* kModes[] = {"CAST_NONE", "CAST_RINT",  "CAST_FLOOR",
                                    "CAST_CEIL", "CAST_ROUND", "CAST_TRUNC",
                                    "CAST_ODD"};
  uint32_t modes = 0;
  for (const CastRule& rule : kCasts) {
    if (rule.from != from || rule.to != to) continue;
    modes = __NPU_ARCH__ == 2201 ? rule.on_2201 : rule.on_1001;
  }
  if (modes & bit(mode)) return;
  core().error(at, "Cast", "product",
               std::string(kProduct.name) + " has no Cast of " + name_of(from) +
                   " to " + name_of(to) +
                   (modes == 0 ? "" : std::string(" with ") + kModes[int(mode)]));
}

// Reductions, comparisons, selections -------------------------------------------------

// As the API reference computes it, page ReduceMax: an index needs the places of every
// round, which are kept, and a value those of the first.
int64_t work_bytes(int64_t repeats, int64_t esize, bool sum, bool with_index) {
  if (sum && __NPU_ARCH__ == 2201) return 0;
  const int64_t per_block = kBlock / esize, lanes = kRepeat / esize;
  const auto whole = [&](int64_t n) {
    return (n + per_block - 1) / per_block * per_block;
  };
  int64_t made = repeats * (sum ? 1 : 2);
  int64_t total = whole(made);
  while (with_index && made > 2) {
    made = (made + lanes - 1) / lanes * 2;
    total += whole(made);
  }
  return total * esize;
}

bool reduce_begin(Where at, const char* api, const Lanes& lanes, const View& src,
                  const View& dst, int64_t runs, int64_t bytes, int64_t step) {
  Core& on = core();
  if (!on.vector(api, at, lanes, nullptr, 0, &src, 1)) return false;
  if (!on.check_view(dst)) return false;
  if (step < 0 || step / bytes > 65535) {
    on.error(at, api, "repeat", "dstRepStride of " + number(step / bytes));
    return false;
  }
  // A result must not lie in what its own repeat or a later one reads.
  int64_t first = 0, last = lanes.per_repeat - 1;
  while (first < last && !is_active(lanes, 0, first)) ++first;
  while (last > first && !is_active(lanes, 0, last)) --last;
  const int64_t repeats = total_repeats(lanes);
  for (int64_t i = 0; i < runs && dst.lo == src.lo; ++i) {
    const int64_t lo = dst.at + i * step;
    for (int64_t r = i; r < repeats; ++r) {
      if (lo >= address(src, r, last) + src.esize ||
          address(src, r, first) >= lo + bytes) {
        continue;
      }
      on.error(at, api, "overlap",
               "the result at UB address " + number(lo) + " lies in src");
      return false;
    }
  }
  for (int64_t i = 0; i < runs; ++i) {
    const int64_t lo = dst.at + i * step;
    if (!on.use(dst, lo, lo + bytes, true) && (lo < dst.lo || lo + bytes > dst.hi)) {
      return false;
    }
  }
  return true;
}

bool spread_begin(Where at, const char* api, const View& src, const View& dst,
                  int64_t repeats, int64_t width) {
  Core& on = core();
  if (!on.vector(api, at, Lanes{8, repeats, -1, {0, 0}}, nullptr, 0, nullptr, 0)) {
    return false;
  }
  if (!on.check_view(src) || !on.check_view(dst)) return false;
  if (dst.blk < 1 || dst.blk > 65535 || dst.rep < 0 || dst.rep > 65535) {
    on.error(at, api, "repeat",
             "strides of " + number(dst.blk) + " and " + number(dst.rep));
    return false;
  }
  if (repeats == 0) return false;
  const int64_t read = src.at + repeats * width;
  if (read > src.hi) return on.use(src, src.at, read, false);
  on.use(src, src.at, read, false);
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t b = 0; b < 8; ++b) {
      const int64_t lo = dst.at + (r * dst.rep + b * dst.blk) * kBlock;
      if (lo < read && lo + kBlock > src.at) {
        on.error(at, api, "overlap", "dst and src overlap");
        return false;
      }
      if (lo < dst.lo || lo + kBlock > dst.hi) {
        return on.use(dst, lo, lo + kBlock, true);
      }
      on.use(dst, lo, lo + kBlock, true);
    }
  }
  return true;
}

void check_whole_repeats(Where at, const char* api, int64_t bytes) {
  if (bytes % kRepeat == 0) return;
  core().error(at, api, "copy-length",
               number(bytes) +
                   " bytes are compared, not a multiple of 256: the device "
                   "leaves the rest out");
}

void check_compare_type(Where at, const char* api, Kind kind, CMPMODE mode,
                        uint32_t on_1001) {
  const uint32_t only_equal = mode == CMPMODE::EQ ? uint32_t(kInt32) : 0;
  require(at, api, kind, kFloats | only_equal, on_1001);
}

bool compare_begin(Where at, const char* api, const Lanes& lanes, const View& dst,
                   const View* src, int srcs) {
  Core& on = core();
  if (!on.vector(api, at, lanes, nullptr, 0, src, srcs)) return false;
  if (!on.check_view(dst)) return false;
  const int64_t elements =
      lanes.count >= 0 ? lanes.count : lanes.repeats * lanes.per_repeat;
  const int64_t hi = dst.at + (elements + 7) / 8;
  on.use(dst, dst.at, hi, true);
  return hi <= dst.hi;
}

bool select_begin(Where at, const Lanes& lanes, const View& dst, const View& mask,
                  const View* src, int srcs, SELMODE mode) {
  Core& on = core();
  if (__NPU_ARCH__ == 1001 && mode != SELMODE::VSEL_CMPMASK_SPR) {
    on.error(at, "Select", "product",
             std::string(kProduct.name) + " selects with VSEL_CMPMASK_SPR only");
  }
  if ((srcs == 1) != (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE)) {
    on.error(at, "Select", "product",
             "a scalar src1 goes with VSEL_TENSOR_SCALAR_MODE, and only with it");
  }
  if (!on.vector("Select", at, lanes, &dst, 1, src, srcs)) return false;
  if (!on.check_view(mask)) return false;
  const int64_t of_repeat = lanes.per_repeat / 8;
  const int64_t repeats = total_repeats(lanes);
  int64_t bytes = mode == SELMODE::VSEL_CMPMASK_SPR ? of_repeat : repeats * of_repeat;
  if (lanes.count >= 0) bytes = std::min(bytes, (lanes.count + 7) / 8);
  on.use(mask, mask.at, mask.at + bytes, false);
  return mask.at + bytes <= mask.hi;
}

}  // namespace simulator

namespace AscendC {

namespace {

void require_registers(simulator::Where at, const char* api) {
  if (__NPU_ARCH__ == 2201) return;
  simulator::core().error(at, api, "product",
                          std::string(simulator::kProduct.name) + " has no " + api);
}

}  // namespace

void SetMaskCount(simulator::Where at) {
  require_registers(at, "SetMaskCount");
  simulator::core().mask().counter = true;
}

void SetMaskNorm(simulator::Where at) {
  require_registers(at, "SetMaskNorm");
  simulator::core().mask().counter = false;
}

void ResetMask(simulator::Where at) {
  require_registers(at, "ResetMask");
  simulator::core().mask().bits[0] = ~uint64_t(0);
  simulator::core().mask().bits[1] = ~uint64_t(0);
}

}  // namespace AscendC
