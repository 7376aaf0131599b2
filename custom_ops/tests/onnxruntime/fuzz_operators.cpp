// Random nodes against the library's callbacks: fuzz_operators [CASES [SEED]].
//
// A case is an operator, a type, shapes of rank 0 to 6 with extents of zero and extents whose product overflows,
// attributes and values, most of them fitting and some hostile. The library must refuse what does not fit, and otherwise
// its values are compared with the formulas in a wider type. In some cases a call of the API or an allocation fails: the
// library must return an error, lose nothing, and give the right values in the next run.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "../channels.h"
#include "../check.h"
#include "../rows.h"
#include "host.h"

extern "C" OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept;

namespace nnorm_test {

using nnorm::Shape;

namespace {

struct Figures {
  long cases = 0, refused = 0, made_to_fail = 0, empty = 0, values = 0, beyond = 0;
} figures;

#if defined(NNORM_SANITIZED)
constexpr double lanes_lost = 10;  // as in test_layer_group_normal_norm.cpp
#else
constexpr double lanes_lost = 1;
#endif

// What a case needs to know of the operator that it calls.
struct Operator {
  const OrtCustomOp* op;
  std::string name, plain_name;
  ONNXTensorElementDataType type;
  bool blocked, per_channel, frozen, takes_residual;
  size_t inputs;
  Epilogue epilogue;
};

std::vector<Operator> all_operators(const host::Domain& domain) {
  std::vector<Operator> all;
  for (const OrtCustomOp* op : domain.operators) {
    Operator found{op, op->GetName(op), op->GetName(op), op->GetOutputType(op, 0), false, true, false, false,
                   op->GetInputTypeCount(op), Epilogue::none};
    found.blocked = found.name.rfind("Nchwc", 0) == 0;
    if (found.blocked) found.plain_name = found.name.substr(5);
    found.per_channel = found.name != "LayerNormalNorm";
    for (const EpilogueFacts& facts : nnorm::epilogues)
      if (found.plain_name == facts.operator_name) {
        found.frozen = true;
        found.takes_residual = facts.takes_residual;
        found.epilogue = facts.epilogue;
      }
    all.push_back(found);
    CHECK(op->GetStartVersion(op) == 1 && op->GetEndVersion(op) == 1, "%s: versions that do not exist", found.name.c_str());
    CHECK(op->GetOutputTypeCount(op) == 1 && std::string(op->GetExecutionProviderType(op)) == "CPUExecutionProvider",
          "%s", found.name.c_str());
    for (size_t i = 0; i < found.inputs; ++i) {
      const bool wide = i > 0 && !(found.takes_residual && i + 1 == found.inputs) && sizeof(void*) != 0;
      const auto expected_type = !wide ? found.type
                                 : found.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE ? ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE
                                                                                      : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
      CHECK(op->GetInputType(op, i) == expected_type && op->GetInputCharacteristic(op, i) == INPUT_OUTPUT_REQUIRED &&
                op->GetInputMemoryType(op, i) == OrtMemTypeDefault,
            "%s: input %zu", found.name.c_str(), i);
    }
    CHECK(op->GetOutputCharacteristic(op, 0) == INPUT_OUTPUT_REQUIRED, "%s", found.name.c_str());
  }
  return all;
}

// Numbers for X, parameters and residual: ordinary ones, or with a share of hostile ones.
double number(Random& random, bool hostile) {
  if (!hostile || random.below(6) != 0) return 2 * random.normal();
  const double odd[] = {0.0,   -0.0,  NAN,    INFINITY, -INFINITY, 1e-45, -1e-40, 3e-39, 1e-310, 1.0,
                        -1.0,  1e4,   -65504, 1e10,     -1e17,     1e30,  -3e38,  1e300, 0x1p-24, 1e-7};
  return odd[random.below(sizeof odd / sizeof *odd)];
}

double exponent(Random& random, bool hostile) {
  const double usual[] = {0, 1, 2, 1e-7, -1e-7};
  if (random.below(4) == 0) return usual[random.below(5)];
  if (!hostile || random.below(4) != 0) return random.uniform(-2, 4);
  const double odd[] = {NAN, INFINITY, -INFINITY, 40, -40, 1e3, -1e6, 1e-30, -1e-45, 1e20};
  return odd[random.below(10)];
}

template <class T>
std::vector<T> tensor(size_t n, const std::function<double()>& draw) {
  std::vector<double> numbers(n);
  for (double& value : numbers) value = draw();
  return to_type<T>(numbers);
}

// The result of an element of BatchNormalNorm, with the limits that nnorm/mathematics.h states. Returns false where the
// formula leaves the range of the arithmetic, so that only NaN is a promise.
template <class Real>
bool true_element(const ChannelParameters<Real>& p, size_t c, Real x, Real residual, Epilogue epilogue, Wider<Real>& y,
                  Wider<Real>& tolerance) {
  using Wide = Wider<Real>;
  using F = nnorm::Format<Real>;
  const Wide h = Wide(p.scale[c]) * Wide(x) + Wide(p.shift[c]), given = h < 0 ? p.neg[c] : p.pos[c];
  const Wide steps = std::fabs(Wide(p.scale[c]) * Wide(x)) + std::fabs(Wide(p.shift[c]));
  if (std::isfinite(steps) && steps >= Wide(std::numeric_limits<Real>::max()) / 4) return false;
  const Wide weight = p.weight[c], bias = p.bias[c], added = nnorm::epilogues[size_t(epilogue)].takes_residual ? residual : 0;
  const Wide limited = std::copysign(std::fabs(h) > Wide(F::greatest_magnitude) ? Wide(F::greatest_magnitude) : std::fabs(h), h);
  const Wide least = F::least_exponent, size = std::fabs(given);
  const Wide eta = std::copysign(size < least ? least : size, given);
  if (std::isnan(h) || std::isnan(given) || std::isnan(weight) || std::isnan(bias) || std::isnan(added)) {
    y = NAN;
    return true;
  }
  const Wide largest = std::numeric_limits<Real>::max(), smallest = std::numeric_limits<Real>::min();
  const Wide z = eta * std::log2(1 + std::fabs(limited));
  const Wide psi = weight * true_psi(limited, eta), doubled = 2 * weight, gain = doubled / eta;
  y = true_epilogue(epilogue, psi + bias, added);
  const Wide sizes = std::fabs(psi) + std::fabs(bias) + std::fabs(added) +
                     (std::fabs(h) > Wide(F::greatest_magnitude)
                          ? Wide(0)
                          : std::fabs(weight) * true_slope(h, eta) * steps);
  const Wide unit = std::is_same_v<Real, float> ? Wide(4e-7) : Wide(1e-15);
  tolerance = unit * std::max(Wide(1), std::fabs(eta)) * sizes + 8 * (1 + 2 / std::fabs(eta)) * smallest * (1 + std::fabs(weight));
  return std::isfinite(sizes) && sizes < largest / 4 && std::fabs(doubled) < largest && std::fabs(gain) < largest / 4 && std::fabs(eta) < Wide(1000) &&
         std::fabs(z) < Wide(F::exponent_bias - 3) &&
         (gain == 0 || std::fabs(gain) > smallest * 1e10);
}

template <class T>
void compare(const std::string& what, T result, Wider<T> truth, Wider<T> tolerance) {
  const double value = double(nnorm::widened(result));
  if (std::isnan(truth)) {
    CHECK(std::isnan(value), "%s: NaN becomes %g", what.c_str(), value);
  } else {
    const double most = sizeof(T) == 2 ? (std::is_same_v<T, nnorm::Float16> ? 65504.0 : 3.3e38) : 1e308;
    if (std::fabs(double(truth)) > most * 0.99) return;  // the type rounds it to infinity, or not
    const Wider<T> error = std::fabs(Wider<T>(nnorm::widened(result)) - truth);
    CHECK(error <= tolerance + Wider<T>(last_rounding<T>(double(truth))), "%s: %.9g, true %.9g, tolerance %.3g", what.c_str(),
          value, double(truth), double(tolerance));
  }
  ++figures.values;
}

// One node: its attributes, tensors and the verdict that the library must reach.
template <class T>
struct Case {
  using Real = Arithmetic<T>;

