// serve ENGINE.plan IMAGES.f32 [PLUGINS]: prints the logits of an engine that `nnorm-export engine` wrote, for TensorRT or
// TensorRT-RTX. IMAGES.f32 holds float32 values and nothing else, as numpy's tofile writes them. PLUGINS is a library that
// registers the plugins, of nnorm_export.get_plugin_path(registering=True); an engine by bodies needs none.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int64_t kBatch = 64;  // at most, if the engine's batch is dynamic

static void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

static std::vector<char> read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::runtime_error("cannot be read");
  return bytes;
}

static std::vector<float> read_floats(const std::string& path) {
  const std::vector<char> bytes = read_bytes(path);
  if (bytes.size() % sizeof(float)) throw std::runtime_error("is cut off within a float32");
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

// TensorRT's errors and warnings, on stderr.
class Logger final : public nvinfer1::ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", text);
  }
};

// The headers describe tables of functions, which are not the same in all versions.
static void check_version() {
  const int major = getInferLibMajorVersion(), minor = getInferLibMinorVersion();
  const bool is_rtx_with_the_headers_of_11 = major == 1 && minor >= 5 && NV_TENSORRT_MAJOR == 11;
  if (major != NV_TENSORRT_MAJOR && !is_rtx_with_the_headers_of_11) {
    throw std::runtime_error("was compiled with the headers of TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
                             ", and the library is of version " + std::to_string(major) + "." + std::to_string(minor));
  }
}

