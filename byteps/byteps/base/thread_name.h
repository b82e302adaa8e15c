// Threads by name, for those who look at a process (top -H, perf, a debugger).
#ifndef BYTEPS_BASE_THREAD_NAME_H_
#define BYTEPS_BASE_THREAD_NAME_H_

#include <pthread.h>

#include <string>

namespace byteps {
namespace core {

// "bps-" and `name` and, where there are several, `number`: 15 characters are shown.
inline void NameThisThread(const std::string& name, long number = -1) {
  const std::string text = "bps-" + name + (number < 0 ? "" : "/" + std::to_string(number));
  pthread_setname_np(pthread_self(), text.substr(0, 15).c_str());
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_THREAD_NAME_H_