  const Operator& target;
  Random& random;
  host::Node node;
  std::vector<Shape> shapes;
  std::vector<T> x, residual;
  std::vector<std::vector<Real>> parameters;
  bool attributes_fit = true, shapes_fit = true, huge = false, hostile;
  int64_t axis = -1, groups = 1, block = 16;
  float epsilon = 1e-5f, delta = 0.0031622776601683794f;

  Case(const Operator& of, Random& numbers) : target(of), random(numbers), hostile(numbers.below(3) == 0) {
    choose_shapes();
    choose_attributes();
    if (shapes_fit && !huge) choose_values();
  }

  std::string describe() const {
    std::string text = target.name + " " + NameOf<T>::value;
    for (const Shape& shape : shapes) text += " " + nnorm::to_string(shape);
    return text + ", axis " + std::to_string(axis) + ", groups " + std::to_string(groups);
  }

  void choose_shapes() {
    const int64_t extents[] = {0, 1, 2, 3, 4, 5, 8, 16, 17, 24};
    Shape shape(random.below(7));
    huge = random.below(40) == 0;
    int64_t budget = random.below(100) ? 300 : 9000;
    for (int64_t& extent : shape) {
      extent = huge && random.below(2) ? int64_t(1) << (20 + random.below(43)) : extents[random.below(16) ? 1 + random.below(9) : 0];
      if (!huge && extent > budget) extent = 1;
      budget /= std::max<int64_t>(extent, 1);
    }
    if (!huge && random.below(30) == 0 && !shape.empty() && nnorm::count(shape) <= 8) shape.back() = 5000;  // several items, long rows
    if (target.blocked && shape.size() > 1 && random.below(8)) shape[1] = 16 * int64_t(random.below(3));
    const int64_t rank = int64_t(shape.size());
    Shape parameter;
    if (target.per_channel) {
      shapes_fit = rank >= (target.blocked ? 3 : 2);
      if (shapes_fit) parameter = {shape[1]};
    } else {
      axis = int64_t(random.below(size_t(std::max<int64_t>(1, 2 * rank)))) - rank;
      if (random.below(15) == 0) axis = int64_t(random.below(40)) - 20;
      shapes_fit = axis >= -rank && axis < rank;
      if (shapes_fit) parameter.assign(shape.begin() + (axis < 0 ? axis + rank : axis), shape.end());
    }
    shapes.assign(target.inputs, parameter);
    shapes[0] = shape;
    if (target.takes_residual) shapes.back() = shape;
    if (random.below(15) == 0) {  // one input of another shape
      Shape& wrong = shapes[1 + random.below(target.inputs - 1)];
      const Shape right = wrong;
      if (wrong.empty() || random.below(2)) wrong.push_back(1);
      else wrong[random.below(wrong.size())] += 1;
      shapes_fit &= wrong == right;
    }
    huge = false;
    for (const Shape& each : shapes) {
      long double product = 1;
      for (const int64_t extent : each) product *= static_cast<long double>(extent);
      huge |= product > 1e6L;
    }
  }

