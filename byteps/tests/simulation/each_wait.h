// EachWait: ends each wait of a job in each possible way.
#ifndef BYTEPS_TESTS_SIMULATION_EACH_WAIT_H_
#define BYTEPS_TESTS_SIMULATION_EACH_WAIT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "world.h"

namespace byteps {
namespace simulation {

// Plays a job, and records each wait of the product's threads, with its place in the code. Then
// plays the job again for each of these waits, and for each way to end it. A seed determines the
// order of events, so the job is the same up to that wait.
class EachWait {
 public:
  // `most`: number of waits to end, per place and job; 0: all. `only`: number of the only wait to
  // end; negative: all waits.
  EachWait(uint64_t most, int64_t only);

  // Plays the job with additional faults, in its own process. Returns whether all conditions held.
  using Play = std::function<bool(const std::vector<Fault>& faults)>;
  bool Run(const Play& play);

  // Begins a job. `play` calls this within the job, before its nodes start.
  void BeginJob(const Plan& plan);

  // Returns a table in Markdown: how often waits at each place were ended in each way.
  std::string Print() const;

 private:
  static constexpr size_t kMostWaits = 1 << 16;
  static constexpr size_t kMostCallers = 24;
  struct Noted {
    Wait wait;
    std::array<void*, kMostCallers> callers;  // innermost first; null after the last
  };
  // Memory shared with the processes of jobs.
  struct Notes {
    int servers;
    int workers;
    bool takes_notes;
    size_t size;
    std::array<Noted, kMostWaits> waits;
  };
  static constexpr size_t kNumWays = 8;

  static std::array<Fault, kNumWays> WaysToEnd(const Notes& notes, const Wait& wait);
  // Looks up the source lines of new addresses.
  void FindLines();
  // File and line of the product's code that waits, "engine/operation.cc:222"; "" if there is none.
  std::string PlaceOf(const Noted& noted) const;

  const uint64_t most_;
  const int64_t only_;
  Notes* const notes_;
  std::map<const void*, std::vector<std::string>> lines_;  // by address, inlined functions first
  std::map<std::string, std::array<uint64_t, kNumWays>> times_;  // by place
  uint64_t points_ = 0;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_EACH_WAIT_H_
