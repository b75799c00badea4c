// What can go wrong in a call, as exceptions that the FFI handlers turn into errors.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

namespace pagedjax::device {

enum class Kind {
  kInvalid,       // a mistake of the caller; nothing happened
  kStale,         // another version of the pool than the call was made for
  kState,         // the pool is closed or poisoned, or there is no device
  kMemory,        // no memory for it; nothing happened
  kDevice,        // the device failed; what happened to the pages is not known
};

struct Trouble {
  Kind kind;
  std::string message;
};

inline void require(bool fine, const std::string& message, Kind kind = Kind::kInvalid) {
  if (!fine) throw Trouble{kind, message};
}

inline std::string text(int64_t number) { return std::to_string(number); }

// The product of sizes, none negative; INT64_MAX where it is more than that.
inline int64_t product(std::initializer_list<int64_t> sizes) {
  int64_t all = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(all, size, &all)) return INT64_MAX;
  }
  return all;
}

}  // namespace pagedjax::device
