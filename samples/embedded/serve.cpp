// serve MODEL.onnx IMAGES.f32 LIBRARY [THREADS]: prints the logits of a file that nnorm_export.export wrote, in a session
// that has the kernels in LIBRARY. IMAGES.f32 holds float32 values and nothing else, as numpy's tofile writes them.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int64_t kBatch = 64;

static std::vector<float> read_floats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::runtime_error("cannot be read");
  if (bytes.size() % sizeof(float)) throw std::runtime_error("is cut off within a float32");
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

// The only input or output of a model: its name, and its shape with the batch, which comes first, left out.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;

  int64_t size() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }
  std::vector<int64_t> with_batch(int64_t count) const {
    std::vector<int64_t> all{count};
    all.insert(all.end(), shape.begin(), shape.end());
    return all;
  }
};

static Tensor described(const char* what, size_t count, const Ort::AllocatedStringPtr& name, const Ort::TypeInfo& type) {
  const auto tensor = type.GetTensorTypeAndShapeInfo();
  std::vector<int64_t> shape = tensor.GetShape();
  if (count != 1 || tensor.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || shape.empty() ||
      std::any_of(shape.begin() + 1, shape.end(), [](int64_t size) { return size < 1; })) {
    throw std::runtime_error(std::string("must have one ") + what + ", of float32, with no dynamic axis but the first");
  }
  shape.erase(shape.begin());
  return {name.get(), shape};
}

class Model {
 public:
  Model(const std::string& path, const std::string& library, int threads) : session_(nullptr) {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(threads);  // 0: one for each core
    options.SetGraphOptimizationLevel(GraphOptimizationLevel::ORT_ENABLE_ALL);
    // Of all the file needs no more than this: each normalization then runs by its kernel. It would by its body without.
    // A file that a known fault of ONNX Runtime hits needs a line more, which `nnorm-export doctor MODEL.onnx` prints:
    // options.AddConfigEntry("optimization.disable_specified_optimizers", "…");
    options.RegisterCustomOpsLibrary(library.c_str());
    session_ = Ort::Session(environment_, path.c_str(), options);
    Ort::AllocatorWithDefaultOptions allocator;
    input_ = described("input", session_.GetInputCount(), session_.GetInputNameAllocated(0, allocator),
                       session_.GetInputTypeInfo(0));
    output_ = described("output", session_.GetOutputCount(), session_.GetOutputNameAllocated(0, allocator),
                        session_.GetOutputTypeInfo(0));
  }

  int64_t pixels() const { return input_.size(); }
  int64_t classes() const { return output_.size(); }

  // `count` images of pixels() each, to as many times classes() logits. The session reads and writes these very buffers.
  void run(float* images, float* logits, int64_t count) {
    Ort::IoBinding binding(session_);
    binding.BindInput(input_.name.c_str(), tensor(input_, images, count));
    binding.BindOutput(output_.name.c_str(), tensor(output_, logits, count));
    session_.Run(Ort::RunOptions{nullptr}, binding);
  }

 private:
  Ort::Value tensor(const Tensor& description, float* values, int64_t count) const {
    const std::vector<int64_t> shape = description.with_batch(count);
    return Ort::Value::CreateTensor<float>(memory_, values, description.size() * count, shape.data(), shape.size());
  }

  Ort::Env environment_{ORT_LOGGING_LEVEL_WARNING, "serve"};
  Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::Session session_;
  Tensor input_, output_;
};

// In nine digits: as many as tell any two float32 apart.
static void print_row(const float* values, int64_t count) {
  for (int64_t column = 0; column < count; ++column) std::printf("%s%.9g", column ? " " : "", values[column]);
  std::printf("\n");
}

int main(int argc, char** argv) {
  char* end = nullptr;
  const long threads = argc == 5 ? std::strtol(argv[4], &end, 10) : 0;
  if (argc < 4 || argc > 5 || threads < 0 || (end && *end)) {
    std::fprintf(stderr, "usage: serve MODEL.onnx IMAGES.f32 LIBRARY [THREADS]\n");
    return 2;
  }
  std::string at = argv[1];
  try {
    Model model(argv[1], argv[3], static_cast<int>(threads));
    std::vector<float> images = read_floats(at = argv[2]);
    if (images.size() % model.pixels()) {
      throw std::runtime_error("holds " + std::to_string(images.size()) + " values, and an image has " +
                               std::to_string(model.pixels()));
    }
    at = argv[1];
    std::vector<float> logits(kBatch * model.classes());
    const auto count = static_cast<int64_t>(images.size()) / model.pixels();
    for (int64_t first = 0; first < count; first += kBatch) {
      const int64_t batch = std::min(kBatch, count - first);
      model.run(&images[first * model.pixels()], logits.data(), batch);
      for (int64_t row = 0; row < batch; ++row) print_row(&logits[row * model.classes()], model.classes());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s: %s\n", at.c_str(), error.what());
    return 2;
  }
  return 0;
}
