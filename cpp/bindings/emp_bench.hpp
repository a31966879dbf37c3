// EMP's own speed, for the side-by-side benchmark: each measurement goes the way that EMP offers for it.
#pragma once

#include <emp-sh2pc/emp-sh2pc.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "emp_channel.hpp"

namespace deepseal::emp_engine {

class Timer {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

inline int party_of(const std::string& role) {
  if (role == "garbler") return ::emp::ALICE;
  if (role == "evaluator") return ::emp::BOB;
  throw std::invalid_argument("expected the role garbler or evaluator");
}

template <typename Use>
void with_party(int role, ::emp::IOChannel* io, Use&& use) {
  constexpr int ots_in_reserve = 16 * 1024;  // EMP's own default
  if (role == ::emp::ALICE) {
    auto party = std::make_unique<::emp::SemiHonestGen>(io, ots_in_reserve);
    use(*party);
  } else {
    auto party = std::make_unique<::emp::SemiHonestEva>(io, ots_in_reserve);
    use(*party);
  }
}

// EMP's own channel, or ours; EMP's closes its descriptor and knows blocking sockets only.
template <typename Use>
auto with_channel(int fd, double timeout, bool own, Use&& use) {
  if (own) {
    SocketChannel io(fd, timeout);
    return use(io);
  }
  const int copy = ::dup(fd);
  if (copy < 0 || ::fcntl(copy, F_SETFL, ::fcntl(copy, F_GETFL) & ~O_NONBLOCK) < 0) std::_Exit(broken);
  ::emp::NetIO io(copy);
  return use(io);
}

// Both sides have received all: what is timed includes the way of the last byte.
inline void meet(::emp::IOChannel& io) {
  char mark = 0;
  io.send_data(&mark, 1);
  io.flush();
  io.recv_data(&mark, 1);
}

inline std::uint64_t delta_leaks(std::uint64_t trials) {
  ::emp::PRG prg;
  std::uint64_t leaks = 0;
  for (std::uint64_t i = 0; i < trials; ++i) {
    ::emp::block seed[5];
    prg.random_block(seed, 5);
    const ::emp::block delta = ::emp::set_bit(seed[0], 0);
    ::emp::MITCCRH<8> hash;
    hash.setS(seed[1]);
    ::emp::block first[2], second[2];
    ::emp::halfgates_garble(seed[2], seed[2] ^ delta, seed[3], seed[3] ^ delta, delta, first, &hash);
    ::emp::halfgates_garble(seed[2], seed[2] ^ delta, seed[4], seed[4] ^ delta, delta, second, &hash);
    const ::emp::block difference = first[0] ^ second[0];
    leaks += ::emp::cmpBlock(&difference, &delta, 1) ? 1 : 0;
  }
  return leaks;
}

inline constexpr std::size_t layer_width = 4096;

inline std::pair<double, double> bench_memory(std::uint64_t gates) {
  const pybind11::gil_scoped_release release;
  const std::uint64_t rounds = (gates + layer_width - 1) / layer_width;
  ::emp::PRG prg;
  ::emp::block seed[2];
  prg.random_block(seed, 2);
  const ::emp::block delta = ::emp::set_bit(seed[0], 0);
  ::emp::BlockVec a(layer_width), b(layer_width), zero(layer_width), active(layer_width), tables(2 * layer_width);
  prg.random_block(a.data(), layer_width);
  prg.random_block(b.data(), layer_width);
  ::emp::MITCCRH<8> garbling, evaluating;
  garbling.setS(seed[1]);
  evaluating.setS(seed[1]);
  double garble = 0, evaluate = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const Timer first;
    for (std::size_t i = 0; i < layer_width; ++i) {
      zero[i] = ::emp::halfgates_garble(a[i], a[i] ^ delta, b[i], b[i] ^ delta, delta, &tables[2 * i], &garbling);
    }
    garble += first.seconds();
    const Timer second;
    for (std::size_t i = 0; i < layer_width; ++i) {
      active[i] = ::emp::halfgates_eval(a[i], b[i], &tables[2 * i], &evaluating);
    }
    evaluate += second.seconds();
    if (!::emp::cmpBlock(zero.data(), active.data(), layer_width)) std::_Exit(wrong_answer);
  }
  const double share = static_cast<double>(gates) / static_cast<double>(rounds * layer_width);
  return {garble * share, evaluate * share};
}

inline pybind11::dict report(double setup, double seconds, std::uint64_t sent, std::uint64_t received) {
  pybind11::dict result;
  result["setup_seconds"] = setup;
  result["seconds"] = seconds;
  result["bytes_sent"] = sent;
  result["bytes_received"] = received;
  return result;
}

// What `work` takes and moves on a channel, and what the set-up before it takes.
struct Measured {
  double setup = 0, seconds = 0;
  std::uint64_t sent = 0, received = 0;

