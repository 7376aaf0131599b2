// Random nodes against the library's callbacks: fuzz_operators [CASES [SEED]].
//
// A case is an operator, a type, shapes of rank 0 to 6 with extents of zero and extents whose product overflows,
// attributes and values, most of them valid and some extreme, and parameters that are constants or computed. The
// library must refuse invalid nodes; the values of valid ones are compared with the formulas in a wider type. In some
// cases a call of the API or an allocation fails: the library must return an error, leak nothing, and give the right
// values in the next run.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "registered.h"
#include "reference.h"

namespace nnorm_test {

using nnorm::Shape;

namespace {

struct Figures {
  long cases = 0, refused = 0, made_to_fail = 0, empty = 0;
  Compared compared;
} figures;

// Numbers for X, parameters and residual: ordinary numbers, some of them replaced by extreme ones.
double number(Random& random, bool extreme) {
  if (!extreme || random.below(6) != 0) return 2 * random.normal();
  const double odd[] = {0.0,   -0.0,  NAN,    INFINITY, -INFINITY, 1e-45, -1e-40, 3e-39, 1e-310, 1.0,
                        -1.0,  1e4,   -65504, 1e10,     -1e17,     1e30,  -3e38,  1e300, 0x1p-24, 1e-7};
  return odd[random.below(sizeof odd / sizeof *odd)];
}

double exponent(Random& random, bool extreme) {
  const double usual[] = {0, 1, 2, 1e-7, -1e-7};
  if (random.below(4) == 0) return usual[random.below(5)];
  if (!extreme || random.below(4) != 0) return random.uniform(-2, 4);
  const double odd[] = {NAN, INFINITY, -INFINITY, 40, -40, 1e3, -1e6, 1e-30, -1e-45, 1e20};
  return odd[random.below(10)];
}

template <class T>
std::vector<T> tensor(size_t n, const std::function<double()>& draw) {
  std::vector<double> numbers(n);
  for (double& value : numbers) value = draw();
  return to_type<T>(numbers);
}

// One node: its attributes and tensors, and whether the library must refuse it.
template <class T>
struct Case {
  using Real = Arithmetic<T>;

  const Operator& operation;
  Random& random;
  host::Node node;
  std::vector<Shape> shapes;
  std::vector<T> x, residual;
  std::vector<std::vector<Real>> parameters;
  bool attributes_fit = true, shapes_fit = true, huge = false, extreme;
  std::vector<bool> constants;  // which of the inputs are constants
  bool outer_constants = false;  // the kernel gets constants of an outer graph, which are not its inputs
  int64_t axis = -1, groups = 1, block = 16;
  float epsilon = 1e-5f, delta = 0.0031622776601683794f;

  Case(const Operator& of, Random& numbers) : operation(of), random(numbers), extreme(numbers.below(3) == 0) {
    choose_shapes();
    choose_attributes();
    if (shapes_fit && !huge) choose_values();
    constants.resize(operation.inputs);
    const size_t share = random.below(3);  // none, all or some of the inputs
    for (size_t i = 1; !huge && shapes_fit && i < operation.inputs - operation.takes_residual; ++i)
      constants[i] = share == 1 || (share == 2 && random.below(2));
    outer_constants = random.below(4) == 0;
  }
  ~Case() { host::constants.clear(); }

