// How fast the kernels of GPUs are, beside copies of as many bytes: a Markdown table for the device that is there.
//
//   kernels [REPEATS]
//
// Every variant is a CUDA graph of many launches that rotate through tensors which together are several times the L2
// cache. The graphs of one table row's size take turns, and a time is the median over the turns. Every variant writes
// into memory poisoned with NaN first, and is only timed if none is left.
//
// CMake (NNORM_BUILD_TESTS) builds it with the kernels. By hand: custom_ops/cuda/kernels.cu once for each of float,
// nnorm::Float16 and nnorm::BFloat16 with -DNNORM_TYPE, and this file, everything with
// nvcc -std=c++17 -O3 -arch=native -Icustom_ops/include -DNNORM_INSTRUCTION_SET=cuda.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "nnorm/cuda_kernels.h"

namespace {

using nnorm::Arithmetic;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);  // what comes after could only be wrong
}

constexpr size_t pool_bytes = size_t(1) << 30;
constexpr size_t most_channels = 65536;

__host__ __device__ unsigned scrambled(size_t n) {  // splitmix64
  unsigned long long z = n * 0x9e3779b97f4a7c15ull + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return unsigned(z >> 32);
}

__host__ __device__ float uniform(size_t n) { return float(scrambled(n) >> 8) * 0x1p-24f; }

// Normal numbers, by Box and Muller, each its own: no kernel can profit from repetition.
template <class T>
__global__ void fill_with_normal_numbers(T* to, size_t count, size_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    const float radius = sqrtf(-2 * logf(uniform(2 * (seed + i)) + 0x1p-25f));
    nnorm::narrow(Arithmetic<T>(radius * cospif(2 * uniform(2 * (seed + i) + 1))), to[i]);
  }
}

template <class T>
__global__ void count_nan(const T* from, size_t count, unsigned long long* found) {
  unsigned mine = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    const auto value = nnorm::widened(from[i]);
    mine += value != value;
  }
  if (mine) atomicAdd(found, mine);
}

// What a kernel that reads and writes once could reach: four accesses of 16 bytes under way in each thread.
__global__ void __launch_bounds__(256) copy_accesses(const uint4* from, uint4* to, size_t count) {
  constexpr int in_flight = 4;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += in_flight * step) {
    uint4 values[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k)
      if (i + k * step < count) values[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < in_flight; ++k)
      if (i + k * step < count) to[i + k * step] = values[k];
  }
}

// Memory that all variants share; tensors are pieces of it, one behind the other.
struct Pools {
  unsigned char *x, *residual, *y;
  float* parameters[6];  // scale, shift, exponent_pos, exponent_neg, weight, bias
  void* tables[2];  // of the channels of a group; the second has the bits of CPUs
  unsigned long long* found;

  Pools() {
    for (unsigned char** pool : {&x, &residual, &y}) must(cudaMalloc(pool, pool_bytes), "allocation");
    must(cudaMalloc(&found, sizeof *found), "allocation");
    nnorm::ChannelProblem<double> largest{};
    largest.channels = most_channels;
    for (void*& table : tables) must(cudaMalloc(&table, nnorm::cuda::table_size(largest)), "allocation");
    const float least[] = {0.5f, -0.5f, 0, 0, 0.5f, -0.5f}, greatest[] = {1.5f, 0.5f, 2, 2, 1.5f, 0.5f};
    for (int p = 0; p < 6; ++p) {
      std::vector<float> values(most_channels);
      for (size_t i = 0; i < most_channels; ++i)
        values[i] = least[p] + (greatest[p] - least[p]) * uniform(p * most_channels + i);
      if (p == 3)  // λ in [0, 2], exponent_pos and exponent_neg are λ and 2 − λ
        for (size_t i = 0; i < most_channels; ++i) values[i] = 2 - 2 * uniform(2 * most_channels + i);
      must(cudaMalloc(&parameters[p], most_channels * sizeof(float)), "allocation");
      must(cudaMemcpy(parameters[p], values.data(), most_channels * sizeof(float), cudaMemcpyHostToDevice), "copy");
    }
    must(cudaDeviceSynchronize(), "copies");  // a non-blocking stream does not wait for them
  }
};

struct Device {
  cudaDeviceProp properties;
  cudaStream_t stream;

