// The handlers for arrays in the memory of an NPU, called as an XLA backend would, through
// the C interface of the FFI: with the mock's stream, and scratch memory of the mock.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../acl.h"
#include "../page_store.h"
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* pagedjax_on_npu_paged_attention(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* pagedjax_on_npu_write_kv(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* pagedjax_on_npu_copy_pages(XLA_FFI_CallFrame*);

struct XLA_FFI_Error {
  std::string message;
};

namespace {

const pagedjax::acl::Table* acl = nullptr;
void* stream = nullptr;
std::vector<void*> to_free;  // in the order of the stream: after the next wait
int failures = 0;

void expect(bool fine, const std::string& what) {
  if (fine) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}
void message(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}
void destroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = stream;
  return nullptr;
}
XLA_FFI_Error* allocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  const int rc = acl->aclrtMalloc(&args->data, args->size, 0);
  return rc == 0 ? nullptr : new XLA_FFI_Error{"no scratch memory"};
}
XLA_FFI_Error* release(XLA_FFI_DeviceMemory_Free_Args* args) {
  to_free.push_back(args->data);
  return nullptr;
}

void wait() {
  expect(acl->aclrtSynchronizeStreamWithTimeout(stream, 1000) == 0,
         "the stream" + pagedjax::acl::recent_message(*acl));
  for (void* memory : to_free) acl->aclrtFree(memory);
  to_free.clear();
}

// An array in device memory.
struct Array {
  template <class T>
  Array(XLA_FFI_DataType dtype, std::vector<int64_t> shape, const std::vector<T>& values)
      : dims(std::move(shape)), bytes(values.size() * sizeof(T)) {
    acl->aclrtMalloc(&data, (bytes + 31) / 32 * 32, 0);
    acl->aclrtMemcpy(data, bytes, values.data(), bytes, pagedjax::acl::kHostToDevice);
    buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data,
              static_cast<int64_t>(dims.size()), dims.data()};
  }
  Array(const Array&) = delete;
  ~Array() { acl->aclrtFree(data); }

  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(bytes / sizeof(T));
    acl->aclrtMemcpy(values.data(), bytes, data, bytes, pagedjax::acl::kDeviceToHost);
    return values;
  }

  std::vector<int64_t> dims;
  size_t bytes;
  void* data = nullptr;
  XLA_FFI_Buffer buffer;
};

struct Attribute {
  const char* name;
  XLA_FFI_DataType dtype;
  const void* value;
};

// Calls a handler; what it says, or "".
std::string call(XLA_FFI_Handler* handler, const std::vector<Array*>& args,
                 const std::vector<Array*>& rets, const std::vector<Attribute>& attributes) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create;
  api.XLA_FFI_Error_GetMessage = message;
  api.XLA_FFI_Error_Destroy = destroy;
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_DeviceMemory_Allocate = allocate;
  api.XLA_FFI_DeviceMemory_Free = release;
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> attr_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
  std::vector<void*> arg_buffers, ret_buffers, values;
  for (Array* x : args) arg_buffers.push_back(&x->buffer);
  for (Array* x : rets) ret_buffers.push_back(&x->buffer);
  std::vector<XLA_FFI_Scalar> scalars(attributes.size());
  std::vector<XLA_FFI_ByteSpan> spans(attributes.size());
  std::vector<XLA_FFI_ByteSpan*> names;
  for (size_t i = 0; i < attributes.size(); ++i) {
    scalars[i] = {attributes[i].dtype, const_cast<void*>(attributes[i].value)};
    spans[i] = {attributes[i].name, std::strlen(attributes[i].name)};
    values.push_back(&scalars[i]);
    names.push_back(&spans[i]);
  }
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()),
                arg_types.data(), arg_buffers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                ret_types.data(), ret_buffers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(attributes.size()),
                 attr_types.data(), names.data(), values.data()};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return "";
  const std::string said = error->message;
  delete error;
  return said;
}

