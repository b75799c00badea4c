// Elements of vector instructions: their types, the masks that choose them, and the
// loops over those chosen.
#pragma once

#include "sim_tensor.h"

namespace simulator {

// Element types, as bits.
enum Kind : uint32_t {
  kInt8 = 1,
  kUint8 = 2,
  kInt16 = 4,
  kUint16 = 8,
  kHalf = 16,
  kBfloat16 = 32,
  kInt32 = 64,
  kUint32 = 128,
  kFloat = 256,
  kInt64 = 512,
  kFloats = kHalf | kFloat,
  kNumbers = kHalf | kFloat | kInt16 | kInt32,
};

template <class T>
constexpr Kind kind_of() {
  return std::is_same<T, int8_t>::value       ? kInt8
         : std::is_same<T, uint8_t>::value    ? kUint8
         : std::is_same<T, int16_t>::value    ? kInt16
         : std::is_same<T, uint16_t>::value   ? kUint16
         : std::is_same<T, half>::value       ? kHalf
         : std::is_same<T, bfloat16_t>::value ? kBfloat16
         : std::is_same<T, int32_t>::value    ? kInt32
         : std::is_same<T, uint32_t>::value   ? kUint32
         : std::is_same<T, float>::value      ? kFloat
                                              : kInt64;
}

// Reports a type that the product's instruction does not take. A set of 0: no such API.
void require(Where at, const char* api, Kind kind, uint32_t on_2201, uint32_t on_1001);

inline Lanes counted(int64_t per_repeat, int64_t count) {
  return Lanes{per_repeat, 0, count, {0, 0}};
}
// The mask forms: the first `mask` elements of each repeat, or the bits of two words,
// or with `isSetMask` false what SetVectorMask left.
Lanes masked(Where at, const char* api, int64_t per_repeat, uint64_t mask,
             int64_t repeats, bool set);
Lanes masked(Where at, const char* api, int64_t per_repeat, const uint64_t mask[],
             int64_t repeats, bool set);

// A mask argument: a number of elements, or a pointer to two words of bits. The API has
// pointers to constant words in some functions only.
template <class M>
using IsMask =
    std::enable_if_t<std::is_integral<M>::value || std::is_same<M, uint64_t*>::value ||
                     std::is_same<M, const uint64_t*>::value>;
template <class M>
using IsPlainMask =
    std::enable_if_t<std::is_integral<M>::value || std::is_same<M, uint64_t*>::value>;
template <class M>
constexpr auto as_mask(M mask) {
  if constexpr (std::is_pointer<M>::value) {
    return static_cast<const uint64_t*>(mask);
  } else {
    return static_cast<uint64_t>(mask);
  }
}

template <class T>
constexpr int64_t per_repeat() {
  return kRepeat / int64_t(sizeof(T));
}

template <class T>
inline T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
inline void store(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

// Calls f(repeat, lane) for the elements that take part, in order.
template <class F>
inline void for_lanes(const Lanes& lanes, F f) {
  const int64_t repeats = total_repeats(lanes);
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t i = 0; i < lanes.per_repeat; ++i) {
      if (is_active(lanes, r, i)) f(r, i);
    }
  }
}

// Calls f(k, pointers to the first lane of a block) for the lanes k of each block that
// take part: within a block operands are contiguous.
template <size_t N, class F>
inline void for_blocks(uint8_t* ub, const Lanes& lanes, const View (&views)[N], F f) {
  const int64_t repeats = total_repeats(lanes);
  const int64_t width = lanes.per_repeat / 8;
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t first = 0; first < lanes.per_repeat; first += width) {
      const int64_t left = lanes.count - r * lanes.per_repeat - first;
      const uint64_t bits = lanes.count < 0 ? lanes.bits[first >> 6] >> (first & 63)
                            : left >= width ? ~uint64_t(0)
                            : left <= 0     ? 0
                                            : (uint64_t(1) << left) - 1;
      if (bits == 0) continue;
      uint8_t* at[N];
      for (size_t n = 0; n < N; ++n) at[n] = ub + address(views[n], r, first);
      for (int64_t k = 0; k < width; ++k) {
        if (bits >> k & 1) f(k, at);
      }
    }
  }
}

// dst = f(), f(a) or f(a, b), where a is an element of the first source and so on.
template <class D, class F>
inline void fill(Where at, const char* api, const Lanes& lanes, View dst, F f) {
  Core& on = core();
  if (!on.vector(api, at, lanes, &dst, 1, nullptr, 0)) return;
  Core* const where = &on;
  on.issue([=] {
    uint8_t* const ub = where->ub();
    for_lanes(lanes, [&](int64_t r, int64_t i) {
      store<D>(ub + address(dst, r, i), f(r, i));
    });
  });
}

template <class D, class A, class F>
inline void map(Where at, const char* api, const Lanes& lanes, View dst, View a, F f) {
  Core& on = core();
  if (!on.vector(api, at, lanes, &dst, 1, &a, 1)) return;
  Core* const where = &on;
  on.issue([=] {
    const View views[] = {dst, a};
    for_blocks(where->ub(), lanes, views, [&](int64_t k, uint8_t* const* at) {
      store<D>(at[0] + k * sizeof(D), f(load<A>(at[1] + k * sizeof(A))));
    });
  });
}

template <class D, class A, class B, class F>
inline void map(Where at, const char* api, const Lanes& lanes, View dst, View a, View b,
                F f) {
  Core& on = core();
  const View sources[] = {a, b};
  if (!on.vector(api, at, lanes, &dst, 1, sources, 2)) return;
  Core* const where = &on;
  on.issue([=] {
    const View views[] = {dst, a, b};
    for_blocks(where->ub(), lanes, views, [&](int64_t k, uint8_t* const* at) {
      store<D>(at[0] + k * sizeof(D),
               f(load<A>(at[1] + k * sizeof(A)), load<B>(at[2] + k * sizeof(B))));
    });
  });
}

// dst = f(dst, a, b).
template <class D, class A, class B, class F>
inline void fold(Where at, const char* api, const Lanes& lanes, View dst, View a,
                 View b, F f) {
  Core& on = core();
  const View sources[] = {dst, a, b};
  if (!on.vector(api, at, lanes, &dst, 1, sources, 3)) return;
  Core* const where = &on;
  on.issue([=] {
    const View views[] = {dst, a, b};
    for_blocks(where->ub(), lanes, views, [&](int64_t k, uint8_t* const* at) {
      uint8_t* const out = at[0] + k * sizeof(D);
      store<D>(out, f(load<D>(out), load<A>(at[1] + k * sizeof(A)),
                      load<B>(at[2] + k * sizeof(B))));
    });
  });
}

}  // namespace simulator
