// Servers that have links with each other (BYTEPS_BACKUP_STATE): a job, each node a process, in
// which each server sends values to its neighbors, which send them back.  Some are killed, and
// others take their places; what goes over a link is checked, each byte.
//
//   server_ring [SERVERS]
//
// Exit status: 0 all went as expected; 1 not.  Settings come from the environment, as for
// byteps-server.
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/admission.h"

namespace {

using byteps::core::Message;
using byteps::core::MessageHead;
using byteps::core::Role;
using byteps::core::SharedBytes;

constexpr int kMost = 8;
constexpr int kProcesses = 2 * kMost;  // servers, and those that take their places
constexpr int kEnough = 30;            // answers
constexpr auto kPatience = std::chrono::seconds(60);
constexpr size_t kSizes[] = {1, 5000, 300'000};

// What the processes see of each other.
struct Board {
  std::atomic<int> port{0};
  std::atomic<bool> over{false};
  struct Place {
    std::atomic<int> rank{-1};
    // Answers of each neighbor, since it has its place.
    std::atomic<int> answers[kMost] = {};
  } places[kProcesses];
};
Board* board = nullptr;
int servers = 2;

char ByteAt(uint64_t number, int from, size_t place) {
  return static_cast<char>((number * 7 + from * 31 + place) % 251);
}

SharedBytes ValuesOf(uint64_t number, int from) {
  const SharedBytes bytes = SharedBytes::New(kSizes[number % std::size(kSizes)]);
  for (size_t i = 0; i < bytes.size(); ++i) bytes.data()[i] = ByteAt(number, from, i);
  return bytes;
}

bool AreValuesOf(const SharedBytes& values, uint64_t number, int from) {
  if (values.size() != kSizes[number % std::size(kSizes)]) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values.data()[i] != ByteAt(number, from, i)) return false;
  }
  return true;
}

class Node : public byteps::core::ChannelUser {
 public:
  // `place`: of a server, on the board.
  Node(Role role, Board::Place* place) : place_(place) {
    byteps::core::SessionOptions options;
    options.role = role;
    options.num_servers = servers;
    session_ =
        std::make_unique<byteps::core::Session>(byteps::core::Config::FromEnvironment(), options);
  }

  int Run(Role role) {
    try {
      session_->Start(this);
      if (role == Role::kScheduler) board->port = session_->port();
      if (role == Role::kServer) BeginToSend();
      if (role == Role::kWorker) {
        while (!board->over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        session_->Leave({});
      } else {
        std::unique_lock<std::mutex> lock(mu_);
        cond_.wait(lock, [this] { return ended_; });
      }
    } catch (const ps::Error& e) {
      Fail(e.what());
    }
    session_->Stop();
    if (!failure_.empty()) printf("%s: %s\n", NameOf(role), failure_.c_str());
    fflush(stdout);
    return failure_.empty() ? 0 : 1;
  }

  char* PlaceFor(const MessageHead& head, size_t bytes) override {
    if (!head.between_servers || head.is_request) return nullptr;
    std::lock_guard<std::mutex> lock(mu_);
    const auto sent = sent_.find(head.peer);
    const bool is_it = sent != sent_.end() && sent->second.number == head.number;
    return is_it && sent->second.place.size() == bytes ? sent->second.place.data() : nullptr;
  }

  void OnMessage(Message* message) override {
    if (!message->between_servers) return Fail("a message of no server");
    if (message->is_request) {
      if (!AreValuesOf(message->values, message->number, message->peer)) Fail("a wrong request");
      message->is_request = false;
      return session_->Send(*message);
    }
    {
      std::lock_guard<std::mutex> lock(mu_);
      const auto sent = sent_.find(message->peer);
      if (sent == sent_.end() || sent->second.number != message->number) return;
      if (message->values.data() != sent->second.place.data()) {
        failure_ = "an answer is not in its place";
      }
      if (!AreValuesOf(message->values, message->number, rank_)) failure_ = "a wrong answer";
      sent_.erase(sent);
      ++place_->answers[message->peer];
    }
    Ask(message->peer);
  }

  void OnEvent(const ps::MembershipEvent& event) override {
    using Event = ps::MembershipEvent;
    if (place_ != nullptr && event.kind == Event::kServerLost) {
      Sent given_up;
      {
        std::lock_guard<std::mutex> lock(mu_);
        lost_.insert(event.rank);
        std::swap(given_up, sent_[event.rank]);
        sent_.erase(event.rank);
        place_->answers[event.rank] = 0;
      }
      // The answer may be coming into it.
      if (!given_up.place.empty()) session_->Abandon(given_up.place.data(), given_up.place.size());
    }
    if (place_ != nullptr && event.kind == Event::kServerReplaced) {
      {
        std::lock_guard<std::mutex> lock(mu_);
        lost_.erase(event.rank);
      }
      Ask(event.rank);
    }
    if (event.kind == Event::kFailed) Fail(event.reason);
    std::lock_guard<std::mutex> lock(mu_);
    if (event.kind == Event::kEnded) ended_ = true;
    cond_.notify_all();
  }

 private:
  struct Sent {
    uint64_t number = 0;
    SharedBytes place;  // for the answer
  };

  static const char* NameOf(Role role) { return byteps::core::NameOf(role); }

  void Fail(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mu_);
    if (failure_.empty()) failure_ = reason;
    ended_ = true;
    cond_.notify_all();
  }

