// Shared by the programs that compare bits: numbers of every kind, and the operators on the CPU in every layout.
#pragma once

#include <string>

#include "channels.h"
#include "rows.h"

namespace nnorm_test {

using nnorm::ChannelWork;
using nnorm::Sharing;
using nnorm::InstructionSet;

template <class T>
bool is_nan(T value) {
  const auto wide = nnorm::widened(value);
  return wide != wide;
}

// All NaNs are equal: their bits depend on the order of operands, which compilers may change.
template <class T>
bool differ(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) != 0 && !(is_nan(a) && is_nan(b));
}

// What a program compares, from its command line. Empty means everything.
struct Only {
  std::string type, operators;

  template <class T>
  bool type_is() const {
    return type.empty() || type == NameOf<T>::value;
  }
  bool channels() const { return operators.empty() || operators == "BatchNormalNorm"; }
  bool rows() const { return operators.empty() || operators == "LayerNormalNorm"; }
};

// Numbers as networks have them, numbers of any size, and arbitrary bits.
enum class Kind { normal, any_size, any_bits };

// Without logarithms, which would take most of an emulator's time.
inline double draw(Kind kind, Random& random) {
  if (kind == Kind::normal) {  // approximately normal, of variance 1
    double sum = -3;
    for (int i = 0; i < 3; ++i) sum += 2 * random.uniform();
    return sum;
  }
  const double mantissa = random.uniform(-2, 2);  // drawn first: compilers choose the order of arguments
  return std::ldexp(mantissa, int(random.below(200)) - 100);
}

template <class T>
std::vector<T> numbers(size_t n, Kind kind, Random& random) {
  std::vector<T> result(n);
  for (T& value : result) {
    if (kind == Kind::any_bits) {
      const uint64_t bits = random.bits();
      std::memcpy(&value, &bits, sizeof value);
    } else {
      nnorm::narrow(Arithmetic<T>(draw(kind, random)), value);
    }
  }
  return result;
}

// x of [samples, channels, extent] in the layout of `sharing`, whose rows are blocks of `lanes` channels for Sharing::lane.
struct Layout {
  Sharing sharing;
  size_t samples, channels, extent, lanes;

  size_t place_of(size_t sample, size_t channel, size_t position) const {
    const size_t within = sharing == Sharing::row       ? channel * extent + position
                          : sharing == Sharing::element ? position * channels + channel
                                                        : (channel / lanes * extent + position) * lanes + channel % lanes;
    return sample * channels * extent + within;
  }

  template <class T>
  std::vector<T> from_rows(const std::vector<T>& x) const {
    std::vector<T> result(x.size());
    for_each([&](size_t row_place, size_t place) { result[place] = x[row_place]; });
    return result;
  }
  template <class T>
  std::vector<T> to_rows(const std::vector<T>& x) const {
    std::vector<T> result(x.size());
    for_each([&](size_t row_place, size_t place) { result[row_place] = x[place]; });
    return result;
  }

 private:
  template <class F>
  void for_each(F f) const {
    for (size_t s = 0, i = 0; s < samples; ++s)
      for (size_t c = 0; c < channels; ++c)
        for (size_t p = 0; p < extent; ++p, ++i) f(i, place_of(s, c, p));
  }
};

template <class T>
std::vector<T> batch_normal_norm(const InstructionSet& set, const Layout& layout, nnorm::Epilogue epilogue,
                                 const ChannelParameters<Arithmetic<T>>& p, const std::vector<T>& x,
                                 const std::vector<T>& residual) {
  const nnorm::KernelTable<T>& kernels = set.table<T>();
  std::vector<Arithmetic<T>> table(size_t(nnorm::ChannelField::count) * layout.channels);
  kernels.prepare_channels(p.pointers().data(), layout.channels, 1, table.data());
  const std::vector<T> x_there = layout.from_rows(x), residual_there = layout.from_rows(residual);
  std::vector<T> y(x.size());
  ChannelWork<T> work{};
  work.x = x_there.data();
  work.residual = residual_there.data();
  work.y = y.data();
  work.table = table.data();
  work.table_width = layout.channels;
  work.size = x.size();
  work.sharing = layout.sharing;
  work.lanes = layout.lanes;
  work.row_length = layout.sharing == Sharing::row       ? layout.extent
                    : layout.sharing == Sharing::element ? layout.channels
                                                         : layout.extent * layout.lanes;
  work.period = layout.sharing == Sharing::row       ? layout.channels
                : layout.sharing == Sharing::element ? 1
                                                     : layout.channels / layout.lanes;
  work.epilogue = epilogue;
  kernels.batch_normal_norm(work, 0, nnorm::count_items(work));
  return layout.to_rows(y);
}

template <class T>
std::vector<T> layer_group_normal_norm(const InstructionSet& set, const Rows<T>& problem, const std::vector<T>& x) {
  std::vector<T> y(x.size());
  const RowProblem<T> work = problem.work(x.data(), y.data());
  set.table<T>().layer_group_normal_norm(work, 0, nnorm::count_items(work));
  return y;
}

}  // namespace nnorm_test
