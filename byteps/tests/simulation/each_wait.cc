#include "each_wait.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

// Defined by the linker: the program's code.
extern "C" const char __executable_start, etext;

namespace byteps {
namespace simulation {
namespace {

// A wait without a deadline lasts this much longer than without the fault: more than any timeout of
// an operation.
constexpr double kWithoutLimitS = 5;
constexpr double kLongestS = 14;
constexpr double kAfterLimitS = 0.01;

constexpr const char* kNamesOfWays[] = {"woken",  "held up",   "peer late", "silent",
                                        "killed", "peer lost", "job fails", "stopped"};

constexpr size_t kPeerKilled = 5;
constexpr size_t kSchedulerKilled = 6;

// An address inside the call that returns to `caller`.
const char* CallOf(void* caller) { return static_cast<const char*>(caller) - 1; }

bool IsOfThisProgram(const char* at) { return at >= &__executable_start && at < &etext; }

}  // namespace

EachWait::EachWait(uint64_t most, int64_t only)
    : most_(most),
      only_(only),
      notes_(static_cast<Notes*>(mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  if (notes_ == MAP_FAILED) abort();
  void* first[1];
  backtrace(first, 1);  // loads a library, which threads of a job must not do
}

void EachWait::BeginJob(const Plan& plan) {
  if (!notes_->takes_notes) return;
  notes_->servers = plan.servers;
  notes_->workers = plan.workers;
  ListenToWaits([this](const Wait& wait) {
    if (notes_->size == kMostWaits) abort();
    Noted& noted = notes_->waits[notes_->size++];
    noted.wait = wait;
    noted.callers.fill(nullptr);
    backtrace(noted.callers.data(), static_cast<int>(kMostCallers));
    return Waking::kUsual;
  });
}

std::array<Fault, EachWait::kNumWays> EachWait::WaysToEnd(const Notes& notes, const Wait& wait) {
  const int first_worker = 1 + notes.servers;
  const auto turn = static_cast<int>(wait.number);
  const int server = 1 + turn % notes.servers;
  const int worker = first_worker + turn % notes.workers;
  const bool of_worker = wait.node >= first_worker;
  const double limit_s = wait.limit_s == 0 ? kWithoutLimitS : std::min(wait.limit_s, kLongestS);
  std::array<Fault, kNumWays> ways{};
  for (Fault& way : ways) {
    way.at_wait = static_cast<int64_t>(wait.number);
    way.node = wait.node;
    way.peer = of_worker ? server : worker;
    way.seconds = limit_s + kAfterLimitS;
  }
  constexpr Fault::Kind kKinds[] = {Fault::kWake, Fault::kHoldUp, Fault::kDelay, Fault::kPause,
                                    Fault::kKill, Fault::kKill,   Fault::kKill,  Fault::kStop};
  static_assert(std::size(kKinds) == kNumWays && std::size(kNamesOfWays) == kNumWays);
  for (size_t i = 0; i < kNumWays; ++i) ways[i].kind = kKinds[i];
  ways[kPeerKilled].node = ways[kPeerKilled].peer;
  ways[kSchedulerKilled].node = 0;
  return ways;
}

bool EachWait::Run(const Play& play) {
  notes_->size = 0;
  notes_->takes_notes = true;
  const bool held = play({});
  notes_->takes_notes = false;
  if (!held) return false;
  FindLines();
  bool is_good = true;
  std::map<std::string, uint64_t> ended;  // counts of this job
  for (size_t i = 0; i < notes_->size; ++i) {
    const Noted& noted = notes_->waits[i];
    const std::string place = PlaceOf(noted);
    if (place.empty() || (only_ >= 0 && noted.wait.number != static_cast<uint64_t>(only_)))
      continue;
    if (noted.wait.node > notes_->servers + notes_->workers) continue;
    if (++ended[place] > most_ && most_ > 0) continue;
    ++points_;
    const auto ways = WaysToEnd(*notes_, noted.wait);
    for (size_t way = 0; way < kNumWays; ++way) {
      // Threads that wait for time or for a thread cannot be woken.
      if (ways[way].kind == Fault::kWake && !noted.wait.for_condition) continue;
      if (way == kSchedulerKilled && noted.wait.node == 0) continue;  // same as "killed"
      ++times_[place][way];
      if (play({ways[way]})) continue;
      printf("  at %s: wait %llu of node %d, %s\n", place.c_str(),
             static_cast<unsigned long long>(noted.wait.number), noted.wait.node,
             kNamesOfWays[way]);
      is_good = false;
    }
  }
  return is_good;
}

void EachWait::FindLines() {
  std::set<void*> unknown;
  for (size_t i = 0; i < notes_->size; ++i) {
    for (void* const caller : notes_->waits[i].callers) {
      if (IsOfThisProgram(CallOf(caller)) && lines_.count(caller) == 0) unknown.insert(caller);
    }
  }
  if (unknown.empty()) return;
  char program[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
  if (length < 0) abort();
  std::string command = "addr2line -a -i -e '" + std::string(program, length) + "'";
  for (void* const caller : unknown) {
    char address[32];
    snprintf(address, sizeof(address), " %#tx", CallOf(caller) - &__executable_start);
    command += address;
  }
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) abort();
  auto next = unknown.begin();
  std::vector<std::string>* lines = nullptr;
  for (char line[PATH_MAX]; fgets(line, sizeof(line), output) != nullptr;) {
    std::string text(line);
    if (text.rfind("0x", 0) == 0) {
      lines = &lines_[*next++];
    } else {
      lines->push_back(text.substr(0, text.find_first_of(" \n")));
    }
  }
  if (pclose(output) != 0 || next != unknown.end()) abort();
}

std::string EachWait::PlaceOf(const Noted& noted) const {
  constexpr const char* kProduct = "byteps/byteps/";
  for (void* const caller : noted.callers) {
    const auto found = lines_.find(caller);
    if (found == lines_.end()) continue;
    for (const std::string& line : found->second) {
      const size_t at = line.rfind(kProduct);
      const bool is_wrapper = line.find("base/mutex.h:") != std::string::npos ||
                              line.find("simulation/virtual_threads.cc:") != std::string::npos ||
                              line.find("simulation/each_wait.cc:") != std::string::npos;
      if (is_wrapper) continue;
      if (at != std::string::npos) return line.substr(at + strlen(kProduct));
      if (line.find("byteps/tests/") != std::string::npos) return "";
    }
  }
  return "";
}

std::string EachWait::Print() const {
  std::string text = std::to_string(points_) + " waits were ended, at " +
                     std::to_string(times_.size()) + " places\n| place |";
  for (const char* name : kNamesOfWays) text += std::string(" ") + name + " |";
  text += "\n|---|";
  for (size_t i = 0; i < kNumWays; ++i) text += "---|";
  for (const auto& [place, times] : times_) {
    text += "\n| " + place + " |";
    for (const uint64_t n : times) text += " " + std::to_string(n) + " |";
  }
  return text + "\n";
}

}  // namespace simulation
}  // namespace byteps
