// The C interface of producers: normalizations and activations that write the 8-bit copy of their result.  Statuses are abi.h's.
//
// A library made for the name NAME exports
//     int32_t qsync_NAME(const QsyncProducerArguments*)             runs on arguments->stream; returns a status
//     int64_t qsync_NAME_workspace(const QsyncProducerArguments*)   bytes of workspace; negative: -status
// compiling/library.py mirrors this file; a test compares the two.
#pragma once

#include "abi.h"

// Formats of tensors, as their fields say.
#define QSYNC_FLOAT32 0
#define QSYNC_FLOAT16 1
#define QSYNC_BFLOAT16 2
#define QSYNC_INT8 3

// Rounding of 8-bit copies.
#define QSYNC_NEAREST 0
#define QSYNC_STOCHASTIC 1
#define QSYNC_FLOOR 2

// Every field is 8 bytes wide.  Tensors are dense (rows, columns): positions and channels of channels-last images.  A pointer is
// null where there is no operand, or where an output is not wanted.
struct QsyncProducerArguments {
  int64_t struct_bytes;     // sizeof(QsyncProducerArguments)
  int64_t rows, columns;
  int64_t x_format, residual_format, out_format, kept_format, grad_format, grad_input_format;
  int64_t rounding;
  int64_t scale_per_row;    // 1: the result's copy has a scale for each row; 0: one
  int64_t seed, x_seed;     // of the rounding of the result's copy, and of what is kept
  int64_t offset;           // of random numbers, where offset_tensor is null
  double eps;

  const void* x;            // forward: what is normalized; backward: that, or its 8-bit copy
  const void* residual;
  const float* weight;
  const float* bias;
  const float* residual_absmax;
  const int64_t* offset_tensor;
  float* mean;              // written by forward kernels, read by backward ones, as the next
  float* spread;            // a batch norm's variance, a layer norm's 1 / deviation
  void* out;
  float* absmax;
  int8_t* q;
  float* scale;
  int64_t* stream_out;      // the stream of all of x: the offset for those who round because of the copy
  void* kept;               // the sum that a layer norm normalizes
  int8_t* x_q;
  float* x_scale;
  uint8_t* open;            // a bit for each element: ReLU is open
  const void* grad;
  void* grad_input;
  void* grad_residual;      // in the format of grad_input
  float* grad_weight;
  float* grad_bias;
  const float* multiplier;  // of the channels of a gradient whose copy q is
  void* workspace;

  int64_t workspace_bytes;
  void* stream;             // cudaStream_t
  int64_t device;           // ordinal
  int64_t sm_count;         // multiprocessors
};
