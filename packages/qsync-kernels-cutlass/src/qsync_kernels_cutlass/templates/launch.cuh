// What every kernel family shares on the host side: the device of a call, opting in to shared memory, and statuses.
#pragma once

#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>

#include "abi.h"

namespace qsync {

inline int32_t cuda_status(cudaError_t error) {
  return error == cudaSuccess ? QSYNC_OK : QSYNC_CUDA_ERROR + int32_t(error);
}

// Makes the device of the call current, and the previous one again afterwards: the caller's thread keeps its device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int64_t device) : device_(int(device)) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (error_ == cudaSuccess && previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;
  int32_t status() const { return cuda_status(error_); }

 private:
  int device_;
  int previous_ = -1;
  cudaError_t error_;
};

// Shared memory that a block may have on the one chip that a library is compiled for (architectures.py has the same).
#ifdef __CUDA_ARCH_LIST__
constexpr int most_shared_bytes(int arch) {
  return (arch == 700 ? 96 : arch == 750 ? 64 : arch == 800 ? 163 : arch == 860 || arch == 890 ? 99 : 227) << 10;
}
constexpr int kMostSharedBytes = most_shared_bytes(__CUDA_ARCH_LIST__);
#else
constexpr int kMostSharedBytes = 227 << 10;
#endif

// Lets a kernel use more than 48 KiB of shared memory: asked of the runtime once per kernel and device.
template <int bytes, class Kernel>
int32_t allow_shared_memory(Kernel kernel, int64_t device, std::atomic<uint64_t>& allowed_devices) {
  static_assert(bytes <= kMostSharedBytes, "the kernel's buffers do not fit into the chip's shared memory: fewer stages");
  if (bytes < (48 << 10)) return QSYNC_OK;
  uint64_t const bit = device < 64 ? uint64_t(1) << device : 0;
  if (bit != 0 && (allowed_devices.load(std::memory_order_relaxed) & bit) != 0) return QSYNC_OK;
  auto const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed_devices.fetch_or(bit, std::memory_order_relaxed);
  return cuda_status(error);
}

inline bool aligned(void const* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes) == 0; }

// Sizes travel as int64_t; CUTLASS counts tiles and extents in int32_t.  Strides stay 64 bits wide.
inline bool fits_int32(int64_t value) { return value >= 0 && value <= INT32_MAX; }

}  // namespace qsync