  void choose_attributes() {
    const auto give_float = [&](const char* name, float& value) {
      if (random.below(3) == 0) return;  // the default
      if (random.below(12) == 0) {
        const float odd[] = {0.0f, -0.0f, -1.0f, NAN, INFINITY, -INFINITY, 1e-45f, 1e30f, -1e-45f};
        value = odd[random.below(9)];
      } else {
        value = float(random.log_uniform(1e-8, 1));
      }
      attributes_fit &= value >= 0;
      node[name] = value;
    };
    const auto spoil = [&](const char* name, bool is_integer) {  // another type
      if (random.below(40)) return;
      attributes_fit = false;
      if (random.below(2)) node[name] = std::string("text");
      else if (is_integer) node[name] = 4.0f;
      else node[name] = int64_t(1);
    };
    if (target.blocked) {
      const int64_t blocks[] = {8, 16, 16, 16, 4, 0, -8, int64_t(1) << 32};
      block = blocks[random.below(8)];
      attributes_fit = block == 8 || block == 16;
      node["block"] = block;
      spoil("block", true);
      if (attributes_fit && shapes_fit && shapes[0][1] % block != 0) shapes_fit = false;
    } else if (!target.frozen) {
      give_float("epsilon", epsilon);
      give_float("delta", delta);
      spoil("epsilon", false);
      spoil("delta", false);
      if (target.per_channel) {
        const int64_t channels = shapes[0].size() > 1 ? shapes[0][1] : 1;
        groups = 1 + int64_t(random.below(size_t(std::min<int64_t>(std::max<int64_t>(channels, 1), 32))));
        if (random.below(2) && channels > 0 && channels % groups) groups = 1;
        if (random.below(20) == 0) {
          const int64_t odd[] = {0, -1, -4, int64_t(1) << 31, (int64_t(1) << 32) + 1, INT64_MIN, INT32_MAX};
          groups = odd[random.below(7)];
        }
        attributes_fit &= groups >= 1 && groups <= INT32_MAX;
        if (attributes_fit && shapes_fit && channels % groups != 0) shapes_fit = false;
        node["num_groups"] = groups;
        spoil("num_groups", true);
      } else {
        node["axis"] = axis;
        spoil("axis", true);
      }
    }
  }

