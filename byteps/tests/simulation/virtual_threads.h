// Threads, locks and time that a seed decides.
//
// Within Run, std::thread, std::mutex, std::shared_mutex, std::condition_variable, sleeping and
// both clocks of this process are played: all threads share one, exactly one of them runs at a
// time, and a random generator picks which goes on whenever one waits, and often when it takes or
// gives up a lock.  Time stands still while any thread can run, and jumps to the next deadline when
// none can; to yield is to sleep for a moment.  So one seed is one order of events, always the
// same, and hours pass in milliseconds.
//
// It works by defining the C library's functions of those names, which come before the library's
// own.  The code under test is not changed, nor compiled differently.
#ifndef BYTEPS_TESTS_SIMULATION_VIRTUAL_THREADS_H_
#define BYTEPS_TESTS_SIMULATION_VIRTUAL_THREADS_H_

#include <cstdint>
#include <functional>
#include <string>

namespace byteps {
namespace simulation {

struct Outcome {
  // Empty: `body` returned and every thread ended.  Otherwise what hung, and where each thread
  // waits; then nothing more may be run in this process.
  std::string hang;
  double seconds = 0;        // that passed for the threads
  uint64_t switches = 0;     // between threads
  uint64_t fingerprint = 0;  // of their order: equal when two runs were alike
};

// Runs `body` as the first thread.  It hangs when no thread can go on, or `limit_s` seconds have
// passed for them.
Outcome Run(uint64_t seed, double limit_s, const std::function<void()>& body);

// Whether the caller is a thread within Run.
bool IsPlayed();

// For whatever else the seed decides; within Run.
uint64_t Random(uint64_t below);

// Mixes a number into the fingerprint; within Run.
void Note(uint64_t number);

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_VIRTUAL_THREADS_H_
