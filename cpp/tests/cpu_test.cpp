#include "deepseal/cpu.hpp"

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "test.hpp"

using deepseal::CpuFeatures;
using deepseal::CpuidWords;
using deepseal::decode;

namespace {

constexpr CpuidWords everything{0xffffffff, 0xffffffff, 0xffffffff, 0xff};

CpuidWords with_state(std::uint64_t xcr0) {
  CpuidWords words = everything;
  words.xcr0 = xcr0;
  return words;
}

constexpr CpuFeatures sse_only{.aes = true, .pclmul = true};
constexpr CpuFeatures no_avx512{.aes = true, .vaes = true, .pclmul = true, .vpclmulqdq = true, .avx2 = true};

}  // namespace

TEST_CASE("no CPUID bit, no feature") {
  CHECK(decode({}) == CpuFeatures{});
  CHECK(decode({0, 0, 0, 0xff}) == CpuFeatures{});
}

TEST_CASE("all bits with all register state saved: every feature") {
  const CpuFeatures features = decode(everything);
  for (const auto& [name, flag] : deepseal::cpu_feature_names) CHECK(features.*flag);
}

TEST_CASE("vector features need the register state that the operating system saves") {
  CHECK(decode(with_state(0x00)) == sse_only);
  CHECK(decode(with_state(0x02)) == sse_only);  // XMM alone
  CHECK(decode(with_state(0x04)) == sse_only);  // YMM alone
  CHECK(decode(with_state(0xe0)) == sse_only);
  CHECK(decode(with_state(0x06)) == no_avx512);
  CHECK(decode(with_state(0x66)) == no_avx512);  // ZMM16 to ZMM31 missing
  CHECK(decode(with_state(0xe6)) == decode(everything));
}

TEST_CASE("each feature follows its own bit") {
  const std::uint32_t avx = 1u << 28;
  const std::uint32_t avx512f = 1u << 16;
  CHECK(decode({1u << 25, 0, 0, 0xff}) == CpuFeatures{.aes = true});
  CHECK(decode({1u << 1, 0, 0, 0xff}) == CpuFeatures{.pclmul = true});
  CHECK(decode({avx, 1u << 5, 0, 0xff}) == CpuFeatures{.avx2 = true});
  CHECK(decode({avx, 0, 1u << 9, 0xff}) == CpuFeatures{.vaes = true});
  CHECK(decode({avx, 0, 1u << 10, 0xff}) == CpuFeatures{.vpclmulqdq = true});
  CHECK(decode({avx, avx512f, 0, 0xff}) == CpuFeatures{.avx512f = true});
  CHECK(decode({avx, avx512f | 1u << 30, 0, 0xff}) == CpuFeatures{.avx512f = true, .avx512bw = true});
  CHECK(decode({avx, avx512f | 1u << 31, 0, 0xff}) == CpuFeatures{.avx512f = true, .avx512vl = true});
  CHECK(decode({avx, 1u << 30 | 1u << 31, 0, 0xff}) == CpuFeatures{});  // no AVX-512 foundation
}

TEST_CASE("detection does not change") { CHECK(&deepseal::cpu_features() == &deepseal::cpu_features()); }

TEST_CASE("build description") {
  CHECK(!deepseal::architecture().empty());
  CHECK(deepseal::compiler().find(' ') != std::string::npos);
}

#if defined(__linux__) && defined(__x86_64__)
TEST_CASE("detection agrees with the kernel") {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::set<std::string, std::less<>> flags;
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  if (flags.empty()) return;  // /proc is not there
  for (const auto& [name, flag] : deepseal::cpu_feature_names) {
    const std::string_view kernel_name = name == "pclmul" ? "pclmulqdq" : name;
    CHECK(flags.contains(kernel_name) == deepseal::cpu_features().*flag);
  }
}
#endif
