// Exceptions of this project, invariants, and probes of rare events.
#ifndef BYTEPS_BASE_INVARIANT_H_
#define BYTEPS_BASE_INVARIANT_H_

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace byteps {
namespace core {

// A std::bad_alloc with the number of requested bytes.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : bytes_(bytes) {}
  const char* what() const noexcept override { return "out of memory"; }
  size_t bytes() const { return bytes_; }

 private:
  const size_t bytes_;
};

// Returns uninitialised memory, to be freed with delete[]. Throws OutOfMemory.
inline char* NewBytes(size_t bytes) {
  char* const memory = new (std::nothrow) char[bytes];
  if (memory == nullptr) throw OutOfMemory(bytes);
  return memory;
}

// Base of all exceptions of this project: an operation, or the whole job, failed.
//
// The text is for the user: it names what was tried, with which peer, and the limit that was
// exceeded, as far as known. `file` and `line` locate the throw, for the log.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE())
      : std::runtime_error(what), file_(file), line_(line) {}
  const char* file() const { return file_; }
  int line() const { return line_; }

 private:
  const char* file_;
  int line_;
};

// Thrown for an invalid argument or setting.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Throws Error "epoll_ctl: Bad file descriptor", for example. Call after a failed system call.
[[noreturn]] inline void ThrowErrno(const char* call, const char* file = __builtin_FILE(),
                                    int line = __builtin_LINE()) {
  throw Error(std::string(call) + ": " + strerror(errno), file, line);
}

}  // namespace core
}  // namespace byteps

namespace ps {
using byteps::core::Error;
using byteps::core::ThrowErrno;

// Invariants, checked in tests, simulations and releases.
//
//   BPS_INVARIANT("a block is returned once", in_use_ >= size, "block of " + std::to_string(size));
//
// A check costs a single predictable branch. The last argument describes the broken state, and is
// evaluated only on failure. docs/design/reliability.md lists all invariants by name.
//
// A broken invariant ends the job, but not the process. It is logged and counted. Then
// - BPS_INVARIANT throws Error, so the operation or connection fails at once;
// - BPS_INVARIANT_NOTED continues, for destructors and callbacks, which must not throw.
// In both cases the membership (net/membership/membership.h) fails the job within a heartbeat, and
// every node gets an error that names the failed node and the invariant.

struct InvariantReport {
  uint64_t count = 0;  // number of invariants broken in this process so far
  // The last one, such as "the invariant 'a block is returned once' was broken: ...".
  std::string last;
};
InvariantReport BrokenInvariants();
// Returns only the count, without a lock.
uint64_t NumBrokenInvariants();

namespace invariant {

// Logs and counts a broken invariant. Returns its description.
std::string Note(const char* name, const char* file, int line, const std::string& seen);

// Logs and counts a broken invariant, and throws Error.
[[noreturn, gnu::cold]] void Throw(const char* name, const char* file, int line,
                                   const std::string& seen);

}  // namespace invariant
}  // namespace ps

#define BPS_INVARIANT(name, holds, seen)                      \
  do {                                                        \
    if (__builtin_expect(!(holds), 0)) {                      \
      ::ps::invariant::Throw(name, __FILE__, __LINE__, seen); \
    }                                                         \
  } while (0)

#define BPS_INVARIANT_NOTED(name, holds, seen)                                                \
  do {                                                                                        \
    if (__builtin_expect(!(holds), 0)) ::ps::invariant::Note(name, __FILE__, __LINE__, seen); \
  } while (0)