  Device() {
    must(cudaSetDevice(0), "device");
    must(cudaGetDeviceProperties(&properties, 0), "properties");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  unsigned blocks() const { return unsigned(properties.multiProcessorCount) * 32; }
};

// One candidate: `launch` enqueues it for the tensors of a slot. Bytes are those that one launch reads and writes.
struct Variant {
  std::string name;
  double bytes;
  std::function<cudaError_t(size_t slot)> launch;
  cudaGraphExec_t graph = nullptr;
  std::vector<float> milliseconds = {};  // of a launch, turn by turn

  float quantile(double share) const {
    std::vector<float> sorted = milliseconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[size_t(share * double(sorted.size() - 1) + 0.5)];
  }
  double rate() const { return bytes / quantile(0.5) / 1e6; }  // GB/s
};

// A tensor size, and all that is measured with it.
template <class T>
class Group {
 public:
  Group(const Device& device, const Pools& pools, std::string title, size_t elements)
      : device_(device), pools_(pools), title_(std::move(title)), elements_(elements), bytes_(elements * sizeof(T)) {
    // Slots begin at 256 bytes, as allocations do, and together exceed the cache several times.
    stride_ = (bytes_ + 255) / 256 * 256;
    const size_t beyond_cache = 1 + 4 * size_t(device.properties.l2CacheSize) / stride_;
    slots_ = std::min(pool_bytes / stride_, std::max<size_t>(2, beyond_cache));
    if (slots_ < 2) must(cudaErrorInvalidValue, "tensors too large for the pools");
    add("cudaMemcpyAsync", 2, [this](size_t slot) {
      return cudaMemcpyAsync(y(slot), x(slot), bytes_, cudaMemcpyDeviceToDevice, device_.stream);
    });
    if (bytes_ % sizeof(uint4) == 0)
      add("copy kernel", 2, [this](size_t slot) {
        const size_t count = bytes_ / sizeof(uint4);
        const unsigned blocks = unsigned(std::min<size_t>((count + 1023) / 1024, device_.blocks()));
        copy_accesses<<<blocks, 256, 0, device_.stream>>>(reinterpret_cast<const uint4*>(x(slot)),
                                                          reinterpret_cast<uint4*>(y(slot)), count);
        return cudaGetLastError();
      });
  }

  T* x(size_t slot) const { return at(pools_.x, slot); }
  T* residual(size_t slot) const { return at(pools_.residual, slot); }
  T* y(size_t slot) const { return at(pools_.y, slot); }

  void add(const std::string& name, int tensors, std::function<cudaError_t(size_t)> launch) {
    variants_.push_back({name, double(tensors) * double(bytes_), std::move(launch)});
  }

  // The values of `same_bits` that differ in what the kernels do: tensors of 16 bits can be computed in two ways.
  static std::vector<bool> arithmetics() { return sizeof(T) == 2 ? std::vector{false, true} : std::vector{false}; }
  static std::string named(const std::string& name, bool same_bits) { return same_bits ? name + ", same bits" : name; }

  // Rows with channels in the middle, [samples, channels, extent], or last, [samples, lanes]. ONNX Runtime's operators have a
  // table of the channels, TensorRT's have none.
  void add_channels(size_t samples, size_t channels, size_t extent, size_t lanes) {
    nnorm::ChannelProblem<T> of_group{};
    for (int p = 0; p < 6; ++p) of_group.parameters[p] = pools_.parameters[p];
    of_group.samples = samples;
    of_group.channels = channels;
    of_group.extent = extent;
    for (const bool same_bits : arithmetics())
      must(nnorm::cuda::prepare(of_group, pools_.tables[same_bits], device_.stream, same_bits), "table");
    for (const nnorm::EpilogueFacts& facts : nnorm::epilogues)
      for (const bool same_bits : arithmetics())
        for (const void* table : {static_cast<const void*>(pools_.tables[same_bits]), static_cast<const void*>(nullptr)})
          add(named(facts.operator_name, same_bits) + (table ? "" : ", no table"), facts.takes_residual ? 3 : 2,
              [=](size_t slot) {
                nnorm::ChannelProblem<T> problem = of_group;
                problem.x = x(slot);
                problem.residual = facts.takes_residual ? residual(slot) : nullptr;
                problem.y = y(slot);
                problem.epilogue = facts.epilogue;
                return lanes ? nnorm::cuda::run_channels_last(problem, lanes, device_.stream, same_bits, table)
                             : nnorm::cuda::run(problem, device_.stream, same_bits, table);
              });
  }

