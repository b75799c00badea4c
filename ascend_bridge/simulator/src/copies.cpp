// Copies between global memory and the unified buffer.
#include "sim_copy.h"

#include "launch.h"

namespace simulator {

namespace {

constexpr int64_t kMaxBlocks = 4095;

bool blocks_in_range(Where at, const char* api, int64_t count, int64_t len,
                     int64_t src_gap, int64_t dst_gap, int64_t max) {
  Core& on = core();
  if (count < 0 || count > kMaxBlocks) {
    on.error(at, api, "block-count",
             number(count) + " blocks, of at most " + number(kMaxBlocks));
    return false;
  }
  if (len < 0 || len > max || src_gap < 0 || src_gap > max || dst_gap < 0 ||
      dst_gap > max) {
    on.error(at, api, "block-count",
             "blockLen " + number(len) + ", srcStride " + number(src_gap) +
                 ", dstStride " + number(dst_gap) + ": a field holds 0 to " +
                 number(max));
    return false;
  }
  return true;
}

void nothing_to_copy(Where at, const char* api) {
  core().error(at, api, "copy-length", "nothing is copied: a length of 0");
}

}  // namespace

void require_copied(Where at, const char* api, Kind kind) {
  require(at, api, kind, ~uint32_t(0), ~uint32_t(kBfloat16));
}

bool count_plan(Where at, int64_t count, int64_t esize, CopyPlan* plan) {
  const int64_t bytes = count * esize;
  if (count < 0 || bytes % kBlock != 0) {
    core().error(
        at, "DataCopy", "copy-length",
        number(count) + " elements are " + number(bytes) +
            " bytes, not a multiple of 32: the device drops the rest silently");
    return false;
  }
  if (count == 0) {
    nothing_to_copy(at, "DataCopy");
    return false;
  }
  *plan = CopyPlan{1, bytes, bytes, bytes, esize};
  return true;
}

bool block_plan(Where at, const AscendC::DataCopyParams& params, int64_t esize,
                bool into_ub, CopyPlan* plan) {
  if (!blocks_in_range(at, "DataCopy", params.blockCount, params.blockLen,
                       params.srcStride, params.dstStride, 65535)) {
    return false;
  }
  if (params.blockCount == 0 || params.blockLen == 0) {
    nothing_to_copy(at, "DataCopy");
    return false;
  }
  const int64_t bytes = params.blockLen * kBlock;
  const int64_t src = bytes + params.srcStride * kBlock;
  const int64_t dst = bytes + params.dstStride * kBlock;
  *plan = CopyPlan{params.blockCount, bytes, into_ub ? src : dst, into_ub ? dst : src,
                   esize};
  return true;
}

bool pad_plan(Where at, const AscendC::DataCopyExtParams& params, int64_t esize,
              bool into_ub, int64_t left, int64_t right, CopyPlan* plan) {
  const char* const api = "DataCopyPad";
  if (__NPU_ARCH__ == 1001) {
    core().error(at, api, "product",
                 std::string(kProduct.name) + " has no DataCopyPad");
  }
  if (!blocks_in_range(at, api, params.blockCount, params.blockLen, params.srcStride,
                       params.dstStride, (int64_t(1) << 32) - 1)) {
    return false;
  }
  if (params.blockLen > 2097151) {
    core().error(at, api, "block-count",
                 "blockLen " + number(params.blockLen) + ", of at most 2097151 bytes");
    return false;
  }
  if (params.blockCount == 0 || params.blockLen == 0) {
    nothing_to_copy(at, api);
    return false;
  }
  if (params.blockLen % esize != 0) {
    core().error(at, api, "copy-length",
                 "blockLen " + number(params.blockLen) +
                     " is not a whole number of elements of " + number(esize) +
                     " bytes");
    return false;
  }
  if (left < 0 || right < 0 || left * esize > kBlock || right * esize > kBlock) {
    core().error(at, api, "copy-length",
                 "padding of " + number(left) + " and " + number(right) +
                     " elements: each side holds at most 32 bytes");
    return false;
  }
  const int64_t held = left * esize + params.blockLen + right * esize;
  const int64_t whole = (held + kBlock - 1) / kBlock * kBlock;
  const int64_t gm_gap = into_ub ? params.srcStride : params.dstStride;
  const int64_t ub_gap = into_ub ? params.dstStride : params.srcStride;
  *plan = CopyPlan{params.blockCount,
                   params.blockLen,
                   params.blockLen + gm_gap,
                   whole + ub_gap * kBlock,
                   esize,
                   left * esize,
                   right * esize};
  return true;
}

void copy_in(const char* api, Where at, const View& dst, uintptr_t src,
             const CopyPlan& plan) {
  Core& on = core();
  on.begin(kMte2, api, at);
  if (dst.position != TPosition::VECIN) {
    on.error(at, api, "copy-position",
             "global memory is copied to VECIN tensors only, and dst is not one");
  }
  if (!on.check_view(dst)) return;
  const int64_t held = plan.pad_left + plan.bytes + plan.pad_right;
  const int64_t tail = (kBlock - held % kBlock) % kBlock;
  for (int64_t i = 0; i < plan.count; ++i) {
    const int64_t to = dst.at + i * plan.ub_step;
    if (to < dst.lo || to + held + tail > dst.hi) {
      on.use(dst, to, to + held + tail, true);
      return;
    }
    // The rest of the last block is overwritten too, with nothing one may read.
    on.use(dst, to, to + held + tail, true);
    if (tail > 0) on.forget(to + held, to + held + tail);
  }
  if (!on.gm(Blocks{src, plan.bytes, plan.count, plan.gm_step}, plan.esize, false)) {
    return;
  }
  Core* const where = &on;
  const int64_t to = dst.at;
  on.issue([where, to, src, plan, held, tail] {
    for (int64_t i = 0; i < plan.count; ++i) {
      uint8_t* out = where->ub() + to + i * plan.ub_step;
      std::memset(out + held, 0xff, size_t(tail));
      for (int64_t b = 0; b < plan.pad_left; ++b) out[b] = plan.value[b % plan.esize];
      out += plan.pad_left;
      std::memcpy(out, reinterpret_cast<const void*>(src + uintptr_t(i * plan.gm_step)),
                  size_t(plan.bytes));
      out += plan.bytes;
      for (int64_t b = 0; b < plan.pad_right; ++b) out[b] = plan.value[b % plan.esize];
    }
  });
}

void copy_out(const char* api, Where at, uintptr_t dst, const View& src,
              const CopyPlan& plan) {
  Core& on = core();
  on.begin(kMte3, api, at);
  if (src.position != TPosition::VECOUT) {
    on.error(at, api, "copy-position",
             "global memory is written from VECOUT tensors only, and src is not one");
  }
  if (!on.check_view(src)) return;
  for (int64_t i = 0; i < plan.count; ++i) {
    const int64_t from = src.at + i * plan.ub_step;
    if (from < src.lo || from + plan.bytes > src.hi) {
      on.use(src, from, from + plan.bytes, false);
      return;
    }
    on.use(src, from, from + plan.bytes, false);
  }
  if (!on.gm(Blocks{dst, plan.bytes, plan.count, plan.gm_step}, plan.esize, true)) {
    return;
  }
  Core* const where = &on;
  const int64_t from = src.at;
  on.issue([where, dst, from, plan] {
    for (int64_t i = 0; i < plan.count; ++i) {
      std::memcpy(reinterpret_cast<void*>(dst + uintptr_t(i * plan.gm_step)),
                  where->ub() + from + i * plan.ub_step, size_t(plan.bytes));
    }
  });
}

void copy_local(Where at, const View& dst, const View& src, int64_t count,
                int64_t bytes, int64_t dst_step, int64_t src_step) {
  Core& on = core();
  on.begin(kVector, "DataCopy", at);
  if (!on.check_view(dst) || !on.check_view(src)) return;
  for (int write = 0; write < 2; ++write) {
    const View& view = write ? dst : src;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t lo = view.at + i * (write ? dst_step : src_step);
      if (lo < view.lo || lo + bytes > view.hi) {
        on.use(view, lo, lo + bytes, write != 0);
        return;
      }
      on.use(view, lo, lo + bytes, write != 0);
    }
  }
  Core* const where = &on;
  const int64_t to = dst.at, from = src.at;
  on.issue([=] {
    for (int64_t i = 0; i < count; ++i) {
      std::memmove(where->ub() + to + i * dst_step, where->ub() + from + i * src_step,
                   size_t(bytes));
    }
  });
}

}  // namespace simulator
