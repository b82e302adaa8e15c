// Both ends of a link in one process, over any transport, with a network between them that can
// break.
#ifndef BYTEPS_TESTS_NET_LINK_CONTRACT_LINK_PAIR_H_
#define BYTEPS_TESTS_NET_LINK_CONTRACT_LINK_PAIR_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/peer_table.h"
#include "ps/sarray.h"

namespace contract {

// End that connects, like a worker, or end that listens, like a server.
enum Side { kConnects = 0, kListens = 1 };

// Record of what one end has received.
class Seen {
 public:
  struct State {
    std::vector<std::string> texts;  // texts of messages, in the order of arrival
    int resumed = 0;                 // number of resumptions
    size_t again = 0;                // messages sent again
    int closed = 0;                  // number of closings
    ps::LinkEnding ending;
  };

  State get() {
    ps::MutexLock lock(&mu_);
    return state_;
  }
  size_t count() {
    ps::MutexLock lock(&mu_);
    return state_.texts.size();
  }
  // Blocks the delivering thread while this process plays a stopped one.
  void Came(std::string text) {
    while (stopped_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ps::MutexLock lock(&mu_);
    state_.texts.push_back(std::move(text));
  }
  void Resumed(size_t again) {
    ps::MutexLock lock(&mu_);
    ++state_.resumed;
    state_.again += again;
  }
  void Closed(const ps::LinkEnding& ending) {
    ps::MutexLock lock(&mu_);
    ++state_.closed;
    state_.ending = ending;
  }
  // Sets the buffer for values of messages from now on; null: allocate.
  void ReceiveAt(char* place) {
    ps::MutexLock lock(&mu_);
    place_ = place;
  }
  char* place() {
    ps::MutexLock lock(&mu_);
    if (place_ != nullptr) ++places_told_;
    return place_;
  }
  int places_told() {
    ps::MutexLock lock(&mu_);
    return places_told_;
  }
  void Stop(bool stopped) { stopped_ = stopped; }

 private:
  ps::Mutex mu_;
  State state_ PS_GUARDED_BY(mu_);
  char* place_ PS_GUARDED_BY(mu_) = nullptr;
  int places_told_ PS_GUARDED_BY(mu_) = 0;
  std::atomic<bool> stopped_{false};
};

class LinkPair {
 public:
  virtual ~LinkPair() = default;

  // Sends a message with this one value.
  virtual void Send(Side from, const ps::SArray<char>& value) = 0;
  // Breaks the connection as a network fault does, without an action of either end.
  virtual void Break() = 0;
  // Says goodbye, and closes when everything sent before has arrived.
  virtual void CloseInOrder(Side side) = 0;
  // Closes at once.
  virtual void Close(Side side) = 0;
  virtual void Abandon(Side side, const void* begin, size_t bytes) = 0;
  virtual bool AllArrived(Side side) = 0;
  virtual ps::LinkLoad Load(Side side) = 0;

  Seen* seen(Side side) { return &seen_[side]; }
  // Describes both ends, for failure messages.
  std::string Text();

 private:
  Seen seen_[2];
};

struct Transport {
  std::string name;
  // Makes a connected pair.
  std::function<std::unique_ptr<LinkPair>()> make;
};
inline void PrintTo(const Transport& transport, std::ostream* out) { *out << transport.name; }
// Lists the transports of this build and machine. RDMA is included if CONTRACT_RDMA_ADDRESS is an
// address of a device.
std::vector<Transport> Transports();

std::unique_ptr<LinkPair> MakeTcpPair(bool encrypts, int nics);
#ifdef BYTEPS_WITH_RDMA
std::unique_ptr<LinkPair> MakeRdmaPair(const std::string& address);
#endif

// Waits until `done` returns true. Returns false after a time that no test takes unless it hangs.
template <typename Done>
bool WaitUntil(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace contract
#endif  // BYTEPS_TESTS_NET_LINK_CONTRACT_LINK_PAIR_H_
