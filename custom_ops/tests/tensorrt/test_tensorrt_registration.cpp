// Tests of the libraries that register the plugins when a program loads them. The tests use mock libraries instead of
// TensorRT. They also use NVIDIA's libraries if the environment variable NNORM_TENSORRT_LIBRARIES lists their paths,
// separated by ":". Each test runs in its own process, because such a library registers the plugins once per process.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "nnorm/operators.h"

namespace nnorm_test {
namespace {

#define NNORM_TEXT_OF(value) #value
#define NNORM_TEXT(value) NNORM_TEXT_OF(value)
constexpr bool is_11 = NV_TENSORRT_MAJOR == 11;
const std::string nvinfer = "libnvinfer.so." NNORM_TEXT(NV_TENSORRT_MAJOR), lean = "libnvinfer_lean.so." NNORM_TEXT(NV_TENSORRT_MAJOR),
                  other = is_11 ? "libnvinfer.so.10" : "libnvinfer.so.11", rtx = "libtensorrt_rtx.so.1";

class Mock {
 public:
  explicit Mock(const std::string& name) : library_(dlopen((NNORM_MOCKS + name).c_str(), RTLD_NOW | RTLD_LOCAL)) {
    CHECK(library_ != nullptr, "%s", dlerror());
  }
  std::string notes() const { return reinterpret_cast<const char* (*)()>(dlsym(library_, "mock_nvinfer_notes"))(); }
  void* function(const char* name) const { return dlsym(library_, name); }

