// Loads libnnorm_ort.so without a CUDA library, with one that cannot be used, and with one whose kernels are compiled
// for the CPU. Each case loads a copy of libnnorm_ort.so from a folder of its own. ctest runs the program twice, once
// with NNORM_EXPORT_SAME_BITS=1.
#include <dlfcn.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "../buffers.h"
#include "../check.h"
#include "../environment.h"
#include "cuda_interface.h"
#include "host.h"
#include "nnorm/same_bits.h"

namespace nnorm_test {
namespace {

using nnorm::Arithmetic;
using nnorm::Shape;
namespace files = std::filesystem;

using Register = OrtStatus*(OrtSessionOptions*, const OrtApiBase*);

// A folder with a copy of libnnorm_ort.so.
class Folder {
 public:
  Folder() {
    std::string name = (files::temp_directory_path() / "nnorm-XXXXXX").string();  // mkdtemp replaces the six letters
    CHECK(mkdtemp(name.data()) != nullptr, "%s", name.c_str());
    path_ = name;
    files::copy_file(NNORM_ORT_LIBRARY, path_ / "libnnorm_ort.so");
  }
  ~Folder() { files::remove_all(path_); }

  files::path cuda_library() const { return path_ / NNORM_CUDA_LIBRARY; }

  Register* load() const {
    void* const library = dlopen((path_ / "libnnorm_ort.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::printf("%s\n", dlerror());
    return library == nullptr ? nullptr : reinterpret_cast<Register*>(dlsym(library, "RegisterCustomOps"));
  }

 private:
  files::path path_;
};

// The operators of the domain that this ONNX Runtime gets, by provider, or the error.
struct Outcome {
  std::string reason;
  std::vector<const OrtCustomOp*> cpu, cuda, cuda_plugin;
};

Outcome outcome_of(Register* register_operators, const OrtApi& api) {
  host::current_api = &api;
  host::Domain* domain = nullptr;
  OrtStatus* const status = register_operators(reinterpret_cast<OrtSessionOptions*>(&domain), &host::base);
  Outcome outcome;
  if (status != nullptr) {
    outcome.reason = api.GetErrorMessage(status);
    api.ReleaseStatus(status);
  } else {
    for (const OrtCustomOp* op : domain->operators) {
      const std::string provider = op->GetExecutionProviderType(op);
      if (provider == "CPUExecutionProvider") outcome.cpu.push_back(op);
      if (provider == "CUDAExecutionProvider") outcome.cuda.push_back(op);
      if (provider == "CudaPluginExecutionProvider") outcome.cuda_plugin.push_back(op);
    }
  }
  return outcome;
}

size_t count_operators() {
  size_t operators = 0;
  nnorm::for_each_operator([&](auto) { ++operators; });
  return 4 * operators;  // types
}

void test_unusable_library(const OrtApi& api) {
  struct {
    const char* what;
    bool exists, is_library, usable;
  } const cases[] = {{"there is none", false, false, true},
                     {"it is a text", true, false, false},
                     {"it lacks the function", true, true, false}};
  for (const auto& each : cases) {
    const Folder folder;
    if (each.is_library)
      files::copy_file(NNORM_ORT_LIBRARY, folder.cuda_library());
    else if (each.exists)
      std::ofstream(folder.cuda_library()) << "not a library";
    Register* const register_operators = folder.load();
    if (!CHECK(register_operators != nullptr, "%s", each.what)) continue;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Outcome outcome = outcome_of(register_operators, api);
      if (each.usable) {
        CHECK(outcome.reason.empty() && outcome.cpu.size() > count_operators() && outcome.cuda.empty(), "%s: %s", each.what,
              outcome.reason.c_str());
      } else {
        const bool names_file = outcome.reason.find(folder.cuda_library().string()) != std::string::npos;
        CHECK(names_file && outcome.reason.find("reinstall nnorm_export") != std::string::npos, "%s: %s", each.what,
              outcome.reason.c_str());
      }
    }
    CHECK(host::live_statuses == 0, "%s: a status is lost", each.what);
  }
}

// One node with the default attributes, of X [2, channels, extent].
template <class T>
struct Node {
  const Shape shape;
  std::vector<T> x, residual;
  std::vector<std::vector<Arithmetic<T>>> parameters;
  const OrtCustomOp* op;
  const host::Node attributes;
  void* state = nullptr;

  explicit Node(const OrtCustomOp* called, int64_t extent = 5, int64_t channels = 16) : shape{2, channels, extent}, op(called) {
    Random random(7);
    std::vector<double> numbers(nnorm::count(shape)), others(numbers.size());
    for (double& number : numbers) number = random.normal();
    for (double& number : others) number = random.normal();
    x = to_type<T>(numbers);
    residual = to_type<T>(others);
    const bool frozen = op->GetInputTypeCount(op) > 3, layer = std::string(op->GetName(op)) == "LayerNormalNorm";
    for (size_t i = 0; i < (frozen ? 6 : 2); ++i) {
      std::vector<Arithmetic<T>>& values = parameters.emplace_back(size_t(layer ? extent : channels));
      for (Arithmetic<T>& value : values) value = Arithmetic<T>(random.uniform(0.5, 1.5));
    }
  }

