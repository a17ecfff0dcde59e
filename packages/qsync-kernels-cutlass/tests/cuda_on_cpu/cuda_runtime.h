// CUDA's C++ on a CPU, as far as the kernels of producers use it: a block is run as one fiber a thread, so that indices, reductions
// and barriers are those of a chip.  A barrier or a shuffle that not all threads of a block or a warp reach ends the program.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulated {

constexpr unsigned kMostThreads = 1024, kStackBytes = 128 << 10;
enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  jmp_buf place;
  ucontext_t context;
  State state;
  bool started;
  unsigned shuffles;
  std::unique_ptr<char[]> stack;
};

inline Fiber fibers[kMostThreads];
inline unsigned current;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline uint32_t exchanged[2][kMostThreads];
inline dim3 thread_index, block_index, grid_size;

inline void enter() {
  body();
  fibers[current].state = State::kDone;
  _longjmp(scheduler, 1);
}

inline void wait(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

inline void resume(unsigned thread) {
  current = thread;
  thread_index.x = thread;
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[thread];
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline bool all(unsigned first, unsigned end, State state) {
  for (unsigned thread = first; thread < end; ++thread) {
    if (fibers[thread].state != state) return false;
  }
  return true;
}

inline bool release(unsigned first, unsigned end, State state) {
  if (!all(first, end, state)) return false;
  for (unsigned thread = first; thread < end; ++thread) fibers[thread].state = State::kReady;
  return true;
}

inline void run_block(unsigned threads) {
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
    fiber.state = State::kReady, fiber.started = false, fiber.shuffles = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (!all(0, threads, State::kDone)) {
    bool moved = release(0, threads, State::kAtBlockBarrier);
    for (unsigned warp = 0; warp < threads; warp += 32) moved |= release(warp, warp + 32, State::kAtWarpBarrier);
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (fibers[thread].state == State::kReady) resume(thread), moved = true;
    }
    if (!moved) {
      std::fputs("some threads wait at a barrier or a shuffle that others never reach\n", stderr);
      std::abort();
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size

inline void __syncthreads() { emulated::wait(emulated::State::kAtBlockBarrier); }

template <class Value>
inline Value __shfl_xor_sync(unsigned, Value value, int distance) {
  static_assert(sizeof(Value) == 4, "a word");
  // Two buffers in turn: the one is written again only after all threads have passed the barrier of the other.
  auto& buffer = emulated::exchanged[emulated::fibers[emulated::current].shuffles++ % 2];
  unsigned const thread = emulated::current;
  std::memcpy(&buffer[thread], &value, 4);
  emulated::wait(emulated::State::kAtWarpBarrier);
  std::memcpy(&value, &buffer[thread ^ unsigned(distance)], 4);
  return value;
}

inline unsigned atomicMax(unsigned* address, unsigned value) {
  unsigned const before = *address;
  if (value > before) *address = value;
  return before;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  unsigned long long const before = *address;
  return *address += value, before;
}

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline int __float2int_rd(float x) { return std::isnan(x) ? 0 : int(std::floor(x)); }
inline int __float2int_rn(float x) { return std::isnan(x) ? 0 : int(std::nearbyint(x)); }

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t const both = uint64_t(y) << 32 | x;
  unsigned found = 0;
  for (int byte = 0; byte < 4; ++byte) found |= unsigned(both >> (8 * (selector >> (4 * byte) & 7)) & 0xFF) << (8 * byte);
  return found;
}

enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return std::memset(memory, value, bytes), cudaSuccess;
}

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters), dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t) {
  auto const parameters = *static_cast<Parameters const*>(arguments[0]);
  emulated::body = [=] { kernel(parameters); };
  emulated::grid_size = grid;
  // Blocks of a chip run in any order.
  for (unsigned y = grid.y; y-- > 0;) {
    for (unsigned x = grid.x; x-- > 0;) {
      emulated::block_index = dim3(x, y);
      emulated::run_block(block.x);
    }
  }
  return cudaSuccess;
}
