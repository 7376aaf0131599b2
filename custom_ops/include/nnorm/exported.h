// A function that other programs find in the library. On Linux and macOS the list of a library (exports.map) decides too.
#pragma once

#if defined(_WIN32)
#define NNORM_EXPORTED __declspec(dllexport)
#else
#define NNORM_EXPORTED __attribute__((visibility("default")))
#endif