  void add_rows(const std::string& name, size_t rows, size_t row_length, size_t period, size_t run) {
    for (const bool same_bits : arithmetics())
      add(named(name, same_bits), 2, [=](size_t slot) {
        nnorm::RowProblem<T> problem{};
        problem.x = x(slot);
        problem.y = y(slot);
        problem.weight = pools_.parameters[4];
        problem.bias = pools_.parameters[5];
        problem.rows = rows;
        problem.row_length = row_length;
        problem.period = period;
        problem.run = run;
        problem.epsilon = 1e-5;
        problem.delta = 0.0031622776601683794;
        return nnorm::cuda::run(problem, device_.stream, same_bits);
      });
  }

  void measure(int repeats) {
    for (Variant& variant : variants_) check(variant);
    for (Variant& variant : variants_) variant.graph = captured(variant);
    cudaEvent_t start, stop;
    must(cudaEventCreate(&start), "event");
    must(cudaEventCreate(&stop), "event");
    constexpr int warm_up = 3;
    for (int turn = 0; turn < warm_up + repeats; ++turn)
      for (Variant& variant : variants_) {
        must(cudaEventRecord(start, device_.stream), "event");
        must(cudaGraphLaunch(variant.graph, device_.stream), "graph launch");
        must(cudaEventRecord(stop, device_.stream), "event");
        must(cudaEventSynchronize(stop), variant.name.c_str());
        float milliseconds = 0;
        must(cudaEventElapsedTime(&milliseconds, start, stop), "event");
        if (turn >= warm_up) variant.milliseconds.push_back(milliseconds / float(launches()));
      }
    must(cudaEventDestroy(start), "event");
    must(cudaEventDestroy(stop), "event");
    for (Variant& variant : variants_) must(cudaGraphExecDestroy(variant.graph), "graph");
  }

  void print() const {
    double copy = 0;
    for (const Variant& variant : variants_)
      if (variant.name.find("opy") != std::string::npos) copy = std::max(copy, variant.rate());
    for (const Variant& variant : variants_)
      std::printf("| %s | %s | %.1f | %.1f – %.1f | %.0f | %.0f %% |\n", title_.c_str(), variant.name.c_str(),
                  1e3 * variant.quantile(0.5), 1e3 * variant.quantile(0.1), 1e3 * variant.quantile(0.9), variant.rate(),
                  100 * variant.rate() / copy);
    std::fflush(stdout);
  }

 private:
  T* at(unsigned char* pool, size_t slot) const { return reinterpret_cast<T*>(pool + slot * stride_); }

  // Launches of a graph, which rotate through the slots: as many as move a few gigabytes, so that its own start hardly
  // counts, but few enough for a graph.
  size_t launches() const {
    constexpr size_t most = 4096;
    return std::min(most, slots_ * std::max<size_t>(1, (size_t(4) << 30) / (2 * bytes_ * slots_)));
  }

  // The first launches, outside of any graph; they also load the code.
  void check(const Variant& variant) const {
    must(cudaMemsetAsync(pools_.y, 0xff, pool_bytes, device_.stream), "poison");
    must(cudaMemsetAsync(pools_.found, 0, sizeof *pools_.found, device_.stream), "counter");
    for (size_t slot = 0; slot < slots_; ++slot) must(variant.launch(slot), variant.name.c_str());
    for (size_t slot = 0; slot < slots_; ++slot)
      count_nan<<<device_.blocks(), 256, 0, device_.stream>>>(y(slot), elements_, pools_.found);
    must(cudaGetLastError(), "count of NaN");
    unsigned long long found = 0;
    must(cudaMemcpyAsync(&found, pools_.found, sizeof found, cudaMemcpyDeviceToHost, device_.stream), "copy");
    must(cudaStreamSynchronize(device_.stream), variant.name.c_str());
    if (found == 0) return;
    std::fprintf(stderr, "%s, %s: %llu elements are NaN or were not written\n", title_.c_str(), variant.name.c_str(),
                 found);
    std::exit(1);
  }

