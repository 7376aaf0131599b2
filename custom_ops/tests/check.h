// Checks, which are counted and printed, and a table of the worst error of each function.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace nnorm_test {

inline long passed = 0, failed = 0;

__attribute__((format(printf, 5, 6))) inline bool check(bool ok, const char* file, int line, const char* condition,
                                                        const char* format, ...) {
  ++(ok ? passed : failed);
  if (ok || failed > 20) return ok;  // later failures are not printed
  std::printf("%s:%d: not %s: ", file, line, condition);
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  return ok;
}

// CHECK(condition, "printf-style %s with the case's numbers", …)
#define CHECK(condition, ...) nnorm_test::check(bool(condition), __FILE__, __LINE__, #condition, __VA_ARGS__)

// The exit status of a program whose tests this machine cannot run. Tests.cmake sets it as ctest's SKIP_RETURN_CODE.
constexpr int skipped = 77;

// The exit status of a program. A program without any check fails.
inline int finish() {
  std::printf("%ld passed, %ld failed\n", passed, failed);
  return failed || !passed;
}

// The greatest error so far, and its arguments.
struct Worst {
  double error = 0, first = 0, second = 0;

  void see(double seen, double x, double y = 0) {
    if (seen > error || seen != seen) *this = {seen, x, y};
  }
};

// A row for each function, a column for each instruction set.
class ErrorTable {
 public:
  // `tightness`: the worst error of a function on all instruction sets must be at least this fraction of its bound.
  explicit ErrorTable(double tightness) : tightness_(tightness) {}

  void add(const std::string& function, double bound, const std::string& instruction_set, const Worst& worst) {
    if (!rows_.count(function)) order_.push_back(function);
    Row& row = rows_[function];
    row.bound = bound;
    row.columns.emplace_back(instruction_set, worst);
  }

  void print_and_check() const {
    for (const std::string& function : order_) {
      std::printf("%-44s bound %-9.3g", function.c_str(), rows_.at(function).bound);
      for (const auto& [instruction_set, worst] : rows_.at(function).columns)
        std::printf(" %s %-9.3g", instruction_set.c_str(), worst.error);
      std::printf("\n");
    }
    for (const auto& [function, row] : rows_) {
      double greatest = 0;
      for (const auto& [instruction_set, worst] : row.columns) {
        CHECK(worst.error <= row.bound, "%s on %s errs by %.6g at (%.17g, %.17g)", function.c_str(), instruction_set.c_str(),
              worst.error, worst.first, worst.second);
        greatest = worst.error > greatest ? worst.error : greatest;
      }
      CHECK(greatest >= tightness_ * row.bound, "the bound %g of %s is loose: %.3g seen", row.bound, function.c_str(),
            greatest);
    }
  }

 private:
  struct Row {
    double bound = 0;
    std::vector<std::pair<std::string, Worst>> columns;
  };
  double tightness_;
  std::vector<std::string> order_;
  std::map<std::string, Row> rows_;
};

}  // namespace nnorm_test
