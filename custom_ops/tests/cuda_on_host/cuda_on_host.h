// The part of CUDA that the .cuh files use, implemented on the CPU for tests without a GPU.
//
// Blocks run one at a time, those of a cluster together. Each thread has a context with its own stack. A scheduler
// resumes the threads in an order that changes from round to round, so that a missing barrier shows; a thread runs until
// it waits at a barrier, in an exchange with its warp or for data from another block. A launch fails if threads wait for
// each other forever, or if some end while others wait at a barrier. With AddressSanitizer this finds what
// compute-sanitizer's memcheck finds on a GPU. It does not show how fast a kernel is, and does not run the device's
// instructions.
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
#define __shared__ static  // blocks run one at a time, so they can share it; kernels for clusters have dynamic memory only
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

enum class Waiting { not_at_all, to_start, for_warp, for_block, for_cluster, for_arrivals, for_nothing_more };

// Counts the bytes that blocks of a cluster have sent to one of them (an mbarrier). A phase ends when one thread has
// expected its bytes and all of them have arrived.
struct alignas(8) Arrivals {
  int32_t missing;  // negative if bytes arrived before they were expected
  uint16_t phase, expected;

  void end_phase() {
    if (!expected || missing != 0) return;
    ++phase;
    expected = 0;
  }
  bool has_ended(unsigned parity) const { return phase % 2 != parity; }
};

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
  unsigned exchange;  // which one it is
  const Arrivals* arrivals;  // what it waits for, and the parity of the phase
  unsigned parity;
};

// The number of rows and columns of a grid's blocks that run, counted from the last. Tests of huge grids set it.
inline unsigned last_blocks = ~0u;

// The blocks that run together: one, or those of a cluster.
class Cluster {
 public:
  static Cluster& current() {
    static Cluster cluster;
    return cluster;
  }

  // Runs `size` blocks of `count` threads, from block `first` on; returns false if threads wait forever.
  bool run(dim3 first, unsigned size, unsigned count, size_t shared_bytes, const std::function<void()>& kernel) {
    while (threads_.size() < size * count) add_thread();
    // The memory of each block ends at the end of an allocation, so that AddressSanitizer detects accesses after it. Its
    // content is arbitrary.
    shared_.clear();
    for (unsigned rank = 0; rank < size; ++rank) {
      shared_.emplace_back(new unsigned char[shared_bytes]);
      std::memset(shared_.back().get(), 0xa5, shared_bytes);
    }
    kernel_ = &kernel;
    first_ = first;
    size_ = size;
    count_ = count;
    const unsigned all = size * count;
    for (unsigned i = 0; i < all; ++i) threads_[i]->waiting = Waiting::to_start;
    start(0);
    for (unsigned round = 0;; ++round) {
      bool ran = false;
      for (unsigned n = 0; n < all; ++n) {
        const unsigned i = round % 2 ? all - 1 - n : n;
        if (threads_[i]->waiting != Waiting::not_at_all) continue;
        resume(i);
        ran = true;
      }
      if (release() || ran || start_next()) continue;
      if (count_waiting(0, all, Waiting::for_nothing_more) == all) return true;
      threads_.clear();  // they are stopped inside this kernel
      return false;
    }
  }

  void wait(Waiting what) {
    Thread& thread = *threads_[running_];
    thread.waiting = what;
    change(thread.context, scheduler_);
  }

  void wait_for(const Arrivals& arrivals, unsigned parity) {
    threads_[running_]->arrivals = &arrivals;
    threads_[running_]->parity = parity;
    wait(Waiting::for_arrivals);
  }

