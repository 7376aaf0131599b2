// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// A row is read from memory once if it fits into the registers of a warp or a block (up to 16384 elements, 4096 in
// float64), or into the shared memory of a block. Longer rows are read four times. Each warp reads whole tiles of a row, so that sums are in the order of
// nnorm/row_statistics.h.
//
// As on CPUs, the result for a row of equal elements with ε = 0 is NaN.
#pragma once

#include "launch.cuh"
#include "tiles.cuh"

namespace nnorm::cuda {

template <class T>
struct Rows {
  using Real = Arithmetic<T>;

  const T* x;
  T* y;
  const Real* weight;
  const Real* bias;
  size_t rows, period;
  unsigned row_length;
  unsigned run;         // neighboring elements that share one weight
  Divisor run_divisor;  // by `run`
  bool whole_weights;   // run is 1, and weight and bias can be read with the accesses of x
  bool one_weight_for_access;  // `run` is a multiple of an access, and rows consist of whole accesses
  Real epsilon, delta;
  Real length, inverse_length;
  Real bounded_exponent;  // see the function bounded_exponent()
};

// Loads `count` neighboring numbers with accesses of at most 16 bytes.
template <int count, class Real>
NNORM_DEVICE void load_all(const Real* from, Real (&to)[count]) {
  constexpr int width = count < widest<Real> ? count : widest<Real>;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    const Access<Real, width> access = load<width>(from + i);
    for (int j = 0; j < width; ++j) to[i + j] = access.values[j];
  }
}

// How weight and bias of an access are found: side by side (w.whole_weights), by the run of each element, or of the
// access as a whole if w.one_weight_for_access.
enum class Weights { neighbors, by_element, by_access };

// Loads weight and bias of `count` elements, from element start + offset of a row.
template <Weights weights, int width, class T>
NNORM_DEVICE void load_affine(const Rows<T>& w, size_t weights_of_row, unsigned start, unsigned offset, unsigned count,
                              Arithmetic<T> (&weight)[width], Arithmetic<T> (&bias)[width]) {
  if constexpr (weights == Weights::neighbors) {
    load_all(w.weight + (weights_of_row + start) + offset, weight);
    load_all(w.bias + (weights_of_row + start) + offset, bias);
  } else if (weights == Weights::by_access && w.one_weight_for_access) {
    const size_t i = weights_of_row + w.run_divisor.divide(start + offset);
    const Arithmetic<T> its_weight = w.weight[i], its_bias = w.bias[i];
#pragma unroll
    for (int j = 0; j < width; ++j) weight[j] = its_weight, bias[j] = its_bias;
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (unsigned(j) >= count) continue;
      const size_t i = weights_of_row + w.run_divisor.divide(start + offset + unsigned(j));
      weight[j] = w.weight[i];
      bias[j] = w.bias[i];
    }
  }
}

template <class T>
using Psi = RowBranches<Evaluation<T>, Arithmetic<T>>;

// Whether the elements of a row need no clamp; tested once for each row.
template <class T>
NNORM_DEVICE bool is_bounded(const Psi<T>& psi, Arithmetic<T> bounded_exponent) {
  return std::fabs(psi.pos.eta) <= bounded_exponent && std::fabs(psi.neg.eta) <= bounded_exponent;
}

template <int number>
using Turn = std::integral_constant<int, number>;

constexpr unsigned block_of_short_rows = 128;
// The accesses of a row that only some rows of a kernel for short rows have: those of its last 8 elements a thread.
constexpr int values_step = 8;

