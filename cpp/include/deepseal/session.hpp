// The public permutations of a session: AES under keys that are derived from the session's seed, by domain and epoch.
#pragma once

#include <cstdint>
#include <optional>

#include "deepseal/aes.hpp"

namespace deepseal {

// K(domain, epoch) = AES_seed(domain | epoch). An epoch is 2^14 hash calls of a garbler (4,096 gates).
//
// Why the key changes. In the ideal-cipher model a call of TMMO is distinguished from random only if one of the
// adversary's p cipher queries meets one of its two inner points, each of which has 127 bits of entropy from delta
// (queries may go both ways: at most 4 p q / 2^127 for q calls under the key), or if two inner points of the epoch meet
// (at most (2 q)^2 / 2^127). A query is made under one key, so over E epochs of q = 2^14 calls the sum is at most
// p 2^-111 + E 2^-97: 2^-31 for p = 2^80 queries, however long the session is, and 2^-57 for 2^40 epochs (4.5 10^15
// gates). Under a single key the first term would grow with the length of the session. The argument is that of Guo, Katz,
// Wang, Yu (S&P 2020, ePrint 2019/074) for one key and of Guo, Katz, Wang, Weng, Yu (CRYPTO 2020, ePrint 2019/1168) for
// many; the constants above are our own count.
class SessionKeys {
 public:
  SessionKeys(const Kernels& kernels, Block seed) : kernels_(kernels) { kernels.expand(seed, root_); }

  const Kernels& kernels() const noexcept { return kernels_; }

  AesKey derive(Domain domain, std::uint64_t epoch) const {
    const Block in = tweak(Domain::key, static_cast<std::uint64_t>(domain), epoch);
    Block key;
    kernels_.encrypt(root_, &in, &key, 1);
    AesKey expanded;
    kernels_.expand(key, expanded);
    return expanded;
  }

 private:
  const Kernels& kernels_;
  AesKey root_;
};

// One domain's permutation, which moves on from epoch to epoch.
class Permutation {
 public:
  Permutation(const SessionKeys& session, Domain domain) : session_(session), domain_(domain) {}

  const AesKey& at(std::uint64_t epoch) {
    if (!key_ || epoch != epoch_) {
      key_ = session_.derive(domain_, epoch);
      epoch_ = epoch;
    }
    return *key_;
  }

 private:
  SessionKeys session_;
  Domain domain_;
  std::uint64_t epoch_ = 0;
  std::optional<AesKey> key_;
};

}  // namespace deepseal
