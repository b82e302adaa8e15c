// MemoryReserve: lets a thread survive a lack of memory.
#ifndef BYTEPS_BASE_MEMORY_RESERVE_H_
#define BYTEPS_BASE_MEMORY_RESERVE_H_

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Memory kept in reserve, so that a failure can be reported. Thread-safe.
class MemoryReserve {
 public:
  // Runs `work`. If `work` throws, frees the reserve and calls `failed` with the exception. If
  // `failed` also lacks memory, calls it again until kPatience has passed. Returns false if
  // `failed` never succeeded; threads that wait for the work then fail at their own deadlines.
  //
  // (Clang cannot see which locks `work` and `failed` require.)
  template <typename Work, typename Failed>
  bool Survive(const Work& work, const Failed& failed) noexcept PS_NO_THREAD_SAFETY_ANALYSIS {
    std::exception_ptr thrown;
    try {
      work();
      return true;
    } catch (...) {
      thrown = std::current_exception();
    }
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    GiveUp();
    bool is_told = Tell(thrown, failed);
    while (!is_told && std::chrono::steady_clock::now() < deadline) {
      // Ended by memory that other threads free; deadline: kPatience.
      std::this_thread::sleep_for(kPause);
      is_told = Tell(thrown, failed);
    }
    Take();
    if (!is_told) SayNothingIsLeft();
    return is_told;
  }

 private:
  static constexpr size_t kBytes = 64 << 10;
  static constexpr auto kPause = std::chrono::milliseconds(5);
  static constexpr auto kPatience = std::chrono::milliseconds(50);

  template <typename Failed>
  static bool Tell(const std::exception_ptr& thrown,
                   const Failed& failed) noexcept PS_NO_THREAD_SAFETY_ANALYSIS {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& e) {
      try {
        failed(e);
        return true;
      } catch (const std::exception&) {
        return false;
      }
    }
  }

  void GiveUp() {
    ps::MutexLock lock(&mu_);
    bytes_.reset();
  }
  void Take() {
    ps::MutexLock lock(&mu_);
    if (!bytes_) bytes_.reset(new (std::nothrow) char[kBytes]);
  }
  // Allocates nothing.
  static void SayNothingIsLeft() {
    static constexpr char kText[] = "byteps: there is no memory to say that there is none\n";
    // Standard error cannot be written either.
    if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) return;
  }

  ps::Mutex mu_;
  std::unique_ptr<char[]> bytes_ PS_GUARDED_BY(mu_){new (std::nothrow) char[kBytes]};
};

// Returns text about the tightest limit, such as "1048576 of 2147483648 bytes are free (memory.max
// of the control group)". Throws std::bad_alloc.
std::string DescribeFreeMemory();
// Returns how many bytes this process may still allocate, by all known limits.
uint64_t AvailableMemory();

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_BASE_MEMORY_RESERVE_H_
