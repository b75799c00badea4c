// The vendor's runtime as a table of functions, loaded with dlopen.
#pragma once

#include <string>

#include "acl_functions.h"

namespace pagedjax::acl {

struct Table {
#define PAGEDJAX_ACL_POINTER(result, name, arguments) result(*name) arguments = nullptr;
  PAGEDJAX_ACL_FUNCTIONS(PAGEDJAX_ACL_POINTER)
#undef PAGEDJAX_ACL_POINTER
};

// The table of `libascendcl.so`, or of the library that PAGEDJAX_ACL_LIBRARY names, after
// aclInit; nullptr, with the reason, where there is none. Tried once, and again only if it
// failed and the environment names another library.
const Table* load(std::string* why);

// What the runtime last complained about on this thread, or nothing.
std::string recent_message(const Table& acl);

// Calls aclFinalize if load() called aclInit. Nothing may be open.
void finalize();

}  // namespace pagedjax::acl
