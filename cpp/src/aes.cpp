#include "deepseal/aes.hpp"

#include <stdexcept>
#include <string>

#include "deepseal/cpu.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "blocks are read and sent in the order of little-endian bytes");

namespace deepseal {

extern const Kernels portable_kernels;
#if defined(DEEPSEAL_X86_KERNELS)
extern const Kernels aesni_kernels;
extern const Kernels vaes256_kernels;
extern const Kernels vaes512_kernels;
#endif

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> list;
#if defined(DEEPSEAL_X86_KERNELS)
    const CpuFeatures& cpu = cpu_features();
    if (cpu.aes && cpu.vaes && cpu.avx512f && cpu.avx512bw && cpu.avx512vl) list.push_back(&vaes512_kernels);
    if (cpu.aes && cpu.vaes && cpu.avx2) list.push_back(&vaes256_kernels);
    if (cpu.aes) list.push_back(&aesni_kernels);
#endif
    list.push_back(&portable_kernels);
    return list;
  }();
  return found;
}

const Kernels& kernels(std::string_view name) {
  std::string known;
  for (const Kernels* candidate : available_kernels()) {
    if (name.empty() || candidate->name == name) return *candidate;
    known += (known.empty() ? "" : ", ") + std::string(candidate->name);
  }
  throw std::invalid_argument("expected kernels that this processor can run (" + known + "), found " + std::string(name));
}

}  // namespace deepseal
