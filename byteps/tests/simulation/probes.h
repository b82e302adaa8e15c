// Which of base/probe.h's probes the seeds reach, and what a seed does there.
#ifndef BYTEPS_TESTS_SIMULATION_PROBES_H_
#define BYTEPS_TESTS_SIMULATION_PROBES_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "byteps/base/probe.h"

namespace byteps {
namespace simulation {

constexpr size_t kNumProbes = static_cast<size_t>(ps::Probe::kNumProbes);

// "WindowFull"
std::string NameOfProbe(int number);

// Listens to all probes, for as long as the process lives.
void ListenToProbes();

// What happens when the job of the seed that is played reaches a probe: `then` is called with its
// number, and how often the job has reached some.  If `disturbed`, the thread may yield or sleep
// there.
void BeginProbes(bool disturbed, std::function<void(int probe, int reached)> then);
// The job is over.
void EndProbes();

// Jobs that reached each probe, and how often all of them did.
class ProbeTable {
 public:
  // Adds what the last job has reached.
  void Add();
  // A table, in Markdown, and below it those that nobody reached.
  std::string Print() const;

 private:
  std::array<uint64_t, kNumProbes> jobs_{};
  std::array<uint64_t, kNumProbes> times_{};
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_PROBES_H_
