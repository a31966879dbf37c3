// EMP's channel interface over a connected socket that somebody else opened and goes on owning.
#pragma once

#include <emp-tool/emp-tool.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace deepseal::emp_engine {

// EMP's objects cannot be unwound in the middle of a session (their destructors end the process), so a failure ends the
// process with one of these statuses; the parent process turns it into an error for people.
enum Status : int { hung_up = 81, stalled = 82, broken = 83, wrong_answer = 84 };

class SocketChannel final : public ::emp::IOChannel {
 public:
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_recv = 0;

  SocketChannel(int fd, double timeout) : fd_(fd), timeout_(timeout), out_(capacity), in_(capacity) {}
  SocketChannel(const SocketChannel&) = delete;
  SocketChannel& operator=(const SocketChannel&) = delete;

  void send_data_internal(const void* data, std::int64_t size) override {
    auto* bytes = static_cast<const char*>(data);
    auto count = static_cast<std::size_t>(size);
    bytes_sent += count;
    if (count > capacity - filled_) {
      flush();
      if (count >= capacity) return write_all(bytes, count);
    }
    std::memcpy(out_.data() + filled_, bytes, count);
    filled_ += count;
  }

  void recv_data_internal(void* data, std::int64_t size) override {
    auto* bytes = static_cast<char*>(data);
    auto count = static_cast<std::size_t>(size);
    bytes_recv += count;
    if (filled_ != 0) flush();
    while (true) {
      const std::size_t take = std::min(count, end_ - next_);
      std::memcpy(bytes, in_.data() + next_, take);
      next_ += take;
      bytes += take;
      count -= take;
      if (count == 0) return;
      if (count >= capacity) {
        const std::size_t got = read_some(bytes, count);
        bytes += got;
        count -= got;
      } else {
        next_ = 0;
        end_ = read_some(in_.data(), capacity);
      }
    }
  }

  void flush() override {
    write_all(out_.data(), filled_);
    filled_ = 0;
  }

  // Both sides wait for each other. Afterwards nothing is buffered, so the socket can carry what comes next.
  void finish() {
    char mark = 0;
    ++bytes_sent;
    ++bytes_recv;
    flush();
    write_all(&mark, 1);
    if (next_ == end_) {
      read_some(&mark, 1);
    } else if (end_ - next_ != 1) {
      std::_Exit(broken);
    }
    next_ = end_ = 0;
  }

 private:
  static constexpr std::size_t capacity = 128 * 1024;

  void write_all(const char* bytes, std::size_t count) {
    while (count != 0) {
      const ssize_t done = ::send(fd_, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done >= 0) {
        bytes += done;
        count -= static_cast<std::size_t>(done);
      } else {
        wait_after(errno, POLLOUT);
      }
    }
  }

  std::size_t read_some(char* bytes, std::size_t count) {
    while (true) {
      const ssize_t done = ::recv(fd_, bytes, count, MSG_DONTWAIT);
      if (done > 0) return static_cast<std::size_t>(done);
      if (done == 0) std::_Exit(hung_up);
      wait_after(errno, POLLIN);
    }
  }

  void wait_after(int error, short event) {
    using Clock = std::chrono::steady_clock;
    if (error == EINTR) return;
    if (error == EPIPE || error == ECONNRESET) std::_Exit(hung_up);
    if (error != EAGAIN && error != EWOULDBLOCK) std::_Exit(broken);
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_));
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
      if (left <= 0) std::_Exit(stalled);
      pollfd wanted{fd_, event, 0};
      const int ready = ::poll(&wanted, 1, static_cast<int>(std::min<std::int64_t>(left, 1'000'000)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) std::_Exit(broken);
    }
  }

  int fd_;
  double timeout_;
  std::vector<char> out_;
  std::vector<char> in_;
  std::size_t filled_ = 0;
  std::size_t next_ = 0;
  std::size_t end_ = 0;
};

}  // namespace deepseal::emp_engine
