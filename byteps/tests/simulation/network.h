// A network between the nodes of a job that loses what it is told to.
//
// A pair of nodes has one link, messages of membership come in order and one at a time, those of
// data come in any order and several at a time, and a link that ends says so at both its ends.  A
// node that joins again, in another incarnation of the job, has another life: what was sent to its
// last one does not reach it.
//
// All of it is written with ordinary threads and locks, which virtual_threads.h plays.
#ifndef BYTEPS_TESTS_SIMULATION_NETWORK_H_
#define BYTEPS_TESTS_SIMULATION_NETWORK_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ps/internal/message.h"

namespace byteps {
namespace simulation {

class SimulatedChannel;

inline std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

// Whether it is one of membership.
inline bool IsControl(const ps::Message& message) { return !message.meta.control.empty(); }

// What happens to the links.
class Network {
 public:
  Network();
  ~Network();

  // A number that no life of a node has had.
  uint64_t NewLife() { return ++lives_; }
  // It has its address, unless another one has.
  void Add(SimulatedChannel* node);
  // It has none any more, and all its links are closed in good order.
  void Leave(SimulatedChannel* node);

  // A message in flight.  Within a millisecond, or when what holds its link lets go.
  // Lost where there is no link.  `expected`: a life of the receiver, for whose link it waits.
  void Carry(const SimulatedChannel& from, int to, uint64_t expected, ps::Message message);

  // Whether the scheduler has a link with this life of the node.
  bool IsLinked(int node, uint64_t life);
  // False: one of them is dead.
  bool Link(int a, int b);
  // Makes a link, or tells `from` that nobody is there, or one of another incarnation.
  void Connect(const SimulatedChannel& from, int to);
  // Ends a link; what is in flight on it is lost.  Each end hears of it once it has received what
  // came before, if it is told: `how`, and whether its peer closed it.
  struct End {
    std::string how;
    bool by_peer = false;
    bool orderly = false;
  };
  void Unlink(int a, int b, const End* at_a, const End* at_b);
  // The scheduler closes a link in good order, if it is still with this life of the node.
  void Close(int node, uint64_t life);

  // ----- faults; nodes are numbers, the scheduler is 0

  // Both ends of the link are told that it was reset.
  void Reset(int a, int b);
  // Its process is gone: its links close, and it neither sends nor receives.
  void Kill(int node);
  // Another process may have its place.
  void Revive(int node);
  // It goes silent for so long: what it sends, and what is sent to it, waits.  Others notice only
  // that nothing comes.
  void Pause(int node, double seconds);
  // The link holds what it carries for so long.
  void Delay(int a, int b, double seconds);

  // Workers that the scheduler has taken into the job.
  int admitted() const { return admitted_; }

 private:
  friend class SimulatedChannel;
  using Clock = std::chrono::steady_clock;
  using Pair = std::pair<int, int>;
  struct Item {
    int from = 0;
    int to = 0;
    uint64_t from_life = 0;
    uint64_t to_life = 0;
    uint64_t link = 0;  // that it goes by; of an end: 0
    ps::Message message;
    bool is_end = false;
    End end;
  };

  static Pair PairOf(int a, int b) { return a < b ? Pair(a, b) : Pair(b, a); }
  void Run();
  void Deliver(Item item);
  // mu_ is held, for these:
  uint64_t LifeOf(int node) const;
  void TellOfEnd(const SimulatedChannel& node, int peer, const std::string& how);
  void SendWaiting(const Pair& pair);
  void ForgetWaiting(int node);
  Clock::time_point ArrivalOf(int from, int to, bool in_order);

  std::mutex mu_;
  std::condition_variable cond_;
  std::map<int, SimulatedChannel*> nodes_;
  std::set<int> killed_;
  struct LinkState {
    uint64_t number = 0;
    std::map<int, uint64_t> lives;  // of both ends
  };
  std::map<Pair, LinkState> links_;
  uint64_t next_link_ = 1;
  std::multimap<Clock::time_point, Item> under_way_;
  std::list<Item> waiting_;  // for a link
  std::map<int, Clock::time_point> paused_;
  std::map<Pair, Clock::time_point> delayed_;
  std::map<Pair, Clock::time_point> last_;  // (from, to): when the last one in order arrives
  bool stopping_ = false;
  std::atomic<int> admitted_{0};
  std::atomic<uint64_t> lives_{0};
  std::atomic<int> incarnation_{1};  // that the scheduler is at
  std::atomic<uint64_t> job_{0};     // its number
  std::thread thread_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_NETWORK_H_
