// The environment variables of a test.
#pragma once

#include <stdlib.h>

#include <optional>
#include <string>

namespace nnorm_test {

// Sets an environment variable for the lifetime of the object.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* const before = getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Environment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

}  // namespace nnorm_test