  void BeginToSend() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      rank_ = session_->rank();
    }
    for (int rank = 0; rank < servers; ++rank) Ask(rank);
    place_->rank = rank_;
  }

  // Sends a request, unless one is in flight.
  void Ask(int server) {
    Message message;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (rank_ < 0 || !ps::AreNeighbors(rank_, server, servers)) return;
      if (lost_.count(server) > 0 || sent_.count(server) > 0) return;
      message = byteps::core::MakeRequest(byteps::core::kPushPull, server, 16, ++number_, "a body");
      message.between_servers = true;
      message.SetValues(ValuesOf(message.number, rank_));
      sent_[server] = {message.number, SharedBytes::New(message.values.size())};
    }
    session_->Send(message);
  }

  Board::Place* const place_;
  std::unique_ptr<byteps::core::Session> session_;
  std::mutex mu_;
  std::condition_variable cond_;
  std::string failure_;
  bool ended_ = false;
  int rank_ = -1;
  uint64_t number_ = 0;
  std::set<int> lost_;
  std::map<int, Sent> sent_;
};

pid_t Spawn(Role role, Board::Place* place) {
  fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setenv("DMLC_PS_ROOT_PORT", std::to_string(board->port).c_str(), 1);
  auto* node = new Node(role, place);  // its handlers may run until the process ends
  _exit(node->Run(role));
}

bool WaitUntil(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// Whether each server has got answers of all its neighbors.
bool AllAnswer(const std::map<int, pid_t>& running) {
  int ranks = 0;
  for (const auto& [number, pid] : running) {
    const Board::Place& place = board->places[number];
    if (place.rank < 0) continue;
    ++ranks;
    for (int peer = 0; peer < servers; ++peer) {
      const bool near = ps::AreNeighbors(place.rank, peer, servers);
      if (near && place.answers[peer] < kEnough) return false;
    }
  }
  return ranks == servers;
}

int Run() {
  const pid_t scheduler = Spawn(Role::kScheduler, nullptr);
  if (!WaitUntil([] { return board->port > 0; })) return 1;
  std::map<int, pid_t> running;
  int next = 0;
  for (; next < servers; ++next) running[next] = Spawn(Role::kServer, &board->places[next]);
  const pid_t worker = Spawn(Role::kWorker, nullptr);
  bool well = WaitUntil([&] { return AllAnswer(running); });
  printf("all have answered: %d\n", well);
  // One that connects to others, then one that others connect to; the last one is replaced at once,
  // since the next waits for a place.
  for (const int rank : {0, servers - 1}) {
    if (!well) break;
    for (const auto& [number, pid] : std::map<int, pid_t>(running)) {
      if (board->places[number].rank != rank) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      running.erase(number);
    }
    running[next] = Spawn(Role::kServer, &board->places[next]);
    const auto& place = board->places[next++];
    well = WaitUntil([&] { return place.rank == rank && AllAnswer(running); });
    printf("server %d is replaced, and all have answered: %d\n", rank, well);
  }
  board->over = true;
  running[kProcesses] = worker;
  running[kProcesses + 1] = scheduler;
  for (const auto& [number, pid] : running) {
    int status = 0;
    const auto has_ended = [&, pid = pid] { return waitpid(pid, &status, WNOHANG) == pid; };
    if (!WaitUntil(has_ended)) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
    }
    if (status == 0) continue;
    printf("process %d ended with wait status %d\n", number, status);
    well = false;
  }
  return well ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) servers = atoi(argv[1]);
  if (servers < 2 || servers > kMost) return 2;
  void* const memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  board = new (memory) Board();
  setenv("DMLC_PS_ROOT_URI", "127.0.0.1", 1);
  setenv("DMLC_NUM_WORKER", "1", 1);
  setenv("DMLC_NUM_SERVER", std::to_string(servers).c_str(), 1);
  setenv("BYTEPS_REPLACE_SERVERS_S", "60", 1);
  setenv("BYTEPS_BACKUP_STATE", "1", 1);
  const int status = Run();
  printf("server_ring: %s\n", status == 0 ? "ok" : "FAILED");
  return status;
}