  template <typename Channel, typename Setup, typename Work>
  void measure(Channel& io, Setup&& prepare, Work&& work) {
    meet(io);
    const Timer before;
    prepare();
    meet(io);
    setup = before.seconds();
    const std::uint64_t sent_before = io.bytes_sent, received_before = io.bytes_recv;
    const Timer timer;
    work();
    io.flush();
    meet(io);
    seconds = timer.seconds();
    sent = io.bytes_sent - sent_before;
    received = io.bytes_recv - received_before;
  }
};

inline pybind11::dict bench_and(int fd, const std::string& role, std::uint64_t gates, double timeout, bool own) {
  const int me = party_of(role);
  const std::uint64_t rounds = (gates + layer_width - 1) / layer_width;
  Measured result;
  {
    const pybind11::gil_scoped_release release;
    ::emp::set_test_mode(false);
    with_channel(fd, timeout, own, [&](auto& io) {
      ::emp::BlockVec a(layer_width), b(layer_width), c(layer_width);
      auto bits = std::make_unique<bool[]>(layer_width);
      for (std::size_t i = 0; i < layer_width; ++i) bits[i] = (i >> (me == ::emp::ALICE ? 0 : 1)) % 2 != 0;
      const Timer timer;
      with_party(me, &io, [&](auto& party) {
        using Party = std::decay_t<decltype(party)>;
        const double setup = timer.seconds();
        result.measure(
            io,
            [&] {
              party.feed(a.data(), ::emp::ALICE, bits.get(), layer_width);
              party.feed(b.data(), ::emp::BOB, bits.get(), layer_width);
            },
            [&] {
              for (std::uint64_t round = 0; round < rounds; ++round) {
                for (std::size_t i = 0; i < layer_width; ++i) party.Party::and_gate(&c[i], &a[i], &b[i]);
              }
            });
        result.setup = setup;
        party.reveal(bits.get(), ::emp::PUBLIC, c.data(), layer_width);
        io.flush();
      });
      for (std::size_t i = 0; i < layer_width; ++i) {
        if (bits[i] != ((i & 3) == 3)) std::_Exit(wrong_answer);
      }
    });
  }
  result.seconds *= static_cast<double>(gates) / static_cast<double>(rounds * layer_width);
  return report(result.setup, result.seconds, result.sent, result.received);
}

inline std::unique_ptr<::emp::OTExtension> extension(const std::string& kind, int role, ::emp::IOChannel* io) {
  if (kind == "iknp") return std::make_unique<::emp::IKNP>(role, io, false);
  if (kind == "softspoken2") return std::make_unique<::emp::SoftSpokenOT<2>>(role, io, false);
  if (kind == "softspoken4") return std::make_unique<::emp::SoftSpokenOT<4>>(role, io, false);
  if (kind == "softspoken8") return std::make_unique<::emp::SoftSpokenOT<8>>(role, io, false);
  if (kind == "ferret") return std::make_unique<::emp::Ferret>(role, io, false);
  throw std::invalid_argument("expected iknp, softspoken2, softspoken4, softspoken8 or ferret");
}

inline pybind11::dict bench_cot(int fd, const std::string& role, std::uint64_t count, const std::string& kind,
                                double timeout, bool own) {
  const int me = party_of(role);
  Measured result;
  {
    const pybind11::gil_scoped_release release;
    ::emp::set_test_mode(false);
    with_channel(fd, timeout, own, [&](auto& io) {
      auto ot = extension(kind, me, &io);
      const std::int64_t chunk = ot->chunk_size();  // so that nothing is left over for what is timed
      ::emp::BlockVec labels(count), warm(static_cast<std::size_t>(chunk));
      result.measure(
          io, [&] { ot->rcot(warm.data(), chunk); },
          [&] { ot->rcot(labels.data(), static_cast<std::int64_t>(count)); });
      // The sender shows its side, so that a wrong correlation cannot be fast.
      ::emp::BlockVec zero(labels);
      ::emp::block delta = ot->Delta;
      if (me == ::emp::ALICE) {
        io.send_block(&delta, 1);
        io.send_block(zero.data(), static_cast<std::int64_t>(count));
        io.flush();
      } else {
        io.recv_block(&delta, 1);
        io.recv_block(zero.data(), static_cast<std::int64_t>(count));
        for (std::uint64_t i = 0; i < count; ++i) {
          const ::emp::block wanted = ::emp::getLSB(labels[i]) ? zero[i] ^ delta : zero[i];
          if (!::emp::cmpBlock(&wanted, &labels[i], 1)) std::_Exit(wrong_answer);
        }
      }
      meet(io);
    });
  }
  return report(result.setup, result.seconds, result.sent, result.received);
}

inline pybind11::dict bench_base_ot(int fd, const std::string& role, const std::string& kind, double timeout, bool own) {
  const int me = party_of(role);
  if (kind != "co" && kind != "csw") throw std::invalid_argument("expected co or csw");
  Measured result;
  {
    const pybind11::gil_scoped_release release;
    ::emp::set_test_mode(false);
    with_channel(fd, timeout, own, [&](auto& io) {
      constexpr int count = 128;
      std::unique_ptr<::emp::OT> ot;
      if (kind == "co") {
        ot = std::make_unique<::emp::OTCO>(&io);
      } else {
        ot = std::make_unique<::emp::OTCSW>(&io);
      }
      ::emp::BlockVec zero(count), one(count), got(count);
      ::emp::PRG prg;
      prg.random_block(zero.data(), count);
      prg.random_block(one.data(), count);
      bool choices[count];
      prg.random_bool(choices, count);
      result.measure(io, [] {}, [&] {
        if (me == ::emp::ALICE) {
          ot->send(zero.data(), one.data(), count);
        } else {
          ot->recv(got.data(), choices, count);
        }
      });
    });
  }
  return report(result.setup, result.seconds, result.sent, result.received);
}

}  // namespace deepseal::emp_engine
