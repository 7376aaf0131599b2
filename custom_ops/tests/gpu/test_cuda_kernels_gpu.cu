// The same tests where a GPU runs the kernels.
#include "../test_cuda_kernels.cpp"