  // All threads of a warp must take the same exchange, whose number `which` is.
  template <class T>
  T exchange(T value, unsigned with, unsigned which) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    std::memcpy(&threads_[running_]->exchanged, &value, sizeof value);
    threads_[running_]->exchange = which;
    wait(Waiting::for_warp);
    const unsigned block = rank() * count_, begin = block + with / lanes * lanes;
    for (unsigned i = begin; i < std::min(begin + lanes, block + count_); ++i)
      if (threads_[i]->exchange != which) {
        std::fprintf(stderr, "the threads of a warp take different exchanges\n");
        std::abort();
      }
    std::memcpy(&value, &threads_[block + with]->exchanged, sizeof value);
    wait(Waiting::for_warp);  // until all have read
    return value;
  }

  unsigned size() const { return size_; }
  unsigned rank() const { return running_ / count_; }  // of the running thread's block
  unsigned char* shared() { return shared_[rank()].get(); }

  // What is in block `other` where `place` is in the running thread's block.
  template <class T>
  T& in_block(unsigned other, T& place) {
    return *reinterpret_cast<T*>(shared_[other].get() + (reinterpret_cast<unsigned char*>(&place) - shared()));
  }

 private:
  void add_thread() {
    threads_.push_back(std::make_unique<Thread>());
    Thread& thread = *threads_.back();
    getcontext(&thread.context.start);
    thread.context.start.uc_stack.ss_sp = thread.stack.get();
    thread.context.start.uc_stack.ss_size = stack_bytes;
    makecontext(&thread.context.start, &Cluster::run_thread, 0);
  }

  // Runs a thread's part of one block after another.
  static void run_thread() {
    Cluster& cluster = current();
    for (;;) {
      (*cluster.kernel_)();
      cluster.wait(Waiting::for_nothing_more);
    }
  }

  void resume(unsigned i) {
    running_ = i;
    threadIdx = dim3(i % count_);
    blockIdx = dim3(first_.x + rank(), first_.y);
    change(scheduler_, threads_[i]->context);
  }

  void start(unsigned rank) {
    for (unsigned i = rank * count_; i < (rank + 1) * count_; ++i) threads_[i]->waiting = Waiting::not_at_all;
  }

  // A block starts as late as possible, when those before it have ended or wait for it: so a missing
  // barrier before the first access to its memory shows.
  bool start_next() {
    for (unsigned rank = 0; rank < size_; ++rank)
      if (threads_[rank * count_]->waiting == Waiting::to_start) return start(rank), true;
    return false;
  }

  unsigned count_waiting(unsigned begin, unsigned end, Waiting what) const {
    return unsigned(std::count_if(threads_.begin() + begin, threads_.begin() + end,
                                  [what](const auto& thread) { return thread->waiting == what; }));
  }

  // Resumes the threads of a warp, block or cluster if all of them have arrived, and those whose data have arrived.
  bool release() {
    bool released = false;
    const auto all = [&](unsigned begin, unsigned end, Waiting what) {
      if (count_waiting(begin, end, what) != end - begin) return;
      for (unsigned i = begin; i < end; ++i) threads_[i]->waiting = Waiting::not_at_all;
      released = true;
    };
    const unsigned end = size_ * count_;
    for (unsigned block = 0; block < end; block += count_) {
      for (unsigned begin = 0; begin < count_; begin += lanes)
        all(block + begin, block + std::min(begin + lanes, count_), Waiting::for_warp);
      all(block, block + count_, Waiting::for_block);
    }
    all(0, end, Waiting::for_cluster);
    for (unsigned i = 0; i < end; ++i) {
      Thread& thread = *threads_[i];
      if (thread.waiting != Waiting::for_arrivals || !thread.arrivals->has_ended(thread.parity)) continue;
      thread.waiting = Waiting::not_at_all;
      released = true;
    }
    return released;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::unique_ptr<unsigned char[]>> shared_;
  const std::function<void()>* kernel_ = nullptr;
  Context scheduler_;
  dim3 first_;
  unsigned size_ = 1, count_ = 1, running_ = 0;
};

inline unsigned char* dynamic_shared() { return Cluster::current().shared(); }

// A GPU faults if an access is not aligned to its size.
inline void check_access(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  std::fprintf(stderr, "an access of %zu bytes at %p is not aligned\n", bytes, pointer);
  std::abort();
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::Cluster::current().wait(cuda_on_host::Waiting::for_block); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned distance) {
  return cuda_on_host::Cluster::current().exchange(value, threadIdx.x ^ distance, distance);
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned lane, int width = int(cuda_on_host::lanes)) {
  const unsigned with = threadIdx.x / unsigned(width) * unsigned(width) + lane;
  return cuda_on_host::Cluster::current().exchange(value, with, cuda_on_host::lanes + lane);
}

inline int __any_sync(unsigned mask, bool value) {
  for (unsigned distance = cuda_on_host::lanes / 2; distance > 0; distance /= 2)
    value |= __shfl_xor_sync(mask, value, distance);
  return value;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }

namespace nnorm::cuda {

template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, cudaStream_t, Work work, size_t shared = 0,
                   size_t = 0, unsigned cluster = 1) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || threads == 0 || threads > 1024 ||
      shared > size_t(cuda_on_host::shared_memory) || cluster > 8 || blocks.x % cluster != 0)
    return cudaErrorInvalidValue;  // as a device does
  gridDim = blocks;
  blockDim = dim3(threads);
  cuda_on_host::have_clusters_run |= cluster > 1;
  cuda_on_host::last_grid = blocks.x;
  const unsigned most = cuda_on_host::last_blocks;
  for (unsigned y = blocks.y > most ? blocks.y - most : 0; y < blocks.y; ++y)
    for (unsigned x = blocks.x > most ? (blocks.x - most) / cluster * cluster : 0; x < blocks.x; x += cluster)
      if (!cuda_on_host::Cluster::current().run(dim3(x, y), cluster, threads, shared, [&] { kernel(work); }))
        return cudaErrorLaunchFailure;
  return cudaSuccess;
}

struct KnownClusters {};

template <class Work>
unsigned clusters_at_once(void (*)(Work), int, unsigned, unsigned, size_t, size_t, KnownClusters&) {
  return cuda_on_host::clusters;
}

}  // namespace nnorm::cuda
