// The XLA FFI targets. Each checks everything it is given: a wrong rank, dtype or shape
// is an error of the call, never a wild read.
#include <cstring>
#include <new>
#include <string>

#include "attention.h"
#include "pages.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using pagedjax::DType;
using pagedjax::Problem;

struct Wrong {
  std::string message;
};

void require(bool fine, const std::string& message) {
  if (!fine) throw Wrong{message};
}

template <class Call>
ffi::Error guarded(const char* target, Call call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const Wrong& wrong) {
    return ffi::Error::InvalidArgument(std::string(target) + ": " + wrong.message);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(target) + ": no memory for the working space");
  }
}

std::string text(const ffi::AnyBuffer& buffer) {
  std::string out = "[";
  for (int64_t size : buffer.dimensions()) {
    out += (out.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return out + "]";
}

void require_shape(const char* name, const ffi::AnyBuffer& buffer,
                   std::initializer_list<int64_t> shape) {
  const auto have = buffer.dimensions();
  bool fine = have.size() == shape.size();
  size_t i = 0;
  for (int64_t size : shape) {
    fine = fine && have[i] == size;
    ++i;
  }
  if (fine) return;
  std::string wanted = "[";
  for (int64_t size : shape) wanted += (wanted.size() > 1 ? ", " : "") + std::to_string(size);
  throw Wrong{std::string(name) + " must have shape " + wanted + "], got " + text(buffer)};
}

void require_rank(const char* name, const ffi::AnyBuffer& buffer, size_t rank) {
  require(buffer.dimensions().size() == rank, std::string(name) + " must have " +
                                                  std::to_string(rank) + " axes, got " +
                                                  text(buffer));
}

template <class T>
const T* typed(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype) {
  require(buffer.element_type() == dtype, std::string(name) + " has the wrong dtype");
  return static_cast<const T*>(buffer.untyped_data());
}

DType kv_dtype(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::S8:
      return DType::kI8;
    case ffi::DataType::F8E4M3FN:
      return DType::kF8E4M3;
    default:
      throw Wrong{"k_pages must be float32, bfloat16, float16, int8 or float8_e4m3fn"};
  }
}

// XLA's pool for this call. A closure that a pool thread starts late, after the call
// has returned, holds only what parallel_for gave it.
pagedjax::Executor executor(ffi::ThreadPool& pool) {
  pagedjax::Executor out;
  out.num_threads = std::max<int64_t>(1, pool.num_threads());
  out.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return out;
}

void attention(ffi::ThreadPool& pool, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k_pages,
               const ffi::AnyBuffer& v_pages, const ffi::AnyBuffer& page_indices,
               const ffi::AnyBuffer& seq_lens, const ffi::AnyBuffer* cu_q_lens,
               const ffi::RemainingArgs& scales, ffi::AnyBuffer out, ffi::AnyBuffer lse,
               float scale, int64_t window, float soft_cap, bool share_prefixes) {
  require_rank("q", q, 3);
  require_rank("k_pages", k_pages, 4);
  require_rank("page_indices", page_indices, 2);
  const auto q_shape = q.dimensions(), kv_shape = k_pages.dimensions();
  Problem p;
  p.num_tokens = q_shape[0];
  p.num_heads = q_shape[1];
  p.head_dim = q_shape[2];
  p.num_pages = kv_shape[0];
  p.page_size = kv_shape[1];
  p.num_kv_heads = kv_shape[2];
  p.num_slots = page_indices.dimensions()[0];
  p.pages_per_slot = page_indices.dimensions()[1];
  require(kv_shape[3] == p.head_dim, "k_pages " + text(k_pages) + " and q " + text(q) +
                                         " differ in head_dim");
  require(p.num_heads > 0 && p.head_dim > 0 && p.page_size > 0 && p.num_kv_heads > 0,
          "q and k_pages must not have an empty axis besides the first");
  require(p.num_heads % p.num_kv_heads == 0, "the heads of q " + text(q) +
                                                 " must be a multiple of those of k_pages " +
                                                 text(k_pages));
  require_shape("v_pages", v_pages, {kv_shape[0], kv_shape[1], kv_shape[2], kv_shape[3]});
  require(v_pages.element_type() == k_pages.element_type(), "v_pages has the wrong dtype");
  require_shape("seq_lens", seq_lens, {p.num_slots});
  require_shape("out", out, {p.num_tokens, p.num_heads, p.head_dim});
  require_shape("lse", lse, {p.num_tokens, p.num_heads});
  require(out.element_type() == q.element_type(), "out has the wrong dtype");
  p.kv_dtype = kv_dtype(k_pages);
  p.q_dtype = kv_dtype(q);
  require(dtype_bytes(p.q_dtype) > 1, "q must be float32, bfloat16 or float16");
  p.q = q.untyped_data();
  p.k_pages = k_pages.untyped_data();
  p.v_pages = v_pages.untyped_data();
  p.page_indices = typed<int32_t>("page_indices", page_indices, ffi::DataType::S32);
  p.seq_lens = typed<int32_t>("seq_lens", seq_lens, ffi::DataType::S32);
  if (cu_q_lens != nullptr) {
    require_shape("cu_q_lens", *cu_q_lens, {p.num_slots + 1});
    p.cu_q_lens = typed<int32_t>("cu_q_lens", *cu_q_lens, ffi::DataType::S32);
  } else {
    require(p.num_tokens == p.num_slots, "q " + text(q) + " must have one row per row of " +
                                             "page_indices " + text(page_indices));
  }
  require(scales.size() == (dtype_bytes(p.kv_dtype) == 1 ? 2u : 0u),
          "k_scales and v_scales go with int8 and float8 pages and with no others");
  for (size_t i = 0; i < scales.size(); ++i) {
    const char* name = i == 0 ? "k_scales" : "v_scales";
    const auto given = scales.get<ffi::AnyBuffer>(i);
    require(given.has_value(), std::string(name) + " is not a buffer");
    require_shape(name, *given, {p.num_pages, p.page_size, p.num_kv_heads});
    (i == 0 ? p.k_scales : p.v_scales) = typed<float>(name, *given, ffi::DataType::F32);
  }
  require(window >= 0, "window must not be negative, got " + std::to_string(window));
  require(soft_cap >= 0, "soft_cap must not be negative");
  p.scale = scale;
  p.window = window;
  p.soft_cap = soft_cap;
  p.share_prefixes = share_prefixes;
  p.out = out.untyped_data();
  p.lse = const_cast<float*>(typed<float>("lse", lse, ffi::DataType::F32));
  if (const char* wrong = pagedjax::run_attention(p, executor(pool))) throw Wrong{wrong};
}

ffi::Error decode(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
                  ffi::AnyBuffer v_pages, ffi::AnyBuffer page_indices, ffi::AnyBuffer seq_lens,
                  ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> lse, float scale, int64_t window, float soft_cap,
                  bool share_prefixes) {
  return guarded("paged_attention", [&] {
    attention(pool, q, k_pages, v_pages, page_indices, seq_lens, nullptr, scales, *out, *lse,
              scale, window, soft_cap, share_prefixes);
  });
}

ffi::Error ragged(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
                  ffi::AnyBuffer v_pages, ffi::AnyBuffer page_indices, ffi::AnyBuffer seq_lens,
                  ffi::AnyBuffer cu_q_lens, ffi::RemainingArgs scales,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse, float scale,
                  int64_t window, float soft_cap, bool share_prefixes) {
  return guarded("ragged_paged_attention", [&] {
    attention(pool, q, k_pages, v_pages, page_indices, seq_lens, &cu_q_lens, scales, *out, *lse,
              scale, window, soft_cap, share_prefixes);
  });
}

// Gives `to` what `from` holds; nothing to do when XLA made them one buffer.
void carry_over(const char* name, const ffi::AnyBuffer& from, ffi::AnyBuffer to) {
  require(from.element_type() == to.element_type() && from.size_bytes() == to.size_bytes(),
          std::string(name) + " and its result differ");
  if (from.untyped_data() != to.untyped_data()) {
    std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
  }
}

// Rows of `new_rows` [T, ...] into `held` [N, page_size, ...].
void write(const char* name, const ffi::AnyBuffer& held, const ffi::AnyBuffer& new_rows,
           const ffi::AnyBuffer& pages, const ffi::AnyBuffer& offsets, ffi::AnyBuffer out) {
  const auto shape = held.dimensions(), rows = new_rows.dimensions();
  require(shape.size() >= 2 && rows.size() + 1 == shape.size(),
          std::string(name) + "_pages " + text(held) + " and " + name + " " + text(new_rows) +
              " do not go together");
  for (size_t i = 1; i < rows.size(); ++i) {
    require(rows[i] == shape[i + 1], std::string(name) + "_pages " + text(held) + " and " + name +
                                         " " + text(new_rows) + " do not go together");
  }
  require(held.element_type() == new_rows.element_type(),
          std::string(name) + " must have the dtype of its pages");
  require_shape("pages", pages, {rows[0]});
  require_shape("offsets", offsets, {rows[0]});
  carry_over(name, held, out);
  if (rows[0] == 0 || held.size_bytes() == 0) return;
  pagedjax::write_rows(static_cast<char*>(out.untyped_data()),
                       static_cast<const char*>(new_rows.untyped_data()),
                       typed<int32_t>("pages", pages, ffi::DataType::S32),
                       typed<int32_t>("offsets", offsets, ffi::DataType::S32), rows[0], shape[0],
                       shape[1], new_rows.size_bytes() / rows[0]);
}

ffi::Error write_kv(ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, ffi::AnyBuffer pages, ffi::AnyBuffer offsets,
                    ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  return guarded("write_kv", [&] {
    write("k", k_pages, k, pages, offsets, *k_out);
    write("v", v_pages, v, pages, offsets, *v_out);
  });
}

void copy(const char* name, const ffi::AnyBuffer& held, const ffi::AnyBuffer& src,
          const ffi::AnyBuffer& dst, int64_t num_layers, ffi::AnyBuffer out) {
  const auto shape = held.dimensions();
  require(shape.size() >= 1, std::string(name) + " must have a first axis of pages");
  require(num_layers > 0 && shape[0] % num_layers == 0,
          std::string(name) + " " + text(held) + " does not hold a whole number of pages for " +
              std::to_string(num_layers) + " layers");
  require_rank("src_pages", src, 1);
  require_shape("dst_pages", dst, {src.dimensions()[0]});
  carry_over(name, held, out);
  if (shape[0] == 0) return;
  pagedjax::copy_pages(static_cast<char*>(out.untyped_data()),
                       typed<int32_t>("src_pages", src, ffi::DataType::S32),
                       typed<int32_t>("dst_pages", dst, ffi::DataType::S32), src.dimensions()[0],
                       num_layers, shape[0] / num_layers, held.size_bytes() / shape[0]);
}

ffi::Error copy_pages(ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer src,
                      ffi::AnyBuffer dst, ffi::Result<ffi::AnyBuffer> k_out,
                      ffi::Result<ffi::AnyBuffer> v_out, int64_t num_layers) {
  return guarded("copy_pages", [&] {
    copy("k_pages", k_pages, src, dst, num_layers, *k_out);
    copy("v_pages", v_pages, src, dst, num_layers, *v_out);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_paged_attention, decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("share_prefixes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_ragged_paged_attention, ragged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("share_prefixes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_write_kv, write_kv,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_copy_pages, copy_pages,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_layers"));

// Read by the loader before anything is registered.
extern "C" {
int pagedjax_ffi_major() { return XLA_FFI_API_MAJOR; }
int pagedjax_ffi_minor() { return XLA_FFI_API_MINOR; }
const char* pagedjax_isa() { return pagedjax::kernels().name; }
}