  ~Node() { destroy(); }
  Node(const Node&) = delete;

  // Creates the kernel. Its parameters are constants of the model in a GPU's memory, or computed.
  OrtStatus* create(bool constants) {
    const auto* const info = reinterpret_cast<const OrtKernelInfo*>(&attributes);
    for (size_t i = 0; constants && i < parameters.size(); ++i)
      host::constants[{info, i + 1}] = {{int64_t(parameters[i].size())}, parameters[i].data(), true, op->GetInputType(op, i + 1)};
    OrtStatus* const status = op->CreateKernelV2(op, host::current_api, info, &state);
    host::constants.clear();
    return status;
  }

  void destroy() {
    if (state != nullptr) op->KernelDestroy(state);
    state = nullptr;
  }

  // Runs the kernel.
  OrtStatus* compute(std::vector<T>& y, const Shape& x_shape) {
    host::Context context;
    context.refused_from = SIZE_MAX;
    context.inputs.push_back({x_shape, x.data()});
    for (auto& values : parameters)
      context.inputs.push_back({values.size() == size_t(shape[2]) ? Shape{shape[2]} : Shape{x_shape[1]}, values.data()});
    if (op->GetInputTypeCount(op) == 8) context.inputs.push_back({x_shape, residual.data()});
    y.resize(x.size());
    context.output.data = y.data();
    return op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
  }
  std::vector<T> compute() {
    std::vector<T> y;
    const std::string reason = message(compute(y, shape));
    CHECK(reason.empty(), "%s", reason.c_str());
    return y;
  }

  // Creates, runs and destroys the kernel. Returns the message of the error, or an empty string and y.
  std::string run(std::vector<T>& y, const Shape& x_shape, bool constants = false) {
    OrtStatus* status = create(constants);
    if (status == nullptr) status = compute(y, x_shape);
    destroy();
    return message(status);
  }
  std::string run(std::vector<T>& y, bool constants = false) { return run(y, shape, constants); }

