// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// A row is read from memory once if it fits into the registers of a warp or of a block, or into a block's shared memory.
// Longer rows are read four times. Sums are of float32 (float64 for float64), over a thread's elements, then over its warp,
// then over its block. Their order depends only on the row's length and alignment, so that results are reproducible.
//
// As on CPUs, a row of equal elements with ε = 0 is NaN, as 0/0 is.
#pragma once

#include "launch.cuh"

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
  unsigned run;         // neighbouring elements that share one weight
  Divisor run_divisor;  // by `run`
  bool whole_weights;   // run is 1, and weight and bias can be read in the same accesses as x
  Real epsilon, delta;
  Real inverse_length;  // a division takes as long as ten multiplications
  Real bounded_exponent;  // see the function bounded_exponent()
};

// `count` neighbouring numbers, in accesses of 16 bytes or fewer.
template <int count, class Real>
NNORM_DEVICE void load_all(const Real* from, Real (&to)[count]) {
  constexpr int width = count < widest<Real> ? count : widest<Real>;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    const Access<Real, width> access = load<width>(from + i);
    for (int j = 0; j < width; ++j) to[i + j] = access.values[j];
  }
}

// Weight and bias of the elements that start at `position` of a row. `whole` means that w.whole_weights is true.
template <bool whole, int width, class T>
NNORM_DEVICE void load_affine(const Rows<T>& w, size_t weights_of_row, unsigned position, Arithmetic<T> (&weight)[width],
                              Arithmetic<T> (&bias)[width]) {
  const auto each = [&] {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const size_t i = weights_of_row + w.run_divisor.divide(position + unsigned(j));
      weight[j] = w.weight[i];
      bias[j] = w.bias[i];
    }
  };
  const auto all = [&] {
    load_all(w.weight + weights_of_row + position, weight);
    load_all(w.bias + weights_of_row + position, bias);
  };
  if constexpr (whole)
    all();
  else if (w.whole_weights)
    all();
  else
    each();
}

// h = (x − mean)·inverse + correction, called with x − mean.
template <class Real>
struct Standardization {
  Real inverse, correction;

  NNORM_DEVICE Real operator()(Real centred) const { return centred * inverse + correction; }
};

// From Σ(x − near) and Σ(x − near)², where `near` is the rounded mean.
template <class Real>
NNORM_DEVICE Standardization<Real> standardization_of(const Real (&moments)[2], Real inverse_length, Real epsilon) {
  const Real shift = moments[0] * inverse_length, variance = moments[1] * inverse_length - shift * shift;
  const Real inverse = inverse_root((variance < 0 ? Real(0) : variance) + epsilon);  // this comparison keeps NaN
  return {inverse, -shift * inverse};
}

template <class T>
struct RowBranches {
  using Real = Arithmetic<T>;
  Branch<Real> pos, neg;

  NNORM_DEVICE RowBranches(const Real (&sums)[4], Real inverse_length, Real delta) {
    const LmbdaSums<Real> means{sums[0] * inverse_length, sums[1] * inverse_length, sums[2] * inverse_length,
                                sums[3] * inverse_length};
    const Exponents<Real> eta = resolve_exponents(estimate_lmbda(means, Real(1), delta), delta);
    pos = branch<Evaluation<T>>(eta.pos, Real(1), Real(1));
    neg = branch<Evaluation<T>>(eta.neg, Real(1), Real(-1));
  }

  // Tested once for each row, so that its elements need no clamp.
  NNORM_DEVICE bool bounded(Real bounded_exponent) const {
    return std::fabs(pos.eta) <= bounded_exponent && std::fabs(neg.eta) <= bounded_exponent;
  }

  template <bool bounded>
  NNORM_DEVICE Real of(Real h, Log2<Real> log, Real weight, Real bias) const {
    const bool negative = h < Real(0);
    const Real eta = negative ? neg.eta : pos.eta, gain = negative ? neg.gain : pos.gain;
    return gain * Evaluation<T>::template exp2_m1<bounded>(log, eta) * weight + bias;
  }
};

// log₂(1 + |h|); adds its terms to the sums that λ̂ is computed from.
template <class T>
NNORM_DEVICE Log2<Arithmetic<T>> summed_logarithm(Arithmetic<T> h, Arithmetic<T> (&sums)[4]) {
  const Arithmetic<T> a = magnitude(h);
  const Log2<Arithmetic<T>> log = Evaluation<T>::log2_1p(a);
  add_lmbda_terms(h, a, log, sums[0], sums[1], sums[2], sums[3]);
  return log;
}

constexpr int smallest_block = 128;
template <int threads>
constexpr int block_of = threads < smallest_block ? smallest_block : threads;

