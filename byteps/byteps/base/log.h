// The log: its lines, how they are written, and what they are made of.
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

// Upstream's logging, BPS_LOG(severity) << ..., for our namespaces.  Upstream makes each line and
// then drops it where it is not to be logged; a line of each partition would be the dearest of
// them.

using common::LogLevel;
using common::LogMessage;

bool IsLogged(LogLevel severity);

// Ends the expression that BPS_LOG begins: lower than <<, higher than ?:.
struct LogEnd {
  void operator&(const std::ostream& /*line*/) const {}
};

#undef BPS_LOG
#define BPS_LOG(severity)                                         \
  !::byteps::core::IsLogged(::byteps::common::LogLevel::severity) \
      ? static_cast<void>(0)                                      \
      : ::byteps::core::LogEnd() & _BPS_LOG_##severity

// What is logged where BYTEPS_LOG_LEVEL does not say; without this call: WARNING.  To be called
// before anything is logged.
void SetDefaultLogLevel(LogLevel level);

}  // namespace core
}  // namespace byteps

namespace ps {
using byteps::common::LogLevel;
using byteps::common::LogMessage;

// The lines of the log: one form for ps-lite, the engine and the server.
//
//   2026-01-31T12:29:46.330324Z WARNING server 0 host-a sum_server.cc:135: workers disagree ...
//   {"time":"2026-01-31T12:29:46.330324Z","severity":"WARNING","role":"server","rank":0,
//    "host":"host-a","source":"sum_server.cc:135","message":"workers disagree ..."}
//
// BYTEPS_LOG_FORMAT chooses: text, or json (one object a line).  Time is UTC.  An unknown rank is
// "-" in text and null in JSON.  BYTEPS_LOG_HIDE_TIME=1 leaves the time out.

// What lines tell of this process from now on.  `rank` less than 0: not known.
void SetLogIdentity(const std::string& role, int rank);

// Writes `text` to the error output, a line for each of its own.  `severity` is one of T, D, I, W,
// E, F.  Any thread.  Never waits for who reads: up to 1 MiB of lines are kept for a reader that is
// slow, and what comes on top is dropped, and counted where the next line can be written.
void WriteLogLine(char severity, const char* file, int line, const std::string& text);

// Waits, so long at most, until what was written is read.  exit() does so for 0.5 s.
void FlushLog(double seconds);

// The last warning or error that was written here.
struct LoggedProblem {
  uint64_t count = 0;  // so many were written; 0: none
  int64_t unix_ms = 0;
  std::string text;  // without time and place
};
LoggedProblem LastLoggedProblem();

// Writes to a file descriptor without waiting for its reader: a terminal that was stopped, or a
// collector of logs that hangs, must not stop the threads that move gradients.

// What the reader takes at once is written by the thread that calls Write.  The rest waits, up to
// `limit` bytes, for a thread of its own, which exists only meanwhile; beyond that, whole texts are
// dropped and counted.  Never destroyed, since that thread may be there until the process ends.
class LogOutput {
 public:
  // `fd` stays the caller's, and may come to mean another file.  `notice` is called with the
  // number of texts that were dropped once there is room again, with no lock held, and returns
  // what is to be written in their place.
  LogOutput(int fd, size_t limit, std::function<std::string(uint64_t)> notice);
  LogOutput(const LogOutput&) = delete;
  LogOutput& operator=(const LogOutput&) = delete;

  // Any thread.  Texts are written in the order of the calls.
  void Write(const std::string& text);

  // Waits until all has been written, `seconds` at most.
  void Flush(double seconds);

  // Around fork(): the child owns nothing of what waits in its parent.
  void BeforeFork();
  void AfterFork(bool in_child);

 private:
  // How the kernel is kept from blocking the writer.
  enum class Kind { kFile, kReopened, kSocket, kOther };

  void Look() PS_REQUIRES(mu_);
  // Bytes that were taken; all of them where nobody will ever read them.
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

// Numbers, moments and foreign bytes as text.

// "2.5 s"
std::string Seconds(double s);

// "0x1f"
std::string Hex(uint64_t x);

}  // namespace core
}  // namespace byteps

namespace ps {

// RFC 3339 without fraction and zone: "2025-03-01T12:00:00", in UTC.
std::string UtcText(time_t seconds);

// `text` in quotes, with everything escaped that JSON does not allow inside.  Bytes that are no
// UTF-8 become U+FFFD: other processes may have sent them.
std::string JsonText(const std::string& text);

// The beginning of `text`, of at most `most` bytes, that ends with a whole character.
std::string CutText(const std::string& text, size_t most);

// `text`, which came from the network and which nobody vouches for, as a log or a terminal may show
// it: in quotes, of printable ASCII alone, and no longer than `most` bytes of it.  So it can
// neither begin a line of its own nor end its quotes.
std::string ForeignText(const std::string& text, size_t most = 400);

// What is said of a refusal for the reason `text`.  `authenticated`: the peer has proved that it is
// of this job.
std::string RefusedBecause(const std::string& text, bool authenticated);

}  // namespace ps

#endif  // BYTEPS_BASE_LOG_H_
