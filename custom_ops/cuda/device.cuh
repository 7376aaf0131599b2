// What the kernels share: accesses of 16 bytes, rounding in pairs, division by a constant.
//
// The code is CUDA C++. For tests without a GPU it is also compiled as C++, with tests/cuda_on_host/ instead of CUDA.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define NNORM_DEVICE __device__ __forceinline__
#define NNORM_DYNAMIC_SHARED(bytes) extern __shared__ __align__(16) unsigned char bytes[]
#define NNORM_CHECK_ACCESS(pointer, bytes)
#else
#include "cuda_on_host.h"
#endif

#include <type_traits>

#include "nnorm/half_mathematics.h"
#include "nnorm/problems.h"

namespace nnorm::cuda {

constexpr unsigned warp_size = 32;
constexpr size_t access_bytes = 16;  // the widest access of a thread

// The blocks of `threads` that a multiprocessor shall hold at once: `wanted`, or as many as it can.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int threads_of_multiprocessor = 1024;  // Turing
#else
constexpr int threads_of_multiprocessor = 1536;  // all later ones have these, or 2048
#endif
constexpr int blocks_at_once(int wanted, int threads) {
  return wanted * threads <= threads_of_multiprocessor ? wanted : threads_of_multiprocessor / threads;
}

// A 16-bit element that is computed with the bits of the CPU kernels.
template <class T>
struct SameBits : T {};

// Whether the device's approximate instructions compute ψ of tensors of T.
template <class T>
constexpr bool computed_by_device = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The arithmetic of ψ for tensors of T.
template <class T>
using Evaluation = std::conditional_t<computed_by_device<T>, ForHalf, Accurate>;

// Neighboring elements that one instruction reads or writes.
template <class T, int width>
struct alignas(sizeof(T) * width) Access {
  T values[width];
};

template <class T>
constexpr int widest = int(access_bytes / sizeof(T));

template <int width, class T>
NNORM_DEVICE Access<T, width> load(const T* from) {
  NNORM_CHECK_ACCESS(from, sizeof(Access<T, width>));
  return *reinterpret_cast<const Access<T, width>*>(from);
}

// Writes to any memory. In some kernels nvcc 13 writes each element with its own instruction; see store_global().
template <int width, class T>
NNORM_DEVICE void store(T* to, const Access<T, width>& access) {
  NNORM_CHECK_ACCESS(to, sizeof access);
  *reinterpret_cast<Access<T, width>*>(to) = access;
}

// Writes to device memory in one instruction.
template <int width, class T>
NNORM_DEVICE void store_global(T* to, const Access<T, width>& access) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof access == 16) {
    uint32_t words[4];
    memcpy(words, &access, sizeof words);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof access == 8) {
    uint32_t words[2];
    memcpy(words, &access, sizeof words);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else if constexpr (sizeof access == 4) {
    uint32_t word;
    memcpy(&word, &access, sizeof word);
    asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(word) : "memory");
  } else
#endif
  {
    store(to, access);
  }
}

// Copies from device to shared memory while the thread goes on, until wait_for_copies(). Before compute capability 8.0
// the thread waits.
template <int width, class T>
NNORM_DEVICE void copy_asynchronously(T* shared, const T* from) {
  NNORM_CHECK_ACCESS(shared, sizeof(Access<T, width>));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(unsigned(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(from)), "n"(int(sizeof(Access<T, width>)))
               : "memory");
#else
  store(shared, load<width>(from));
#endif
}

NNORM_DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Rounds all elements of an access, 16-bit elements in pairs if the device can.
template <class T, int width>
NNORM_DEVICE Access<T, width> narrowed(const Arithmetic<T> (&values)[width]) {
  Access<T, width> result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool in_pairs = sizeof(T) == 2 && width % 2 == 0;
#else
  constexpr bool in_pairs = false;
#endif
  if constexpr (in_pairs) {
#pragma unroll
    for (int j = 0; j < width; j += 2) {
      uint32_t pair;
      if constexpr (std::is_base_of_v<Float16, T>)  // it is Float16 or SameBits<Float16>
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[j + 1]), "f"(values[j]));
      else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[j + 1]), "f"(values[j]));
      memcpy(&result.values[j], &pair, sizeof pair);
    }
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) narrow(values[j], result.values[j]);
  }
  return result;
}

// The number of elements between the last 16-byte boundary and an address.
template <class T>
size_t misalignment(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % access_bytes / sizeof(T);
}

// Computes n/divisor for n < 2^31 by a multiplication (Granlund and Montgomery 1994, figure 4.1).
class Divisor {
 public:
  explicit Divisor(unsigned divisor) {
    while ((uint64_t(1) << shift_) < divisor) ++shift_;
    multiplier_ = unsigned(((((uint64_t(1) << shift_) - divisor) << 32) / divisor) + 1);
  }
  NNORM_DEVICE unsigned divide(unsigned n) const { return (__umulhi(n, multiplier_) + n) >> shift_; }

 private:
  unsigned multiplier_ = 0, shift_ = 0;
};

}  // namespace nnorm::cuda