void run() {
  constexpr auto kF16 = XLA_FFI_DataType_F16, kF32 = XLA_FFI_DataType_F32;
  constexpr auto kS32 = XLA_FFI_DataType_S32;
  const uint16_t one = 0x3c00, two = 0x4000;  // float16
  const std::vector<int64_t> pool{4, 16, 1, 16};
  Array k_pages(kF16, pool, std::vector<uint16_t>(4 * 256));
  Array v_pages(kF16, pool, std::vector<uint16_t>(4 * 256));
  Array k(kF16, {2, 1, 16}, std::vector<uint16_t>(32, one));
  Array v(kF16, {2, 1, 16}, std::vector<uint16_t>(32, two));
  Array places(kS32, {2}, std::vector<int32_t>{3 * 16, -1});
  const std::vector<Array*> pages{&k_pages, &v_pages};
  expect(call(pagedjax_on_npu_write_kv, {&k_pages, &v_pages, &k, &v, &places}, pages, {}) == "",
         "write_kv");
  Array from(kS32, {2}, std::vector<int32_t>{3, 4}), to(kS32, {2}, std::vector<int32_t>{1, 0});
  Array counts(kS32, {2}, std::vector<int32_t>{1, 2});
  const std::string copied = call(pagedjax_on_npu_copy_pages,
                                  {&k_pages, &v_pages, &from, &to, &counts}, pages, {});
  expect(copied == "", "copy_pages: " + copied);
  Array q(kF16, {2, 2, 16}, std::vector<uint16_t>(64, one));
  Array table(kS32, {2, 1}, std::vector<int32_t>{1, 4});
  Array lens(kS32, {2}, std::vector<int32_t>{1, 0});
  Array too_long(kS32, {2}, std::vector<int32_t>{1 << 30, -1});
  Array whole(kS32, {2}, std::vector<int32_t>{16, 0});
  Array out(kF16, {2, 2, 16}, std::vector<uint16_t>(64, one));
  // Room behind it that the call must leave alone.
  Array lse(kF32, {2, 2}, std::vector<float>(8, 7.0f));
  const float scale = 0.25f, soft_cap = 0.0f;
  const int64_t window = 0;
  const bool share = true;
  const std::vector<Attribute> options{{"scale", kF32, &scale},
                                       {"share_prefixes", XLA_FFI_DataType_PRED, &share},
                                       {"soft_cap", kF32, &soft_cap},
                                       {"window", XLA_FFI_DataType_S64, &window}};
  const std::vector<Array*> operands{&q, &k_pages, &v_pages, &table, &lens};
  const std::string attended =
      call(pagedjax_on_npu_paged_attention, operands, {&out, &lse}, options);
  expect(attended == "", "paged_attention: " + attended);
  wait();
  expect(k_pages.read<uint16_t>()[256] == one && k_pages.read<uint16_t>()[0] == 0, "the copy");
  expect(out.read<uint16_t>()[0] == two && out.read<uint16_t>()[32] == 0, "the output");
  expect(lse.read<float>()[0] == 4.0f && lse.read<float>()[2] < -1e30f, "the log-sum-exp");
  for (int i = 4; i < 8; ++i) expect(lse.read<float>()[i] == 7.0f, "past the log-sum-exps");
  std::vector<float> sums[2];
  for (int i = 0; i < 2; ++i) {
    const std::string said = call(pagedjax_on_npu_paged_attention,
                                  {&q, &k_pages, &v_pages, &table, i == 0 ? &whole : &too_long},
                                  {&out, &lse}, options);
    expect(said == "", "lengths: " + said);
    wait();
    sums[i] = lse.read<float>();
  }
  expect(sums[0] == sums[1] && sums[0][0] > 2.0f, "a length over the table is the table's");
  Array wrong(kF32, {2, 2, 16}, std::vector<float>(64));
  const std::string refused = call(pagedjax_on_npu_paged_attention,
                                   {&wrong, &k_pages, &v_pages, &table, &lens},
                                   {&out, &lse}, options);
  expect(refused.find("float16 and bfloat16 only") != std::string::npos, refused);
  const std::string apart =
      call(pagedjax_on_npu_write_kv, {&k_pages, &v_pages, &k, &v, &places}, {&k, &v}, {});
  expect(apart.find("one buffer") != std::string::npos, apart);
}

}  // namespace

int main() {
  std::string why;
  acl = pagedjax::acl::load(&why);
  void* context = nullptr;
  if (acl == nullptr || acl->aclrtCreateContext(&context, 0) != 0 ||
      acl->aclrtCreateStream(&stream) != 0) {
    std::fprintf(stderr, "no mock: %s\n", why.c_str());
    return 1;
  }
  run();
  pagedjax::device::forget_npu_handlers();
  using Bytes = int64_t();
  void* const mock = dlopen(std::getenv("PAGEDJAX_ACL_LIBRARY"), RTLD_NOW);
  auto* const bytes = reinterpret_cast<Bytes*>(dlsym(mock, "mock_acl_device_bytes"));
  expect(bytes != nullptr && bytes() == 0, "nothing is kept on the device");
  std::printf(failures == 0 ? "handlers on an NPU: fine\n" : "handlers on an NPU: FAILED\n");
  return failures == 0 ? 0 : 1;
}
