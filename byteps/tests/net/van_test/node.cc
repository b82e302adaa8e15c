#include "node.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/net/membership/node_membership.h"
#include "ps/internal/env.h"
#include "ps/internal/postoffice.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/van.h"
#endif

namespace van_test {
namespace {

// An endpoint is broken so many times in a row, with pauses of up to all but one of these.
constexpr int kBreaks = 4;
constexpr std::chrono::milliseconds kBreakPause(40);

constexpr size_t kStallBytes = 64 << 20;
constexpr uint64_t kStallSeed = 77;

// One process's part, and how it ended.
class Node {
 public:
  Node(const std::string& role, int rank, int port) : role_(role), rank_(rank) {
    std::unordered_map<std::string, std::string> settings;
    settings["DMLC_ROLE"] = role;
    settings["DMLC_PS_ROOT_URI"] = options.host;
    settings["DMLC_PS_ROOT_PORT"] = std::to_string(port);
    settings["DMLC_NUM_WORKER"] = std::to_string(options.workers);
    settings["DMLC_NUM_SERVER"] = std::to_string(options.servers);
    settings["DMLC_WORKER_ID"] = std::to_string(role == "worker" ? rank : 0);
    settings["DMLC_ENABLE_RDMA"] = options.transport;
    if (options.transport != "tcp") settings["DMLC_NODE_HOST"] = options.host;
    settings["BYTEPS_SECRET"] = "what the nodes of this test know";
    ps::Environment::Init(settings);
    ps::Postoffice::Handlers handlers;
    handlers.on_message = [this](ps::Message* msg) { OnMessage(msg); };
    if (!options.places.empty() && role == "worker") {
      handlers.place_for = [this](const ps::Meta& meta, size_t bytes) {
        return PlaceFor(meta, bytes);
      };
    }
    handlers.on_event = [this](const ps::MembershipEvent& event) { OnEvent(event); };
    ps::Postoffice::Get()->SetHandlers(handlers);
  }

  // 0: as a job should end.
  int Run(int port_pipe) {
    std::string error;
    try {
      ps::Postoffice::Get()->Start(0, nullptr, false);
      if (port_pipe >= 0) {
        const int port = ps::Postoffice::Get()->van()->node().port;
        if (write(port_pipe, &port, sizeof(port)) != sizeof(port)) return 1;
      }
      if (role_ == "worker") {
        Work();
      } else {
        WaitForEnd();
      }
      error = Failure();
      if (role_ == "worker" && error.empty()) {
        ps::Postoffice::Get()->van()->membership()->AsNode()->Leave({});
      }
      Tell(Resources());
#ifdef BYTEPS_WITH_RDMA
      if (auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van())) {
        Tell("endpoints left: " + std::to_string(van->CountEndpoints()));
      }
#endif
      const auto begin = Clock::now();
      engine_.Stop();
      ps::Postoffice::Get()->Finalize(0, false);
      engine_.Drop();
      Tell("stopped in " + std::to_string(Seconds(Clock::now() - begin)) + " s; " + Resources());
    } catch (const ps::Error& e) {
      error = e.what();
    }
    engine_.Stop();
    for (const std::string& line : EndpointLines()) Tell(line);
    if (!error.empty()) Tell("error: " + error);
    if (role_ == "worker" &&
        rank_ >= options.workers) {  // it was to be refused; it goes when it is killed
      while (error.find("was refused") != std::string::npos) pause();
      return 1;
    }
    if (wrong_) return 1;
    if (options.expect.empty()) return error.empty() ? 0 : 1;
    return error.find(options.expect) != std::string::npos ? 0 : 1;
  }

 private:
  struct Pending {
    int server = 0;
    uint64_t seed = 0;
    size_t size = 0;
    Clock::time_point sent;
    std::shared_ptr<Memory> memory;  // of its value
  };

  void Tell(const std::string& text) {
    printf("%s %d: %s\n", role_.c_str(), rank_, text.c_str());
    fflush(stdout);
  }

  std::string Failure() {
    std::lock_guard<std::mutex> lock(mu_);
    return failure_;
  }