// To be called when TensorRT is loaded, and before an engine is. The library stays loaded: TensorRT keeps its plugins.
static void register_plugins(const std::string& library) {
  if (!dlopen(library.c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
  for (const char* name : {"BatchNormalNorm", "LayerNormalNorm", "GroupNormalNorm"}) {
    if (!getPluginRegistry()->getCreator(name, "1", "nnorm")) {
      throw std::runtime_error(std::string("registers no plugin ") + name +
                               "; give the library for this TensorRT: libnnorm_trt_register_10.so, _11.so or _rtx.so");
    }
  }
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t count) { check(cudaMalloc(&data_, count * sizeof(float)), "memory of the GPU"); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// The only input or output of an engine: its name, and its shape, whose first axis is the batch.
struct Tensor {
  std::string name;
  nvinfer1::Dims shape;

  int64_t size() const {  // of one image or one row of logits
    int64_t size = 1;
    for (int axis = 1; axis < shape.nbDims; ++axis) size *= shape.d[axis];
    return size;
  }
};

class Model {
 public:
  explicit Model(const std::string& path) {
    const std::vector<char> bytes = read_bytes(path);
    // Asked for first: without a GPU some versions of TensorRT end the process.
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "an engine runs on a GPU alone, and this machine has none that can be used");
    runtime_.reset(nvinfer1::createInferRuntime(logger_));
    if (!runtime_) throw std::runtime_error("TensorRT cannot be started: its reason is above");
    engine_.reset(runtime_->deserializeCudaEngine(bytes.data(), bytes.size()));
    if (!engine_) throw std::runtime_error("TensorRT cannot load it: its reason is above");
    context_.reset(engine_->createExecutionContext());
    if (!context_) throw std::runtime_error("TensorRT cannot prepare it: its reason is above");
    input_ = described(nvinfer1::TensorIOMode::kINPUT, "input");
    output_ = described(nvinfer1::TensorIOMode::kOUTPUT, "output");
    const int64_t most = engine_->getProfileShape(input_.name.c_str(), 0, nvinfer1::OptProfileSelector::kMAX).d[0];
    batch_ = is_dynamic() ? std::min(kBatch, most) : input_.shape.d[0];
    images_ = std::make_unique<DeviceBuffer>(batch_ * pixels());
    logits_ = std::make_unique<DeviceBuffer>(batch_ * classes());
    check(cudaStreamCreate(&stream_), "a stream");
  }
  ~Model() { cudaStreamDestroy(stream_); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  int64_t pixels() const { return input_.size(); }
  int64_t classes() const { return output_.size(); }
  int64_t batch() const { return batch_; }
  bool is_dynamic() const { return input_.shape.d[0] < 0; }

  // `count` images of pixels() each, at most batch() of them, to as many times classes() logits.
  void run(const float* images, float* logits, int64_t count) {
    nvinfer1::Dims shape = input_.shape;
    shape.d[0] = count;
    if (!context_->setInputShape(input_.name.c_str(), shape) ||
        !context_->setTensorAddress(input_.name.c_str(), images_->data()) ||
        !context_->setTensorAddress(output_.name.c_str(), logits_->data())) {
      throw std::runtime_error("does not take " + std::to_string(count) + " images");
    }
    const size_t in = count * pixels() * sizeof(float), out = count * classes() * sizeof(float);
    check(cudaMemcpyAsync(images_->data(), images, in, cudaMemcpyHostToDevice, stream_), "the images");
    if (!context_->enqueueV3(stream_)) throw std::runtime_error("TensorRT cannot run it: its reason is above");
    check(cudaMemcpyAsync(logits, logits_->data(), out, cudaMemcpyDeviceToHost, stream_), "the logits");
    check(cudaStreamSynchronize(stream_), "the run");
  }

 private:
  Tensor described(nvinfer1::TensorIOMode mode, const char* what) const {
    std::vector<std::string> names;
    for (int index = 0; index < engine_->getNbIOTensors(); ++index) {
      const char* const name = engine_->getIOTensorName(index);
      if (engine_->getTensorIOMode(name) == mode) names.emplace_back(name);
    }
    const char* const name = names.size() == 1 ? names[0].c_str() : nullptr;
    const nvinfer1::Dims shape = name ? engine_->getTensorShape(name) : nvinfer1::Dims{};
    if (!name || engine_->getTensorDataType(name) != nvinfer1::DataType::kFLOAT || shape.nbDims < 1 ||
        std::any_of(shape.d + 1, shape.d + shape.nbDims, [](int64_t size) { return size < 1; })) {
      throw std::runtime_error(std::string("must have one ") + what + ", of float32, with no dynamic axis but the first");
    }
    return {name, shape};
  }

  // In the order in which they are made; they end in the reverse order.
  Logger logger_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  Tensor input_, output_;
  int64_t batch_ = 0;
  std::unique_ptr<DeviceBuffer> images_, logits_;
  cudaStream_t stream_ = nullptr;
};

// In nine digits: as many as tell any two float32 apart.
static void print_row(const float* values, int64_t count) {
  for (int64_t column = 0; column < count; ++column) std::printf("%s%.9g", column ? " " : "", values[column]);
  std::printf("\n");
}

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: serve ENGINE.plan IMAGES.f32 [PLUGINS]\n");
    return 2;
  }
  std::string at = argv[0];
  try {
    check_version();
    if (argc == 4) register_plugins(at = argv[3]);
    const std::vector<float> images = read_floats(at = argv[2]);
    Model model(at = argv[1]);
    const auto values = static_cast<int64_t>(images.size());
    const int64_t count = values / model.pixels();
    const int64_t at_a_time = model.is_dynamic() ? 1 : model.batch();
    if (values % (model.pixels() * at_a_time)) {
      at = argv[2];
      throw std::runtime_error("holds " + std::to_string(values) + " values, and the engine takes images of " +
                               std::to_string(model.pixels()) + ", " + std::to_string(at_a_time) + " at a time");
    }
    std::vector<float> logits(model.batch() * model.classes());
    for (int64_t first = 0; first < count; first += model.batch()) {
      const int64_t batch = std::min(model.batch(), count - first);
      model.run(&images[first * model.pixels()], logits.data(), batch);
      for (int64_t row = 0; row < batch; ++row) print_row(&logits[row * model.classes()], model.classes());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s: %s\n", at.c_str(), error.what());
    return 2;
  }
  return 0;
}
