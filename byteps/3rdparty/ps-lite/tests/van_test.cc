// Tries a transport: one scheduler, servers and workers, each a process, that exchange
// messages whose every byte is checked.  Values come back from where they were received, as
// they do from a BytePS server.
//
//   van_test [--transport tcp|ibverbs] [--host ADDRESS] [--workers N] [--servers K]
//            [--rounds R] [--sizes BYTES,BYTES...] [--window MESSAGES] [--ping-ms MS]
//            [--places cached|plain] [--abandon ROUND] [--stall ROUND] [--refused N]
//            [--kill ROLE:RANK:ROUND] [--break PLANE:ROUND[:EVERY]] [--expect TEXT] [--timeout S]
//
//   --window   requests of a worker under way
//   --ping-ms  each worker also sends control messages at this pace, and tells their delay
//   --places   workers say where answers belong: in the memory of the request, which is in
//              the registration cache, or not
//   --abandon  in that round workers give up all that they wait for, and write to its memory
//   --stall    worker 0 gives up a value of 64 MiB in that round, while server 0 does nothing
//   --refused  as many processes want to join that the scheduler refuses, and stay
//   --kill     that worker ends by SIGKILL in that round; or server, told by worker 0
//   --break    worker 0 breaks its first endpoint of that plane to server 0 in that round, and
//              amid the messages of each EVERY-th from then on, several times in a row, once
//              the last ones are mended; with PLANE "served", server 0 breaks its end of that
//              worker's data
//   --expect   every survivor must fail, with this in its error
//   --timeout  for the whole run; who is not done by then is killed and has failed
//
// Exit status: 0 all went as expected; 1 not; 2 bad usage.  Other settings come from the
// environment, as for byteps-server.
#include <dirent.h>
#include <getopt.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ps/endpoint_counters.h"
#include "ps/internal/env.h"
#include "ps/internal/postoffice.h"
#include "ps/membership.h"
#include "ps/registration_cache.h"
#ifdef BYTEPS_WITH_RDMA
#include "../src/rdma/van.h"
#endif

namespace {

using Clock = std::chrono::steady_clock;

enum Op : int { kPing = 1, kEcho = 2, kDie = 3, kStall = 4, kBreak = 5 };

struct Options {
  std::string transport = "tcp";
  std::string host = "127.0.0.1";
  int workers = 1;
  int servers = 1;
  int rounds = 10;
  std::vector<size_t> sizes = {0, 1, 1000, 4096, 4097, 65536, 1000000};
  size_t window = 16;
  int ping_ms = 0;
  std::string places;
  int abandon_round = -1;
  int stall_round = -1;
  int refused = 0;
  std::string kill_role;
  int kill_rank = -1;
  int kill_round = -1;
  std::string break_plane;
  int break_round = -1;
  int break_every = 0;
  std::string expect;
  double timeout_s = 60;
};

Options options;

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Differs by sender, receiver, message and place.  By words: an emulated processor is slow.
uint64_t WordAt(uint64_t seed, size_t place) {
  return (seed * 0x9e3779b97f4a7c15ull + place) * 0xd6e8feb86659fd93ull;
}

// What a server does to every word.
constexpr uint64_t kMark = 0x5a5a5a5a5a5a5a5aull;

// Calls work(place, bytes) for each word, and for what is left behind the last.
template <typename Work>
void ForWords(size_t bytes, Work work) {
  for (size_t at = 0; at < bytes; at += 8) work(at, std::min<size_t>(8, bytes - at));
}

void Fill(char* data, size_t bytes, uint64_t seed) {
  ForWords(bytes, [&](size_t at, size_t n) {
    const uint64_t word = WordAt(seed, at);
    memcpy(data + at, &word, n);
  });
}

void Mark(char* data, size_t bytes) {
  ForWords(bytes, [&](size_t at, size_t n) {
    uint64_t word = 0;
    memcpy(&word, data + at, n);
    word ^= kMark;
    memcpy(data + at, &word, n);
  });
}

// The place of the first byte that is not as it should be, or -1.
int64_t FirstWrong(const char* data, size_t bytes, uint64_t seed, uint64_t mark = kMark) {
  int64_t wrong = -1;
  ForWords(bytes, [&](size_t at, size_t n) {
    const uint64_t word = WordAt(seed, at) ^ mark;
    if (wrong < 0 && memcmp(data + at, &word, n) != 0) wrong = static_cast<int64_t>(at);
  });
  return wrong;
}

// What the kernel says of this process: pinned and resident KiB, and open files.
std::string Resources() {
  std::ifstream status("/proc/self/status");
  std::string line, pinned = "0", resident = "0";
  while (std::getline(status, line)) {
    std::istringstream words(line);
    std::string name, value;
    words >> name >> value;
    if (name == "VmPin:") pinned = value;
    if (name == "VmRSS:") resident = value;
  }
  int files = 0;
  if (DIR* folder = opendir("/proc/self/fd")) {
    while (readdir(folder) != nullptr) ++files;
    closedir(folder);
  }
  return "pinned_kib=" + pinned + " rss_kib=" + resident + " fds=" + std::to_string(files - 3);
}

// What a worker's values lie in.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(new char[bytes]) {
    if (options.places == "cached") number_ = ps::RegistrationCache::Add(bytes_.get(), bytes);
  }
  ~Memory() { ps::RegistrationCache::Remove(number_); }
  char* data() { return bytes_.get(); }

 private:
  std::unique_ptr<char[]> bytes_;
  uint64_t number_ = 0;
};

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
    engine_ = std::thread([this] { EngineLoop(); });
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
        ps::Postoffice::Get()->van()->membership()->Leave(false);
      }
      Tell(Resources());