// Computes rows in registers, `values` elements in each thread. With chains = 1 a warp computes a row of at most one
// tile, else a block of at most `chains` warps a row, each warp one tile. `own` means that w.whole_weights is true,
// `exact` that rows have all elements of a warp. If `ahead`, the next row is copied to shared memory while this one is
// computed.
template <int chains, int values, bool whole, bool own, bool exact, bool ahead, class T>
__global__ void __launch_bounds__(chains == 1 ? block_of_short_rows : unsigned(chains) * warp_size)
    layer_group_normal_norm_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = Tile<T>::width, accesses = values / width;
  constexpr int certain = chains == 1 ? (values - values_step) / width : 0;  // accesses that every row has
  static_assert(values <= Tile<T>::accesses * width, "a warp has one tile");
  constexpr unsigned teams_of_block = chains == 1 ? block_of_short_rows / warp_size : 1;
  const unsigned warp = threadIdx.x / warp_size;
  const unsigned start = Tile<T>::start(chains == 1 ? 0 : warp);
  const auto position = [&](int k) { return start + Tile<T>::offset(k); };
  // Whether the row has all elements of this warp; the code for these tests nothing.
  const bool full = exact || (chains == 1 ? 0 : warp * unsigned(row_tile)) + unsigned(values) * warp_size <= w.row_length;

  // Calls f(k, count) for the accesses of this thread, with the number of elements that the row has from there.
  const auto for_accesses = [&](const auto& f) {
    const auto loop = [&](auto all) {
#pragma unroll
      for (int k = 0; k < accesses; ++k) {
        const bool exists = all.value || k < certain;
        if (exists || position(k) < w.row_length) f(k, exists ? unsigned(width) : w.row_length - position(k));
      }
    };
    if (full)
      loop(std::true_type());
    else
      loop(std::false_type());
  };
  // Sums the terms that add(i, sums) adds for the elements of the row.
  const auto sums_of_row = [&](auto turn, auto& sums, const auto& add) {
    constexpr int terms = int(std::extent_v<std::remove_reference_t<decltype(sums)>>);
    Sums<T, terms> part;
    for_accesses([&](int k, unsigned count) {
#pragma unroll
      for (int j = 0; j < width; ++j)
        if (whole || unsigned(j) < count) add(k * width + j, part.of(k * width + j));
    });
    sums_of_team<chains, turn.value, Tile<T>::places>(part.values, sums);
  };

  NNORM_DYNAMIC_SHARED(stage);
  // No barrier is needed: a thread reads only what it copied.
  T* const next = reinterpret_cast<T*>(stage) + start;
  const auto copy = [&](size_t row) {
    if (row >= w.rows) return;
    const T* const x = w.x + row * w.row_length + start;
    for_accesses([&](int k, unsigned) { copy_asynchronously<width>(next + Tile<T>::offset(k), x + Tile<T>::offset(k)); });
  };

  const size_t first_row = size_t(blockIdx.x) * teams_of_block + (chains == 1 ? warp : 0);
  const size_t step = size_t(gridDim.x) * teams_of_block;
  if constexpr (ahead) copy(first_row);
  for (size_t row = first_row; row < w.rows; row += step) {
    if constexpr (ahead) wait_for_copies();
    const T* const x = ahead ? next : w.x + row * w.row_length + start;
    T* const y = w.y + row * w.row_length + start;
    Real h[values] = {}, sum[1];
    for_accesses([&](int k, unsigned count) {
      const Access<T, width> access = load_part<whole>(x + Tile<T>::offset(k), count);
#pragma unroll
      for (int j = 0; j < width; ++j) h[k * width + j] = widened(access.values[j]);
    });
    sums_of_row(Turn<0>(), sum, [&](int i, Real* part) { part[0] += h[i]; });
    if constexpr (ahead) copy(row + step);  // the sum needed all elements, so they have been read

    const Real mean = sum[0] / w.length;
    Real moments[2];
    sums_of_row(Turn<1>(), moments, [&](int i, Real* part) {
      h[i] -= mean;
      add_moments(h[i], part[0], part[1]);
    });

    const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
    Log2<Real> log[values];
    Real sums[4];
    sums_of_row(Turn<2>(), sums, [&](int i, Real* part) {
      h[i] = standardize.of_centered(h[i]);
      log[i] = Evaluation<T>::log2_1p(magnitude(h[i]));
      add_lmbda_terms(h[i], std::fabs(h[i]), log[i], part[0], part[1], part[2], part[3]);
    });

    const Psi<T> psi = Psi<T>::from(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = row % w.period * (w.row_length / w.run);
    const auto transform = [&](auto bounded) {
      for_accesses([&](int k, unsigned count) {
        Real weight[width], bias[width], results[width];
        load_affine<own ? Weights::neighbors : Weights::by_access>(w, weights_of_row, start, Tile<T>::offset(k), count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j)
          results[j] = result_of<Evaluation<T>, bounded.value>(h[k * width + j], log[k * width + j], psi.pos, psi.neg,
                                                               weight[j], bias[j]);
        store_part<whole>(y + Tile<T>::offset(k), narrowed<T>(results), count);
      });
    };
    if (is_bounded<T>(psi, w.bounded_exponent))
      transform(std::true_type());
    else
      transform(std::false_type());
  }
}

