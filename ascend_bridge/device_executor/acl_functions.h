// The entry points of the vendor's runtime that the executor calls, declared by hand: no
// vendor header is needed to build, and the library is found when a program runs.
//
// One list makes both the table of pointers (acl.h) and the check of every signature and
// constant against the real header (acl_check.cc). Enumerations are int here.
#pragma once

#include <cstddef>
#include <cstdint>

// X(result, name, (arguments))
#define PAGEDJAX_ACL_FUNCTIONS(X)                                                           \
  X(int, aclInit, (const char* config_path))                                                \
  X(int, aclFinalize, ())                                                                   \
  X(const char*, aclGetRecentErrMsg, ())                                                    \
  X(const char*, aclrtGetSocName, ())                                                       \
  X(int, aclrtGetDeviceCount, (uint32_t * count))                                           \
  X(int, aclrtGetDeviceInfo, (uint32_t device, int attribute, int64_t* value))              \
  X(int, aclrtGetDevice, (int32_t * device))                                                \
  X(int, aclrtCreateContext, (void** context, int32_t device))                              \
  X(int, aclrtDestroyContext, (void* context))                                              \
  X(int, aclrtSetCurrentContext, (void* context))                                           \
  X(int, aclrtGetCurrentContext, (void** context))                                          \
  X(int, aclrtCreateStream, (void** stream))                                                \
  X(int, aclrtDestroyStream, (void* stream))                                                \
  X(int, aclrtDestroyStreamForce, (void* stream))                                           \
  X(int, aclrtSynchronizeStreamWithTimeout, (void* stream, int32_t milliseconds))           \
  X(int, aclrtMalloc, (void** memory, size_t size, int policy))                             \
  X(int, aclrtFree, (void* memory))                                                         \
  X(int, aclrtMallocHost, (void** memory, size_t size))                                     \
  X(int, aclrtFreeHost, (void* memory))                                                     \
  X(int, aclrtMemcpy, (void* to, size_t room, const void* from, size_t size, int kind))     \
  X(int, aclrtMemcpyAsync,                                                                  \
    (void* to, size_t room, const void* from, size_t size, int kind, void* stream))         \
  X(int, aclrtMemsetAsync,                                                                  \
    (void* memory, size_t room, int32_t value, size_t size, void* stream))

// X(our name, value, the header's name)
#define PAGEDJAX_ACL_CONSTANTS(X)                                                           \
  X(kSuccess, 0, ACL_SUCCESS)                                                               \
  X(kRepeatedInit, 100002, ACL_ERROR_REPEAT_INITIALIZE)                                     \
  X(kNoHostMemory, 200000, ACL_ERROR_BAD_ALLOC)                                             \
  X(kNoContext, 107002, ACL_ERROR_RT_CONTEXT_NULL)                                          \
  X(kNoDeviceMemory, 207001, ACL_ERROR_RT_MEMORY_ALLOCATION)                                \
  X(kDeviceOutOfMemory, 207018, ACL_ERROR_RT_DEVICE_OOM)                                    \
  X(kSyncTimeout, 507046, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)                                 \
  X(kHugePagesFirst, 0, ACL_MEM_MALLOC_HUGE_FIRST)                                          \
  X(kHostToDevice, 1, ACL_MEMCPY_HOST_TO_DEVICE)                                            \
  X(kDeviceToHost, 2, ACL_MEMCPY_DEVICE_TO_HOST)                                            \
  X(kDeviceToDevice, 3, ACL_MEMCPY_DEVICE_TO_DEVICE)                                        \
  X(kAiCores, 101, ACL_DEV_ATTR_AICORE_CORE_NUM)                                            \
  X(kVectorCores, 201, ACL_DEV_ATTR_VECTOR_CORE_NUM)

namespace pagedjax::acl {

#define PAGEDJAX_ACL_CONSTANT(ours, value, theirs) constexpr int ours = value;
PAGEDJAX_ACL_CONSTANTS(PAGEDJAX_ACL_CONSTANT)
#undef PAGEDJAX_ACL_CONSTANT

}  // namespace pagedjax::acl
