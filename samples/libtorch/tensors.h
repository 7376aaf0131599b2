// What both programs share: the images are read, the logits printed, and messages name the file.
#pragma once

#include <torch/script.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Takes a step that reads or runs the file at `path`, whose name torch's messages seldom have.
template <class Step>
auto naming(const std::string& path, Step step) {
  try {
    return step();
  } catch (const c10::Error& error) {  // its what() goes on with the stack
    throw std::runtime_error(path + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

// What torch.save(tensor, path) wrote in Python.
inline at::Tensor read_tensor(const std::string& path) {
  return naming(path, [&] {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot be opened");
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const c10::IValue value = torch::jit::pickle_load(bytes);
    if (!value.isTensor()) throw std::runtime_error("holds a " + value.tagKind() + ", not a tensor");
    return value.toTensor();
  });
}

// A line for each row, in nine digits: as many as tell any two float32 apart.
inline void print_rows(const at::Tensor& output) {
  const at::Tensor values = output.to(at::kCPU, at::kDouble).contiguous();
  const double* value = values.const_data_ptr<double>();
  const int64_t rows = values.dim() == 0 ? 1 : values.size(0);
  for (int64_t row = 0; row < rows; ++row) {
    const char* separator = "";
    for (int64_t column = 0; column < values.numel() / rows; ++column) {
      std::printf("%s%.9g", std::exchange(separator, " "), *value++);
    }
    std::printf("\n");
  }
}
