// What the kernels of producers share: blocks of 256 threads, their reductions, the grid of a launch, sums over programs.
//
// Reductions have one order, so that the same operands give the same bits.
#pragma once

#include "launch.cuh"
#include "producer_math.cuh"

namespace qsync {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostPrograms = 1024;  // that leave partial sums, or maxima, to another kernel

// Blocks to a multiprocessor: of kernels that leave partial sums, and of those that only write.
constexpr int64_t kSumming = 4, kWriting = 16;

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

inline int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

// The largest of a block, for all of its threads.
__device__ inline uint32_t block_largest(uint32_t value) {
  __shared__ uint32_t shared[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) value = larger(value, shared[warp]);
  __syncthreads();
  return value;
}

// The largest of a vector of bits, for all threads of a block.
__device__ inline uint32_t largest_of(float const* partial, int count) {
  uint32_t found = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) found = larger(found, __float_as_uint(partial[i]));
  return block_largest(found);
}

// The sum of a block, for all of its threads; it wraps around, and so is the same in any order.
__device__ inline uint32_t block_sum(uint32_t value) {
  __shared__ uint32_t shared[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) value += shared[warp];
  __syncthreads();
  return value;
}

// The sum of partial checksums, for all threads of a block.
__device__ inline uint32_t sum_of(float const* partial, int count) {
  uint32_t found = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) found += __float_as_uint(partial[i]);
  return block_sum(found);
}

// One argument a kernel, so that a launch is type-checked.
template <class Parameters>
int32_t launch(void (*kernel)(Parameters), dim3 grid, Parameters parameters, void* stream) {
  void* arguments[] = {&parameters};
  cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  return cuda_status(cudaGetLastError());
}

// Statuses before anything runs.
inline int32_t check(QsyncProducerArguments const& q, int64_t needed) {
  if (q.struct_bytes != int64_t(sizeof(QsyncProducerArguments))) return QSYNC_WRONG_ABI;
  if (q.rows <= 0 || q.columns <= 0 || q.sm_count <= 0 || !fits_int32(q.columns)) return QSYNC_INVALID_PROBLEM;
  if (q.workspace_bytes < needed || (needed > 0 && q.workspace == nullptr)) return QSYNC_WORKSPACE_TOO_SMALL;
  return QSYNC_OK;
}

// Whether eights of every tensor begin at multiples of 16 bytes (8 of 8-bit copies).
inline bool is_wide(QsyncProducerArguments const& q) {
  uintptr_t every = 0;
  for (void const* const pointer : {q.x, q.residual, static_cast<void const*>(q.weight), static_cast<void const*>(q.bias),
                                    static_cast<void const*>(q.out), static_cast<void const*>(q.kept), q.grad,
                                    static_cast<void const*>(q.grad_input), static_cast<void const*>(q.grad_residual)}) {
    every |= reinterpret_cast<uintptr_t>(pointer);
  }
  uintptr_t const copies = reinterpret_cast<uintptr_t>(q.q) | reinterpret_cast<uintptr_t>(q.x_q);
  return q.columns % kEight == 0 && every % 16 == 0 && copies % 8 == 0;
}

// Sums over programs of partials (2, programs, columns), the first into one vector, the second into another.
struct ColumnSums {
  float const* partial;
  float* first;
  float* second;
  int64_t programs, columns;
};

constexpr int kSumColumns = 32;

static __global__ void __launch_bounds__(kThreads) add_programs(ColumnSums p) {
  __shared__ float shared[kWarps][kSumColumns];
  int const lane = threadIdx.x % kSumColumns, group = threadIdx.x / kSumColumns;
  int64_t const column = int64_t(blockIdx.x) * kSumColumns + lane;
  auto const* const partial = p.partial + int64_t(blockIdx.y) * p.programs * p.columns;
  float sum = 0.0f;
  for (int64_t program = group; program < p.programs && column < p.columns; program += kWarps) {
    sum += partial[program * p.columns + column];
  }
  shared[group][lane] = sum;
  __syncthreads();
  auto* const total = blockIdx.y == 0 ? p.first : p.second;
  if (group != 0 || column >= p.columns || total == nullptr) return;
  for (int other = 1; other < kWarps; ++other) sum += shared[other][lane];
  total[column] = sum;
}

inline int32_t launch_add_programs(ColumnSums p, void* stream) {
  return launch(add_programs, dim3(unsigned(ceil_div(p.columns, kSumColumns)), 2), p, stream);
}

}  // namespace qsync