constexpr int long_row_threads = 512;
static_assert(long_row_threads / int(warp_size) == int(row_chains), "a warp for each chain");

// The number of accesses of a thread to a long row that are in flight together: 32 bytes. More would need so many
// registers that two blocks do not fit on a multiprocessor.
template <class T>
constexpr int accesses_in_flight = 32 / int(Tile<T>::width * sizeof(T));

// Calls use(start, accesses) for all accesses of a thread, several at once, and end_of_tile() after those of each tile.
template <bool whole, class T, class Use, class End>
NNORM_DEVICE void for_each_access(const T* row, unsigned length, Use use, End end_of_tile) {
  static_assert(Tile<T>::accesses % accesses_in_flight<T> == 0);
  for (unsigned tile = threadIdx.x / warp_size; size_t(tile) * row_tile < length; tile += unsigned(row_chains)) {
#pragma unroll 1
    for (int first = 0; first < Tile<T>::accesses; first += accesses_in_flight<T>) {
      const unsigned start = Tile<T>::start(tile) + Tile<T>::offset(first);
      const T* const from = row + start;
      Access<T, Tile<T>::width> accesses[accesses_in_flight<T>] = {};
#pragma unroll
      for (int k = 0; k < accesses_in_flight<T>; ++k) {
        const unsigned position = start + Tile<T>::offset(k);
        if (position < length) accesses[k] = load_part<whole>(from + Tile<T>::offset(k), length - position);
      }
      use(start, accesses);
    }
    end_of_tile();
  }
}

// Computes the sums over a row: add(element, sums) adds the terms of an element. see(start, accesses) is called before.
template <int turn, bool whole, int count, class T, class Add, class See>
NNORM_DEVICE void sums_of_long_row(const T* row, unsigned length, Arithmetic<T> (&sums)[count], Add add, See see) {
  constexpr int width = Tile<T>::width;
  Sums<T, count> of_tile;
  ChainSum<Arithmetic<T>> chain{0, 0};  // the sum that this lane has after sum_of_tile()
  for_each_access<whole>(
      row, length,
      [&](unsigned start, const auto& accesses) {
        see(start, accesses);
#pragma unroll
        for (int i = 0; i < accesses_in_flight<T> * width; ++i)
          if (start + Tile<T>::offset(i / width) + unsigned(whole ? 0 : i % width) < length)
            add(widened(accesses[i / width].values[i % width]), of_tile.of(i));
      },
      [&] {
        chain.add(sum_of_tile<Tile<T>::places>(of_tile.values));
        of_tile = {};
      });
  constexpr unsigned apart = lanes_of_sum<Tile<T>::places * count>;
  const unsigned lane = threadIdx.x % warp_size;
  sums_of_chains<turn, int(row_chains)>(chain.total(), lane / apart, threadIdx.x / warp_size,
                                        lane % apart == 0 && lane < count * apart, sums);
}