  std::string describe() const {
    std::string text = operation.name + " " + NameOf<T>::value;
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
    if (operation.blocked && shape.size() > 1 && random.below(8)) shape[1] = 16 * int64_t(random.below(3));
    const int64_t rank = int64_t(shape.size());
    Shape parameter;
    if (operation.per_channel) {
      shapes_fit = rank >= (operation.blocked ? 3 : 2);
      if (shapes_fit) parameter = {shape[1]};
    } else {
      axis = int64_t(random.below(size_t(std::max<int64_t>(1, 2 * rank)))) - rank;
      if (random.below(15) == 0) axis = int64_t(random.below(40)) - 20;
      shapes_fit = axis >= -rank && axis < rank;
      if (shapes_fit) parameter.assign(shape.begin() + (axis < 0 ? axis + rank : axis), shape.end());
    }
    shapes.assign(operation.inputs, parameter);
    shapes[0] = shape;
    if (operation.takes_residual) shapes.back() = shape;
    if (random.below(15) == 0) {  // one input of another shape
      Shape& wrong = shapes[1 + random.below(operation.inputs - 1)];
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
      attributes_fit &= value >= 0 && std::isfinite(value);
      node[name] = value;
    };
    const auto set_wrong_type = [&](const char* name, bool is_integer) {  // another type
      if (random.below(40)) return;
      attributes_fit = false;
      if (random.below(2)) node[name] = std::string("text");
      else if (is_integer) node[name] = 4.0f;
      else node[name] = int64_t(1);
    };
    if (operation.blocked) {
      const int64_t blocks[] = {8, 16, 16, 16, 4, 0, -8, int64_t(1) << 32};
      block = blocks[random.below(8)];
      attributes_fit = block == 8 || block == 16;
      node["block"] = block;
      set_wrong_type("block", true);
      if (attributes_fit && shapes_fit && shapes[0][1] % block != 0) shapes_fit = false;
    } else if (!operation.frozen) {
      give_float("epsilon", epsilon);
      give_float("delta", delta);
      set_wrong_type("epsilon", false);
      set_wrong_type("delta", false);
      if (operation.per_channel) {
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
        set_wrong_type("num_groups", true);
      } else {
        node["axis"] = axis;
        set_wrong_type("axis", true);
      }
    }
  }

  void choose_values() {
    const double scale = extreme && random.below(3) == 0 ? random.log_uniform(1e-6, 1e6) : 1;
    const bool equal = extreme && random.below(8) == 0, odd = extreme;
    const double one = number(random, odd);
    x = tensor<T>(nnorm::count(shapes[0]), [&] { return equal ? one : scale * number(random, odd && random.below(4) == 0); });
    if (operation.takes_residual) residual = tensor<T>(x.size(), [&] { return number(random, odd); });
    for (size_t i = 1; i < operation.inputs - operation.takes_residual; ++i) {
      const bool is_exponent = operation.frozen && (i == 3 || i == 4);
      parameters.push_back(tensor<Real>(nnorm::count(shapes[i]), [&] {
        return is_exponent ? exponent(random, odd) : number(random, odd && random.below(4) == 0);
      }));
    }
  }