#ifdef BYTEPS_WITH_RDMA
      if (auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van())) {
        Tell("endpoints left: " + std::to_string(van->CountEndpoints()));
      }
#endif
      const auto begin = Clock::now();
      StopEngine();
      ps::Postoffice::Get()->Finalize(0, false);
      received_.clear();
      Tell("stopped in " + std::to_string(Seconds(Clock::now() - begin)) + " s; " + Resources());
    } catch (const dmlc::Error& e) {
      error = e.what();
    }
    StopEngine();
    for (const auto& e : ps::ReadEndpointCounters()) {
      std::ostringstream text;
      text << "endpoint peer='" << e.peer << "' plane=" << e.plane << " index=" << e.index
           << " sent=" << e.messages_sent << "/" << e.bytes_sent
           << " received=" << e.messages_received << "/" << e.bytes_received
           << " in_place=" << e.values_in_place << "/" << e.bytes_in_place
           << " in_pool=" << e.values_in_pool << "/" << e.bytes_in_pool
           << " in_frames=" << e.values_in_frames << "/" << e.bytes_in_frames;
      Tell(text.str());
    }
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

  void StopEngine() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      engine_stop_ = true;
      received_cond_.notify_one();
    }
    if (engine_.joinable()) engine_.join();
  }

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

  // Values are looked at by a thread of their own, as a BytePS server's engine does: a ping
  // must not wait for that.
  void OnMessage(ps::Message* msg) {
    if (msg->meta.head == kStall && msg->meta.request) {  // nothing is sent on from here
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    if (msg->meta.head != kEcho) return Handle(msg);
    std::lock_guard<std::mutex> lock(mu_);
    received_.push_back(std::move(*msg));
    received_cond_.notify_one();
  }

  void EngineLoop() {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      received_cond_.wait(lock, [this] { return engine_stop_ || !received_.empty(); });
      if (engine_stop_) return;
      ps::Message msg = std::move(received_.front());
      received_.pop_front();
      lock.unlock();
      Handle(&msg);
      msg = ps::Message();
      lock.lock();
    }
  }

  void Handle(ps::Message* msg) {
    if (msg->meta.request) {
      Answer(msg);
    } else {
      Check(*msg);
    }
  }

  static void Answer(ps::Message* msg) {
    if (msg->meta.head == kDie) kill(getpid(), SIGKILL);
#ifdef BYTEPS_WITH_RDMA
    auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van());
    if (msg->meta.head == kBreak && van != nullptr) {
      van->BreakEndpoint(msg->meta.sender, ps::rdma::Plane::kData, 0);
    }
