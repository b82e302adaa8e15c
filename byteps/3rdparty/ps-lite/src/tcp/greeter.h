// Who connected and has not yet proved that it is of this job.
//
// It holds a socket and a few bytes for a short time, and nothing else: what the proof is for
// (memory, a place among the peers, a word with the scheduler) begins when it is there.
#ifndef PS_TCP_GREETER_H_
#define PS_TCP_GREETER_H_

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "./poller.h"
#include "./stream.h"
#include "./wire.h"
#include "ps/auth.h"

namespace ps {
namespace tcp {

class Greeter : public Pollable, public std::enable_shared_from_this<Greeter> {
 public:
  using Ptr = std::shared_ptr<Greeter>;
  struct Host {
    // What is told to who connects: the job and this process.
    std::function<Challenge()> challenge;
    // It has proved what it said.  Takes the socket, or leaves it and returns why not.
    std::function<std::string(const StreamPtr&, const Hello&)> admit;
    // It is gone, one way or the other.
    std::function<void(const Ptr&)> done;
    const auth::Secret* secret = nullptr;
    std::shared_ptr<const tls::Context> tls;  // null: nothing is encrypted
  };

  // `host` outlives the poller's thread, in which all of it is called.
  Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd);

  void Start();
  // Closes the socket, for this reason.  Poller's thread.
  void End(const std::string& reason);
  Poller::Clock::time_point began() const { return began_; }

  bool OnReady(uint32_t events) override;

 private:
  enum class Phase { kHandshake, kHello, kProof, kDone };

  // True: there may be more.
  bool ShakeHands();
  bool Read();
  void OnHello();
  void OnProof();
  void Refuse(const std::string& bytes, const std::string& reason);

  const Host* const host_;
  const std::shared_ptr<Poller> poller_;
  const Poller::Clock::time_point began_ = Poller::Clock::now();
  // All below is of the poller's thread.
  StreamPtr socket_;
  Phase phase_;
  std::array<char, kHelloBytes> buffer_;
  size_t there_ = 0;
  Hello hello_;
  std::string said_;
};

}  // namespace tcp
}  // namespace ps
#endif  // PS_TCP_GREETER_H_