  // Runs the node. Returns the message of the error, or an empty string and y.
  std::string run(int place, std::vector<T>& y) {
    const OrtApi* api = host::current_api;
    const auto* const info = reinterpret_cast<const OrtKernelInfo*>(&node);
    // Copies that end at the end of their allocations. Huge tensors have no memory that may be read.
    static char nowhere;
    const std::unique_ptr<T[]> x_copy(copy_of(x)), residual_copy(copy_of(residual)), apart(new T[std::max<size_t>(1, x.size())]());
    std::vector<std::unique_ptr<Real[]>> copies, of_outer_graphs;
    host::Context context;
    const bool hidden = huge || !shapes_fit;
    context.refused_from = hidden ? 0 : SIZE_MAX;
    context.inputs.push_back({shapes[0], hidden ? static_cast<void*>(&nowhere) : x_copy.get()});
    for (size_t i = 1; i < operation.inputs - operation.takes_residual; ++i) {
      if (!hidden) copies.emplace_back(copy_of(parameters[i - 1]));
      context.inputs.push_back({shapes[i], hidden ? static_cast<void*>(&nowhere) : copies.back().get()});
      if (!constants[i]) continue;
      host::constants[{info, i}] = context.inputs.back();
      host::constants[{info, i}].type = operation.op->GetInputType(operation.op, i);
      if (hidden || !outer_constants) continue;
      of_outer_graphs.emplace_back(new Real[parameters[i - 1].size()]());
      host::constants[{info, i}].data = of_outer_graphs.back().get();
    }
    if (operation.takes_residual)
      context.inputs.push_back({shapes.back(), hidden ? static_cast<void*>(&nowhere) : residual_copy.get()});
    T* const output = place == 1 ? x_copy.get() : place == 2 && operation.takes_residual ? residual_copy.get() : apart.get();
    context.output.data = output;
    void* state = nullptr;
    OrtStatus* status;
    {
      const Inside inside;
      status = operation.op->CreateKernelV2(operation.op, api, info, &state);
    }
    if (status != nullptr) return message(status);
    of_outer_graphs.clear();  // a sanitizer detects a kernel that reads them
    {
      const Inside inside;
      status = operation.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
      if (status == nullptr && output == apart.get()) {  // again, with the state that the kernel keeps
        std::fill_n(output, x.size(), T{});
        context.output_made = false;
        status = operation.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
      }
      operation.op->KernelDestroy(state);
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
    if (operation.frozen) return compare_frozen(y);
    const size_t extent = operation.per_channel ? nnorm::count(shapes[0], 2) : 1;
    const size_t row_length = operation.per_channel ? size_t(shapes[0][1] / groups) * extent : nnorm::count(shapes[1]);
    Random unused(0);
    Rows<T> rows({x.size() / row_length, row_length, operation.per_channel ? size_t(groups) : 1, extent}, {}, unused);
    rows.x = x;
    rows.weight = parameters[0];
    rows.bias = parameters[1];
    rows.epsilon = double(epsilon);
    rows.delta = double(delta);
    compare_rows(describe(), rows, y, figures.compared);
  }

  void compare_frozen(const std::vector<T>& y) {
    Random unused(0);
    ChannelParameters<Real> p(0, unused);
    std::vector<Real>* const fields[] = {&p.scale, &p.shift, &p.pos, &p.neg, &p.weight, &p.bias};
    for (size_t i = 0; i < 6; ++i) *fields[i] = parameters[i];
    const size_t channels = size_t(shapes[0][1]), extent = nnorm::count(shapes[0], 2), lanes = size_t(block);
    const auto channel_of = [&](size_t i) {
      return operation.blocked ? i / (extent * lanes) % (channels / lanes) * lanes + i % lanes : i / extent % channels;
    };
    compare_channels(describe(), p, channel_of, operation.epilogue, x, residual, y, figures.compared);
  }

  void check_once() {
    ++figures.cases;
    const bool fits = attributes_fit && shapes_fit;
    std::vector<T> y, again;
    if (random.below(8) == 0) figures.made_to_fail += fails_on_the_way(random, describe(), [&] { return run(0, y); });
    const std::string reason = run(0, y);
    if (huge && fits) {  // the host has no memory for it
      CHECK(!reason.empty(), "%s: computed", describe().c_str());
    } else if (!fits) {
      CHECK(!reason.empty() && reason.rfind(operation.name + ": ", 0) == 0, "%s: not refused: %s", describe().c_str(),
            reason.c_str());
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

void check_case(const Operator& operation, Random& random) {
  switch (operation.type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return Case<float>(operation, random).check_once();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return Case<nnorm::Float16>(operation, random).check_once();
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return Case<nnorm::BFloat16>(operation, random).check_once();
    default:
      if (have_reference_for_double) Case<double>(operation, random).check_once();
  }
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  return fuzz(count, arguments, [](const host::Domain& domain, long cases, Random& random) {
    const std::vector<Operator> operators = all_operators(domain);
    for (long i = 0; i < cases; ++i) check_case(operators[random.below(operators.size())], random);
    std::printf("%ld cases: %ld refused, %ld made to fail, %ld empty; %ld values right or NaN as they must be, %ld beyond "
                "what the arithmetic promises\n",
                figures.cases, figures.refused, figures.made_to_fail, figures.empty, figures.compared.values,
                figures.compared.beyond);
  });
}
