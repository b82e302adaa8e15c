// The processes of van_test, and what its nodes are made of: options, values, figures, answers.
#include <dirent.h>
#include <getopt.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "byteps/net/link/counters.h"
#include "byteps/net/link/registration_cache.h"
#include "node.h"
#include "ps/internal/postoffice.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/van.h"
#endif

namespace van_test {
namespace {

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
  const int status = RunNode(role, rank, port, port_pipe);
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

}  // namespace
}  // namespace van_test

int main(int argc, char** argv) {
  van_test::Parse(argc, argv);
  const int bad = van_test::RunAll();
  printf("van_test: %s\n", bad == 0 ? "ok" : "FAILED");
  return bad == 0 ? 0 : 1;
}

namespace van_test {

// ----- options

Options options;

namespace {

[[noreturn]] void Usage(const std::string& error) {
  fprintf(stderr, "van_test: %s; the head of van_test/node.h explains the options\n",
          error.c_str());
  exit(2);
}

std::vector<std::string> Fields(const std::string& text, char separator) {
  std::vector<std::string> fields;
  std::istringstream in(text);
  for (std::string field; std::getline(in, field, separator);) fields.push_back(field);
  return fields;
}

}  // namespace

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

namespace {

// ----- values

// Differs by sender, receiver, message and place.  By words: an emulated CPU is slow.
uint64_t WordAt(uint64_t seed, size_t place) {
  return (seed * 0x9e3779b97f4a7c15ull + place) * 0xd6e8feb86659fd93ull;
}

// Calls work(place, bytes) for each word, and for what is left behind the last.
template <typename Work>
void ForWords(size_t bytes, Work work) {
  for (size_t at = 0; at < bytes; at += 8) work(at, std::min<size_t>(8, bytes - at));
}

}  // namespace

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

int64_t FirstWrong(const char* data, size_t bytes, uint64_t seed, uint64_t mark) {
  int64_t wrong = -1;
  ForWords(bytes, [&](size_t at, size_t n) {
    const uint64_t word = WordAt(seed, at) ^ mark;
    if (wrong < 0 && memcmp(data + at, &word, n) != 0) wrong = static_cast<int64_t>(at);
  });
  return wrong;
}

Memory::Memory(size_t bytes) : bytes_(new char[bytes]) {
  if (options.places == "cached") number_ = ps::RegistrationCache::Add(bytes_.get(), bytes);
}

Memory::~Memory() { ps::RegistrationCache::Remove(number_); }

// ----- figures

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

std::vector<std::string> EndpointLines() {
  std::vector<std::string> lines;
  for (const auto& e : ps::ReadEndpointCounters()) {
    std::ostringstream text;
    text << "endpoint peer='" << e.peer << "' plane=" << e.plane << " index=" << e.index
         << " sent=" << e.messages_sent << "/" << e.bytes_sent
         << " received=" << e.messages_received << "/" << e.bytes_received
         << " in_place=" << e.values_in_place << "/" << e.bytes_in_place
         << " offered=" << e.values_offered << " in_pool=" << e.values_in_pool << "/"
         << e.bytes_in_pool << " in_frames=" << e.values_in_frames << "/" << e.bytes_in_frames
         << " send_completions=" << e.send_completions;
    lines.push_back(text.str());
  }
  return lines;
}

std::string SpeedLine(uint64_t bytes, double seconds) {
  char text[200];
  snprintf(text, sizeof(text), "%.3f s, %.2f MB/s each way", seconds, bytes / seconds / 1e6);
  return text;
}

std::string DelayLine(std::vector<double>* delays) {
  std::sort(delays->begin(), delays->end());
  char text[200];
  snprintf(text, sizeof(text), "%zu pings, p50 %.3f ms, p99 %.3f ms, max %.3f ms", delays->size(),
           (*delays)[delays->size() / 2] * 1e3, (*delays)[delays->size() * 99 / 100] * 1e3,
           delays->back() * 1e3);
  return text;
}

// ----- answers

void Answer(ps::Message* request) {
  if (request->meta.head == kDie) kill(getpid(), SIGKILL);
#ifdef BYTEPS_WITH_RDMA
  auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van());
  if (request->meta.head == kBreak && van != nullptr) {
    van->BreakEndpoint(request->meta.sender, ps::rdma::Plane::kData, 0);
  }
#endif
  ps::Message answer;
  answer.meta = request->meta;
  answer.meta.request = false;
  answer.meta.recver = request->meta.sender;
  for (auto& value : request->data) Mark(value.data(), value.size());
  answer.data = request->data;
  ps::Postoffice::Get()->van()->Send(answer);
}

Engine::Engine(std::function<void(ps::Message*)> handle)
    : handle_(std::move(handle)), thread_([this] { Loop(); }) {}

void Engine::Take(ps::Message message) {
  std::lock_guard<std::mutex> lock(mu_);
  received_.push_back(std::move(message));
  cond_.notify_one();
}

void Engine::Stop() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
    cond_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Engine::Loop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    cond_.wait(lock, [this] { return stop_ || !received_.empty(); });
    if (stop_) return;
    ps::Message message = std::move(received_.front());
    received_.pop_front();
    lock.unlock();
    handle_(&message);
    message = ps::Message();
    lock.lock();
  }
}

}  // namespace van_test
