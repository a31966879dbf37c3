#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "test.hpp"

#ifndef DOCTEST_VERSION

#include <exception>
#include <iostream>

namespace deepseal::testing {
namespace {
int failed_checks = 0;
}

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::vector<std::string>& captured() {
  static std::vector<std::string> all;
  return all;
}

bool check(bool passed, const char* expression, const char* file, int line) {
  if (!passed) {
    ++failed_checks;
    std::cerr << file << ':' << line << ": failed: " << expression << '\n';
    for (const std::string& text : captured()) std::cerr << "  " << text << '\n';
  }
  return passed;
}

bool run(const Case& test) {
  const int before = failed_checks;
  try {
    test.body();
  } catch (const RequirementFailed&) {
  } catch (const std::exception& error) {
    ++failed_checks;
    std::cerr << "unexpected exception: " << error.what() << '\n';
  }
  const bool passed = failed_checks == before;
  std::cout << (passed ? "ok      " : "FAILED  ") << test.name << '\n';
  return passed;
}

}  // namespace deepseal::testing

int main() {
  using namespace deepseal::testing;
  int passed = 0;
  int failed = 0;
  for (const Case& test : cases()) ++(run(test) ? passed : failed);
  std::cout << passed << " passed, " << failed << " failed\n";
  return failed == 0 && passed > 0 ? 0 : 1;
}

#endif
