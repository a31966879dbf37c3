// doctest where it is installed; otherwise the little of it that our tests use: TEST_CASE, CHECK, CHECK_THROWS_AS,
// REQUIRE, CAPTURE.
#pragma once

#if __has_include(<doctest/doctest.h>)
#include <doctest/doctest.h>
#else

#include <sstream>
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

// What a failed check prints besides its expression.
std::vector<std::string>& captured();

struct Capture {
  template <class T>
  Capture(const char* name, const T& value) {
    std::ostringstream text;
    text << name << " = " << value;
    captured().push_back(text.str());
  }
  ~Capture() { captured().pop_back(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
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
#define CAPTURE(...) const ::deepseal::testing::Capture DEEPSEAL_JOIN(capture_, __COUNTER__)(#__VA_ARGS__, __VA_ARGS__)
#define CHECK_THROWS_AS(expression, ...)                                                                         \
  do {                                                                                                           \
    bool thrown_as_expected = false;                                                                             \
    try {                                                                                                        \
      static_cast<void>(expression);                                                                             \
    } catch (const __VA_ARGS__&) {                                                                               \
      thrown_as_expected = true;                                                                                 \
    } catch (...) {                                                                                              \
    }                                                                                                            \
    static_cast<void>(::deepseal::testing::check(thrown_as_expected, #expression " throws " #__VA_ARGS__, __FILE__, __LINE__)); \
  } while (false)
#define REQUIRE(...)                                                                                           \
  do {                                                                                                         \
    if (!::deepseal::testing::check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__))         \
      throw ::deepseal::testing::RequirementFailed(#__VA_ARGS__);                                              \
  } while (false)

#endif
