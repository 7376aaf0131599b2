// Tensors that detect accesses outside their elements.
#pragma once

#include <cstring>
#include <vector>

#include "nnorm/kernels.h"
#include "oracle.h"

namespace nnorm_test {

// Numbers that start `offset` elements after an aligned address and end at the end of the allocation, so that
// AddressSanitizer detects any read after them.
template <class T>
class Input {
 public:
  Input(const std::vector<T>& values, size_t offset) : storage_(offset), offset_(offset) {
    storage_.insert(storage_.end(), values.begin(), values.end());
    storage_.shrink_to_fit();
  }
  const T* data() const { return storage_.data() + offset_; }
  const std::vector<T>& storage() const { return storage_; }

 private:
  std::vector<T> storage_;
  size_t offset_;
};

// n elements with a guard on either side, all of them filled with one byte.
template <class T>
class Output {
 public:
  Output(size_t n, size_t offset) : storage_(guard + offset + n + guard), first_(guard + offset), n_(n) {
    if (!storage_.empty()) std::memset(static_cast<void*>(storage_.data()), filling, storage_.size() * sizeof(T));
  }
  Output(const std::vector<T>& values, size_t offset) : Output(values.size(), offset) {
    std::copy(values.begin(), values.end(), data());
  }

  T* data() { return storage_.data() + first_; }
  std::vector<T>& storage() { return storage_; }
  std::vector<T> values() const { return std::vector<T>(&storage_[first_], &storage_[first_] + n_); }
  bool guards_hold() const { return filled(0, first_) && filled(first_ + n_, storage_.size()); }

 private:
  static constexpr size_t guard = 64;
  static constexpr unsigned char filling = 0xa5;

  bool filled(size_t from, size_t to) const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(storage_.data());
    for (size_t i = from * sizeof(T); i < to * sizeof(T); ++i)
      if (bytes[i] != filling) return false;
    return true;
  }

  std::vector<T> storage_;
  size_t first_, n_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The order in which items are computed: in one range, one at a time in random order, or in ranges of random size.
enum class Order { at_once, shuffled, in_groups };

template <class Work>
void run_items(void (*kernel)(const Work&, size_t, size_t), const Work& work, Order order, Random& random) {
  const size_t items = nnorm::count_items(work);
  if (order == Order::at_once) return kernel(work, 0, items);
  std::vector<std::pair<size_t, size_t>> ranges;
  for (size_t begin = 0, end; begin < items; begin = end) {
    end = std::min(items, begin + 1 + (order == Order::in_groups ? random.below(5) : 0));
    ranges.emplace_back(begin, end);
  }
  for (size_t i = ranges.size(); i > 1; --i) std::swap(ranges[i - 1], ranges[random.below(i)]);
  for (const auto& [begin, end] : ranges) kernel(work, begin, end);
}

// Values rounded to T.
template <class T>
std::vector<T> to_type(const std::vector<double>& values) {
  std::vector<T> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) nnorm::narrow(nnorm::Arithmetic<T>(values[i]), result[i]);
  return result;
}

template <class T>
std::vector<nnorm::Arithmetic<T>> widened_all(const std::vector<T>& values) {
  std::vector<nnorm::Arithmetic<T>> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = nnorm::widened(values[i]);
  return result;
}

template <class T>
struct NameOf;
template <>
struct NameOf<float> {
  static constexpr const char* value = "float";
};
template <>
struct NameOf<double> {
  static constexpr const char* value = "double";
};
template <>
struct NameOf<nnorm::Float16> {
  static constexpr const char* value = "float16";
};
template <>
struct NameOf<nnorm::BFloat16> {
  static constexpr const char* value = "bfloat16";
};

}  // namespace nnorm_test
