// Ends each wait of a job once in each way in which it may end.
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

// A job is played, and the waits of the product's threads are noted, each with its place in the
// code.  Then it is played again for each of these waits, of the nodes that began it, and each way
// to end it.  One seed is one order of events, so it is the same job until that wait.
class EachWait {
 public:
  // `most`: of a place's waits in one job, so many are ended; 0: all.
  // `only`: the number of the one wait that is ended; below 0: all.
  EachWait(uint64_t most, int64_t only);

  // Plays the job with these faults too, in a process of its own.  False: something did not hold.
  using Play = std::function<bool(const std::vector<Fault>& faults)>;
  bool Run(const Play& play);

  // Called by `play` within the job, before its nodes begin.
  void BeginJob(const Plan& plan);

  // A table in Markdown: how often waits at each place were ended in each way.
  std::string Print() const;

 private:
  static constexpr size_t kMostWaits = 1 << 16;
  static constexpr size_t kMostCallers = 24;
  struct Noted {
    Wait wait;
    std::array<void*, kMostCallers> callers;  // the last ones first; null: no more
  };
  // Memory that a job's process shares with this one.
  struct Notes {
    int servers;
    int workers;
    bool takes_notes;
    size_t size;
    std::array<Noted, kMostWaits> waits;
  };
  static constexpr size_t kNumWays = 8;

  static std::array<Fault, kNumWays> WaysToEnd(const Notes& notes, const Wait& wait);
  // Finds the lines of these addresses that are new.
  void FindLines();
  // The file and line of the product that waits, "engine/operation.cc:222"; empty: it is none.
  std::string PlaceOf(const Noted& noted) const;

  const uint64_t most_;
  const int64_t only_;
  Notes* const notes_;
  std::map<const void*, std::vector<std::string>> lines_;  // of an address, the inlined ones first
  std::map<std::string, std::array<uint64_t, kNumWays>> times_;  // by place
  uint64_t points_ = 0;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_EACH_WAIT_H_
