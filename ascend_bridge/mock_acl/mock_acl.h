// A stand-in for libascendcl.so, for tests: the functions of
// ../device_executor/acl_functions.h, and these to watch and to disturb it.
//
//   stream      work is kept and done when the host waits for it, never before: staging
//               memory that is reused too early gives wrong numbers
//   device      memory that the host cannot touch: reading or writing it outside of a
//               copy or a kernel is a segmentation fault
//   thread      has no context until it sets one, and no call works without
//   copies      are checked: the whole range must belong to one allocation, the host's
//               side must be pinned
//   kernels     are those of the simulator build, ../kernels/launch.h
#pragma once

#include <cstdint>

extern "C" {

// Lets the n-th next call of a kind fail (1: the very next): "malloc" (out of device
// memory), "malloc_host", "copy", "launch" (refused), "kernel" (an exception in the
// kernel, seen when the host waits), "timeout" (the wait ends before the work), "lost"
// (the device is gone: this wait and everything after it fails, but for freeing). The
// same comes from PAGEDJAX_MOCK_ACL_FAIL="kind:n", and aclInit fails where that is
// neither a known kind nor a number. Returns 0 for an unknown kind.
int mock_acl_fail(const char* kind, int nth);
// Shuts (1) or opens (0) a gate before which every wait for a stream stands still, 30
// seconds at most; and how many stand there now.
void mock_acl_hold(int shut);
int mock_acl_waiting();
// Ends all disturbances and brings a lost device back. What is allocated stays.
void mock_acl_restore();

int64_t mock_acl_device_bytes();  // allocated now
int64_t mock_acl_pinned_bytes();
int mock_acl_contexts();  // open now
int mock_acl_streams();
// Counted since the last reset: bytes copied to (1) or from (2) the device, launches of
// kernels, waits for a stream, calls of aclrtMalloc and aclrtMallocHost.
int64_t mock_acl_copied(int kind);
int mock_acl_launches();
int mock_acl_waits();
int mock_acl_allocations();
void mock_acl_reset_counts();
// The first error that the simulator reported in a kernel, or "".
const char* mock_acl_kernel_error();
}
