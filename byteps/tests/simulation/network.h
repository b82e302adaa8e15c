// The nodes of a job, and a network between them that loses what it is told to.
//
// Each node is a real Membership under a real Engine or Server, as in a Session; what the van and
// its connections do is played here, by the same rules: a pair of nodes has one link, messages of
// membership come in order and one at a time, those of data come in any order and several at a
// time, and a link that ends says so at both its ends.  A node that joins again, in another
// incarnation of the job, has another life: what was sent to its last one does not reach it.
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

#include "byteps/cluster/channel.h"
#include "byteps/cluster/ps_message.h"
#include "byteps/net/membership/membership.h"

namespace byteps {
namespace simulation {

class SimulatedChannel;

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

  // A message on its way.  Within a millisecond, or when what holds its link lets go.
  // Lost where there is no link.
  void Carry(const SimulatedChannel& from, int to, ps::Message message);

  // Whether the scheduler has a link with this life of the node.
  bool IsLinked(int node, uint64_t life);
  void Link(int a, int b);
  // Makes a link, or tells `from` that nobody is there, or one of another incarnation.
  void Connect(const SimulatedChannel& from, int to);
  // Ends a link; what is under way on it is lost.  Each end hears of it once it has received what
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
  std::map<int, Clock::time_point> paused_;
  std::map<Pair, Clock::time_point> delayed_;
  std::map<Pair, Clock::time_point> last_;  // (from, to): when the last one in order arrives
  bool stopping_ = false;
  std::atomic<int> admitted_{0};
  std::atomic<uint64_t> lives_{0};
  std::atomic<int> incarnation_{1};  // that the scheduler is at
  std::thread thread_;
};

struct NodeSettings {
  ps::Node::Role role = ps::Node::WORKER;
  int number = 0;  // of the node; its address is made from it
  int rank = 0;    // of a worker
  int workers = 1;
  int servers = 1;
  double peer_timeout_s = 3;
  double start_timeout_s = 5;
  bool keep = false;
  double keep_timeout_s = 0;
  bool rejoin = false;
};

class SimulatedChannel : public core::Channel {
 public:
  SimulatedChannel(Network* network, const NodeSettings& settings);
  ~SimulatedChannel() override;

  void Start(core::ChannelUser* user) override;
  void Leave(const ps::Farewell& farewell) override { membership_->Leave(farewell); }
  void StopByOrder(const std::string& how) { membership_->StopByOrder(how); }
  void Stop() override;
  void Send(const core::Message& message) override { Transmit(core::ToPs(message)); }
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return membership_->link_mbps() / 1e3; }
  int rank() const override;
  std::string NameOfServer(int rank) override;
  std::string NameOfWorker(int rank) override;

  int number() const { return settings_.number; }
  uint64_t life() const { return life_; }
  // Of the job; a server's connections are of this one alone.
  int incarnation() const { return incarnation_; }

  // By the network.
  void Receive(int from, uint64_t from_life, ps::Message message);
  void OnEnd(int from, uint64_t from_life, const Network::End& end);

 private:
  class Links;
  struct Event {
    int from = 0;
    uint64_t from_life = 0;
    ps::Message message;
    bool is_end = false;
    Network::End end;
  };
  struct Placing {
    char* begin;
    size_t bytes;
    bool abandoned;
  };

  void StartOnce();
  void Transmit(ps::Message message);
  void ReceiveControl();
  void ReceiveData();
  void HandleEnd(const Event& event);
  // Moves the values to where they belong, or to memory of their own.
  ps::SArray<char> Place(const ps::Meta& meta, const ps::SArray<char>& values);
  // kEmpty: it has none.
  int IdOf(int number, uint64_t life) const;

  Network* const network_;
  const NodeSettings settings_;
  std::atomic<uint64_t> life_{0};
  std::atomic<int> incarnation_{0};
  core::ChannelUser* user_ = nullptr;
  std::unique_ptr<Links> links_;
  std::unique_ptr<ps::Membership> membership_;

  mutable std::mutex mu_;
  std::condition_variable control_cond_;
  std::condition_variable data_cond_;
  // Guarded by mu_:
  struct Name {
    int number = 0;
    uint64_t life = 0;  // 0: any
  };
  std::map<int, Name> names_;  // by node id
  std::deque<Event> control_;
  std::deque<Event> data_;
  bool closed_ = true;

  std::mutex place_mu_;
  std::list<Placing> placing_;  // guarded by place_mu_
  std::vector<std::thread> threads_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_NETWORK_H_
