// What the processor and the operating system let this process use.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace deepseal {

struct CpuFeatures {
  bool aes = false;
  bool vaes = false;
  bool pclmul = false;
  bool vpclmulqdq = false;
  bool avx2 = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;

  bool operator==(const CpuFeatures&) const = default;
};

struct CpuFeatureName {
  std::string_view name;
  bool CpuFeatures::*flag;
};

inline constexpr std::array<CpuFeatureName, 8> cpu_feature_names{{
    {"aes", &CpuFeatures::aes},
    {"vaes", &CpuFeatures::vaes},
    {"pclmul", &CpuFeatures::pclmul},
    {"vpclmulqdq", &CpuFeatures::vpclmulqdq},
    {"avx2", &CpuFeatures::avx2},
    {"avx512f", &CpuFeatures::avx512f},
    {"avx512bw", &CpuFeatures::avx512bw},
    {"avx512vl", &CpuFeatures::avx512vl},
}};

// The x86 words that decide, read apart from the decision so that it can be tested on any machine.
struct CpuidWords {
  std::uint32_t leaf1_ecx = 0;
  std::uint32_t leaf7_ebx = 0;
  std::uint32_t leaf7_ecx = 0;
  std::uint64_t xcr0 = 0;  // zero where the operating system does not offer XGETBV
};

CpuFeatures decode(const CpuidWords& words) noexcept;

// Detected once. All false on a processor that this file does not know.
const CpuFeatures& cpu_features() noexcept;

std::string_view architecture() noexcept;

std::string compiler();

}  // namespace deepseal