// Computes rows of any length, each with one block. If `staged`, shared memory holds the row, else every pass reads it
// again.
template <bool staged, bool whole, class T>
__global__ void __launch_bounds__(long_row_threads, whole ? 2 : 1) layer_group_normal_norm_long_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = Tile<T>::width;
  NNORM_DYNAMIC_SHARED(stage);

  for (size_t row = blockIdx.x; row < w.rows; row += gridDim.x) {
    const T* x = w.x + row * w.row_length;
    T* const kept = reinterpret_cast<T*>(stage);  // no barrier is needed: a thread reads only what it wrote
    const T* const again = staged ? kept : x;
    const auto keep = [&](unsigned start, const auto& accesses) {
      if constexpr (staged) {
#pragma unroll
        for (int k = 0; k < accesses_in_flight<T>; ++k)
          if (start + Tile<T>::offset(k) < w.row_length) store(kept + start + Tile<T>::offset(k), accesses[k]);
      }
    };
    const auto nothing = [](unsigned, const auto&) {};
    Real sum[1];
    sums_of_long_row<0, whole>(x, w.row_length, sum, [](Real value, Real* part) { part[0] += value; }, keep);

    const Real mean = sum[0] / w.length;
    Real moments[2];
    sums_of_long_row<1, whole>(again, w.row_length, moments, [&](Real value, Real* part) {
      add_moments(value - mean, part[0], part[1]);
    }, nothing);

    const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
    Real sums[4];
    sums_of_long_row<2, whole>(again, w.row_length, sums, [&](Real value, Real* part) {
      const Real h = standardize(value);
      add_lmbda_terms(h, std::fabs(h), Evaluation<T>::log2_1p(magnitude(h)), part[0], part[1], part[2], part[3]);
    }, nothing);

    const Psi<T> psi = Psi<T>::from(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = row % w.period * (w.row_length / w.run);
    const auto transform = [&](unsigned start, const auto& accesses) {
      T* const y = w.y + row * w.row_length + start;
#pragma unroll
      for (int k = 0; k < accesses_in_flight<T>; ++k) {
        const unsigned position = start + Tile<T>::offset(k);
        if (position >= w.row_length) continue;
        const unsigned count = w.row_length - position;
        Real weight[width], bias[width], results[width];
        // One weight for an access is not looked for here: the registers are few, and it would be 3 % slower in bfloat16.
        if (w.whole_weights)
          load_affine<Weights::neighbors>(w, weights_of_row, start, Tile<T>::offset(k), count, weight, bias);
        else
          load_affine<Weights::by_element>(w, weights_of_row, start, Tile<T>::offset(k), count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j) {  // bounded rows have no loop of their own: it would be a second copy
          const Real h = standardize(widened(accesses[k].values[j]));
          results[j] =
              result_of<Evaluation<T>, false>(h, Evaluation<T>::log2_1p(magnitude(h)), psi.pos, psi.neg, weight[j], bias[j]);
        }
        store_part<whole>(y + Tile<T>::offset(k), narrowed<T>(results), count);
      }
    };
    for_each_access<whole>(again, w.row_length, transform, [] {});
  }
}

constexpr size_t own_shared_memory = 1 << 10;  // more than the kernels' own variables in shared memory

// The shared memory that holds a row. The last access of a row that is not whole extends beyond its end and is stored too.
template <class T>
size_t bytes_of_row(const Rows<T>& work) {
  return divided_up(work.row_length * sizeof(T), access_bytes) * access_bytes;
}