// Rows of at most threads·values elements, each in the registers of `threads` threads. `exact` is for rows of exactly
// threads·values elements, each with its own weight: it saves a fifth of the instructions.
template <int threads, int values, int width, bool exact, class T>
__global__ void __launch_bounds__(block_of<threads>) layer_group_normal_norm_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int accesses = values / width;
  constexpr unsigned teams_of_block = unsigned(block_of<threads> / threads);
  const unsigned member = threadIdx.x % unsigned(threads);
  const auto position = [&](int k) { return (unsigned(k * threads) + member) * unsigned(width); };
  const auto beyond = [&](int k) { return !exact && position(k) >= w.row_length; };

  for (size_t row = size_t(blockIdx.x) * teams_of_block + threadIdx.x / unsigned(threads); row < w.rows;
       row += size_t(gridDim.x) * teams_of_block) {
    const T* x = w.x + row * w.row_length;
    Real h[values], sum[1] = {0};
#pragma unroll
    for (int k = 0; k < accesses; ++k) {
      if (beyond(k)) continue;
      const Access<T, width> access = load<width>(x + position(k));
#pragma unroll
      for (int j = 0; j < width; ++j) sum[0] += h[k * width + j] = widened(access.values[j]);
    }
    sum_of_team<threads, 0>(sum);

    const Real mean = sum[0] * w.inverse_length;
    Real moments[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < accesses; ++k) {
      if (beyond(k)) continue;
#pragma unroll
      for (int i = k * width; i < (k + 1) * width; ++i) {
        h[i] -= mean;
        moments[0] += h[i];
        moments[1] += h[i] * h[i];
      }
    }
    sum_of_team<threads, 1>(moments);

    const Standardization<Real> standardize = standardization_of(moments, w.inverse_length, w.epsilon);
    Log2<Real> log[values];
    Real sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < accesses; ++k) {
      if (beyond(k)) continue;
#pragma unroll
      for (int i = k * width; i < (k + 1) * width; ++i) {
        h[i] = standardize(h[i]);
        log[i] = summed_logarithm<T>(h[i], sums);
      }
    }
    sum_of_team<threads, 2>(sums);

    const RowBranches<T> psi(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = row % w.period * (w.row_length / w.run);
    const auto transform = [&](auto bounded) {
#pragma unroll
      for (int k = 0; k < accesses; ++k) {
        if (beyond(k)) continue;
        Real weight[width], bias[width], results[width];
        load_affine<exact>(w, weights_of_row, position(k), weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j)
          results[j] = psi.template of<bounded.value>(h[k * width + j], log[k * width + j], weight[j], bias[j]);
        store_global(w.y + row * w.row_length + position(k), narrowed<T>(results));
      }
    };
    if (psi.bounded(w.bounded_exponent))
      transform(std::true_type());
    else
      transform(std::false_type());
  }
}

constexpr int long_row_threads = 512;

// A thread's accesses to a long row, several in flight at once. Calls use(position, access) for each in order, and
// part_done() after each part of them: a sum in parts loses less to rounding than one long chain of additions.
template <int width, class T, class Use, class Done>
NNORM_DEVICE void for_each_access(const T* row, unsigned length, Use use, Done part_done) {
  constexpr int together = 4, batches_of_part = 16;
  constexpr unsigned step = unsigned(long_row_threads * width);
  for (unsigned first = threadIdx.x * unsigned(width); first < length;) {
    for (int batch = 0; batch < batches_of_part && first < length; ++batch, first += together * step) {
      Access<T, width> accesses[together] = {};
#pragma unroll
      for (int k = 0; k < together; ++k)
        if (first + unsigned(k) * step < length) accesses[k] = load<width>(row + (first + unsigned(k) * step));
#pragma unroll
      for (int k = 0; k < together; ++k)
        if (first + unsigned(k) * step < length) use(first + unsigned(k) * step, accesses[k]);
    }
    part_done();
  }
}

// Adds to `total` what add(position, access, part) adds to `part` for all accesses of a thread.
template <int width, int count, class T, class Real, class Add>
NNORM_DEVICE void sum_of_row(const T* row, unsigned length, Real (&total)[count], Add add) {
  Real part[count] = {};
  for_each_access<width>(
      row, length, [&](unsigned position, const Access<T, width>& access) { add(position, access, part); },
      [&] {
        for (int i = 0; i < count; ++i) {
          total[i] += part[i];
          part[i] = 0;
        }
      });
}