  void choose_values() {
    const double scale = hostile && random.below(3) == 0 ? random.log_uniform(1e-6, 1e6) : 1;
    const bool equal = hostile && random.below(8) == 0, odd = hostile;
    const double one = number(random, odd);
    x = tensor<T>(nnorm::count(shapes[0]), [&] { return equal ? one : scale * number(random, odd && random.below(4) == 0); });
    if (target.takes_residual) residual = tensor<T>(x.size(), [&] { return number(random, odd); });
    for (size_t i = 1; i < target.inputs - target.takes_residual; ++i) {
      const bool is_exponent = target.frozen && (i == 3 || i == 4);
      parameters.push_back(tensor<Real>(nnorm::count(shapes[i]), [&] {
        return is_exponent ? exponent(random, odd) : number(random, odd && random.below(4) == 0);
      }));
    }
  }

  // Runs the node; the error's message, or an empty string and y.
  std::string run(int place, std::vector<T>& y) {
    const OrtApi* api = host::current_api;
    void* state = nullptr;
    OrtStatus* status;
    {
      const host::Inside inside;
      status = target.op->CreateKernelV2(target.op, api, reinterpret_cast<const OrtKernelInfo*>(&node), &state);
    }
    if (status != nullptr) return message(status);
    // Copies whose ends are those of their allocations. Huge tensors have no memory that may be read.
    static char nowhere;
    const std::unique_ptr<T[]> x_copy(copy_of(x)), residual_copy(copy_of(residual)), apart(new T[std::max<size_t>(1, x.size())]());
    std::vector<std::unique_ptr<Real[]>> copies;
    host::Context context;
    const bool hidden = huge || !shapes_fit;
    context.refused_from = hidden ? 0 : SIZE_MAX;
    context.inputs.push_back({shapes[0], hidden ? static_cast<void*>(&nowhere) : x_copy.get()});
    for (size_t i = 1; i < target.inputs - target.takes_residual; ++i) {
      if (!hidden) copies.emplace_back(copy_of(parameters[i - 1]));
      context.inputs.push_back({shapes[i], hidden ? static_cast<void*>(&nowhere) : copies.back().get()});
    }
    if (target.takes_residual)
      context.inputs.push_back({shapes.back(), hidden ? static_cast<void*>(&nowhere) : residual_copy.get()});
    T* const output = place == 1 ? x_copy.get() : place == 2 && target.takes_residual ? residual_copy.get() : apart.get();
    context.output.data = output;
    {
      const host::Inside inside;
      status = target.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
      target.op->KernelDestroy(state);
    }
    if (status != nullptr) return message(status);
    CHECK(context.output_made && context.output.shape == shapes[0], "%s: another output shape", describe().c_str());
    y.assign(output, output + x.size());
    return "";
  }

  template <class U>
  static U* copy_of(const std::vector<U>& values) {
    U* copy = new U[values.size()];
    std::copy(values.begin(), values.end(), copy);
    return copy;
  }

