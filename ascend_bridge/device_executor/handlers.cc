// The XLA FFI targets of a pool outside of XLA's memory, for the cpu platform, and the C
// functions that open, watch and close one.
//
// A pool travels as two operands, handle and version: never as attributes, which would
// compile a program anew for each, or leave an old handle in a cached one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <unordered_map>

#include "acl.h"
#include "kernel_library.h"
#include "pool.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace pagedjax::device;
using pagedjax::DType;

using Scalar = ffi::Buffer<ffi::DataType::S32, 0>;
using Ints = ffi::Buffer<ffi::DataType::S32, 1>;
using Table = ffi::Buffer<ffi::DataType::S32, 2>;
using Any = ffi::AnyBuffer;
using Lse = ffi::Buffer<ffi::DataType::F32, 2>;

ffi::ErrorCode code_of(Kind kind) {
  switch (kind) {
    case Kind::kInvalid:
      return ffi::ErrorCode::kInvalidArgument;
    case Kind::kMemory:
      return ffi::ErrorCode::kResourceExhausted;
    case Kind::kDevice:
      return ffi::ErrorCode::kInternal;
    default:
      return ffi::ErrorCode::kFailedPrecondition;
  }
}

template <class Call>
ffi::Error guarded(const char* target, Call call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const Trouble& trouble) {
    return ffi::Error(code_of(trouble.kind), std::string(target) + ": " + trouble.message);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(target) + ": no memory for the working space");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(target) + ": " + error.what());
  }
}

pagedjax::Executor executor(ffi::ThreadPool& pool) {
  pagedjax::Executor out;
  out.num_threads = std::max<int64_t>(1, pool.num_threads());
  out.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return out;
}

int32_t value(const Scalar& scalar) { return *scalar.typed_data(); }

bool has_dtype(const Any& array, DType dtype) {
  return array.element_type() == (dtype == DType::kF16    ? ffi::DataType::F16
                                  : dtype == DType::kBF16 ? ffi::DataType::BF16
                                                          : ffi::DataType::F32);
}

// Throws unless the array is [first, rest...] of the pool's dtype.
void require_like(const char* name, const Any& array, const Shape& pool, int64_t first,
                  std::initializer_list<int64_t> rest) {
  const auto have = array.dimensions();
  std::string wanted = "[" + text(first), got = "[";
  bool fine = have.size() == rest.size() + 1 && have[0] == first;
  size_t axis = 1;
  for (int64_t size : rest) {
    wanted += ", " + text(size);
    fine = fine && have[axis] == size;
    ++axis;
  }
  for (int64_t size : have) got += (got.size() > 1 ? ", " : "") + text(size);
  require(fine, std::string(name) + " must have shape " + wanted + "], got " + got + "]");
  require(has_dtype(array, pool.dtype),
          std::string(name) + " must have the dtype of the pool");
}

int32_t rows_of(const char* name, const Any& array) {
  require(array.dimensions().size() == 3, std::string(name) + " must have 3 axes");
  return static_cast<int32_t>(array.dimensions()[0]);
}

NewTokens new_tokens(const Shape& pool, const Any& k, const Any& v, const Ints& pages,
                     const Ints& offsets) {
  const int32_t tokens = rows_of("k", k);
  require_like("k", k, pool, tokens, {pool.kv_heads, pool.head_dim});
  require_like("v", v, pool, tokens, {pool.kv_heads, pool.head_dim});
  require(pages.dimensions()[0] == tokens && offsets.dimensions()[0] == tokens,
          "pages and offsets must have one entry for each of the " + text(tokens) + " tokens");
  return {k.untyped_data(), v.untyped_data(), pages.typed_data(), offsets.typed_data(), tokens};
}