 private:
  void* library_;
};

bool has_every_plugin_once(const Mock& mock) {
  const std::string notes = mock.notes();
  size_t operators = 0;
  bool all = true;
  nnorm::for_each_operator([&](auto declared) {
    ++operators;
    for (const char* plugin_namespace : {"nnorm::", "::"})
      all = all && (" " + notes).find(std::string(" ") + plugin_namespace + decltype(declared)::name + " ") != std::string::npos;
  });
  return CHECK(all && notes.find("WRONG") == std::string::npos && size_t(std::count(notes.begin(), notes.end(), ' ')) == 2 * operators,
               "registered: %s", notes.c_str());
}

// Runs a test in a child process. The function `said` returns the text that was written to stderr since its last call.
using Said = std::function<std::string()>;
void in_process(const char* name, const std::function<void(const Said&)>& test) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    std::FILE* const kept = std::tmpfile();
    if (CHECK(kept != nullptr, "no temporary file")) dup2(fileno(kept), STDERR_FILENO);
    long read_so_far = 0;
    test([&] {
      std::string text(4096, '\0');
      std::fflush(stderr);
      text.resize(size_t(pread(fileno(kept), text.data(), text.size(), read_so_far)));
      read_so_far += long(text.size());
      return text;
    });
    std::fflush(stdout);
    _exit(failed != 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %d", name, status);
}

void* load(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr, "%s", dlerror());
  return library;
}

void test_what_is_loaded_is_found() {
  for (const std::string& name : {nvinfer, lean})
    in_process(name.c_str(), [&](const Said& said) {
      const Mock mock(name);
      load(NNORM_REGISTER);
      has_every_plugin_once(mock);
      CHECK(said() == "", "%s: not silent", name.c_str());
    });
  in_process("two at once", [](const Said& said) {
    setenv("NNORM_MOCK_MINOR", is_11 ? "5" : "4", 1);
    const Mock first(nvinfer), second(rtx), third(other);
    load(NNORM_REGISTER);
    has_every_plugin_once(first);
    has_every_plugin_once(second);
    CHECK(third.notes() == "" && said() == "", "%s", third.notes().c_str());
  });
}

// A registration that cannot work prints a message, and does not touch the registry of another version.
void test_refusals() {
  in_process("nothing loaded", [](const Said& said) {
    load(NNORM_REGISTER);
    const std::string text = said();
    CHECK(text.find("this process has not loaded any TensorRT. Load TensorRT first") != std::string::npos, "%s", text.c_str());
  });
  in_process("another version", [](const Said& said) {
    const Mock mock(other);
    load(NNORM_REGISTER);
    const std::string text = said();
    CHECK(mock.notes() == "" && text.find("is for TensorRT " NNORM_TEXT(NV_TENSORRT_MAJOR) " and") != std::string::npos &&
              text.find("this process has " + other + ". Load the library of its version") != std::string::npos,
          "%s%s", mock.notes().c_str(), text.c_str());
  });
}

// TensorRT-RTX has TensorRT 10's registry up to version 1.4.
void test_rtx_by_its_version() {
  for (const char* library : {NNORM_REGISTER, NNORM_REGISTER_RTX})
    for (const char* minor : {"0", "4", "5", "7", "12"})
      in_process(minor, [&](const Said& said) {
        setenv("NNORM_MOCK_MINOR", minor, 1);
        const Mock mock(rtx);
        load(library);
        const std::string text = said();
        if ((std::atoi(minor) >= 5) == is_11) {
          has_every_plugin_once(mock);
          CHECK(text == "", "%s", text.c_str());
        } else {
          CHECK(mock.notes() == "" && text.find("this process has " + rtx) != std::string::npos, "%s", text.c_str());
        }
      });
}

// A second load does nothing and prints nothing, also by another path or after dlclose().
void test_loaded_twice() {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("nnorm_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::filesystem::path copy = folder / "register.so";
  std::filesystem::copy_file(NNORM_REGISTER, copy);
  in_process("twice", [&](const Said& said) {
    const Mock mock(nvinfer);
    void* const first = load(NNORM_REGISTER);
    if (first != nullptr) dlclose(first);
    load(NNORM_REGISTER);
    load(copy);
    has_every_plugin_once(mock);
    CHECK(said() == "", "not silent");
  });
  std::filesystem::remove_all(folder);
}

// The parser of TensorRT-RTX opens "libtensorrt_rtx.so" and looks for functions of TensorRT-RTX in it.
void test_missing_name() {
  in_process("libtensorrt_rtx.so", [](const Said&) {
    const char* const name = "libtensorrt_rtx.so";
    const Mock mock(rtx);
    CHECK(dlopen(name, RTLD_NOW) == nullptr, "this machine has a %s", name);
    load(NNORM_REGISTER_RTX);
    void* const found = load(name);
    if (found != nullptr)
      CHECK(dlsym(found, "getPluginRegistry") == mock.function("getPluginRegistry"), "another library's function");
  });
  in_process("without TensorRT-RTX", [](const Said&) {
    CHECK(dlopen(NNORM_REGISTER_RTX, RTLD_NOW) == nullptr, "loaded");
    const char* const reason = dlerror();
    CHECK(reason != nullptr && std::strstr(reason, rtx.c_str()) != nullptr, "%s", reason);
  });
}

// One of NVIDIA's registries has this plugin, and a copy of the plugin has its fields.
void test_creator(nvinfer1::IPluginRegistry& registry, const char* name, const char* plugin_namespace, int32_t fields) {
  using namespace nvinfer1;
  auto* const creator = static_cast<IPluginCreatorV3One*>(registry.getCreator(name, "1", plugin_namespace));
  if (!CHECK(creator != nullptr, "%s in \"%s\"", name, plugin_namespace)) return;
  CHECK(std::strcmp(creator->getPluginName(), name) == 0 && creator->getFieldNames()->nbFields == fields, "%s", name);
  const PluginFieldCollection none{};
  const std::unique_ptr<IPluginV3> plugin(creator->createPlugin("node", &none, TensorRTPhase::kRUNTIME));
  const std::unique_ptr<IPluginV3> copy(plugin == nullptr ? nullptr : plugin->clone());
  if (!CHECK(copy != nullptr && copy != plugin, "%s", name)) return;
  auto* const runtime = static_cast<IPluginV3OneRuntime*>(copy->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  CHECK(runtime->getFieldsToSerialize()->nbFields == fields, "%s", name);
}

void test_registry_of(const std::string& path) {
  in_process(path.c_str(), [&](const Said& said) {
    using namespace nvinfer1;
    void* const library = load(path);
    if (library == nullptr) return;
    const auto number = [&](const char* name) { return reinterpret_cast<int32_t (*)()>(dlsym(library, name))(); };
    const bool is_rtx = path.find(rtx) != std::string::npos;
    const int version = !is_rtx ? number("getInferLibMajorVersion") : number("getInferLibMinorVersion") >= 5 ? 11 : 10;
    std::printf("%s: version %d.%d\n", path.c_str(), number("getInferLibMajorVersion"), number("getInferLibMinorVersion"));
    if (version != NV_TENSORRT_MAJOR) {
      load(NNORM_REGISTER);
      CHECK(said().find("Load the library of its version") != std::string::npos, "not refused");
      return;
    }
    IPluginRegistry& registry = *reinterpret_cast<IPluginRegistry* (*)()>(dlsym(library, "getPluginRegistry"))();
    const auto each = [&](auto test) {
      nnorm::for_each_operator([&](auto declared) {
        int32_t fields = 0;
        declared.for_each_attribute([&](const char*, auto&) { ++fields; });
        for (const char* plugin_namespace : {"nnorm", ""}) test(decltype(declared)::name, plugin_namespace, fields);
      });
    };
    const auto test = [&](const char* name, const char* plugin_namespace, int32_t fields) {
      test_creator(registry, name, plugin_namespace, fields);
    };
    const auto count = [&] {
      int32_t all = 0;
      registry.getAllCreators(&all);
      return all;
    };
    const int32_t own = count();

    load(is_rtx ? NNORM_REGISTER_RTX : NNORM_REGISTER);
    each(test);
    load(NNORM_REGISTER);
    const std::string text = said();
    CHECK(text.find("nnorm") == std::string::npos && text.find("NormalNorm") == std::string::npos, "%s", text.c_str());
    each([&](const char* name, const char* plugin_namespace, int32_t) {
      CHECK(registry.deregisterCreator(*registry.getCreator(name, "1", plugin_namespace)), "%s", name);
    });
    CHECK(count() == own, "%d creators, before there were %d", count(), own);

    const IPluginRegistry::PluginLibraryHandle handle = registry.loadLibrary(NNORM_PLUGINS);
    if (!CHECK(handle != nullptr, "loadLibrary")) return;
    each(test);
    registry.deregisterLibrary(handle);
    CHECK(count() == own, "%d creators, before there were %d", count(), own);
  });
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  test_what_is_loaded_is_found();
  test_refusals();
  test_rtx_by_its_version();
  test_loaded_twice();
  test_missing_name();
  if (const char* const libraries = std::getenv("NNORM_TENSORRT_LIBRARIES")) {
    std::istringstream paths(libraries);
    for (std::string path; std::getline(paths, path, ':');) test_registry_of(path);
  }
  return finish();
}