namespace ps {

// Probes name rare branches, so that tests can see which of them were reached.
//
//   PS_PROBE(kWindowFull);
//
// Without a listener a probe only loads a pointer. The simulation (byteps/tests/simulation) counts
// probes. Its seed decides whether the thread yields or is delayed at a probe, or a fault happens
// there. `simulate` prints for each probe how many of its jobs have reached it.

// All probes: the name of each, and its description in tables.
#define PS_PROBES(X)                                                                   \
  /* engine */                                                                         \
  X(kSentByCaller, "a small sum is sent by the thread that called")                    \
  X(kCallerQueued, "a small sum has to queue")                                         \
  X(kWindowFull, "a server's window is full")                                          \
  X(kStepsBack, "a worker is ahead of the others, and its window shrinks")             \
  X(kTaskOfEnded, "a partition was queued when its operation failed")                  \
  X(kEndedBeforeSum, "a sum comes when its operation has failed")                      \
  X(kAwaitsWriters, "a wait for a failed operation waits for its writers")             \
  X(kNobodyAnswered, "a worker gives up an operation that no server answered")         \
  X(kDeclarationLate, "a declaration is not answered in time")                         \
  X(kReleasedInUse, "a name is released while operations of it run")                   \
  X(kAnswerToNobody, "an answer to a declaration comes when it was given up")          \
  /* device */                                                                         \
  X(kPushAwaitsPinned, "a push finds the pinned pool empty")                           \
  X(kSumAwaitsPinned, "a sum for the GPU finds the pinned pool empty")                 \
  X(kReceivedElsewhere, "a sum is received elsewhere, since the pinned pool is empty") \
  X(kPoolShared, "a block that comes back serves several that wait")                   \
  X(kCopyLeft, "a copy is left to the thread that gives copies already")               \
  X(kCopyCalled, "a copy takes so long that the driver calls")                         \
  X(kPushHeldBack, "a push waits for the server that replaces a lost one")             \
  X(kPushedAgain, "a partition is pushed again, to another server")                    \
  X(kAnswerOfLost, "an answer comes of a server that is lost")                         \
  X(kSumGiven, "a worker gives a sum to the server that comes")                        \
  X(kReplacedAgain, "a server that has replaced a lost one is lost before it goes on") \
  /* server */                                                                         \
  X(kServedHere, "a request is served by the thread that received it")                 \
  X(kQueuedWhileServing, "a small request finds its engine thread at work")            \
  X(kLooksSooner, "a round is due before the engine thread would look")                \
  X(kRoundLate, "a round is late")                                                     \
  X(kRoundOfLost, "a round fails since it lacks the push of a worker that is gone")    \
  X(kRoundAfterLost, "a round begins that a worker which is gone can never complete")  \
  X(kPushAfterFailure, "a push comes after its round has failed")                      \
  X(kStepAfterFailure, "a step is asked for after its round has failed")               \
  X(kRoundHeld, "a push waits until an older round of its tensor has ended")           \
  X(kRoundsOpen, "a worker begins a round while an older one is open")                 \
  X(kNoSpareMemory, "the memory of no push is there for the parameters of a step")     \
  X(kStepMade, "a speculative step is kept")                                           \
  X(kStepRedone, "a speculative step is made again, clipped")                          \
  X(kStepDropped, "a speculative step is dropped")                                     \
  X(kStepOvertaken, "parameters are loaded while a speculative step is open")          \
  X(kRoundGivenUp, "a member goes on, and so gives up a round")                        \
  X(kRoundLosesMember, "a replica is removed while a round is open")                   \
  X(kReplicaAwaited, "others wait for a replica's push")                               \
  X(kReplicaLate, "a replica's push is later than others wait")                        \
  X(kRoundShort, "a round closes without the members of a removed replica")            \
  X(kPushOfAbsent, "a push comes of a replica that was removed")                       \
  X(kGivenOpen, "a sum is given of a round that some members have pushed")             \
  X(kGivenFirst, "a sum is given of a round that nobody has pushed")                   \
  X(kPushOfGiven, "a push comes whose sum another member has given")                   \
  X(kBackupLost, "the server that has a copy of this one's state is lost")             \
  X(kBackupWhole, "a backup has been told all state that there is")                    \
  X(kStateFetched, "a server that comes fetches the state of a lost one")              \
  X(kLateRecord, "a record comes to a backup of a server that was lost")               \
  X(kRoundCopied, "a round waits until its backup has it")                             \
  X(kStepCopied, "a step waits until its backup has it")                               \
  X(kVerdictCopied, "a verdict waits until its backup has it")                         \
  X(kLoadCopied, "a load waits until its backup has it")                               \
  X(kStateCopied, "a backup that comes is told a state that there is")                 \
  X(kHeldForBackup, "a request waits for the answer of a backup")                      \
  X(kAnsweredAgain, "a member is answered by a round that was restored")               \
  X(kTensorFreed, "no member holds a tensor any more, and the server frees it")        \
  X(kFreedLater, "a partition is freed once its backup has answered")                  \
  X(kRoundOfReleased, "a round fails since a member has released its tensor")          \
  X(kPushAfterRelease, "a push comes of a tensor that another member has released")    \
  X(kFreedHeld, "a server that comes keeps a tensor until all have resumed")           \
  X(kSumNowhere, "a sum is with nobody, and cannot be made again")                     \
  /* membership */                                                                     \
  X(kFailedInJoin, "the job fails while a node waits for the others")                  \
  X(kComeAgain, "a node is told to come again")                                        \
  X(kForgotten, "a server is lost before a worker came, and is forgotten")             \
  X(kGoneAlready, "a node is lost that is gone already")                               \
  X(kDeparturesTogether, "several workers that left are told of together")             \
  X(kSaysGoodbye, "a worker says goodbye")                                             \
  X(kLastLeaves, "the last worker leaves")                                             \
  X(kGenerationEnds, "a scheduler that keeps the cluster ends a generation")           \
  X(kOldGeneration, "a message comes of an older generation")                          \
  X(kCameWhileTurning, "a node comes while the scheduler ends a generation")           \
  X(kEndedAlready, "the last worker leaves a job that is over")                        \
  X(kLastWord, "the scheduler's connection closes, and its last word may still come")  \
  X(kLinkReported, "a node tells the scheduler of a broken connection")                \
  X(kLinkOfLeaver, "the connection to a peer breaks that has left in good order")      \
  X(kDidNotStart, "nodes stay away until the scheduler gives up")                      \
  X(kStoppedInJob, "a node is told to end while the job runs")                         \
  X(kServerBreaksWithMost, "most replicas have lost their links with a server")        \
  X(kReplicaRemoved, "a replica is removed, and the others go on")                     \
  X(kJoinerRemoved, "a replica is removed before it has joined")                       \
  X(kLateRemoved, "a replica is removed since it is late")                             \
  X(kLateExcused, "one that is late may wait for a server that is lost")               \
  X(kReplicaWaits, "a replica that came late is ready to join")                        \
  X(kReplicaAdmitted, "a replica is admitted, and servers are told")                   \
  X(kJoinerExpected, "a server begins to wait for a replica that joins")               \
  X(kReplicaJoined, "a replica has joined a job that runs")                            \
  X(kServerLost, "a server is lost, and another one is waited for")                    \
  X(kNodeReturns, "a node comes to a scheduler after another one died")                \
  X(kNewcomersGiveWay, "others came to the scheduler before nodes that return")        \
  X(kSchedulerGoesOn, "a scheduler goes on with the job of one that died")             \
  X(kTakesOverLeaving, "it tells again that a replica was removed")                    \
  X(kTakesOverGathering, "a replica was gathering when the scheduler died")            \
  X(kTakesOverWaiting, "a replica was waiting when the scheduler died")                \
  X(kTakesOverJoining, "a replica was joining when the scheduler died")                \
  X(kTakesOverLeft, "workers had left when the scheduler died")                        \
  X(kNodeStaysAway, "a node does not come back to the scheduler")                      \
  X(kSchedulerAway, "a node waits for a scheduler that died")                          \
  X(kAskedAgain, "a node asks the next scheduler for what it asked the last one")      \
  X(kTakesOverVacancy, "a scheduler goes on with a job that lacks a server")           \
  X(kServerReplaced, "a server takes the place of one that was lost")                  \
  /* the transport; where it is played, its stand-in */                                \
  X(kAbandoned, "values in flight are abandoned")                                      \
  X(kSentAgain, "messages are sent again over another socket")

enum class Probe {
#define PS_NAME_OF_PROBE(name, text) name,
  PS_PROBES(PS_NAME_OF_PROBE)
#undef PS_NAME_OF_PROBE
      kNumProbes
};

using ProbeListener = void (*)(Probe probe);
inline std::atomic<ProbeListener> probe_listener{nullptr};

inline void Reach(Probe probe) {
  const ProbeListener listener = probe_listener.load(std::memory_order_relaxed);
  if (__builtin_expect(listener != nullptr, 0)) listener(probe);
}

}  // namespace ps

#define PS_PROBE(name) ::ps::Reach(::ps::Probe::name)

#endif  // BYTEPS_BASE_INVARIANT_H_
