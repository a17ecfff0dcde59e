// The operand layouts of int8 convolutions that tensor cores cannot take as they are.
#pragma once

#include "launch.cuh"

namespace qsync {

// Few input channels, or long strides: every block of stride_h x stride_w pixels becomes one pixel of lda channels, with the
// padding around the image.
//
//     out[n, h, w, (dh * stride_w + dw) * c_count + c] = x[n, h * stride_h + dh - pad_h, w * stride_w + dw - pad_w, c]
//
// and 0 outside x and in the remaining channels.  A strided convolution of x with padding is then one of `out` with stride 1
// and none, whose filters are folded in the same way (without padding).  A thread writes 16 channels.
constexpr int kChannelsPerThread = 16;

// The 16 channels from `first_channel` of the block of pixels that starts at (first_h, first_w).  Sizes that are known when the
// kernel is compiled (others are 0) leave nothing to compute but addresses.
template <int kChannels, int kStride>
__host__ __device__ inline int4 folded_channels(int8_t const* x, int in_h, int in_w, int first_h, int first_w, int channels,
                                                int stride_h, int stride_w, int first_channel) {
  if constexpr (kChannels > 0) channels = kChannels;
  if constexpr (kStride > 0) stride_h = stride_w = kStride;
  union {
    int8_t bytes[kChannelsPerThread];
    int4 vector;
  } folded;
  int const line = stride_w * channels;
  int dh = first_channel / line, dw = (first_channel - dh * line) / channels;
  int channel = first_channel - dh * line - dw * channels;
#pragma unroll
  for (int i = 0; i < kChannelsPerThread; ++i) {
    int const h = first_h + dh, w = first_w + dw;
    bool const inside = dh < stride_h && h >= 0 && h < in_h && w >= 0 && w < in_w;
    folded.bytes[i] = inside ? x[(int64_t(h) * in_w + w) * channels + channel] : int8_t(0);
    if (++channel == channels) {
      channel = 0;
      if (++dw == stride_w) {
        dw = 0;
        ++dh;
      }
    }
  }
  return folded.vector;
}

template <int kChannels, int kStride>
__global__ void __launch_bounds__(256) fold_pixels(QsyncArguments q) {
  uint32_t const thread = blockIdx.x * 256u + threadIdx.x;
  uint32_t const parts = kChannels > 0 ? 1u : uint32_t(q.lda) / kChannelsPerThread;
  uint32_t const pixel = thread / parts, part = thread - pixel * parts;
  if (pixel >= uint32_t(q.images * q.out_h * q.out_w)) return;
  uint32_t const out_w = uint32_t(q.out_w), out_h = uint32_t(q.out_h);
  uint32_t const row = pixel / out_w, image = row / out_h;
  int const first_h = int(row - image * out_h) * int(q.stride_h) - int(q.pad_h);
  int const first_w = int(pixel - row * out_w) * int(q.stride_w) - int(q.pad_w);
  int8_t const* const x = static_cast<int8_t const*>(q.a) + int64_t(image) * q.in_h * q.in_w * q.in_c;
  static_cast<int4*>(q.out)[thread] =
      folded_channels<kChannels, kStride>(x, int(q.in_h), int(q.in_w), first_h, first_w, int(q.in_c), int(q.stride_h),
                                          int(q.stride_w), int(part) * kChannelsPerThread);
}

inline int32_t run_fold_pixels(QsyncArguments const& q) {
  if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
  int64_t const threads = q.images * q.out_h * q.out_w * (q.lda / kChannelsPerThread);
  if (!fits_int32(threads) || !fits_int32(q.in_h) || !fits_int32(q.in_w) || !fits_int32(q.lda) ||
      q.lda % kChannelsPerThread != 0 || q.stride_h * q.stride_w * q.in_c > q.lda) {
    return QSYNC_INVALID_PROBLEM;
  }
  if (!aligned(q.out, 16)) return QSYNC_MISALIGNED;
  if (threads == 0) return QSYNC_OK;
  DeviceGuard guard(q.device);
  if (guard.status() != QSYNC_OK) return guard.status();
  // The first layers of image networks have kernels of their own.
  bool const square = q.stride_h == q.stride_w, one_part = q.lda == kChannelsPerThread;
  auto const kernel = one_part && q.in_c == 3 && square && q.stride_h == 2   ? fold_pixels<3, 2>
                      : one_part && q.in_c == 3 && square && q.stride_h == 1 ? fold_pixels<3, 1>
                                                                             : fold_pixels<0, 0>;
  kernel<<<unsigned((threads + 255) / 256), 256, 0, static_cast<cudaStream_t>(q.stream)>>>(q);
  return cuda_status(cudaGetLastError());
}

// Filters for the gradient of the input: channels exchanged, both spatial directions reversed.
//
//     out[c, R-1-r, S-1-s, k] = w[k, r, s, c]
constexpr int kTurnTile = 32;

__global__ void __launch_bounds__(256) turn_filters(QsyncArguments q) {
  __shared__ int8_t tile[kTurnTile][kTurnTile + 4];
  int const in_c = int(q.in_c), out_c = int(q.out_c), taps = int(q.filter_h * q.filter_w);
  int const tap = blockIdx.z, c0 = blockIdx.x * kTurnTile, k0 = blockIdx.y * kTurnTile;
  auto const* const w = static_cast<int8_t const*>(q.b);
  auto* const out = static_cast<int8_t*>(q.out);
  for (int row = threadIdx.y; row < kTurnTile; row += blockDim.y) {
    int const k = k0 + row, c = c0 + int(threadIdx.x);
    if (k < out_c && c < in_c) tile[row][threadIdx.x] = w[(int64_t(k) * taps + tap) * in_c + c];
  }
  __syncthreads();
  // Reversing both directions of a filter is reversing the order of its taps.
  for (int row = threadIdx.y; row < kTurnTile; row += blockDim.y) {
    int const c = c0 + row, k = k0 + int(threadIdx.x);
    if (k < out_c && c < in_c) out[(int64_t(c) * taps + (taps - 1 - tap)) * out_c + k] = tile[threadIdx.x][row];
  }
}

inline int32_t run_turn_filters(QsyncArguments const& q) {
  if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
  int64_t const taps = q.filter_h * q.filter_w;
  if (taps < 1 || taps > 65535 || !fits_int32(q.in_c) || !fits_int32(q.out_c) || q.out_c > 65535 * int64_t(kTurnTile)) {
    return QSYNC_INVALID_PROBLEM;
  }
  DeviceGuard guard(q.device);
  if (guard.status() != QSYNC_OK) return guard.status();
  dim3 const grid{unsigned((q.in_c + kTurnTile - 1) / kTurnTile), unsigned((q.out_c + kTurnTile - 1) / kTurnTile), unsigned(taps)};
  turn_filters<<<grid, dim3(kTurnTile, 8), 0, static_cast<cudaStream_t>(q.stream)>>>(q);
  return cuda_status(cudaGetLastError());
}

}  // namespace qsync
