// The same tests where a GPU runs the kernels, captured into graphs.
#include "../tensorrt/test_tensorrt_plugin.cpp"
