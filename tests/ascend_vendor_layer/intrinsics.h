// A model of the instructions that the vendor's Ascend C headers lower to, as far as the
// kernels come to them; own code. ascend_vendor_layer.py adds an empty function for every
// other name that the headers want. Types of the headers are dispatched on by size.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

enum pipe_t {
  PIPE_S,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_ALL,
  PIPE_MTE4,
  PIPE_MTE5,
  PIPE_V2,
  PIPE_FIX
};
enum event_t {
  EVENT_ID0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7
};
enum Order_t { ONLY_VALUE, ONLY_INDEX, VALUE_INDEX, INDEX_VALUE };
extern int64_t block_idx, block_num;

namespace model {

// The mask of vector instructions: 128 bits, or a count of elements.
inline bool counts = false;
inline uint64_t low = ~uint64_t{0}, high = ~uint64_t{0};

// Every element that takes part: (repeat, lane), 64 lanes of 32 bits.
template <class F>
void each(int64_t repeats, F f) {
  const int64_t all = counts ? int64_t(low) : repeats * 64;
  for (int64_t i = 0; i < all; ++i) {
    if (counts || (low >> (i % 64) & 1)) f(i / 64, i % 64);
  }
}

template <class T>
T& at(T* base, int64_t repeat, int64_t lane, int64_t block_stride, int64_t repeat_stride) {
  const int64_t in_block = 32 / sizeof(T);
  const int64_t block = repeat * repeat_stride + lane / in_block * block_stride;
  return base[block * in_block + lane % in_block];
}

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of the same number");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float from_half(uint16_t x) { return float(bits<_Float16>(x)); }
inline uint16_t to_half(float x) { return bits<uint16_t>(_Float16(x)); }
inline float from_bfloat16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
inline uint16_t to_bfloat16(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return x != x ? 0x7fc0 : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline uint64_t copy(char* to, const char* from, int64_t count, int64_t blocks,
                     int64_t from_gap, int64_t to_gap) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * (blocks + to_gap) * 32, from + i * (blocks + from_gap) * 32,
                blocks * 32);
  }
  return 0;
}

}  // namespace model

// Headers instantiate the instructions for more types than the kernels use.
#define MODEL_FLOAT(name)                          \
  template <class D, class... A>                   \
  uint64_t name(D* to, A... rest) {                \
    if constexpr (std::is_same<D, float>::value) { \
      return float_##name(to, rest...);            \
    } else {                                       \
      std::abort();                                \
    }                                              \
  }

#define MODEL_BINARY(name, value)                                                        \
  inline uint64_t float_##name(float* to, float* p, float* q, int64_t repeats,           \
                               int64_t to_block, int64_t p_block, int64_t q_block,       \
                               int64_t to_repeat, int64_t p_repeat, int64_t q_repeat) {  \
    model::each(repeats, [&](int64_t r, int64_t l) {                                     \
      const float a = model::at(p, r, l, p_block, p_repeat);                             \
      const float b = model::at(q, r, l, q_block, q_repeat);                             \
      model::at(to, r, l, to_block, to_repeat) = value;                                  \
    });                                                                                  \
    return 0;                                                                            \
  }                                                                                      \
  MODEL_FLOAT(name)

#define MODEL_UNARY(name, type, parameter, value)                                     \
  inline uint64_t float_##name(float* to, float* p, type parameter int64_t repeats,   \
                               int64_t to_block, int64_t p_block, int64_t to_repeat,  \
                               int64_t p_repeat) {                                    \
    model::each(repeats, [&](int64_t r, int64_t l) {                                  \
      const float a = model::at(p, r, l, p_block, p_repeat);                          \
      model::at(to, r, l, to_block, to_repeat) = value;                               \
    });                                                                               \
    return 0;                                                                         \
  }                                                                                   \
  MODEL_FLOAT(name)

#define MODEL_CONVERT(name, To, From, convert)                                        \
  template <class D, class S>                                                         \
  uint64_t name(D* d, S* s, int64_t repeats, int64_t to_block, int64_t from_block,    \
                int64_t to_repeat, int64_t from_repeat) {                             \
    auto* to = reinterpret_cast<To*>(d);                                              \
    auto* from = reinterpret_cast<From*>(s);                                          \
    model::each(repeats, [&](int64_t r, int64_t l) {                                  \
      model::at(to, r, l, to_block, to_repeat) =                                      \
          convert(model::at(from, r, l, from_block, from_repeat));                    \
    });                                                                               \
    return 0;                                                                         \
  }

