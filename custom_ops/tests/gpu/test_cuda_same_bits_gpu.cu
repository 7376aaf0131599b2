// The same tests where a GPU runs the kernels.
#include "../test_cuda_same_bits.cpp"