// Rows of any length, a block for each. If `staged`, the row is kept in shared memory, else every pass reads it again.
template <bool staged, int width, class T>
__global__ void __launch_bounds__(long_row_threads) layer_group_normal_norm_long_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  using Elements = Access<T, width>;
  NNORM_DYNAMIC_SHARED(stage);

  for (size_t row = blockIdx.x; row < w.rows; row += gridDim.x) {
    const T* x = w.x + row * w.row_length;
    T* const kept = reinterpret_cast<T*>(stage);  // each thread reads only what it wrote, so no barrier is needed
    const T* const again = staged ? kept : x;
    Real sum[1] = {0};
    sum_of_row<width>(x, w.row_length, sum, [&](unsigned position, const Elements& access, Real(&part)[1]) {
      if (staged) store(kept + position, access);
#pragma unroll
      for (int j = 0; j < width; ++j) part[0] += widened(access.values[j]);
    });
    sum_of_team<long_row_threads, 0>(sum);

    const Real mean = sum[0] * w.inverse_length;
    Real moments[2] = {0, 0};
    sum_of_row<width>(again, w.row_length, moments, [&](unsigned, const Elements& access, Real(&part)[2]) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const Real centred = widened(access.values[j]) - mean;
        part[0] += centred;
        part[1] += centred * centred;
      }
    });
    sum_of_team<long_row_threads, 1>(moments);

    const Standardization<Real> standardize = standardization_of(moments, w.inverse_length, w.epsilon);
    Real sums[4] = {0, 0, 0, 0};
    sum_of_row<width>(again, w.row_length, sums, [&](unsigned, const Elements& access, Real(&part)[4]) {
#pragma unroll
      for (int j = 0; j < width; ++j) summed_logarithm<T>(standardize(widened(access.values[j]) - mean), part);
    });
    sum_of_team<long_row_threads, 2>(sums);

    const RowBranches<T> psi(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = row % w.period * (w.row_length / w.run);
    const auto transform = [&](unsigned position, const Elements& access) {  // not for `bounded` rows: that would be another copy of the loop
      Real weight[width], bias[width], results[width];
      load_affine<false>(w, weights_of_row, position, weight, bias);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const Real h = standardize(widened(access.values[j]) - mean);
        results[j] = psi.template of<false>(h, Evaluation<T>::log2_1p(magnitude(h)), weight[j], bias[j]);
      }
      store_global(w.y + row * w.row_length + position, narrowed<T>(results));
    };
    for_each_access<width>(again, w.row_length, transform, [] {});
  }
}

// Rows that fit into the registers of `threads` threads with `values` each.
template <int threads, int values, int width, class T>
cudaError_t run_in_registers(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  constexpr unsigned block = unsigned(block_of<threads>), teams = block / unsigned(threads);
  const unsigned blocks = device.blocks(divided_up(work.rows, teams), 64);
  if constexpr (width > 1)
    if (work.row_length == unsigned(threads * values) && work.whole_weights)
      return launch(&layer_group_normal_norm_rows<threads, values, width, true, T>, blocks, block, stream, work);
  return launch(&layer_group_normal_norm_rows<threads, values, width, false, T>, blocks, block, stream, work);
}

template <int width, class T>
cudaError_t run_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  if (work.row_length <= 32 * 8) return run_in_registers<32, 8, width>(work, device, stream);
  if (work.row_length <= 32 * 16) return run_in_registers<32, 16, width>(work, device, stream);
  if (work.row_length <= 32 * 24) return run_in_registers<32, 24, width>(work, device, stream);
  if (work.row_length <= 32 * 32) return run_in_registers<32, 32, width>(work, device, stream);
  if (work.row_length <= 128 * 32) return run_in_registers<128, 32, width>(work, device, stream);
  constexpr size_t scratch = 1 << 10;  // more than the kernel's own variables in shared memory
  const size_t bytes = work.row_length * sizeof(T), room = size_t(device.shared_memory) - scratch;
  const unsigned blocks = device.blocks(work.rows, 16);
  if (bytes <= room)
    return launch(&layer_group_normal_norm_long_rows<true, width, T>, blocks, long_row_threads, stream, work, bytes, room);
  return launch(&layer_group_normal_norm_long_rows<false, width, T>, blocks, long_row_threads, stream, work);
}

// The greatest exponent with which no value of a row of this length brings 2^z to its limits. A standardised value is at
// most the root of the row's length; twice as much leaves room for rounding, unless the row's variance is all rounding.
template <class Real>
Real bounded_exponent(size_t row_length) {
  const double greatest_log2 = std::log2(1 + 2 * std::sqrt(double(row_length)));
  return Real((double(Format<Real>::exponent_bias) - 2) / greatest_log2);
}

template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  if (problem.row_length >> 31 != 0) return cudaErrorInvalidValue;
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  using Real = Arithmetic<T>;
  constexpr size_t width = widest<T>;
  const bool whole = misalignment(problem.x) == 0 && misalignment(problem.y) == 0 && problem.row_length % width == 0;
  const bool aligned_weights = misalignment(problem.weight) == 0 && misalignment(problem.bias) == 0;
  const Rows<T> work{problem.x,
                     problem.y,
                     problem.weight,
                     problem.bias,
                     problem.rows,
                     problem.period,
                     unsigned(problem.row_length),
                     unsigned(problem.run),
                     Divisor(unsigned(problem.run)),
                     problem.run == 1 && (!whole || aligned_weights),
                     Real(problem.epsilon),
                     Real(problem.delta),
                     Real(1) / Real(problem.row_length),
                     bounded_exponent<Real>(problem.row_length)};
  return whole ? run_rows<int(width)>(work, device, stream) : run_rows<1>(work, device, stream);
}

}  // namespace nnorm::cuda