// Launches the kernel for rows in registers.
template <int chains, int values, bool whole, class T>
cudaError_t run_in_registers(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  constexpr bool ahead = whole && chains == int(row_chains), in_warp = chains == 1;
  const unsigned threads =
      in_warp ? block_of_short_rows : unsigned(divided_up(work.row_length, row_tile)) * warp_size;
  // A block that copies its next row should have one, so there are as many blocks as can run at once.
  const unsigned most = ahead ? unsigned(chains) * warp_size / threads : 64;
  const unsigned blocks = device.blocks(divided_up(work.rows, in_warp ? block_of_short_rows / warp_size : 1), most);
  const size_t shared = ahead ? bytes_of_row(work) : 0, room = size_t(device.shared_memory) - own_shared_memory;
  const auto run = [&](auto own, auto exact) {
    return launch(&layer_group_normal_norm_rows<chains, values, whole, own.value, exact.value, ahead, T>, blocks, threads,
                  stream, work, shared, room);
  };
  if constexpr (whole) {
    // In a row of a warp the tests take a tenth of the time; in longer rows they are a small part.
    if constexpr (in_warp)
      if (work.whole_weights && work.row_length == unsigned(values) * warp_size)
        return run(std::true_type(), std::true_type());
    if (work.whole_weights) return run(std::true_type(), std::false_type());
  }
  return run(std::false_type(), std::false_type());
}

template <bool whole, class T>
cudaError_t run_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  constexpr int in_warp = values_step * int(warp_size);
  if (work.row_length <= in_warp) return run_in_registers<1, 8, whole>(work, device, stream);
  if (work.row_length <= 2 * in_warp) return run_in_registers<1, 16, whole>(work, device, stream);
  if (work.row_length <= 3 * in_warp) return run_in_registers<1, 24, whole>(work, device, stream);
  if (work.row_length <= 4 * in_warp) return run_in_registers<1, 32, whole>(work, device, stream);
  if (work.row_length <= 4 * row_tile) return run_in_registers<4, 32, whole>(work, device, stream);
  const size_t bytes = bytes_of_row(work), room = size_t(device.shared_memory) - own_shared_memory;
  // A thread has no registers for so many float64 elements.
  if constexpr (sizeof(Arithmetic<T>) == 4)
    if (work.row_length <= row_chains * row_tile && (!whole || bytes <= room))
      return run_in_registers<int(row_chains), 32, whole>(work, device, stream);
  const unsigned blocks = device.blocks(work.rows, 16);
  if (bytes <= room)
    return launch(&layer_group_normal_norm_long_rows<true, whole, T>, blocks, long_row_threads, stream, work, bytes, room);
  return launch(&layer_group_normal_norm_long_rows<false, whole, T>, blocks, long_row_threads, stream, work);
}

// The greatest exponent for which no element of a row of this length saturates 2^z. A standardized value is at most the
// root of the row's length. Twice that allows for rounding, except in rows whose variance consists of rounding errors.
template <class Real>
Real bounded_exponent(size_t row_length) {
  const double greatest_log2 = std::log2(1 + 2 * std::sqrt(double(row_length)));
  return Real((double(Format<Real>::exponent_bias) - 2) / greatest_log2);
}

template <class T>
cudaError_t run_any(const RowProblem<T>& problem, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  if (problem.row_length >> 31 != 0) return cudaErrorInvalidValue;
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  using Real = Arithmetic<T>;
  constexpr size_t width = size_t(Tile<T>::width);
  const auto aligned = [](const auto* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % std::min(width * sizeof(*pointer), access_bytes) == 0;
  };
  const bool whole = aligned(problem.x) && aligned(problem.y) && problem.row_length % width == 0;
  const bool aligned_weights = aligned(problem.weight) && aligned(problem.bias);
  const Rows<T> work{problem.x,
                     problem.y,
                     problem.weight,
                     problem.bias,
                     problem.rows,
                     problem.period,
                     unsigned(problem.row_length),
                     unsigned(problem.run),
                     Divisor(unsigned(problem.run)),
                     problem.run == 1 && whole && aligned_weights,
                     problem.run % width == 0 && whole,
                     Real(problem.epsilon),
                     Real(problem.delta),
                     Real(problem.row_length),
                     Real(1) / Real(problem.row_length),
                     bounded_exponent<Real>(problem.row_length)};
  return whole ? run_rows<true>(work, device, stream) : run_rows<false>(work, device, stream);
}

template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream, bool same_bits) {
  return with_elements(problem, same_bits, [=](const auto& of_elements) { return run_any(of_elements, stream); });
}

}  // namespace nnorm::cuda