Attention attention(const Shape& pool, const Any& q, const Table& table, const Ints& lens,
                    float scale, int64_t window, float soft_cap, Any out, Lse lse) {
  const int32_t slots = rows_of("q", q);
  require_like("q", q, pool, slots, {pool.heads, pool.head_dim});
  require_like("out", out, pool, slots, {pool.heads, pool.head_dim});
  require(table.dimensions()[0] == slots && lens.dimensions()[0] == slots,
          "page_indices and seq_lens must have one row for each of the " + text(slots) +
              " rows of q");
  require(lse.dimensions()[0] == slots && lse.dimensions()[1] == pool.heads,
          "lse must have one entry for each row and head of q");
  require(window >= 0 && soft_cap >= 0 && std::isfinite(soft_cap) && std::isfinite(scale),
          "window and soft_cap must not be negative, scale and soft_cap must be finite");
  Attention a{};
  a.q = q.untyped_data();
  a.table = table.typed_data();
  a.lens = lens.typed_data();
  a.slots = slots;
  a.pages_per_slot = static_cast<int32_t>(table.dimensions()[1]);
  a.scale = scale;
  a.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
  a.soft_cap = soft_cap;
  a.out = out.untyped_data();
  a.lse = lse.typed_data();
  return a;
}

ffi::Error write_kv(Scalar handle, Scalar version, Scalar layer, Any k, Any v, Ints pages,
                    Ints offsets, ffi::Result<Scalar> next) {
  return guarded("write_kv", [&] {
    const auto pool = find_pool(value(handle));
    *next->typed_data() = pool->write(value(version), value(layer),
                                      new_tokens(pool->shape(), k, v, pages, offsets));
  });
}

ffi::Error copy_pages(Scalar handle, Scalar version, Ints from, Ints to,
                      ffi::Result<Scalar> next) {
  return guarded("copy_pages", [&] {
    const auto pool = find_pool(value(handle));
    require(from.dimensions()[0] == to.dimensions()[0],
            "src_pages and dst_pages must have one length");
    *next->typed_data() =
        pool->copy(value(version), from.typed_data(), to.typed_data(),
                   static_cast<int32_t>(from.dimensions()[0]));
  });
}

ffi::Error attend(ffi::ThreadPool threads, Scalar handle, Scalar version, Scalar layer, Any q,
                  Table table, Ints lens, ffi::Result<Scalar> same, ffi::Result<Any> out,
                  ffi::Result<Lse> lse, float scale, int64_t window, float soft_cap) {
  return guarded("paged_attention", [&] {
    const auto pool = find_pool(value(handle));
    *same->typed_data() =
        pool->attend(value(version), value(layer),
                     attention(pool->shape(), q, table, lens, scale, window, soft_cap, *out, *lse),
                     executor(threads));
  });
}

ffi::Error step(ffi::ThreadPool threads, Scalar handle, Scalar version, Scalar layer, Any q,
                Any k, Any v, Ints pages, Ints offsets, Table table, Ints lens,
                ffi::Result<Scalar> next, ffi::Result<Any> out, ffi::Result<Lse> lse,
                float scale, int64_t window, float soft_cap) {
  return guarded("attend", [&] {
    const auto pool = find_pool(value(handle));
    *next->typed_data() =
        pool->step(value(version), value(layer),
                   new_tokens(pool->shape(), k, v, pages, offsets),
                   attention(pool->shape(), q, table, lens, scale, window, soft_cap, *out, *lse),
                   executor(threads));
  });
}

ffi::Error read_pages(Scalar handle, Scalar version, Scalar layer, Ints pages,
                      ffi::Result<Scalar> same, ffi::Result<Any> k, ffi::Result<Any> v) {
  return guarded("read_pages", [&] {
    const auto pool = find_pool(value(handle));
    const Shape& s = pool->shape();
    const int64_t count = pages.dimensions()[0];
    require_like("k", *k, s, count, {s.page_size, s.kv_heads, s.head_dim});
    require_like("v", *v, s, count, {s.page_size, s.kv_heads, s.head_dim});
    *same->typed_data() =
        pool->read(value(version), value(layer), pages.typed_data(),
                   static_cast<int32_t>(count), k->untyped_data(), v->untyped_data());
  });
}

