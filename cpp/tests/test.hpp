// doctest where it is installed; otherwise the little of it that our tests use: TEST_CASE, CHECK, REQUIRE.
#pragma once

#if __has_include(<doctest/doctest.h>)
#include <doctest/doctest.h>
#else

#include <stdexcept>
#include <string>
#include <vector>

namespace deepseal::testing {

struct Case {
  const char* name;
  void (*body)();
};

struct RequirementFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<Case>& cases();
bool check(bool passed, const char* expression, const char* file, int line);

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

}  // namespace deepseal::testing

#define DEEPSEAL_JOIN_(a, b) a##b
#define DEEPSEAL_JOIN(a, b) DEEPSEAL_JOIN_(a, b)
#define DEEPSEAL_CASE(name, id)                                                                        \
  static void DEEPSEAL_JOIN(case_, id)();                                                              \
  static const ::deepseal::testing::Registration DEEPSEAL_JOIN(registration_, id)(name,                \
                                                                                  DEEPSEAL_JOIN(case_, id)); \
  static void DEEPSEAL_JOIN(case_, id)()
#define TEST_CASE(name) DEEPSEAL_CASE(name, __COUNTER__)
#define CHECK(...) \
  static_cast<void>(::deepseal::testing::check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__))
#define REQUIRE(...)                                                                                           \
  do {                                                                                                         \
    if (!::deepseal::testing::check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__))         \
      throw ::deepseal::testing::RequirementFailed(#__VA_ARGS__);                                              \
  } while (false)

#endif
