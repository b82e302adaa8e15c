// Load test of a scheduler: one process with many nodes that join it and leave it.
//
//   swarm --port PORT [--host ADDRESS] [--workers N] [--servers K] [--timeout S]
//
// Each node has its own connection and NodeMembership, and no other links. Prints the time to join
// and to leave, and the number of messages from the scheduler without heartbeats (their number
// depends on the machine's speed). Exit status: 0 all nodes joined and left as they should; 1 a
// node failed; 2 bad usage.
#include <getopt.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/net_settings.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/socket.h"
#include "ps/base.h"

namespace {

using Clock = ps::AwakeClock;
using ps::Node;

struct Options {
  std::string host = "127.0.0.1";
  int port = 0;
  int workers = 10;
  int servers = 10;
  double timeout_s = 120;
};

Options options;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class SwarmNode : public ps::MembershipLinks, public ps::tcp::ConnectionOwner {
 public:
  SwarmNode(bool worker, int rank, std::shared_ptr<ps::tcp::Poller> poller)
      : is_worker_(worker), rank_(rank), poller_(std::move(poller)) {
    settings_.secret = ps::NetSettings::From(byteps::core::Config::FromEnvironment()).tcp.secret;
    scheduler_.role = Node::SCHEDULER;
    scheduler_.id = ps::kScheduler;
    scheduler_.hostname = options.host;
    scheduler_.port = options.port;
    self_.role = worker ? Node::WORKER : Node::SERVER;
    self_.hostname = "10." + std::to_string(rank / 65536) + "." + std::to_string(rank / 256 % 256) +
                     "." + std::to_string(rank % 256);
    self_.port = worker ? 0 : 9000;
    token_ = ps::NewToken();
    ps::SetToken(token_, &self_);
    ps::MembershipSettings settings;
    settings.peer_timeout_s = settings.start_timeout_s = options.timeout_s;
    settings.workers = options.workers;
    settings.servers = options.servers;
    settings.rank = worker ? rank : -1;
    membership_ = std::make_unique<ps::NodeMembership>(
        this, settings, [this](const ps::MembershipEvent& event) { OnEvent(event); });
  }

  // Throws Error.
  void Join() {
    Connect(scheduler_);
    membership_->Join();
  }
  void Leave() {
    if (is_worker_) membership_->Leave({});
  }
  bool is_worker() const { return is_worker_; }
  bool ended() const { return ended_; }
  bool failed() const { return failed_; }
  int messages() const { return messages_; }
  void Stop() { membership_->Stop(); }

  // MembershipLinks
  Node self() const override { return self_; }
  const Node& scheduler() const override { return scheduler_; }
  void SetSelf(const Node& node) override { self_.id = node.id; }
  void Connect(const Node& node) override {
    if (node.role != Node::SCHEDULER) return;
    connection_ = std::make_shared<ps::tcp::Connection>(this, &settings_, poller_,
                                                        std::make_shared<ps::tcp::MemoryPool>(0));
    connection_->set_peer(ps::kScheduler);
    ps::tcp::Hello hello;
    hello.sender = token_;
    hello.node_id = Node::kEmpty;
    hello.role = self_.role;
    hello.rank = is_worker_ ? rank_ : -1;
    const auto limit = std::chrono::duration<double>(options.timeout_s);
    connection_->Dial({{"", node.hostname}}, node.port, hello,
                      Clock::now() + std::chrono::duration_cast<Clock::duration>(limit));
  }
  void Disconnect(int /*node_id*/) override {}
  void SetGeneration(int /*generation*/) override {}
  uint64_t job() const override { return 1; }
  void SetJob(uint64_t) override {}
  void Send(ps::Message* msg) override { connection_->Send(*msg); }

  // ConnectionOwner
  std::string OnChallenge(const ps::tcp::ConnectionPtr&, const ps::tcp::Challenge&) override {
    return "";
  }
  Clock::duration Patience(ps::tcp::Connection*, ps::LinkFault) override { return {}; }
  void OnResumed(ps::tcp::Connection*, Clock::duration, size_t) override {}
  char* PlaceFor(const ps::Meta&, size_t) override { return nullptr; }
  void OnMessage(ps::tcp::Connection*, ps::Message* msg, size_t) override {
    if (msg->meta.control.cmd != ps::Control::HEARTBEAT) ++messages_;
    msg->meta.sender = ps::kScheduler;
    membership_->Handle(*msg);
  }
  void OnClosed(const ps::tcp::ConnectionPtr&, const ps::LinkEnding& ending) override {
    membership_->OnLinkLost(ps::kScheduler, ending.reason, ending.by_peer);
  }

 private:
  void OnEvent(const ps::MembershipEvent& event) {
    if (event.kind == ps::MembershipEvent::kEnded) ended_ = true;
    if (event.kind != ps::MembershipEvent::kFailed) return;
    if (!failed_.exchange(true)) fprintf(stderr, "failed: %s\n", event.reason.c_str());
  }

  const bool is_worker_;
  const int rank_;
  ps::tcp::ConnectionSettings settings_;
  const std::shared_ptr<ps::tcp::Poller> poller_;
  Node scheduler_;
  Node self_;
  uint64_t token_ = 0;
  ps::tcp::ConnectionPtr connection_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> failed_{false};
  std::atomic<int> messages_{0};
  std::unique_ptr<ps::NodeMembership> membership_;
};

// Calls `work` for all nodes concurrently.
template <typename Work>
void ForAll(const std::vector<std::unique_ptr<SwarmNode>>& nodes, Work work) {
  std::vector<std::thread> threads;
  for (const auto& node : nodes) threads.emplace_back([&node, &work] { work(node.get()); });
  for (auto& thread : threads) thread.join();
}

int Run() {
  ps::tcp::MakeRoomForFiles(options.workers + options.servers);
  auto poller = std::make_shared<ps::tcp::Poller>(0);
  std::vector<std::unique_ptr<SwarmNode>> nodes;
  for (int i = 0; i < options.servers + options.workers; ++i) {
    const bool worker = i >= options.servers;
    nodes.push_back(std::make_unique<SwarmNode>(worker, worker ? i - options.servers : i, poller));
  }
  std::atomic<int> refused{0};
  auto begin = Clock::now();
  ForAll(nodes, [&refused](SwarmNode* node) {
    try {
      node->Join();
    } catch (const ps::Error& e) {
      if (refused++ == 0) fprintf(stderr, "could not join: %s\n", e.what());
    }
  });
  printf("joined in %.2f s\n", SecondsSince(begin));
  begin = Clock::now();
  if (refused == 0) ForAll(nodes, [](SwarmNode* node) { node->Leave(); });
  bool all = refused == 0;
  for (const auto& node : nodes) {
    while (!node->is_worker() && !node->ended() && !node->failed() && refused == 0 &&
           SecondsSince(begin) < options.timeout_s) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    all = all && !node->failed() && (node->is_worker() || node->ended());
  }
  int messages = 0;
  for (const auto& node : nodes) messages += node->messages();
  printf("left in %.2f s; the scheduler sent %d messages, %.1f for each node\n",
         SecondsSince(begin), messages, messages / static_cast<double>(nodes.size()));
  for (const auto& node : nodes) node->Stop();
  poller->Stop();
  return all ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const option known[] = {
      {"host", required_argument, nullptr, 'h'},    {"port", required_argument, nullptr, 'p'},
      {"workers", required_argument, nullptr, 'w'}, {"servers", required_argument, nullptr, 's'},
      {"timeout", required_argument, nullptr, 't'}, {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", known, nullptr)) != -1;) {
    if (c == 'h') options.host = optarg;
    if (c == 'p') options.port = atoi(optarg);
    if (c == 'w') options.workers = atoi(optarg);
    if (c == 's') options.servers = atoi(optarg);
    if (c == 't') options.timeout_s = atof(optarg);
    if (c == '?') return 2;
  }
  if (options.port <= 0 || options.workers < 1 || options.servers < 1) {
    fprintf(stderr, "usage: swarm --port PORT [--host ADDRESS] [--workers N] [--servers K]\n");
    return 2;
  }
  return Run();
}
