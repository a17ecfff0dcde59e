// The C interface between the host program and a compiled kernel library.
//
// A library made for the name NAME exports
//     int32_t qsync_NAME(const QsyncArguments*)             runs the kernel on arguments->stream; returns a status (below)
//     int64_t qsync_NAME_workspace(const QsyncArguments*)   bytes of workspace that the same arguments need; negative: -status
// Nothing throws, exits or touches CUDA before it is called.  abi.py mirrors this file; a test compares the two.
#pragma once

#include <stdint.h>

#define QSYNC_EXPORT extern "C" __attribute__((visibility("default")))

// Statuses.  Errors of the CUDA runtime are returned as QSYNC_CUDA_ERROR + the cudaError_t.
#define QSYNC_OK 0
#define QSYNC_MISALIGNED 1         // a pointer or a leading dimension is not aligned as the kernel needs it
#define QSYNC_INVALID_PROBLEM 2    // a size is negative, too large, or a stride does not fit
#define QSYNC_NOT_SUPPORTED 3      // the kernel cannot run these arguments on this device
#define QSYNC_WORKSPACE_TOO_SMALL 4
#define QSYNC_WRONG_ABI 5          // struct_bytes is not sizeof(QsyncArguments)
#define QSYNC_INTERNAL 6           // CUTLASS refused for a reason that it does not tell
#define QSYNC_CUDA_ERROR 1000

// Directions of rasterization.
#define QSYNC_RASTER_AUTO 0
#define QSYNC_RASTER_ALONG_M 1
#define QSYNC_RASTER_ALONG_N 2

// Every field is 8 bytes wide, so that the layout does not depend on a compiler's padding.
struct QsyncArguments {
  int64_t struct_bytes;     // sizeof(QsyncArguments)

  // Matrix product out[m, n] = a[m, k] * b[n, k]; sizes in elements.
  int64_t m, n, k;
  int64_t batch;            // independent products, 1 for a plain one
  int64_t lda, ldb, ldo;    // elements between consecutive rows of a, b and out
  int64_t stride_a, stride_b, stride_o;  // elements between the products of a batch

  // Convolution: x NHWC (images, in_h, in_w, in_c), w KRSC (out_c, filter_h, filter_w, in_c / groups),
  // out NPQK (images, out_h, out_w, out_c).
  int64_t images, in_h, in_w, in_c;
  int64_t out_h, out_w, out_c;
  int64_t filter_h, filter_w;
  int64_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  int64_t groups;

  // Device pointers; null where there is none.
  const void* a;            // also x of a convolution
  const void* b;            // also w
  const float* a_scale;     // a_scale_count elements: 1, or one per row (m)
  const float* b_scale;     // b_scale_count elements: 1, or one per column (n)
  const void* bias;         // n elements of the output's format or float32, as the kernel's source says
  void* out;
  void* workspace;
  int64_t a_scale_count, b_scale_count;
  int64_t workspace_bytes;

  void* stream;             // cudaStream_t
  int64_t device;           // ordinal
  int64_t sm_count;         // multiprocessors that the kernel may fill; 0: ask the device
  int64_t raster;           // QSYNC_RASTER_...
  int64_t swizzle;          // band width in tiles, at least 1
  int64_t splits;           // parts of k, at least 1
};
