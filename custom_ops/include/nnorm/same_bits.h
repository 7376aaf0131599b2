// The environment variable NNORM_EXPORT_SAME_BITS: if it is 1, the kernels for GPUs compute 16-bit tensors with the
// bits of the CPU kernels (cuda_kernels.h).
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

namespace nnorm {

constexpr const char* same_bits_variable = "NNORM_EXPORT_SAME_BITS";

// The variable is read once: its value stays the same for the life of the process.
inline bool same_bits_wanted() noexcept {
  static const bool wanted = [] {
    const char* const value = std::getenv(same_bits_variable);
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

// Why the variable's value is refused; empty if it is valid.
inline std::string same_bits_refusal() {
  const char* const value = std::getenv(same_bits_variable);
  if (value == nullptr) return "";
  for (const char* const known : {"", "0", "1"})
    if (std::strcmp(value, known) == 0) return "";
  return std::string("the environment variable ") + same_bits_variable + " is \"" + value + "\"; it must be 0 or 1";
}

}  // namespace nnorm
