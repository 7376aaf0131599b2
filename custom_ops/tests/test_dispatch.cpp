// The kernels that dispatch.cpp chooses on other processors, which the test describes.
#include <set>
#include <string>

#include "check.h"
#include "processor.h"
#include "instruction_sets.h"

namespace nnorm_test {
namespace {

std::set<std::string> features;  // of the processor

bool processor_has(const char* feature) { return features.count(feature) != 0; }

}  // namespace
}  // namespace nnorm_test

#define processor_has nnorm_test::processor_has
#include "dispatch.cpp"  // replaces the library's
#undef processor_has

namespace nnorm_test {
namespace {

const std::set<std::string> v3{"avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"};
const std::set<std::string> v4{"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"};

std::string chosen(const std::set<std::string>& having) {
  features = having;
  std::string names;
  const nnorm::Available available;
  for (const nnorm::InstructionSet* const* next = available.list; *next != nullptr; ++next)
    names += std::string((*next)->name) + " ";
  return names;
}

std::string expected([[maybe_unused]] bool avx2, [[maybe_unused]] bool avx512) {
  std::string names;
#if defined(NNORM_HAVE_AVX512)
  if (avx512) names += "avx512 ";
#endif
#if defined(NNORM_HAVE_AVX2)
  if (avx2) names += "avx2 ";
#endif
#if defined(NNORM_HAVE_NEON)
  names += "neon ";
#endif
#if defined(NNORM_HAVE_BASELINE)
  names += "baseline ";
#endif
  return names;
}

void test(const std::set<std::string>& having, bool avx2, bool avx512) {
  const std::string names = chosen(having);
  CHECK(names == expected(avx2, avx512), "%zu features: %s", having.size(), names.c_str());
}

void test_processors() {
  std::set<std::string> both = v3;
  both.insert(v4.begin(), v4.end());
  test({}, false, false);
  test(v3, true, false);
  test(v4, false, false);
  test(both, true, true);
  for (const std::string& missing : both) {  // a virtual machine may hide any one of them
    std::set<std::string> rest = both;
    rest.erase(missing);
    test(rest, v4.count(missing) != 0, false);
  }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  nnorm_test::test_processors();
  return nnorm_test::finish();
}
