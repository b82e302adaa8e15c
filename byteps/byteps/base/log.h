// The log: its format and output, and functions that format texts for it.
#ifndef BYTEPS_BASE_LOG_H_
#define BYTEPS_BASE_LOG_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <deque>
#include <functional>
#include <ostream>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/common/logging.h"

namespace byteps {
namespace core {

// BPS_LOG(severity) << ... replaces upstream's macro in this project's namespaces. Upstream formats
// a line before it decides whether to log it, which is too expensive for a line per partition.

using common::LogLevel;
using common::LogMessage;

bool IsLogged(LogLevel severity);

// Ends BPS_LOG's expression: the operator binds weaker than <<, and stronger than ?:.
struct LogEnd {
  void operator&(const std::ostream& /*line*/) const {}
};

#undef BPS_LOG
#define BPS_LOG(severity)                                         \
  !::byteps::core::IsLogged(::byteps::common::LogLevel::severity) \
      ? static_cast<void>(0)                                      \
      : ::byteps::core::LogEnd() & _BPS_LOG_##severity

// Sets the level that is used if BYTEPS_LOG_LEVEL is not set; initially WARNING. Call before
// anything is logged.
void SetDefaultLogLevel(LogLevel level);

}  // namespace core
}  // namespace byteps

namespace ps {
using byteps::common::LogLevel;
using byteps::common::LogMessage;

// Format of log lines, the same for ps-lite, the engine and the server.
//
//   2026-01-31T12:29:46.330324Z WARNING server 0 host-a sum_server.cc:135: workers disagree ...
//   {"time":"2026-01-31T12:29:46.330324Z","severity":"WARNING","role":"server","rank":0,
//    "host":"host-a","source":"sum_server.cc:135","message":"workers disagree ..."}
//
// BYTEPS_LOG_FORMAT chooses text or json (an object per line). Times are UTC. An unknown rank is
// "-" in text and null in JSON. BYTEPS_LOG_HIDE_TIME=1 leaves the time out.

// Sets this process's role and rank in log lines. Negative `rank`: unknown.
void SetLogIdentity(const std::string& role, int rank);

// Writes `text` to standard error, a log line for each of its lines. `severity`: T, D, I, W, E or
// F. Never waits for the reader: up to 1 MiB of lines is buffered for a slow reader. Further lines
// are dropped, and their number is logged when there is room again. Thread-safe.
void WriteLogLine(char severity, const char* file, int line, const std::string& text);

// Waits until the reader of standard error has taken all lines, for at most `seconds`. At exit()
// the process waits 0.5 s.
void FlushLog(double seconds);

// The latest warning or error that this process logged.
struct LoggedProblem {
  uint64_t count = 0;  // number of warnings and errors logged so far
  int64_t unix_ms = 0;
  std::string text;  // text without time and source location
};
LoggedProblem LastLoggedProblem();

// Writes to a descriptor without waiting for its reader. A stopped terminal or a hung log collector
// must not stop the threads that move gradients.
//
// Write passes on the bytes that the descriptor takes at once. The rest, up to `limit` bytes, is
// buffered for a thread that exists only while bytes are buffered. When the buffer is full, whole
// texts are dropped and counted. A LogOutput is never destroyed, because its thread may run until
// the process ends.
class LogOutput {
 public:
  // The caller owns `fd`, which may later refer to another file. When there is room again after
  // texts were dropped, `notice` is called with their number, without a lock. It returns a text,
  // which is written instead of them.
  LogOutput(int fd, size_t limit, std::function<std::string(uint64_t)> notice);
  LogOutput(const LogOutput&) = delete;
  LogOutput& operator=(const LogOutput&) = delete;

  // Writes texts in the order of the calls. Thread-safe.
  void Write(const std::string& text);

  // Waits at most `seconds` until everything is written.
  void Flush(double seconds);

  // Call around fork(): the child does not inherit buffered texts.
  void BeforeFork();
  void AfterFork(bool in_child);

 private:
  // Kind of the file. Each kind needs another method to keep the kernel from blocking the writer.
  enum class Kind { kFile, kReopened, kSocket, kOther };

  void Look() PS_REQUIRES(mu_);
  // Writes without blocking. Returns the number of bytes that the descriptor has taken. If the
  // reader is gone for good, returns `bytes`, as if all were written.
  size_t Try(const char* data, size_t bytes) PS_REQUIRES(mu_);
  void Drain();

  const int fd_;
  const size_t limit_;
  const std::function<std::string(uint64_t)> notice_;

  Mutex mu_;
  CondVar empty_;
  bool known_ PS_GUARDED_BY(mu_) = false;
  Kind kind_ PS_GUARDED_BY(mu_) = Kind::kFile;
  dev_t device_ PS_GUARDED_BY(mu_) = 0;
  ino_t inode_ PS_GUARDED_BY(mu_) = 0;
  int reopened_ PS_GUARDED_BY(mu_) = -1;
  std::deque<std::string> waiting_ PS_GUARDED_BY(mu_);
  size_t waiting_bytes_ PS_GUARDED_BY(mu_) = 0;
  uint64_t dropped_ PS_GUARDED_BY(mu_) = 0;
  bool draining_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace ps

namespace byteps {
namespace core {

// Formatting of numbers, times and foreign bytes.
//
// Returns text such as "2.5 s".
std::string Seconds(double s);

// Returns text such as "0x1f".
std::string Hex(uint64_t x);

}  // namespace core
}  // namespace byteps

namespace ps {

// Returns RFC 3339 UTC time without fraction and zone: "2025-03-01T12:00:00".
std::string UtcText(time_t seconds);

// Returns `text` as a JSON string. Bytes that are not UTF-8, which other processes may have sent,
// become U+FFFD.
std::string JsonText(const std::string& text);

// Returns the longest prefix of `text` with at most `most` bytes and whole characters.
std::string CutText(const std::string& text, size_t most);

// Returns untrusted `text` from the network in a form that is safe for logs and terminals: quoted,
// printable ASCII only, at most `most` bytes. So the text cannot start a new line or end its
// quotes.
std::string ForeignText(const std::string& text, size_t most = 400);

// Returns the text that reports a refusal for the reason `text`. `authenticated`: whether the peer
// belongs to this job.
std::string RefusedBecause(const std::string& text, bool authenticated);

}  // namespace ps

#endif  // BYTEPS_BASE_LOG_H_