 private:
  static std::string message(OrtStatus* status) {
    if (status == nullptr) return "";
    const std::string message = host::current_api->GetErrorMessage(status);
    host::current_api->ReleaseStatus(status);
    return message;
  }
};

// The first run of a node whose parameters are constants makes a table of its channels, and later runs read it: they do not
// see what the test writes over the parameters. A run in a stream that is being captured makes none.
template <class T>
void test_table(const OrtCustomOp* op, const std::vector<T>& y) {
  const bool has_table = op->GetInputTypeCount(op) > 3;
  for (const bool captured_first : {false, true}) {
    Node<T> node(op);
    const auto change = [&] { node.parameters.front().front() += 1; };
    CHECK(node.create(true) == nullptr, "%s", op->GetName(op));
    if (captured_first) {
      host::gpu_stream = &node;
      CHECK(same_bits(node.compute(), y), "%s: in a captured stream", op->GetName(op));
      change();
      CHECK(!same_bits(node.compute(), y), "%s: a captured stream has a table", op->GetName(op));
      host::gpu_stream = nullptr;
    }
    const std::vector<T> first = node.compute();
    CHECK(same_bits(first, y) != captured_first, "%s: with constants", op->GetName(op));
    change();
    CHECK(same_bits(node.compute(), first) == has_table, "%s: a later run with constants", op->GetName(op));
    host::gpu_stream = &node;
    CHECK(same_bits(node.compute(), first) == has_table, "%s: captured after the first run", op->GetName(op));
    host::gpu_stream = nullptr;
    CHECK(host::live_allocations == (has_table ? 1 : 0), "%s: %ld allocations", op->GetName(op), host::live_allocations);
  }
  CHECK(host::live_allocations == 0 && host::live_allocators == 0, "%s: a table is lost", op->GetName(op));
  if (!has_table) return;
  std::vector<T> of_many;
  const std::string why = Node<T>(op, 1, 1 << 16).run(of_many, true);
  CHECK(why.find("out of memory") != std::string::npos, "%s: a table without memory: %s", op->GetName(op), why.c_str());
}

// The number of values of a large tensor whose bits differ from those of the CPU library.
template <class T>
size_t count_different(const OrtCustomOp* on_gpu, const OrtCustomOp* on_cpu) {
  constexpr int64_t extent = 9001;
  std::vector<T> y, expected;
  const std::string reason = Node<T>(on_gpu, extent).run(y) + Node<T>(on_cpu, extent).run(expected);
  CHECK(reason.empty(), "%s", reason.c_str());
  size_t different = 0;
  for (size_t i = 0; i < y.size(); ++i) different += std::memcmp(&y[i], &expected[i], sizeof(T)) != 0;
  return different;
}

// Compares the kernels of the CUDA library with those of the CPU library.
template <class T>
void test_runs(const Outcome& outcome, ONNXTensorElementDataType type, double tolerance) {
  size_t compared = 0;
  for (const OrtCustomOp* op : outcome.cuda) {
    if (op->GetOutputType(op, 0) != type) continue;
    const OrtCustomOp* same = nullptr;
    for (const OrtCustomOp* each : outcome.cpu)
      if (std::strcmp(each->GetName(each), op->GetName(op)) == 0 && each->GetOutputType(each, 0) == type) same = each;
    if (!CHECK(same != nullptr, "%s is not in the CPU library", op->GetName(op))) continue;
    Node<T> on_gpu(op), on_cpu(same);
    std::vector<T> y, expected;
    const std::string reason = on_gpu.run(y) + on_cpu.run(expected);
    if (!CHECK(reason.empty(), "%s", reason.c_str())) continue;
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double value = double(nnorm::widened(expected[i]));
      worst = std::max(worst, std::fabs(double(nnorm::widened(y[i])) - value) / (1 + std::fabs(value)));
    }
    CHECK(worst <= tolerance, "%s of %s: the kernels differ by %.3g", op->GetName(op), NameOf<T>::value, worst);
    test_table(op, y);
    ++compared;
    const size_t different = count_different<T>(op, same);
    if (sizeof(T) > 2 || nnorm::same_bits_wanted())
      CHECK(different == 0, "%s of %s: %zu values have other bits", op->GetName(op), NameOf<T>::value, different);
    else
      CHECK(different > 0, "%s of %s: not computed by the device's instructions", op->GetName(op), NameOf<T>::value);
    // Every call of the API fails in turn, then the launch of the kernel, for a size that it does not support.
    for (const bool constants : {false, true}) {
      long calls = 0;
      for (bool failed = true; failed && calls < 1000;) {
        host::failing_call = ++calls;
        const std::string why = on_gpu.run(y, constants);
        failed = host::stop_failing();
        CHECK(failed != why.empty(), "%s, failure %ld: %s", op->GetName(op), calls, why.c_str());
      }
      CHECK(calls > 10 && host::live_statuses == 0 && host::live_infos == 0 && host::live_allocators == 0, "%s: an object is lost",
            op->GetName(op));
    }
    if (std::strcmp(op->GetName(op), "LayerNormalNorm") == 0) continue;  // its weight would be as large as x
    for (auto& values : on_gpu.parameters) values.resize(1);
    const std::string why = on_gpu.run(y, {1, 1, int64_t(1) << 31});
    CHECK(why.find("CUDA: ") != std::string::npos, "%s: an extent of 2^31: %s", op->GetName(op), why.c_str());
  }
  CHECK(compared == count_operators() / 4, "%zu operators of %s", compared, NameOf<T>::value);
}

void test_usable_library(const OrtApi& api) {
  const Folder folder;
  files::copy_file(NNORM_CUDA_ON_HOST_LIBRARY, folder.cuda_library());
  Register* const register_operators = folder.load();
  if (!CHECK(register_operators != nullptr, "not loaded")) return;
  {
    const Environment environment(nnorm::same_bits_variable, "maybe");
    const std::string reason = outcome_of(register_operators, api).reason;
    CHECK(reason.find("NNORM_EXPORT_SAME_BITS is \"maybe\"; it must be 0 or 1") != std::string::npos, "%s", reason.c_str());
  }
  static std::vector<std::unique_ptr<OrtApi>> apis;  // the library may remember an API
  bool failed = true;
  for (long n = 1; failed && n < 1000; ++n) {
    apis.push_back(std::make_unique<OrtApi>(api));
    host::failing_call = n;
    const Outcome first = outcome_of(register_operators, *apis.back());
    failed = host::stop_failing();
    CHECK(failed != first.reason.empty(), "registration, failure %ld: %s", n, first.reason.c_str());
    const Outcome second = outcome_of(register_operators, *apis.back());
    CHECK(second.reason.empty() && second.cuda.size() == count_operators() && second.cuda_plugin.size() == count_operators(), "after failure %ld: %zu operators, %s", n,
          second.cuda.size(), second.reason.c_str());
    CHECK(host::live_statuses == 0, "registration, failure %ld: a status is lost", n);
  }
  const Outcome outcome = outcome_of(register_operators, *apis.back());
  test_runs<float>(outcome, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 1e-4);
  test_runs<double>(outcome, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 1e-12);
  test_runs<nnorm::Float16>(outcome, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 0x1p-8);
  test_runs<nnorm::BFloat16>(outcome, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 0x1p-5);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  static const OrtApi api = host::make_api();
  test_unusable_library(api);
  test_usable_library(api);
  return finish();
}
