#ifndef BYTEPS_PROGRAM_HEALTH_SERVER_H_
#define BYTEPS_PROGRAM_HEALTH_SERVER_H_

#include <functional>
#include <string>
#include <thread>

namespace byteps {
namespace core {

// Whether a scheduler or server is well: what a container's health check asks.
//
// Answers each connection to a Unix socket with one line, until it is destroyed.
class HealthServer {
 public:
  // Binds `path`, in the place of a socket that a process that is gone left there.  `describe`
  // is called by the thread that answers, once for each question; a process that hangs in it
  // does not answer, and so is not well.  Throws UsageError when it cannot listen there.
  HealthServer(const std::string& path, std::function<std::string()> describe);
  // Removes the socket.
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

 private:
  void Run();

  const std::string path_;
  const std::function<std::string()> describe_;
  int listener_ = -1;
  int wake_ = -1;
  std::thread thread_;
};

// What the process at `path` says of itself.  Throws Error that says what happened when it
// does not answer within `timeout_s` seconds.
std::string AskHealth(const std::string& path, double timeout_s);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_PROGRAM_HEALTH_SERVER_H_
