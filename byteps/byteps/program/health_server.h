#ifndef BYTEPS_PROGRAM_HEALTH_SERVER_H_
#define BYTEPS_PROGRAM_HEALTH_SERVER_H_

#include <functional>
#include <string>
#include <thread>

namespace byteps {
namespace core {

// Health of a scheduler or server, for a container's health check.
//
// Answers each connection to a Unix socket with a line of text, until it is destroyed.
class HealthServer {
 public:
  // Binds `path`, and replaces the socket of a dead process. The answering thread calls `describe`
  // for each question. If `describe` hangs there is no answer, so the process counts as unhealthy.
  // Throws UsageError if it cannot listen.
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

// Returns the answer of the process at `path`. If there is none within `timeout_s` seconds, throws
// Error with the cause.
std::string AskHealth(const std::string& path, double timeout_s);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_PROGRAM_HEALTH_SERVER_H_
