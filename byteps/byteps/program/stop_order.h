// End of a scheduler or server that got a signal to stop.
#ifndef BYTEPS_PROGRAM_STOP_ORDER_H_
#define BYTEPS_PROGRAM_STOP_ORDER_H_

#include <chrono>
#include <string>

namespace byteps {
namespace core {

// Waits for the workers of the job.  A cluster's manager tells all processes of a job to end at
// once, and workers that save a checkpoint need their scheduler and servers until it is written.
class StopOrder {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // What it asks of its process.
  class Process {
   public:
    virtual ~Process() = default;
    // The job has ended or failed.
    virtual bool IsOver() = 0;
    // Workers of a job that has begun have not left.
    virtual bool HasWorkers() = 0;
    // Some workers have pushed, and others have not.
    virtual bool HasOpenSums() = 0;
    // Peers have received all that was sent to them.
    virtual bool AllArrived() = 0;
    // It was told once more.
    virtual bool IsHurried() = 0;
    // On a steady clock.
    virtual Duration Now() = 0;
    virtual void Sleep(Duration duration) = 0;
  };

  // `signal` has a name, "SIGTERM"; `limit_s` is BYTEPS_STOP_TIMEOUT_S.  `process` outlives it.
  StopOrder(Process* process, std::string signal, double limit_s);

  // Returns once the process may end.  If that is before the job is over, the result says how the
  // process was stopped: "stopped by SIGTERM"; its peers have to be told.  Else it is empty.
  std::string Await();

 private:
  // Whether waiting has an end now: the job is over, or no time is left.
  bool Ends(Duration deadline);
  template <typename Condition>
  bool WaitUntil(Duration deadline, Condition condition);

  Process* const process_;
  const std::string signal_;
  const double limit_s_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_PROGRAM_STOP_ORDER_H_
