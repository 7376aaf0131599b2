// Allocations that fail on purpose. A program that uses it links failing_allocations.cpp and the code under test.
#pragma once

namespace nnorm_test {

// The allocation of the code under test, from now on, that fails; 0 is none.
inline long failing_allocation = 0;
inline bool made_to_fail = false;  // whether something did
inline bool in_library = false;

// While the code under test runs, its allocations count; while its caller runs on its behalf, they do not.
struct Inside {
  bool before = in_library;
  Inside() { in_library = true; }
  ~Inside() { in_library = before; }
};
struct Outside {
  bool before = in_library;
  Outside() { in_library = false; }
  ~Outside() { in_library = before; }
};

inline bool allocation_fails() {
  if (!in_library || failing_allocation == 0 || --failing_allocation != 0) return false;
  return made_to_fail = true;
}

// Forgets what is to fail, and says whether it did.
inline bool stop_failing() {
  failing_allocation = 0;
  const bool did = made_to_fail;
  made_to_fail = false;
  return did;
}

}  // namespace nnorm_test
