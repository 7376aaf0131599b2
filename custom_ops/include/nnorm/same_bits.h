// What the user asks of the kernels for GPUs by the environment: with NNORM_EXPORT_SAME_BITS=1, tensors of 16 bits get the bits
// of the CPU kernels (cuda_kernels.h).
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

namespace nnorm {

constexpr const char* same_bits_variable = "NNORM_EXPORT_SAME_BITS";

// Read once: a process has one answer.
inline bool same_bits_wanted() noexcept {
  static const bool wanted = [] {
    const char* const value = std::getenv(same_bits_variable);
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

// Why the variable's value means nothing; empty if it means something.
inline std::string same_bits_refusal() {
  const char* const value = std::getenv(same_bits_variable);
  if (value == nullptr) return "";
  for (const char* const known : {"", "0", "1"})
    if (std::strcmp(value, known) == 0) return "";
  return std::string("the environment variable ") + same_bits_variable + " is \"" + value + "\"; it must be 0 or 1";
}

}  // namespace nnorm
