// StopOrder: the end of a scheduler or server that got a signal to stop.
#ifndef BYTEPS_PROGRAM_STOP_ORDER_H_
#define BYTEPS_PROGRAM_STOP_ORDER_H_

#include <chrono>
#include <string>

namespace byteps {
namespace core {

// Makes a process that was told to stop wait for the job's workers. A cluster manager stops all
// processes at once, and workers that save a checkpoint need scheduler and servers until then.
class StopOrder {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // State and clock of the process.
  class Process {
   public:
    virtual ~Process() = default;
    // Returns whether the job has ended or failed.
    virtual bool IsOver() = 0;
    // Returns whether the job has begun and has workers.
    virtual bool HasWorkers() = 0;
    // Returns whether some workers, but not all, have pushed a sum.
    virtual bool HasOpenSums() = 0;
    // Returns whether peers have received everything that was sent.
    virtual bool AllArrived() = 0;
    // Returns whether there was another signal.
    virtual bool IsHurried() = 0;
    // Time on a steady clock.
    virtual Duration Now() = 0;
    virtual void Sleep(Duration duration) = 0;
  };

  // `signal`: a name, e.g. "SIGTERM". `limit_s`: BYTEPS_STOP_TIMEOUT_S. `process` must outlive
  // this.
  StopOrder(Process* process, std::string signal, double limit_s);

  // Returns when the process may end. If the job is not over, the result is the reason to tell its
  // peers: "stopped by SIGTERM". Otherwise it is "".
  std::string Await();

 private:
  // Returns whether to stop waiting: the job is over, or there is no time left.
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