  cudaGraphExec_t captured(const Variant& variant) const {
    must(cudaStreamBeginCapture(device_.stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (size_t launch = 0; launch < launches(); ++launch) must(variant.launch(launch % slots_), variant.name.c_str());
    cudaGraph_t graph;
    must(cudaStreamEndCapture(device_.stream, &graph), "capture");
    cudaGraphExec_t result;
    must(cudaGraphInstantiate(&result, graph, 0), "graph");
    must(cudaGraphDestroy(graph), "graph");
    must(cudaGraphUpload(result, device_.stream), "graph");
    return result;
  }

  const Device& device_;
  const Pools& pools_;
  std::string title_;
  size_t elements_, bytes_, stride_ = 0, slots_ = 0;
  std::vector<Variant> variants_;
};

template <class T>
void measure_type(const Device& device, const Pools& pools, const std::string& type, int repeats) {
  for (unsigned char* pool : {pools.x, pools.residual})
    fill_with_normal_numbers<<<device.blocks(), 256, 0, device.stream>>>(
        reinterpret_cast<T*>(pool), pool_bytes / sizeof(T), pool == pools.x ? 0 : pool_bytes);
  must(cudaGetLastError(), "random numbers");
  must(cudaStreamSynchronize(device.stream), "random numbers");
  const auto finish = [&](Group<T>& group) {
    group.measure(repeats);
    group.print();
  };
  const struct {
    size_t samples, channels, height, width;
  } images[] = {{64, 256, 56, 56}, {256, 512, 7, 7}, {8192, 4096, 1, 1}, {1, 64, 56, 56}, {1, 512, 7, 7}, {8, 2048, 7, 7}};
  for (const auto& [n, c, h, w] : images) {
    const std::string space = h * w == 1 ? "" : ", " + std::to_string(h) + ", " + std::to_string(w);
    const std::string shape = "[" + std::to_string(n) + ", " + std::to_string(c) + space + "] " + type;
    Group<T> group(device, pools, shape, n * c * h * w);
    group.add_channels(n, c, h * w, 0);
    finish(group);
    if (h * w == 1 || n < 64) continue;  // maps of few samples are measured in one layout
    Group<T> channels_last(device, pools, shape + ", channels last", n * c * h * w);
    channels_last.add_channels(n * h * w, c, 1, c);
    finish(channels_last);
    Group<T> groups(device, pools, shape + ", 32 groups", n * c * h * w);
    groups.add_rows("GroupNormalNorm", n * 32, c / 32 * h * w, 32, h * w);
    finish(groups);
  }
  for (const size_t length : {128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384, 65536, 131072}) {
    const size_t rows = (size_t(256) << 20) / sizeof(T) / length;
    const std::string shape = "[" + std::to_string(rows) + ", " + std::to_string(length) + "] " + type;
    Group<T> group(device, pools, shape, rows * length);
    group.add_rows("LayerNormalNorm", rows, length, 1, 1);
    finish(group);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int repeats = count > 1 ? std::atoi(arguments[1]) : 30;
  if (repeats < 1) {
    std::fprintf(stderr, "usage: kernels [REPEATS], a whole number above 0\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "not measured: no GPU that CUDA can use\n");
    return 3;
  }
  const Device device;
  const Pools pools;
  int driver = 0, runtime = 0;
  must(cudaDriverGetVersion(&driver), "version");
  must(cudaRuntimeGetVersion(&runtime), "version");
  std::printf("%s, %d multiprocessors, %d MiB of L2 cache; CUDA %d.%d, driver for up to %d.%d; "
              "medians of %d turns.\n\n",
              device.properties.name, device.properties.multiProcessorCount, device.properties.l2CacheSize >> 20,
              runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10, repeats);
  std::printf("| tensor | what | µs | 10 – 90 %% | GB/s | of the faster copy |\n"
              "| --- | --- | ---: | ---: | ---: | ---: |\n");
  measure_type<float>(device, pools, "float32", repeats);
  measure_type<nnorm::Float16>(device, pools, "float16", repeats);
  measure_type<nnorm::BFloat16>(device, pools, "bfloat16", repeats);
  must(cudaDeviceSynchronize(), "end");
  return 0;
}
