// Clusters: blocks that run at the same time and write to each other's shared memory (compute capability 9.0 and newer).
#pragma once

#include "device.cuh"

namespace nnorm::cuda {

constexpr unsigned most_blocks_of_cluster = 8;  // that every device with clusters has

#if defined(__CUDACC__)
// nvcc 12.1 is the first that knows st.async. Without clusters, clusters_at_once() says 0.
#if CUDART_VERSION < 12010 || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
#define NNORM_HAVE_CLUSTERS 0
#else
#define NNORM_HAVE_CLUSTERS 1
#endif
constexpr bool have_clusters = NNORM_HAVE_CLUSTERS;

// Counts the bytes that blocks of a cluster have sent to one of them (an mbarrier). A phase ends when one thread has
// expected its bytes and all of them have arrived.
struct alignas(8) Arrivals {
  uint64_t state;
};

#if NNORM_HAVE_CLUSTERS
NNORM_DEVICE unsigned in_shared_memory(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

NNORM_DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
NNORM_DEVICE unsigned cluster_size() {
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
NNORM_DEVICE void cluster_barrier() {
  __syncwarp();  // .aligned: all threads of a warp arrive together
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One thread prepares what all blocks use after the next cluster_barrier().
NNORM_DEVICE void prepare(Arrivals& arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                   in_shared_memory(&arrivals))
               : "memory");
}
// One thread of the block expects the bytes of each phase.
NNORM_DEVICE void expect(Arrivals& arrivals, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared_memory(&arrivals)), "r"(bytes)
               : "memory");
}
// Writes to block `rank`, there where `to` and `arrivals` are in this block. A cluster_barrier() would wait for all that
// the blocks have written to device memory, this does not.
NNORM_DEVICE void send(float value, float& to, Arrivals& arrivals, unsigned rank) {
  unsigned there, counter;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(in_shared_memory(&to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(in_shared_memory(&arrivals)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
               "r"(__float_as_uint(value)), "r"(counter)
               : "memory");
}
// Waits until the phase with this parity (of its number from 0) has ended. The bytes are in the memory of this block, so the
// default order of try_wait, that of a block, suffices.
NNORM_DEVICE void wait_for(Arrivals& arrivals, unsigned parity) {
  unsigned ended;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(in_shared_memory(&arrivals)), "r"(parity)
        : "memory");
  } while (!ended);
  __syncwarp();
}
#else
NNORM_DEVICE unsigned cluster_rank() { return 0; }
NNORM_DEVICE unsigned cluster_size() { return 1; }
NNORM_DEVICE void cluster_barrier() {}
NNORM_DEVICE void prepare(Arrivals&) {}
NNORM_DEVICE void expect(Arrivals&, unsigned) {}
NNORM_DEVICE void send(float, float&, Arrivals&, unsigned) {}
NNORM_DEVICE void wait_for(Arrivals&, unsigned) {}
#endif

#else  // tests without a GPU
constexpr bool have_clusters = true;
using cuda_on_host::Arrivals;

inline unsigned cluster_rank() { return cuda_on_host::Cluster::current().rank(); }
inline unsigned cluster_size() { return cuda_on_host::Cluster::current().size(); }
inline void cluster_barrier() { cuda_on_host::Cluster::current().wait(cuda_on_host::Waiting::for_cluster); }
inline void prepare(Arrivals& arrivals) { arrivals = {}; }
inline void expect(Arrivals& arrivals, unsigned bytes) {
  arrivals.missing += int32_t(bytes);
  arrivals.expected = 1;
  arrivals.end_phase();
}
inline void send(float value, float& to, Arrivals& arrivals, unsigned rank) {
  auto& cluster = cuda_on_host::Cluster::current();
  cluster.in_block(rank, to) = value;
  Arrivals& there = cluster.in_block(rank, arrivals);
  there.missing -= int32_t(sizeof value);
  there.end_phase();
}
inline void wait_for(Arrivals& arrivals, unsigned parity) { cuda_on_host::Cluster::current().wait_for(arrivals, parity); }
#endif

}  // namespace nnorm::cuda
