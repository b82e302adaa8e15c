// Sums that members may still lack, if workers keep sums until all members have them
// (BYTEPS_REPLACE_SERVERS_S).
#ifndef BYTEPS_RECOVERY_SERVER_CONFIRMATIONS_H_
#define BYTEPS_RECOVERY_SERVER_CONFIRMATIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Every answered sum gets a serial number. The number is open as long as the sum's round waits for
// a member, or a worker has not confirmed the answer. All members have the sums below the first
// open number, of whatever tensor.
//
// Thread-safe.
class Confirmations {
 public:
  // Keeps a serial open. Owned by a round.
  class Hold {
   public:
    Hold() = default;
    Hold(Confirmations* confirmations, uint64_t serial)
        : confirmations_(confirmations), serial_(serial) {}
    Hold(Hold&& other) noexcept { *this = std::move(other); }
    Hold& operator=(Hold&& other) noexcept {
      if (this == &other) return *this;
      Release();
      confirmations_ = std::exchange(other.confirmations_, nullptr);
      serial_ = std::exchange(other.serial_, 0);
      return *this;
    }
    ~Hold() { Release(); }

    uint64_t serial() const { return serial_; }  // 0: this holds no serial

   private:
    void Release() {
      if (confirmations_ != nullptr) confirmations_->Close(serial_);
    }

    Confirmations* confirmations_ = nullptr;  // outlives this
    uint64_t serial_ = 0;
  };

  // Begins a serial, for a new sum.
  Hold Begin();
  // Records that the sum is the answer to this request. The worker has to confirm it.
  void Answered(int rank, uint64_t request, uint64_t serial);
  // Records that a worker has the answers to all its requests before this one.
  void Confirm(int rank, uint64_t before);
  // Records that a worker has left, and will ask for nothing again.
  void SetGone(int rank);
  // Makes exactly the workers of these ranks absent. Absent workers need not confirm.
  void SetAbsent(const std::set<int>& ranks);
  // Returns the first open serial, or the next serial if none is open.
  uint64_t FirstOpen();

 private:
  void Close(uint64_t serial);
  void CloseLocked(uint64_t serial) PS_REQUIRES(mu_);
  void ConfirmLocked(int rank, uint64_t before) PS_REQUIRES(mu_);

  ps::Mutex mu_;
  uint64_t last_ PS_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, size_t> open_ PS_GUARDED_BY(mu_);  // by serial: number of reasons to stay open
  // Serial of each unconfirmed answer, by rank and request.
  std::map<int, std::map<uint64_t, uint64_t>> answered_ PS_GUARDED_BY(mu_);
  std::set<int> gone_ PS_GUARDED_BY(mu_);
  std::set<int> absent_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_RECOVERY_SERVER_CONFIRMATIONS_H_
