#include "probes.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "virtual_threads.h"

namespace byteps {
namespace simulation {
namespace {

// So often a job's threads are held up, mostly no longer than so long; and so often for long, which
// is together less than any timeout.
constexpr int kMostDisturbances = 40;
constexpr uint64_t kShortUs = 3000;
constexpr int kMostLong = 3;
constexpr uint64_t kLongUs = 300'000;

struct Reached {
  std::array<uint64_t, kNumProbes> times{};
  int sum = 0;
  int disturbances = 0;
  int long_ones = 0;
  std::function<void(int, int)> then;
};
// Of the job that is played; its threads are one.
Reached* now = new Reached;

struct Row {
  const char* name;
  const char* text;
};
constexpr Row kRows[] = {
#define ROW_OF_PROBE(name, text) {#name, text},
    PS_PROBES(ROW_OF_PROBE)
#undef ROW_OF_PROBE
};
static_assert(std::size(kRows) == kNumProbes);

void OnProbe(ps::Probe probe) {
  if (!IsPlayed() || !now->then) return;
  ++now->times[static_cast<size_t>(probe)];
  now->then(static_cast<int>(probe), ++now->sum);
  if (now->disturbances == 0 || Random(4) != 0) return;
  --now->disturbances;
  if (Random(2) == 0) return std::this_thread::yield();
  uint64_t most = kShortUs;
  if (now->long_ones > 0 && Random(4) == 0) {
    --now->long_ones;
    most = kLongUs;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(most)));
}

}  // namespace

std::string NameOfProbe(int number) { return kRows[number].name + 1; }  // without the k

void ListenToProbes() { ps::probe_listener = OnProbe; }

void BeginProbes(bool disturbed, std::function<void(int, int)> then) {
  *now = Reached();
  now->disturbances = disturbed ? kMostDisturbances : 0;
  now->long_ones = disturbed ? kMostLong : 0;
  now->then = std::move(then);
}

void EndProbes() { now->then = nullptr; }

void ProbeTable::Add() {
  for (size_t i = 0; i < kNumProbes; ++i) {
    jobs_[i] += now->times[i] > 0 ? 1 : 0;
    times_[i] += now->times[i];
  }
}

std::string ProbeTable::Print() const {
  std::string text = "| probe | what is seldom | jobs | times |\n|---|---|---|---|\n";
  std::string never;
  for (size_t i = 0; i < kNumProbes; ++i) {
    const std::string name = NameOfProbe(static_cast<int>(i));
    if (times_[i] == 0) {
      never += (never.empty() ? "" : ", ") + name;
      continue;
    }
    text += "| " + name + " | " + kRows[i].text + " | " + std::to_string(jobs_[i]) + " | " +
            std::to_string(times_[i]) + " |\n";
  }
  return text + "not reached: " + (never.empty() ? "none" : never) + "\n";
}

}  // namespace simulation
}  // namespace byteps