#define MODEL_COMMA ,
MODEL_BINARY(vadd, a + b)
MODEL_BINARY(vsub, a - b)
MODEL_BINARY(vmul, a* b)
MODEL_BINARY(vdiv, a / b)
MODEL_BINARY(vmax, a != a ? a : b != b ? b : a > b ? a : b)
MODEL_BINARY(vmin, a != a ? a : b != b ? b : a < b ? a : b)
MODEL_UNARY(vexp, , , std::exp(a))
MODEL_UNARY(vln, , , std::log(a))
MODEL_UNARY(vmuls, float, b MODEL_COMMA, a* b)
MODEL_UNARY(vadds, float, b MODEL_COMMA, a + b)
MODEL_CONVERT(vconv_f162f32, float, uint16_t, model::from_half)
MODEL_CONVERT(vconv_f322f16, uint16_t, float, model::to_half)
MODEL_CONVERT(vconv_f322f16r, uint16_t, float, model::to_half)
MODEL_CONVERT(vconv_bf162f32, float, uint16_t, model::from_bfloat16)
MODEL_CONVERT(vconv_f322bf16r, uint16_t, float, model::to_bfloat16)

inline uint64_t float_vector_dup(float* to, float value, int64_t repeats, int64_t block,
                                 int64_t, int64_t repeat, int64_t) {
  model::each(repeats,
              [&](int64_t r, int64_t l) { model::at(to, r, l, block, repeat) = value; });
  return 0;
}
MODEL_FLOAT(vector_dup)

inline uint64_t float_vcadd(float* to, float* from, int64_t repeats, int64_t step,
                            int64_t block, int64_t repeat, int) {
  for (int64_t i = 0; i < repeats; ++i) to[i * step] = 0;
  model::each(repeats, [&](int64_t r, int64_t l) {
    to[r * step] += model::at(from, r, l, block, repeat);
  });
  return 0;
}
MODEL_FLOAT(vcadd)

inline uint64_t float_vcmax(float* to, float* from, int64_t repeats, int64_t step,
                            int64_t block, int64_t repeat, Order_t order) {
  if (order != ONLY_VALUE) std::abort();
  for (int64_t i = 0; i < repeats; ++i) to[i * step] = -INFINITY;
  model::each(repeats, [&](int64_t r, int64_t l) {
    const float value = model::at(from, r, l, block, repeat);
    if (!(value <= to[r * step])) to[r * step] = value;
  });
  return 0;
}
MODEL_FLOAT(vcmax)

template <class D>
uint64_t vbrcb(D* to, D* from, int64_t block, int64_t repeat, int64_t repeats) {
  if (sizeof(D) != 4) std::abort();
  for (int64_t i = 0; i < repeats * 64; ++i) {
    to[(i / 64 * repeat + i / 8 % 8 * block) * 8 + i % 8] = from[i / 8];
  }
  return 0;
}

template <class D, class S>
uint64_t copy_gm_to_ubuf(D* to, S* from, int64_t, int64_t count, int64_t blocks,
                         int64_t from_gap, int64_t to_gap) {
  return model::copy((char*)to, (const char*)from, count, blocks, from_gap, to_gap);
}
template <class D, class S>
uint64_t copy_ubuf_to_gm(D* to, S* from, int64_t, int64_t count, int64_t blocks,
                         int64_t from_gap, int64_t to_gap) {
  return model::copy((char*)to, (const char*)from, count, blocks, from_gap, to_gap);
}

inline uint64_t set_mask_count() { return model::counts = true, 0; }
inline uint64_t set_mask_norm() { return model::counts = false, 0; }
template <class A, class B>
uint64_t set_vector_mask(A high, B low) {
  model::high = uint64_t(high);
  model::low = uint64_t(low);
  return 0;
}

// Bits of the scalar unit, by which the headers hand out event ids.
template <class A, class B>
uint64_t sbitset1(A x, B i) {
  return uint64_t(x) | uint64_t{1} << i;
}
template <class A, class B>
uint64_t sbitset0(A x, B i) {
  return uint64_t(x) & ~(uint64_t{1} << i);
}
template <class A>
int64_t sff0(A x) {
  return __builtin_ctzll(~uint64_t(x));
}
inline int64_t get_block_idx() { return block_idx; }
inline int64_t get_block_num() { return block_num; }
