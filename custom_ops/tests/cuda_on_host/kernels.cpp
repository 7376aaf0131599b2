// The CUDA kernels for one type of tensor, NNORM_TYPE, compiled for the CPU (cuda_on_host.h); CMake compiles this file once
// for each type.
#include "kernels.cu"