  // What no failure of the job excuses.
  void FailWrong(const std::string& what) {
    wrong_ = true;
    Tell("WRONG: " + what);
    Fail("WRONG: " + what);
  }

  void Fail(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mu_);
    if (failure_.empty()) failure_ = reason;
    cond_.notify_all();
  }

  void OnEvent(const ps::MembershipEvent& event) {
    if (event.kind == ps::MembershipEvent::kFailed) Fail(event.reason);
    std::lock_guard<std::mutex> lock(mu_);
    if (event.kind == ps::MembershipEvent::kEnded) ended_ = true;
    cond_.notify_all();
  }

  void WaitForEnd() {
    std::unique_lock<std::mutex> lock(mu_);
    cond_.wait(lock, [this] { return ended_ || !failure_.empty(); });
  }

  void OnMessage(ps::Message* msg) {
    if (msg->meta.head == kStall && msg->meta.request) {  // nothing is sent on from here
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    if (msg->meta.head != kEcho) return Handle(msg);
    engine_.Take(std::move(*msg));
  }

  void Handle(ps::Message* msg) {
    if (msg->meta.request) {
      Answer(msg);
    } else {
      Check(*msg);
    }
  }

  void Check(const ps::Message& msg) {
    Pending pending;
    {
      std::lock_guard<std::mutex> lock(mu_);
      auto it = pending_.find(msg.meta.addr);
      if (it == pending_.end()) return;
      if (giving_up_ && it->second.memory != nullptr) return;
      pending = it->second;
      pending_.erase(it);
      const bool told = msg.meta.head == kBreak;
      const bool by_control = told || msg.meta.head == kPing;
      if (told) --breaks_asked_;
      const bool of_plane = by_control == (options.break_plane == "control");
      if (of_plane && pending.server == 0 && msg.meta.addr > broken_after_) is_mended_ = true;
      cond_.notify_all();
      if (told) return;
    }
    std::string error;
    if (msg.meta.head == kPing) {
      delays_.push_back(Seconds(Clock::now() - pending.sent));
      if (msg.meta.body != std::string(pending.size, 'x')) error = "a ping's body changed";
    } else if (msg.data.size() != 1 || msg.data[0].size() != pending.size) {
      error = "an answer has the wrong size";
    } else if (!options.places.empty() && pending.size > 0 &&
               msg.data[0].data() != pending.memory->data()) {
      error = "an answer is not in its place";
    } else {
      const int64_t wrong = FirstWrong(msg.data[0].data(), pending.size, pending.seed);
      if (wrong >= 0) {
        error =
            "byte " + std::to_string(wrong) + " of " + std::to_string(pending.size) + " is wrong";
      }
    }
    if (!error.empty()) FailWrong(error);
    std::lock_guard<std::mutex> lock(mu_);
    --outstanding_[msg.meta.head == kPing];
    cond_.notify_all();
  }

  // `size`: of the value, or of a ping's body.
  void Request(int op, int server, size_t size, std::shared_ptr<Memory> memory, uint64_t seed) {
    ps::Message msg;
    msg.meta.app_id = msg.meta.customer_id = msg.meta.timestamp = 0;
    msg.meta.head = op;
    msg.meta.request = msg.meta.push = true;
    msg.meta.simple_app = op != kEcho && op != kStall;
    msg.meta.recver = ps::Postoffice::ServerRankToID(server);
    msg.meta.val_len = static_cast<int>(size);
    msg.meta.option = 0;
    msg.meta.key = seed;
    if (op == kEcho) {
      ps::SArray<char> value;
      value.reset(memory->data(), size, [memory](char*) {});
      msg.AddData(value);
      // Of the one whose writing stops it has to be seen that it has begun: its place is asked for.
      if (!options.places.empty() && seed != kStallSeed) msg.answer = value;
    }
    if (op == kPing) msg.meta.body = std::string(size, 'x');
    {
      std::lock_guard<std::mutex> lock(mu_);
      msg.meta.addr = ++last_request_;
      if (op == kPing || op == kEcho || op == kBreak) {
        pending_[msg.meta.addr] = Pending{server, seed, size, Clock::now(), std::move(memory)};
      }
      if (op == kPing || op == kEcho) ++outstanding_[op == kPing];
      if (op == kBreak) ++breaks_asked_;
    }
    ps::Postoffice::Get()->van()->Send(msg);
  }

  char* PlaceFor(const ps::Meta& meta, size_t bytes) {
    if (meta.request || meta.head != kEcho) return nullptr;
    std::lock_guard<std::mutex> lock(mu_);
    auto it = pending_.find(meta.addr);
    if (it == pending_.end() || it->second.size != bytes) return nullptr;
    asked_seed_ = it->second.seed;
    cond_.notify_all();
    return it->second.memory->data();
  }

  // What is answered before AbandonAll is given up, too: there is something, however fast answers
  // are.
  void GiveUpFromNowOn() {
    std::lock_guard<std::mutex> lock(mu_);
    giving_up_ = true;
  }

  // Gives up what it waits for: when Abandon has returned, nothing is written there.
  void AbandonAll(int round) {
    std::vector<Pending> given_up;
    {
      std::lock_guard<std::mutex> lock(mu_);
      for (auto it = pending_.begin(); it != pending_.end();) {
        if (it->second.memory == nullptr) {  // a ping
          ++it;
          continue;
        }
        given_up.push_back(it->second);
        it = pending_.erase(it);
        --outstanding_[false];
      }
      giving_up_ = false;
    }
    size_t bytes = 0;
    for (const Pending& one : given_up) {
      ps::Postoffice::Get()->van()->Abandon(one.memory->data(), one.size);
      Fill(one.memory->data(), one.size, one.seed + 1);
      bytes += one.size;
    }
    Tell("gave up " + std::to_string(given_up.size()) + " values in round " +
         std::to_string(round) + ", " + std::to_string(bytes) + " bytes");
    // What would still be written comes within this time, or the test shows nothing.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    for (const Pending& one : given_up) {
      if (FirstWrong(one.memory->data(), one.size, one.seed + 1, 0) >= 0) {
        FailWrong("a value that was given up was written");
      }
    }
  }