// Attention on an NPU over pages that are arrays of the host: the pages that are seen go
// there and back no more. For checking; a pool on the NPU is what pays.
ffi::Error attend_arrays(Any q, Any k_pages, Any v_pages, Table table, Ints lens,
                         ffi::Result<Any> out, ffi::Result<Lse> lse, float scale,
                         int64_t window, float soft_cap, bool) {
  return guarded("paged_attention on the NPU", [&] {
    require(k_pages.dimensions().size() == 4, "k_pages must have 4 axes");
    const auto held = k_pages.dimensions();
    rows_of("q", q);
    Shape shape;
    shape.page_size = static_cast<int32_t>(held[1]);
    shape.kv_heads = static_cast<int32_t>(held[2]);
    shape.head_dim = static_cast<int32_t>(held[3]);
    shape.heads = static_cast<int32_t>(q.dimensions()[1]);
    shape.max_slots = static_cast<int32_t>(table.dimensions()[0]);
    shape.pages_per_slot = static_cast<int32_t>(table.dimensions()[1]);
    shape.dtype = k_pages.element_type() == ffi::DataType::BF16 ? DType::kBF16 : DType::kF16;
    for (const Any& pages : {k_pages, v_pages}) {
      require_like("k_pages and v_pages", pages, shape, held[0], {held[1], held[2], held[3]});
    }
    Attention a = attention(shape, q, table, lens, scale, window, soft_cap, *out, *lse);
    // The pages that are seen, in the order in which they are met.
    std::unordered_map<int32_t, int32_t> places;
    std::vector<int32_t> seen, local(int64_t{a.slots} * a.pages_per_slot, -1);
    for (int64_t s = 0; s < a.slots; ++s) {
      const int64_t most = int64_t{a.pages_per_slot} * shape.page_size;
      const int64_t length = std::clamp<int64_t>(a.lens[s], 0, most);
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, length - a.window) : 0;
      for (int64_t c = first / shape.page_size; c * shape.page_size < length; ++c) {
        const int32_t page = a.table[s * a.pages_per_slot + c];
        if (page < 0 || page >= held[0]) continue;
        const auto [place, is_new] = places.emplace(page, static_cast<int32_t>(seen.size()));
        if (is_new) seen.push_back(page);
        local[s * a.pages_per_slot + c] = place->second;
      }
    }
    shape.num_pages = std::max<int32_t>(1, static_cast<int32_t>(seen.size()));
    a.table = local.data();
    const int64_t size = shape.row_bytes();
    std::vector<char> k(seen.size() * size), v(k.size());
    std::vector<int32_t> rows(seen.size());
    for (size_t i = 0; i < seen.size(); ++i) {
      rows[i] = static_cast<int32_t>(i);
      const int64_t at = seen[i] * size;
      std::memcpy(k.data() + i * size, static_cast<const char*>(k_pages.untyped_data()) + at, size);
      std::memcpy(v.data() + i * size, static_cast<const char*>(v_pages.untyped_data()) + at, size);
    }
    Pool pool(0, shape, open_npu_store(shape, 0, pagedjax::device::kTimeoutMs));
    pool.load(rows, k.data(), v.data());
    pool.attend(0, 0, a, pagedjax::Executor{});
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_pool_write_kv, write_kv,
                              ffi::Ffi::Bind()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_pool_copy_pages, copy_pages,
                              ffi::Ffi::Bind()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Scalar>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_pool_paged_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Any>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Ret<Scalar>()
                                  .Ret<Any>()
                                  .Ret<Lse>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_pool_attend, step,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Ret<Scalar>()
                                  .Ret<Any>()
                                  .Ret<Lse>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_pool_read_pages, read_pages,
                              ffi::Ffi::Bind()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Scalar>()
                                  .Arg<Ints>()
                                  .Ret<Scalar>()
                                  .Ret<Any>()
                                  .Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_npu_paged_attention, attend_arrays,
                              ffi::Ffi::Bind()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Ret<Any>()
                                  .Ret<Lse>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("share_prefixes"));
