// GlobalTensor and LocalTensor.
#pragma once

#include "sim_core.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* buffer, uint64_t size) {
    at_ = buffer;
    size_ = size;
    sized_ = true;
  }
  void SetGlobalBuffer(T* buffer) {
    at_ = buffer;
    sized_ = false;
  }
  const T* GetPhyAddr() const { return at_; }
  T* GetPhyAddr(uint64_t offset) const { return at_ + offset; }
  uint64_t GetSize() const { return size_; }

  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part = *this;
    part.at_ = reinterpret_cast<T*>(address(offset));
    part.skipped_ = skipped_ + offset;
    return part;
  }

  T GetValue(uint64_t offset, simulator::Where at = simulator::Where::here()) const {
    T value = T(0);
    if (fits(offset, 1, "GetValue", at) &&
        simulator::core().scalar_gm(address(offset), sizeof(T), sizeof(T), false,
                                    "GlobalTensor::GetValue", at)) {
      std::memcpy(&value, reinterpret_cast<const void*>(address(offset)), sizeof(T));
    }
    return value;
  }

  void SetValue(uint64_t offset, T value,
                simulator::Where at = simulator::Where::here()) const {
    if (fits(offset, 1, "SetValue", at) &&
        simulator::core().scalar_gm(address(offset), sizeof(T), sizeof(T), true,
                                    "GlobalTensor::SetValue", at)) {
      std::memcpy(reinterpret_cast<void*>(address(offset)), &value, sizeof(T));
    }
  }

  // Of the simulator: the address of an element, and whether some are in the tensor.
  uintptr_t address(uint64_t offset = 0) const {
    return reinterpret_cast<uintptr_t>(at_) + offset * sizeof(T);
  }
  bool fits(uint64_t offset, uint64_t count, const char* api,
            simulator::Where at) const {
    const uint64_t end = skipped_ + offset + count;
    if (!sized_ || (end <= size_ && end >= count)) return true;
    simulator::core().error(at, api, "gm-bounds",
                            "elements " +
                                simulator::number(int64_t(skipped_ + offset)) + " to " +
                                simulator::number(int64_t(end)) +
                                " of a tensor that SetGlobalBuffer gave " +
                                simulator::number(int64_t(size_)));
    return false;
  }

 private:
  T* at_ = nullptr;
  uint64_t size_ = 0;     // elements
  uint64_t skipped_ = 0;  // elements before this part of it
  bool sized_ = false;
};

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.view_.at += int64_t(offset) * int64_t(sizeof(T));
    part.length_ = length_ - int64_t(offset);
    return part;
  }
  T GetValue(uint32_t offset, simulator::Where at = simulator::Where::here()) const {
    T value = T(0.0f);
    const int64_t place = view_.at + int64_t(offset) * int64_t(sizeof(T));
    auto& core = simulator::core();
    core.scalar_access(view_, place, sizeof(T), false, "LocalTensor::GetValue", at);
    if (inside(place)) std::memcpy(&value, core.ub() + place, sizeof(T));
    return value;
  }
  template <typename N>
  void SetValue(uint32_t offset, N value,
                simulator::Where at = simulator::Where::here()) const {
    const T stored = static_cast<T>(value);
    const int64_t place = view_.at + int64_t(offset) * int64_t(sizeof(T));
    auto& core = simulator::core();
    core.scalar_access(view_, place, sizeof(T), true, "LocalTensor::SetValue", at);
    if (inside(place)) std::memcpy(core.ub() + place, &stored, sizeof(T));
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(view_, length_ * int64_t(sizeof(T)) / int64_t(sizeof(U)));
  }
  uint32_t GetSize() const { return uint32_t(length_); }
  void SetSize(uint32_t size) { length_ = size; }
  uint32_t GetLength() const { return uint32_t(length_ * int64_t(sizeof(T))); }
  int32_t GetPosition() const { return int32_t(view_.position); }

  // Of the simulator.
  LocalTensor(simulator::View view, int64_t length) : view_(view), length_(length) {}
  simulator::View view(const char* role, int64_t blk = 1, int64_t rep = 8,
                       int64_t align = simulator::kBlock) const {
    simulator::View made = view_;
    made.esize = sizeof(T);
    made.blk = blk;
    made.rep = rep;
    made.role = role;
    made.align = align;
    return made;
  }
  // A view of elements one behind another, `per_repeat` of them to a repeat.
  simulator::View packed(const char* role, int64_t per_repeat) const {
    return view(role, 1, per_repeat * int64_t(sizeof(T)) / simulator::kBlock);
  }

 private:
  bool inside(int64_t place) const {
    return place >= view_.lo && place + int64_t(sizeof(T)) <= view_.hi;
  }
  simulator::View view_{0, 0, 0, sizeof(T), 1, 8, -1, 0, TPosition::GM, "", 32};
  int64_t length_ = 0;
};

}  // namespace AscendC