#endif
    ps::Message answer;
    answer.meta = msg->meta;
    answer.meta.request = false;
    answer.meta.recver = msg->meta.sender;
    for (auto& value : msg->data) Mark(value.data(), value.size());
    answer.data = msg->data;
    ps::Postoffice::Get()->van()->Send(answer);
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

  // Once the last time is mended: a request made since then was answered, so both ends are at
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
    Report(bytes, seconds);
  }

  void Report(uint64_t bytes, double seconds) {
    char text[200];
    snprintf(text, sizeof(text), "%.3f s, %.2f MB/s each way", seconds, bytes / seconds / 1e6);
    Tell(text);
    if (delays_.empty()) return;
    std::sort(delays_.begin(), delays_.end());
    snprintf(text, sizeof(text), "%zu pings, p50 %.3f ms, p99 %.3f ms, max %.3f ms", delays_.size(),
             delays_[delays_.size() / 2] * 1e3, delays_[delays_.size() * 99 / 100] * 1e3,
             delays_.back() * 1e3);
    Tell(text);
  }

  const std::string role_;
  const int rank_;
  std::mutex mu_;
  std::condition_variable cond_;
  std::string failure_;
  std::atomic<bool> wrong_{false};
  bool ended_ = false;
  std::unordered_map<uint64_t, Pending> pending_;
  std::thread engine_;
  std::condition_variable received_cond_;
  std::deque<ps::Message> received_;
  bool engine_stop_ = false;
  size_t outstanding_[2] = {0, 0};  // requests with values, pings
  uint64_t last_request_ = 0;
  uint64_t broken_after_ = 0;  // that request
  bool is_mended_ = true;      // what was broken
  bool giving_up_ = false;     // answers stay pending
  int breaks_asked_ = 0;       // of a server, and not answered
  uint64_t asked_seed_ = 0;    // of the last value for which a place was asked
  std::atomic<bool> pings_stop_{false};
  std::vector<double> delays_;  // the receiving thread's own until all have come
};

// How long the others may outlive one that ended badly.
constexpr double kGraceSeconds = 10;

struct Child {
  std::string name;
  bool may_be_killed = false;  // servers get their ranks as they come
  bool stays = false;          // until it is killed
};

// The child's process id; the child itself never returns.
pid_t Spawn(const std::string& role, int rank, int port, int port_pipe) {
  fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  auto* node = new Node(role, rank, port);  // its handlers may run until the end
  const int status = node->Run(port_pipe);
  fflush(stdout);
  _exit(status);
}

