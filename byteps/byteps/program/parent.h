// The process that started this one, where this one is to end with it.
#ifndef BYTEPS_PROGRAM_PARENT_H_
#define BYTEPS_PROGRAM_PARENT_H_

#include <signal.h>
#include <sys/types.h>

#include <string>

namespace byteps {
namespace core {

// What the kernel sends when the parent has ended; nobody else does.
constexpr int kParentEnded = SIGUSR1;

class Parent {
 public:
  // `pid`: as getppid() told when this process began.
  explicit Parent(pid_t pid) : pid_(pid) {}

  // Has the kernel send kParentEnded.  False: the parent has ended already.
  // `name`: what other nodes call it, or empty.  `log`: see RemoveLog.
  bool Watch(const std::string& name, const std::string& log);

  // Whether it was to be watched, and has ended: waits a moment for that, since a process ends
  // later than its connections and threads.
  bool HasEnded() const;

  // End of this process in words: "stopped: worker 0, which started it, was lost".
  std::string How() const;

  // Nobody will read the log of a process that ended with its parent: removes it, and its folder
  // when it was the last file there.
  void RemoveLog() const;

  // Ends this process, which has joined no job yet, and removes the log.
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
