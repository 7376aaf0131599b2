// The part of CUDA that the .cuh files use, implemented on the CPU for tests without a GPU.
//
// Blocks run one at a time. Each thread of a block has a context with its own stack. A scheduler resumes the threads in
// an order that changes from round to round, so that a missing barrier shows; a thread runs until it waits at a barrier
// or in an exchange with its warp. A launch fails if threads of a block wait for each other forever, or if some end
// while others wait at a barrier. With AddressSanitizer this finds what compute-sanitizer's memcheck finds on a GPU. It
// does not show how fast a kernel is, and does not run the device's instructions.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __shared__ static  // blocks run one at a time, so they can share it
#define __launch_bounds__(...)
#define NNORM_DEVICE inline
#define NNORM_DYNAMIC_SHARED(bytes) unsigned char* const bytes = cuda_on_host::dynamic_shared()
#define NNORM_CHECK_ACCESS(pointer, bytes) cuda_on_host::check_access(pointer, bytes)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// The indices of the running thread.
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// GCC defines a macro, Clang has a feature.
#if defined(__has_feature)
#define NNORM_HAS_ADDRESS_SANITIZER __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define NNORM_HAS_ADDRESS_SANITIZER 1
#else
#define NNORM_HAS_ADDRESS_SANITIZER 0
#endif

namespace cuda_on_host {

constexpr unsigned lanes = 32;
constexpr size_t stack_bytes = 256 << 10;

enum class Waiting { not_at_all, for_warp, for_block, for_nothing_more };

struct Context {
  ucontext_t start;
  jmp_buf resume;
  bool can_resume = false;
};

// Switches from one context to another. swapcontext() makes a system call each time, which took half of the tests'
// time, so it is used only if AddressSanitizer has to follow.
inline void change(Context& from, Context& to) {
#if NNORM_HAS_ADDRESS_SANITIZER
  swapcontext(&from.start, &to.start);
#else
  from.can_resume = true;
  if (_setjmp(from.resume) != 0) return;
  if (to.can_resume) _longjmp(to.resume, 1);
  setcontext(&to.start);
#endif
}

struct Thread {
  Context context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[stack_bytes]};
  Waiting waiting;
  uint64_t exchanged;
};

// The number of rows and columns of a grid's blocks that run, counted from the last. Tests of huge grids set it.
inline unsigned last_blocks = ~0u;

class Block {
 public:
  static Block& current() {
    static Block block;
    return block;
  }

  // Runs one block; returns false if its threads wait forever.
  bool run(unsigned count, size_t shared_bytes, const std::function<void()>& kernel) {
    while (threads_.size() < count) add_thread();
    // The memory ends at the end of the allocation, so that AddressSanitizer detects accesses after it. Its content is
    // arbitrary.
    shared_.reset(new unsigned char[shared_bytes]);
    std::memset(shared_.get(), 0xa5, shared_bytes);
    kernel_ = &kernel;
    count_ = count;
    for (unsigned i = 0; i < count; ++i) threads_[i]->waiting = Waiting::not_at_all;
    for (unsigned round = 0;; ++round) {
      bool ran = false;
      for (unsigned n = 0; n < count; ++n) {
        const unsigned i = round % 2 ? count - 1 - n : n;
        if (threads_[i]->waiting != Waiting::not_at_all) continue;
        resume(i);
        ran = true;
      }
      if (release() || ran) continue;
      if (ended() == count) return true;
      threads_.clear();  // they are stopped inside this kernel
      return false;
    }
  }

  void wait(Waiting what) {
    Thread& thread = *threads_[running_];
    thread.waiting = what;
    change(thread.context, scheduler_);
  }

  template <class T>
  T exchange(T value, unsigned with) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    std::memcpy(&threads_[running_]->exchanged, &value, sizeof value);
    wait(Waiting::for_warp);
    std::memcpy(&value, &threads_[with]->exchanged, sizeof value);
    wait(Waiting::for_warp);  // until all have read
    return value;
  }

  unsigned char* shared() { return shared_.get(); }

 private:
  void add_thread() {
    threads_.push_back(std::make_unique<Thread>());
    Thread& thread = *threads_.back();
    getcontext(&thread.context.start);
    thread.context.start.uc_stack.ss_sp = thread.stack.get();
    thread.context.start.uc_stack.ss_size = stack_bytes;
    makecontext(&thread.context.start, &Block::run_thread, 0);
  }

  // Runs a thread's part of one block after another.
  static void run_thread() {
    Block& block = current();
    for (;;) {
      (*block.kernel_)();
      block.wait(Waiting::for_nothing_more);
    }
  }

  void resume(unsigned i) {
    running_ = i;
    threadIdx = dim3(i);
    change(scheduler_, threads_[i]->context);
  }

  unsigned ended() const { return count_waiting(0, count_, Waiting::for_nothing_more); }

  unsigned count_waiting(unsigned begin, unsigned end, Waiting what) const {
    return unsigned(std::count_if(threads_.begin() + begin, threads_.begin() + end,
                                  [what](const auto& thread) { return thread->waiting == what; }));
  }

  // Resumes the threads of a warp or block if all of them have arrived.
  bool release() {
    bool released = false;
    const auto all = [&](unsigned begin, unsigned end, Waiting what) {
      if (count_waiting(begin, end, what) != end - begin) return;
      for (unsigned i = begin; i < end; ++i) threads_[i]->waiting = Waiting::not_at_all;
      released = true;
    };
    for (unsigned begin = 0; begin < count_; begin += lanes)
      all(begin, std::min(begin + lanes, count_), Waiting::for_warp);
    all(0, count_, Waiting::for_block);
    return released;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::unique_ptr<unsigned char[]> shared_;
  const std::function<void()>* kernel_ = nullptr;
  Context scheduler_;
  unsigned count_ = 0, running_ = 0;
};

inline unsigned char* dynamic_shared() { return Block::current().shared(); }

// A GPU faults if an access is not aligned to its size.
inline void check_access(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  std::fprintf(stderr, "an access of %zu bytes at %p is not aligned\n", bytes, pointer);
  std::abort();
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::Block::current().wait(cuda_on_host::Waiting::for_block); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned distance) {
  return cuda_on_host::Block::current().exchange(value, threadIdx.x ^ distance);
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return cuda_on_host::Block::current().exchange(value, threadIdx.x / cuda_on_host::lanes * cuda_on_host::lanes + lane);
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }

namespace nnorm::cuda {

template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, cudaStream_t, Work work, size_t shared = 0,
                   size_t = 0) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || threads == 0 || threads > 1024 ||
      shared > size_t(cuda_on_host::shared_memory))
    return cudaErrorInvalidValue;  // as a device does
  gridDim = blocks;
  blockDim = dim3(threads);
  const unsigned most = cuda_on_host::last_blocks;
  for (unsigned y = blocks.y > most ? blocks.y - most : 0; y < blocks.y; ++y)
    for (unsigned x = blocks.x > most ? blocks.x - most : 0; x < blocks.x; ++x) {
      blockIdx = dim3(x, y);
      if (!cuda_on_host::Block::current().run(threads, shared, [&] { kernel(work); })) return cudaErrorLaunchFailure;
    }
  return cudaSuccess;
}

}  // namespace nnorm::cuda