  static std::string message(OrtStatus* status) {
    const std::string text = host::current_api->GetErrorMessage(status);
    host::current_api->ReleaseStatus(status);
    CHECK(!text.empty(), "an error without a message");
    return text;
  }

  void compare_all(const std::vector<T>& y) {
    if (target.frozen) return compare_channels(y);
    compare_rows(y);
  }

  void compare_channels(const std::vector<T>& y) {
    Random unused(0);
    ChannelParameters<Real> p(0, unused);
    std::vector<Real>* const fields[] = {&p.scale, &p.shift, &p.pos, &p.neg, &p.weight, &p.bias};
    for (size_t i = 0; i < 6; ++i) *fields[i] = parameters[i];
    const size_t channels = size_t(shapes[0][1]), extent = nnorm::count(shapes[0], 2);
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t lanes = size_t(block);
      const size_t c = target.blocked ? i / (extent * lanes) % (channels / lanes) * lanes + i % lanes : i / extent % channels;
      Wider<T> truth, tolerance = 0;
      const Real added = target.takes_residual ? nnorm::widened(residual[i]) : Real(0);
      if (true_element(p, c, nnorm::widened(x[i]), added, target.epilogue, truth, tolerance))
        compare(describe(), y[i], truth, tolerance);
      else
        ++figures.beyond;
    }
  }

  void compare_rows(const std::vector<T>& y) {
    const size_t row_length = target.per_channel ? size_t(shapes[0][1] / groups) * nnorm::count(shapes[0], 2) : nnorm::count(shapes[1]);
    const size_t run_length = target.per_channel ? nnorm::count(shapes[0], 2) : 1;
    Random unused(0);
    Rows<T> rows({x.size() / row_length, row_length, target.per_channel ? size_t(groups) : 1, run_length}, {}, unused);
    rows.x = x;
    rows.weight = parameters[0];
    rows.bias = parameters[1];
    rows.epsilon = double(epsilon);
    rows.delta = double(delta);
    const Wider<T> unit = lanes_lost * (sizeof(Real) == 4 ? 1e-6 : 4e-15);
    const double squares_fit = sizeof(Real) == 4 ? 1e17 : 1e150;
    for (size_t row = 0; row < rows.geometry.rows; ++row) {
      double greatest = 0, spread = 0;
      const double first = double(nnorm::widened(x[row * row_length]));
      bool finite = true;
      for (size_t i = 0; i < row_length; ++i) {
        const double value = double(nnorm::widened(x[row * row_length + i]));
        finite &= bool(std::isfinite(value));
        greatest = std::max(greatest, std::fabs(value));
        spread = std::max(spread, std::fabs(value - first));
      }
      const double deviation = std::sqrt(spread * spread / double(row_length) + rows.epsilon);
      // What the arithmetic loses: the digits of a mean beside a small deviation, and squares beyond its range.
      const bool beyond = finite && (greatest > squares_fit || !(deviation > 1e-3 * greatest) || !(deviation > 1e-15) ||
                                     !std::isfinite(rows.epsilon) || !std::isfinite(rows.delta));
      if (beyond) {
        figures.beyond += long(row_length);
        continue;
      }
      Truth<Wider<T>> truth;
      if (finite) truth = true_row(rows, row);
      const bool lost = finite && !(unit * truth.lmbda.condition < 0.01);
      for (size_t i = 0; i < row_length; ++i) {
        const size_t at = row * row_length + i, w = row % rows.geometry.period * (row_length / run_length) + i / run_length;
        if (!finite) {
          compare(describe(), y[at], Wider<T>(NAN), Wider<T>(0));
          continue;
        }
        const Wider<T> bias = rows.bias[w], psi = truth.y[i] - bias;
        const Wider<T> log = std::log1p(std::fabs(psi) + Wider<T>(row_length));  // at least that of |h|
        const Wider<T> tolerance = unit * (2 * truth.size[i] + 4 * truth.lmbda.condition * std::fabs(psi) * log) +
                                     64 * (1 + log) * Wider<T>(std::numeric_limits<Real>::denorm_min());
        const bool in_range = truth.size[i] < std::numeric_limits<Real>::max() / 4;  // not for NaN
        if (std::isnan(truth.y[i]) || (in_range && !lost && std::fabs(truth.lmbda.lmbda) < 20))
          compare(describe(), y[at], truth.y[i], tolerance);
        else
          ++figures.beyond;
      }
    }
  }