bool EndedWell(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
bool WasKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

// Waits for all of them; the number that did not end as they should.
int Wait(std::map<pid_t, Child> children) {
  const auto begin = Clock::now();
  double limit_s = options.timeout_s;
  int bad = 0;
  int to_be_killed = options.kill_role.empty() ? 0 : 1;
  while (!children.empty()) {
    int status = 0;
    if (std::all_of(children.begin(), children.end(),
                    [](const auto& c) { return c.second.stays; })) {
      for (const auto& child : children) {
        kill(child.first, SIGKILL);
        waitpid(child.first, &status, 0);
        if (!WasKilled(status)) ++bad;
      }
      break;
    }
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid > 0) {
      if (to_be_killed > 0 && children[pid].may_be_killed && WasKilled(status)) {
        --to_be_killed;
      } else if (!EndedWell(status)) {
        printf("%s: FAILED, wait status %d\n", children[pid].name.c_str(), status);
        ++bad;
        // The others may wait for it as long as a job may take to start.
        limit_s = std::min(limit_s, Seconds(Clock::now() - begin) + kGraceSeconds);
      }
      children.erase(pid);
      continue;
    }
    if (Seconds(Clock::now() - begin) > limit_s) {
      for (const auto& child : children) {
        printf("%s: FAILED, still running after %.0f s\n", child.second.name.c_str(), limit_s);
        kill(child.first, SIGKILL);
        waitpid(child.first, &status, 0);
        ++bad;
      }
      return bad;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return bad + to_be_killed;
}

int RunAll() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  std::map<pid_t, Child> children;
  children[Spawn("scheduler", 0, 0, ends[1])] = {"scheduler", false};
  close(ends[1]);
  int port = 0;
  if (read(ends[0], &port, sizeof(port)) != sizeof(port)) {
    printf("the scheduler did not start\n");
    return Wait(children) + 1;
  }
  for (const std::string role : {"server", "worker"}) {
    for (int rank = 0; rank < (role == "server" ? options.servers : options.workers); ++rank) {
      const bool dies = options.kill_role == role;
      children[Spawn(role, rank, port, -1)] = {role + " " + std::to_string(rank), dies};
    }
  }
  for (int n = 0; n < options.refused; ++n) {
    const int rank = options.workers + n;
    children[Spawn("worker", rank, port, -1)] = {"refused " + std::to_string(n), false, true};
  }
  return Wait(children);
}

[[noreturn]] void Usage(const std::string& error) {
  fprintf(stderr, "van_test: %s; the head of van_test.cc explains the options\n", error.c_str());
  exit(2);
}

std::vector<std::string> Fields(const std::string& text, char separator) {
  std::vector<std::string> fields;
  std::istringstream in(text);
  for (std::string field; std::getline(in, field, separator);) fields.push_back(field);
  return fields;
}

void Parse(int argc, char** argv) {
  const option long_options[] = {
      {"transport", 1, nullptr, 't'}, {"host", 1, nullptr, 'h'},    {"workers", 1, nullptr, 'w'},
      {"servers", 1, nullptr, 's'},   {"rounds", 1, nullptr, 'r'},  {"sizes", 1, nullptr, 'z'},
      {"window", 1, nullptr, 'o'},    {"ping-ms", 1, nullptr, 'p'}, {"kill", 1, nullptr, 'k'},
      {"break", 1, nullptr, 'b'},     {"expect", 1, nullptr, 'e'},  {"timeout", 1, nullptr, 'x'},
      {"places", 1, nullptr, 'l'},    {"abandon", 1, nullptr, 'a'}, {"stall", 1, nullptr, 'y'},
      {"refused", 1, nullptr, 'f'},   {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", long_options, nullptr)) != -1;) {
    const std::string value = optarg == nullptr ? "" : optarg;
    const auto fields = Fields(value, ':');
    switch (c) {
      case 't':
        options.transport = value;
        break;
      case 'h':
        options.host = value;
        break;
      case 'w':
        options.workers = atoi(optarg);
        break;
      case 's':
        options.servers = atoi(optarg);
        break;
      case 'r':
        options.rounds = atoi(optarg);
        break;
      case 'z':
        options.sizes.clear();
        for (const auto& size : Fields(value, ',')) options.sizes.push_back(std::stoull(size));
        break;
      case 'o':
        options.window = atoi(optarg);
        break;
      case 'p':
        options.ping_ms = atoi(optarg);
        break;
      case 'l':
        if (value != "cached" && value != "plain") Usage("--places cached|plain");
        options.places = value;
        break;
      case 'a':
        options.abandon_round = atoi(optarg);
        break;
      case 'y':
        options.stall_round = atoi(optarg);
        break;
      case 'f':
        options.refused = atoi(optarg);
        break;
      case 'k':
        if (fields.size() != 3) Usage("--kill ROLE:RANK:ROUND");
        options.kill_role = fields[0];
        options.kill_rank = std::stoi(fields[1]);
        options.kill_round = std::stoi(fields[2]);
        break;
      case 'b':
        if (fields.size() != 2 && fields.size() != 3) Usage("--break PLANE:ROUND[:EVERY]");
        options.break_plane = fields[0];
        options.break_round = std::stoi(fields[1]);
        if (fields.size() == 3) options.break_every = std::stoi(fields[2]);
        break;
      case 'e':
        options.expect = value;
        break;
      case 'x':
        options.timeout_s = atof(optarg);
        break;
      default:
        Usage("bad option");
    }
  }
  if (optind < argc) Usage(std::string("unexpected argument ") + argv[optind]);
}

}  // namespace

int main(int argc, char** argv) {
  Parse(argc, argv);
  const int bad = RunAll();
  printf("van_test: %s\n", bad == 0 ? "ok" : "FAILED");
  return bad == 0 ? 0 : 1;
}
