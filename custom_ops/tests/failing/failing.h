// Allocations that fail on purpose. A program that uses it links allocations.cpp and the code under test.
#pragma once

namespace nnorm_test {

// The number of the allocation that fails, counted from now on among those of the code under test; 0 for none.
inline long failing_allocation = 0;
inline bool made_to_fail = false;  // whether an allocation has failed
inline bool in_library = false;

// Allocations count while the code under test runs, and not while it calls back its caller.
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

// Resets the failing allocation, and returns whether it failed.
inline bool stop_failing() {
  failing_allocation = 0;
  const bool did = made_to_fail;
  made_to_fail = false;
  return did;
}

}  // namespace nnorm_test
