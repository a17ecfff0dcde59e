// Transposes a matrix of 1-byte elements: out[n, m] = a[m, n], and fills out's rows with zeros up to k columns (k >= m).
//
// Bound by memory: a block of 256 threads moves a tile of 128 x 128 bytes, 16 bytes a thread and access on both sides.  Each thread
// transposes four 4 x 4 blocks in registers.  In shared memory the words of one output row lie together, and their order is
// permuted (exclusive or with the row's group of 16) so that neither side has bank conflicts.
// q.m x q.n is the size of a, q.lda and q.ldo are bytes between rows of a and out.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace qsync {

inline constexpr int kTransposeTile = 128;
inline constexpr int kTransposeThreads = 256;

// Bytes i of four words become word i.
__device__ inline void transpose_4x4(uint32_t (&rows)[4]) {
  uint32_t const low_01 = __byte_perm(rows[0], rows[1], 0x5140), high_01 = __byte_perm(rows[0], rows[1], 0x7362);
  uint32_t const low_23 = __byte_perm(rows[2], rows[3], 0x5140), high_23 = __byte_perm(rows[2], rows[3], 0x7362);
  rows[0] = __byte_perm(low_01, low_23, 0x5410);
  rows[1] = __byte_perm(low_01, low_23, 0x7632);
  rows[2] = __byte_perm(high_01, high_23, 0x5410);
  rows[3] = __byte_perm(high_01, high_23, 0x7632);
}

template <bool kVectorLoads, bool kVectorStores>
__global__ void __launch_bounds__(kTransposeThreads) transpose_bytes_kernel(QsyncArguments q, int64_t tiles_n) {
  __shared__ __align__(16) uint32_t shared[kTransposeTile][kTransposeTile / 4];
  auto const* const source = static_cast<uint8_t const*>(q.a);
  auto* const target = static_cast<uint8_t*>(q.out);
  int64_t const first_m = int64_t(blockIdx.x) / tiles_n * kTransposeTile, first_n = int64_t(blockIdx.x) % tiles_n * kTransposeTile;

  int const chunk = threadIdx.x % 8, row_group = threadIdx.x / 8;  // 16 columns, 4 rows
  uint32_t words[4][4];                                            // [row][word of the chunk]
  for (int row = 0; row < 4; ++row) {
    int64_t const m = first_m + 4 * row_group + row, n = first_n + 16 * chunk;
    auto const* const from = source + m * q.lda + n;
    if (kVectorLoads && m < q.m && n + 16 <= q.n) {
      uint4 const loaded = __ldg(reinterpret_cast<uint4 const*>(from));
      words[row][0] = loaded.x, words[row][1] = loaded.y, words[row][2] = loaded.z, words[row][3] = loaded.w;
    } else {
      for (int word = 0; word < 4; ++word) {
        words[row][word] = 0;
        for (int byte = 0; byte < 4; ++byte) {
          int const column = 4 * word + byte;
          if (m < q.m && n + column < q.n) words[row][word] |= uint32_t(from[column]) << (8 * byte);
        }
      }
    }
  }
  for (int word = 0; word < 4; ++word) {
    uint32_t block[4] = {words[0][word], words[1][word], words[2][word], words[3][word]};
    transpose_4x4(block);
    for (int byte = 0; byte < 4; ++byte) shared[16 * chunk + 4 * word + byte][row_group ^ (4 * chunk)] = block[byte];
  }
  __syncthreads();

  for (int part = 0; part < 4; ++part) {
    int const row = threadIdx.x / 8 + 32 * part, piece = threadIdx.x % 8;  // a row of out, 16 bytes of it
    int64_t const n = first_n + row, m = first_m + 16 * piece;
    if (n >= q.n || m >= q.k) continue;
    auto const* const words_of_row = &shared[row][(4 * piece) ^ (4 * (row / 16))];
    auto* const to = target + n * q.ldo + m;
    if (kVectorStores && m + 16 <= q.k) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(words_of_row);
    } else {
      for (int byte = 0; byte < 16 && m + byte < q.k; ++byte) to[byte] = uint8_t(words_of_row[byte / 4] >> (8 * (byte % 4)));
    }
  }
}

struct TransposeBytes {
  static int32_t run(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    if (q.m <= 0 || q.n <= 0 || q.k < q.m || q.lda < q.n || q.ldo < q.k) return QSYNC_INVALID_PROBLEM;
    int64_t const tiles_m = (q.k - 1) / kTransposeTile + 1, tiles_n = (q.n - 1) / kTransposeTile + 1;
    if (tiles_m > INT32_MAX / tiles_n) return QSYNC_INVALID_PROBLEM;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    bool const loads = aligned(q.a, 16) && q.lda % 16 == 0, stores = aligned(q.out, 16) && q.ldo % 16 == 0;
    auto const kernel = loads ? (stores ? transpose_bytes_kernel<true, true> : transpose_bytes_kernel<true, false>)
                              : (stores ? transpose_bytes_kernel<false, true> : transpose_bytes_kernel<false, false>);
    kernel<<<unsigned(tiles_m * tiles_n), kTransposeThreads, 0, static_cast<cudaStream_t>(q.stream)>>>(q, tiles_n);
    return cuda_status(cudaGetLastError());
  }

  static int64_t workspace(QsyncArguments const&) { return 0; }
};

}  // namespace qsync