  // The peer has begun to write and stops: there is nothing but to break the endpoint.
  void AbandonStalled() {
    Request(kEcho, 0, kStallBytes, MakeValue(kStallBytes, kStallSeed), kStallSeed);
    {
      std::unique_lock<std::mutex> lock(mu_);
      cond_.wait(lock, [this] { return asked_seed_ == kStallSeed || !failure_.empty(); });
    }
    Request(kStall, 0, 0, nullptr, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto begin = Clock::now();
    AbandonAll(options.stall_round);
    Tell("Abandon took " + std::to_string(Seconds(Clock::now() - begin)) + " s");
  }

  // New memory each time, so that an old registration of it would show.
  static std::shared_ptr<Memory> MakeValue(size_t size, uint64_t seed) {
    auto memory = std::make_shared<Memory>(size);
    Fill(memory->data(), size, seed);
    return memory;
  }

  // False once the job has failed.
  bool WaitForRoom(bool ping, size_t room) {
    std::unique_lock<std::mutex> lock(mu_);
    cond_.wait(lock, [&] { return outstanding_[ping] < room || !failure_.empty(); });
    return failure_.empty();
  }

  void PingLoop() {
    for (size_t n = 0; !pings_stop_ && WaitForRoom(true, 1); ++n) {
      Request(kPing, static_cast<int>(n % options.servers), n % 100 == 99 ? 20000 : 8, nullptr, n);
      std::this_thread::sleep_for(std::chrono::milliseconds(options.ping_ms));
    }
  }

  // Once the last time is fixed: a request made since then was answered, so both ends are at
  // it again.  Then several times, so that some fall on a connection that is just being made.
  void BreakLink(int round) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      cond_.wait(lock, [this] { return is_mended_ || !failure_.empty(); });
    }
    for (int time = 0; time < kBreaks; ++time) {
      if (time > 0) std::this_thread::sleep_for(kBreakPause * ((round + time) % kBreaks));
      BreakOnce();
    }
    std::unique_lock<std::mutex> lock(mu_);
    cond_.wait(lock, [this] { return breaks_asked_ == 0 || !failure_.empty(); });
    broken_after_ = last_request_;
    is_mended_ = false;
  }

  void BreakOnce() {
    if (options.break_plane == "served") return Request(kBreak, 0, 0, nullptr, 0);
#ifdef BYTEPS_WITH_RDMA
    auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van());
    const bool data = options.break_plane == "data";
    if (van == nullptr) return;
    van->BreakEndpoint(ps::Postoffice::ServerRankToID(0),
                       data ? ps::rdma::Plane::kData : ps::rdma::Plane::kControl, 0);