  void check_once() {
    ++figures.cases;
    const bool fits = attributes_fit && shapes_fit;
    std::vector<T> y, again;
    if (random.below(8) == 0) {  // something fails on the way
      const long live = host::live_statuses + host::live_infos;
      (random.below(2) ? host::failing_call : host::failing_allocation) = 1 + long(random.below(random.below(2) ? 8 : 40));
      const std::string reason = run(0, y);
      const bool failed = host::stop_failing();
      CHECK(!failed || !reason.empty(), "%s: a failure became a result", describe().c_str());
      CHECK(host::live_statuses + host::live_infos == live, "%s: an object of the host is lost", describe().c_str());
      figures.made_to_fail += failed;
    }
    const std::string reason = run(0, y);
    if (huge && fits) {  // the host has no memory for it
      CHECK(!reason.empty(), "%s: computed", describe().c_str());
    } else if (!fits) {
      CHECK(!reason.empty() && reason.rfind(target.name + ": ", 0) == 0, "%s: not refused: %s", describe().c_str(), reason.c_str());
    } else {
      CHECK(reason.empty(), "%s: refused: %s", describe().c_str(), reason.c_str());
    }
    figures.refused += !reason.empty();
    if (!reason.empty()) return;
    if (y.empty()) {
      ++figures.empty;
      return;
    }
    run(1 + int(random.below(2)), again);
    CHECK(same_bits(y, again), "%s: in place it differs", describe().c_str());
    compare_all(y);
  }
};

void check_case(const Operator& target, Random& random) {
  switch (target.type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return Case<float>(target, random).check_once();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return Case<nnorm::Float16>(target, random).check_once();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return Case<nnorm::BFloat16>(target, random).check_once();
    default:
      if (have_truth_for_double) Case<double>(target, random).check_once();
  }
}

const host::Domain* registered(const OrtApi* api, std::string& reason) {
  host::current_api = api;
  host::Domain* domain = nullptr;
  OrtStatus* status;
  {
    const host::Inside inside;
    status = RegisterCustomOps(reinterpret_cast<OrtSessionOptions*>(&domain), &host::base);
  }
  reason = status == nullptr ? "" : api->GetErrorMessage(status);
  if (status != nullptr) api->ReleaseStatus(status);
  return domain;
}

// Registration with every ONNX Runtime that there may be, and with every call and allocation failing in turn.
void check_registration(const OrtApi& api) {
  std::string reason;
  for (const char* old : {"1.17.3", "0.9", "not a version", ""}) {
    host::version = old;
    CHECK(registered(&api, reason) == nullptr && reason.find("1.18") != std::string::npos, "%s: %s", old, reason.c_str());
  }
  host::version = "2.0.0";
  const OrtApi newer = api;
  CHECK(registered(&newer, reason) != nullptr, "2.0.0: %s", reason.c_str());
  host::version = "1.31.0";
  static std::vector<std::unique_ptr<OrtApi>> apis;  // the library may remember an API
  for (long* const failing : {&host::failing_call, &host::failing_allocation}) {
    bool failed = true;
    for (long n = 1; failed && n < 10000; ++n) {
      apis.push_back(std::make_unique<OrtApi>(api));
      const long statuses = host::live_statuses, domains = host::live_domains;
      *failing = n;
      registered(apis.back().get(), reason);
      failed = host::stop_failing();
      CHECK(failed != reason.empty(), "registration, failure %ld: %s", n, reason.c_str());
      CHECK(host::live_statuses == statuses, "registration, failure %ld: a status is lost", n);
      if (failed && failing == &host::failing_allocation)
        CHECK(host::live_domains == domains, "registration, failure %ld: a domain is lost", n);
      figures.made_to_fail += failed;
      registered(apis.back().get(), reason);  // the process goes on
      CHECK(reason.empty(), "registration after failure %ld: %s", n, reason.c_str());
    }
  }
}

void check_inference(const Operator& target) {
  struct {
    host::Info info;
    bool published;
  } const cases[] = {{{{2, 3}, {"", ""}}, true},     {{{-1, 3}, {"batch", ""}}, true}, {{{-1, 3}, {"", ""}}, false},
                     {{{-1, 3}, {}}, false},         {{{}, {}}, false},               {{{0, -1, -1}, {"", "a", "b"}}, true},
                     {{{0, -1, -1}, {"", "a", ""}}, false}};
  for (const auto& each : cases)
    for (long* const failing : {&host::failing_call, &host::failing_allocation})
      for (long n = 0; n < 8; ++n) {
        host::InferenceContext context{each.info};
        *failing = n;
        OrtStatus* status;
        {
          const host::Inside inside;
          status = target.op->InferOutputShapeFn(target.op, reinterpret_cast<OrtShapeInferContext*>(&context));
        }
        const bool failed = host::stop_failing();
        CHECK(failed == (status != nullptr), "%s: shape inference", target.name.c_str());
        CHECK(failed || context.published == each.published, "%s: shape of rank %zu", target.name.c_str(), each.info.shape.size());
        CHECK(!failed || !context.published, "%s: a failure published a shape", target.name.c_str());
        if (status != nullptr) host::current_api->ReleaseStatus(status);
      }
}

void check_inplace(const Operator& target) {
  for (long n = 0; n < 3; ++n) {
    int *inputs = nullptr, *outputs = nullptr;
    host::failing_allocation = n;
    size_t choices;
    {
      const host::Inside inside;
      choices = target.op->GetMayInplace(&inputs, &outputs);
    }
    CHECK(host::stop_failing() == (n > 0), "%s: in place", target.name.c_str());
    CHECK(choices == (n > 0 ? 0u : 1u + target.takes_residual), "%s: %zu choices", target.name.c_str(), choices);
    for (size_t i = 0; i < choices; ++i)
      CHECK(outputs[i] == 0 && inputs[i] == (i == 0 ? 0 : int(target.inputs) - 1), "%s: choice %zu", target.name.c_str(), i);
    target.op->ReleaseMayInplace(inputs, outputs);
  }
}

// An input that the host does not have.
void check_missing_input(const Operator& target) {
  void* state = nullptr;
  host::Node node;
  if (target.blocked) node["block"] = int64_t(8);
  target.op->CreateKernelV2(target.op, host::current_api, reinterpret_cast<const OrtKernelInfo*>(&node), &state);
  host::Context context;
  context.inputs.assign(target.inputs, {{2, 8, 3}, nullptr});
  OrtStatus* status = target.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
  CHECK(status != nullptr && std::strstr(host::current_api->GetErrorMessage(status), "is missing"), "%s", target.name.c_str());
  host::current_api->ReleaseStatus(status);
  target.op->KernelDestroy(state);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const long cases = count > 1 ? std::atol(arguments[1]) : 20000;
  const unsigned seed = count > 2 ? unsigned(std::atol(arguments[2])) : 1;
  static const OrtApi api = host::make_api();
  check_registration(api);
  static const OrtApi used = host::make_api();
  std::string reason;
  const host::Domain* const domain = registered(&used, reason);
  if (!CHECK(domain != nullptr && reason.empty(), "registration: %s", reason.c_str())) return finish();
  CHECK(registered(&used, reason) == domain, "a second registration makes another domain");
  const std::vector<Operator> operators = all_operators(*domain);
  for (const Operator& target : operators) {
    check_inference(target);
    check_inplace(target);
    check_missing_input(target);
  }
  Random random(seed);
  for (long i = 0; i < cases; ++i) check_case(operators[random.below(operators.size())], random);
  CHECK(host::live_statuses == 0 && host::live_infos == 0, "%ld statuses and %ld infos are lost", host::live_statuses,
        host::live_infos);
  std::printf("%ld cases: %ld refused, %ld made to fail, %ld empty; %ld values right or NaN as they must be, %ld beyond "
              "what the arithmetic promises\n",
              figures.cases, figures.refused, figures.made_to_fail, figures.empty, figures.values, figures.beyond);
  return finish();
}
