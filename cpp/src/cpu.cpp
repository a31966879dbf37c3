#include "deepseal/cpu.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#define DEEPSEAL_X86 1
#elif defined(__linux__) && (defined(__aarch64__) || defined(__arm__))
#include <sys/auxv.h>
#endif

namespace deepseal {
namespace {

constexpr bool bit(std::uint64_t word, unsigned index) noexcept { return (word >> index & 1) != 0; }

#if defined(DEEPSEAL_X86)

std::uint64_t read_xcr0() noexcept {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

CpuFeatures detect() noexcept {
  CpuidWords words;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return {};
  words.leaf1_ecx = ecx;
  if (bit(ecx, 27)) words.xcr0 = read_xcr0();  // OSXSAVE
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    words.leaf7_ebx = ebx;
    words.leaf7_ecx = ecx;
  }
  return decode(words);
}

#elif defined(__linux__) && defined(__aarch64__)

CpuFeatures detect() noexcept {
  CpuFeatures features;
  features.aes = bit(getauxval(AT_HWCAP), 3);  // HWCAP_AES
  return features;
}

#elif defined(__linux__) && defined(__arm__)

CpuFeatures detect() noexcept {
  CpuFeatures features;
  features.aes = bit(getauxval(AT_HWCAP2), 0);  // HWCAP2_AES
  return features;
}

#else

CpuFeatures detect() noexcept { return {}; }

#endif

}  // namespace

CpuFeatures decode(const CpuidWords& words) noexcept {
  constexpr std::uint64_t avx_state = 0x06;     // XMM and YMM registers
  constexpr std::uint64_t avx512_state = 0xe6;  // and opmask, ZMM, ZMM16 to ZMM31
  const bool avx = bit(words.leaf1_ecx, 28) && (words.xcr0 & avx_state) == avx_state;
  const bool avx512 = avx && (words.xcr0 & avx512_state) == avx512_state && bit(words.leaf7_ebx, 16);

  CpuFeatures features;
  features.aes = bit(words.leaf1_ecx, 25);
  features.pclmul = bit(words.leaf1_ecx, 1);
  features.vaes = avx && bit(words.leaf7_ecx, 9);
  features.vpclmulqdq = avx && bit(words.leaf7_ecx, 10);
  features.avx2 = avx && bit(words.leaf7_ebx, 5);
  features.avx512f = avx512;
  features.avx512bw = avx512 && bit(words.leaf7_ebx, 30);
  features.avx512vl = avx512 && bit(words.leaf7_ebx, 31);
  return features;
}

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures features = detect();
  return features;
}

std::string_view architecture() noexcept {
#if defined(__x86_64__)
  return "x86_64";
#elif defined(__i386__)
  return "i686";
#elif defined(__aarch64__)
  return "aarch64";
#elif defined(__arm__)
  return "arm";
#elif defined(__riscv)
  return "riscv";
#elif defined(__powerpc64__)
  return "ppc64";
#elif defined(__s390x__)
  return "s390x";
#else
  return "unknown";
#endif
}

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

}  // namespace deepseal