#endif
  }

  void Misbehave(int round) {
    if (options.kill_round == round && options.kill_role == "worker" &&
        options.kill_rank == rank_) {
      kill(getpid(), SIGKILL);
    }
    if (rank_ != 0) return;
    if (options.kill_round == round && options.kill_role == "server") {
      Request(kDie, options.kill_rank, 0, nullptr, 0);
    }
    const int since = options.break_round < 0 ? -1 : round - options.break_round;
    const bool again = since > 0 && options.break_every > 0 && since % options.break_every == 0;
    if (since == 0 || again) BreakLink(round);
  }

  void Work() {
    std::thread pings;
    if (options.ping_ms > 0) pings = std::thread([this] { PingLoop(); });
    uint64_t bytes = 0;
    auto begin = Clock::now();
    for (int round = 0; round < options.rounds && Failure().empty(); ++round) {
      if (round == 1) {  // the first one warms up
        WaitForRoom(false, 1);
        begin = Clock::now();
        bytes = 0;
      }
      if (options.rounds >= 8 && round % (options.rounds / 4) == 1) Tell(Resources());
      Misbehave(round);
      if (round == options.stall_round && rank_ == 0) AbandonStalled();
      for (const size_t& size : options.sizes) {
        for (int server = 0; server < options.servers; ++server) {
          if (!WaitForRoom(false, options.window)) break;
          const bool is_last = &size == &options.sizes.back() && server == options.servers - 1;
          if (round == options.abandon_round && is_last) GiveUpFromNowOn();
          const uint64_t seed = ((round * 64ull + rank_) * 64 + server) * 1000003 + size;
          Request(kEcho, server, size, MakeValue(size, seed), seed);
          bytes += size;
        }
      }
      if (round == options.abandon_round) AbandonAll(round);
    }
    WaitForRoom(false, 1);
    const double seconds = Seconds(Clock::now() - begin);
    pings_stop_ = true;
    if (pings.joinable()) pings.join();
    WaitForRoom(true, 1);
    Tell(SpeedLine(bytes, seconds));
    if (!delays_.empty()) Tell(DelayLine(&delays_));
  }

  const std::string role_;
  const int rank_;
  std::mutex mu_;
  std::condition_variable cond_;
  std::string failure_;
  std::atomic<bool> wrong_{false};
  bool ended_ = false;
  std::unordered_map<uint64_t, Pending> pending_;
  size_t outstanding_[2] = {0, 0};  // requests with values, pings
  uint64_t last_request_ = 0;
  uint64_t broken_after_ = 0;  // that request
  bool is_mended_ = true;      // what was broken
  bool giving_up_ = false;     // answers stay pending
  int breaks_asked_ = 0;       // of a server, and not answered
  uint64_t asked_seed_ = 0;    // of the last value for which a place was asked
  std::atomic<bool> pings_stop_{false};
  std::vector<double> delays_;  // the receiving thread's own until all have come
  Engine engine_{[this](ps::Message* msg) { Handle(msg); }};
};

}  // namespace

int RunNode(const std::string& role, int rank, int port, int port_pipe) {
  auto* node = new Node(role, rank, port);  // its handlers may run until the process ends
  return node->Run(port_pipe);
}

}  // namespace van_test
