// Parent: the process that has started this one, if this one must end with it.
#ifndef BYTEPS_PROGRAM_PARENT_H_
#define BYTEPS_PROGRAM_PARENT_H_

#include <signal.h>
#include <sys/types.h>

#include <string>

namespace byteps {
namespace core {

// Signal that only the kernel sends, when the parent has ended.
constexpr int kParentEnded = SIGUSR1;

class Parent {
 public:
  // `pid`: result of getppid() when this process began.
  explicit Parent(pid_t pid) : pid_(pid) {}

  // Asks the kernel for kParentEnded. Returns false if the parent has already ended. `name`: the
  // parent's name for other nodes, or "". `log`: see RemoveLog.
  bool Watch(const std::string& name, const std::string& log);

  // Returns whether the watched parent has ended. Waits a moment, because a process ends later than
  // its connections and threads.
  bool HasEnded() const;

  // Describes this process's end, for example "stopped: worker 0, which started it, was lost".
  std::string How() const;

  // Removes the log, and the folder if it is then empty. Nobody reads the log of a process that
  // ended with its parent.
  void RemoveLog() const;

  // Ends this process, which has not joined a job, and removes the log.
  [[noreturn]] void EndAtOnce() const;

 private:
  const pid_t pid_;
  bool watched_ = false;
  std::string name_;
  std::string log_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_PROGRAM_PARENT_H_
