// The nodes of a job on a simulated network.
//
// Each is a real Membership under a real Engine or Server, as in a Session; what the van and its
// connections do is played here, by the same rules.
#ifndef BYTEPS_TESTS_SIMULATION_SIMULATED_CHANNEL_H_
#define BYTEPS_TESTS_SIMULATION_SIMULATED_CHANNEL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "byteps/cluster/channel.h"
#include "byteps/cluster/ps_message.h"
#include "byteps/net/membership/node_membership.h"
#include "network.h"

namespace byteps {
namespace simulation {

// The address of a node, and back.
std::string AddressOf(int number);
int NumberOf(const std::string& address);

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
  int replicas = 1;
  double replace_servers_s = 0;
  bool backups = false;
  double scheduler_return_s = 0;
};

class SimulatedChannel : public core::Channel {
 public:
  SimulatedChannel(Network* network, const NodeSettings& settings);
  ~SimulatedChannel() override;

  void Start(core::ChannelUser* user) override;
  void Leave(const ps::Farewell& farewell) override { membership_->AsNode()->Leave(farewell); }
  void StopByOrder(const std::string& how) { membership_->StopByOrder(how); }
  void Stop() override;
  void Send(const core::Message& message) override { Transmit(core::ToPs(message)); }
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return membership_->AsNode()->link_mbps() / 1e3; }
  bool is_late() const override;
  bool lacks_scheduler() const override;
  void SayReady() override;
  void AskToAdmit(int replica, int life) override;
  void SayAwaited(int rank, const std::string& name, uint32_t round) override;
  void SayLate(int rank, const std::string& why) override;
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
  int FindId(int number, uint64_t life) const;  // mu_ is held
  // Who has sent these data.  False: it is not known yet, and they wait.
  bool NameSender(Event* event);
  core::Role role() const;

  Network* const network_;
  const NodeSettings settings_;
  std::atomic<uint64_t> life_{0};
  std::atomic<int> incarnation_{0};
  std::atomic<uint64_t> job_{0};
  core::ChannelUser* user_ = nullptr;
  std::unique_ptr<Links> links_;
  std::unique_ptr<ps::Membership> membership_;

  mutable std::mutex mu_;
  std::condition_variable control_cond_;
  std::condition_variable data_cond_;
  // Guarded by mu_:
  struct Name {
    int number = 0;
    uint64_t life = 0;   // 0: any
    bool comes = false;  // a server that connects to this one
  };
  std::map<int, Name> names_;  // by node id
  std::deque<Event> control_;
  std::deque<Event> data_;
  std::list<Event> unnamed_;  // of servers of which the scheduler's word is in flight
  bool closed_ = true;

  std::mutex place_mu_;
  std::list<Placing> placing_;  // guarded by place_mu_
  std::vector<std::thread> threads_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_SIMULATED_CHANNEL_H_
