// The public permutations of a session: AES under keys that are derived from the session's seed, by domain and epoch.
#pragma once

#include <cstdint>
#include <optional>

#include "deepseal/aes.hpp"

namespace deepseal {

// K(domain, epoch) = AES_seed(domain | epoch). An epoch is 2^14 hash calls of a garbler (4,096 gates).
//
// Why the key changes: with an ideal cipher, p queries to it and q hash calls, TMMO is distinguished with advantage in
// the order of (p q + q^2) / 2^128 for each key; q <= 2^14 a key keeps this below 2^-33 for p = 2^80, however long the
// session is (multi-instance bounds: Guo, Katz, Wang, Weng, Yu, "Better concrete security for half-gates garbling",
// CRYPTO 2020).
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
