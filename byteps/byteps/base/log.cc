// The log, and the functions that byteps/common/logging.h declares. Upstream's logging.cc is not
// compiled: its lines name neither process nor host.
#include "byteps/base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/common/logging.h"

namespace byteps {
namespace common {
namespace {

constexpr const char* kLevels[] = {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"};
constexpr double kLastWordSeconds = 0.5;

std::atomic<LogLevel> default_level{LogLevel::WARNING};

}  // namespace

LogMessage::LogMessage(const char* fname, int line, LogLevel severity)
    : fname_(fname), line_(line), severity_(severity) {}

LogMessage::~LogMessage() {
  if (core::IsLogged(severity_)) GenerateLogMessage(false);
}

void LogMessage::GenerateLogMessage(bool /*log_time*/) {
  ps::WriteLogLine(LOG_LEVELS[static_cast<int>(severity_)], fname_, line_, str());
}

LogMessageFatal::LogMessageFatal(const char* file, int line)
    : LogMessage(file, line, LogLevel::FATAL) {}

LogMessageFatal::~LogMessageFatal() {
  GenerateLogMessage(false);
  ps::FlushLog(kLastWordSeconds);
  abort();
}

LogLevel MinLogLevelFromEnv() {
  const char* text = getenv("BYTEPS_LOG_LEVEL");
  for (int level = 0; level < 6; ++level) {
    if (text != nullptr && std::string(text) == kLevels[level]) return LogLevel(level);
  }
  return default_level;
}

}  // namespace common

namespace core {

void SetDefaultLogLevel(LogLevel level) { common::default_level = level; }

bool IsLogged(LogLevel severity) {
  static const LogLevel least = common::MinLogLevelFromEnv();
  return severity >= least;
}

}  // namespace core
}  // namespace byteps

namespace ps {
namespace {

std::string HostName() {
  char name[256];
  if (gethostname(name, sizeof(name)) != 0) return "-";
  name[sizeof(name) - 1] = '\0';
  return name;
}

// Limit of log bytes in this process that wait for the reader of standard error.
constexpr size_t kWaitingBytes = 1 << 20;
// Time in seconds that the end of the process waits for the reader of standard error.
constexpr double kLastWordsSeconds = 0.5;

std::string NoticeOf(uint64_t dropped);

bool Says(const char* variable, const char* value) {
  const char* text = getenv(variable);
  return text != nullptr && strcmp(text, value) == 0;
}

// The log is never destroyed, because threads may write while the process ends.
struct Log {
  Log();

  const bool json = Says("BYTEPS_LOG_FORMAT", "json");
  const bool hide_time = Says("BYTEPS_LOG_HIDE_TIME", "1");
  const std::string host = HostName();
  Mutex mu;
  std::string role PS_GUARDED_BY(mu) = "-";
  int rank PS_GUARDED_BY(mu) = -1;
  LoggedProblem problem PS_GUARDED_BY(mu);
  LogOutput output{STDERR_FILENO, kWaitingBytes, NoticeOf};
};

Log* TheLog() {
  static Log* log = new Log();
  return log;
}

const char* NameOf(char severity) {
  switch (severity) {
    case 'T':
      return "TRACE";
    case 'D':
      return "DEBUG";
    case 'W':
      return "WARNING";
    case 'E':
      return "ERROR";
    case 'F':
      return "FATAL";
    default:
      return "INFO";
  }
}

std::string TimeText(int64_t microseconds) {
  char fraction[16];
  snprintf(fraction, sizeof(fraction), ".%06dZ", static_cast<int>(microseconds % 1000000));
  return UtcText(microseconds / 1000000) + fraction;
}

// Makes a fork wait until no thread is writing a line.
void BeforeFork() PS_NO_THREAD_SAFETY_ANALYSIS {
  TheLog()->mu.Lock();
  TheLog()->output.BeforeFork();
}
void AfterFork(bool in_child) PS_NO_THREAD_SAFETY_ANALYSIS {
  TheLog()->output.AfterFork(in_child);
  TheLog()->mu.Unlock();
}

Log::Log() {
  pthread_atfork(BeforeFork, [] { AfterFork(false); }, [] { AfterFork(true); });
  atexit([] { FlushLog(kLastWordsSeconds); });
}

// Returns the length in bytes of the UTF-8 character at text[at]; 0 if it is not valid.
size_t CharacterAt(const std::string& text, size_t at) {
  const auto byte = [&text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return 1;
  const size_t size = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (size == 0 || at + size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  }
  // Refuses overlong forms, surrogates, and code points above the last one.
  const unsigned char second = byte(at + 1);
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return wrong ? 0 : size;
}

// Replaces each byte that is not valid UTF-8 by U+FFFD. Such bytes may come from other processes.
std::string AsUtf8(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t size = CharacterAt(text, at);
    size == 0 ? out += "\xef\xbf\xbd" : out.append(text, at, size);
    at += std::max<size_t>(size, 1);
  }
  return out;
}

// Returns `text` in the log's format: one log line per line of `text`, or a JSON object.
std::string Render(Log* log, char severity, const char* file, int line, const std::string& text,
                   int64_t us) PS_REQUIRES(log->mu) {
  const std::string time = log->hide_time ? "" : TimeText(us);
  const char* slash = strrchr(file, '/');
  const std::string source =
      std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line);
  const std::string rank = std::to_string(log->rank);
  std::string out;
  if (log->json) {
    out = "{";
    if (!time.empty()) out += "\"time\":\"" + time + "\",";
    return out + "\"severity\":\"" + NameOf(severity) + "\",\"role\":" + JsonText(log->role) +
           ",\"rank\":" + (log->rank < 0 ? "null" : rank) + ",\"host\":" + JsonText(log->host) +
           ",\"source\":" + JsonText(source) + ",\"message\":" + JsonText(text) + "}\n";
  }
  const std::string head = (time.empty() ? "" : time + " ") + NameOf(severity) + " " + log->role +
                           " " + (log->rank < 0 ? "-" : rank) + " " + log->host + " " + source +
                           ": ";
  std::istringstream lines(text);
  for (std::string part; std::getline(lines, part);) out += head + AsUtf8(part) + "\n";
  return out.empty() ? head + "\n" : out;
}

int64_t MicrosecondsNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

std::string NoticeOf(uint64_t dropped) {
  Log* log = TheLog();
  MutexLock lock(&log->mu);
  return Render(log, 'W', __FILE__, __LINE__,
                std::to_string(dropped) +
                    " lines were dropped here: nothing read the error output for a while",
                MicrosecondsNow());
}

}  // namespace

void SetLogIdentity(const std::string& role, int rank) {
  Log* log = TheLog();
  MutexLock lock(&log->mu);
  log->role = role;
  log->rank = rank;
}

void WriteLogLine(char severity, const char* file, int line, const std::string& text) {
  Log* log = TheLog();
  const int64_t us = MicrosecondsNow();
  MutexLock lock(&log->mu);
  if (severity == 'W' || severity == 'E' || severity == 'F') {
    ++log->problem.count;
    log->problem.unix_ms = us / 1000;
    log->problem.text = text;
  }
  log->output.Write(Render(log, severity, file, line, text, us));
}

void FlushLog(double seconds) { TheLog()->output.Flush(seconds); }

LoggedProblem LastLoggedProblem() {
  Log* log = TheLog();
  MutexLock lock(&log->mu);
  return log->problem;
}

namespace {

// Interval of checks whether the descriptor has room, where the kernel does not report it.
constexpr int kLookMs = 100;

bool HasRoom(int fd, int timeout_ms) {
  pollfd item{fd, POLLOUT, 0};
  // The wait is ended by room in the descriptor's buffer; deadline: kLookMs.
  return poll(&item, 1, timeout_ms) > 0;
}

}  // namespace

LogOutput::LogOutput(int fd, size_t limit, std::function<std::string(uint64_t)> notice)
    : fd_(fd), limit_(limit), notice_(std::move(notice)) {}

// Other processes may share the open file of the descriptor, and O_NONBLOCK would affect them. So
// this process opens pipes and terminals again for itself.
void LogOutput::Look() {
  struct stat now;
  if (fstat(fd_, &now) != 0) return;
  if (known_ && now.st_dev == device_ && now.st_ino == inode_) return;
  known_ = true;
  device_ = now.st_dev;
  inode_ = now.st_ino;
  if (reopened_ >= 0) close(reopened_);
  reopened_ = -1;
  kind_ = Kind::kFile;
  if (S_ISSOCK(now.st_mode)) kind_ = Kind::kSocket;
  if (!S_ISFIFO(now.st_mode) && !S_ISCHR(now.st_mode)) return;
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  reopened_ = open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  kind_ = reopened_ >= 0 ? Kind::kReopened : Kind::kOther;  // e.g. another user's terminal
}

size_t LogOutput::Try(const char* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    ssize_t n = 0;
    const char* from = data + done;
    const size_t left = bytes - done;
    switch (kind_) {
      case Kind::kFile:
        n = write(fd_, from, left);
        break;
      case Kind::kReopened:
        n = write(reopened_, from, left);
        break;
      case Kind::kSocket:
        n = send(fd_, from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      case Kind::kOther:
        // A writable pipe has room for PIPE_BUF bytes.
        if (!HasRoom(fd_, 0)) return done;
        n = write(fd_, from, std::min<size_t>(left, PIPE_BUF));
        break;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return done;
    if (n < 0) return bytes;  // the reader is gone
    done += n;
  }
  return done;
}

void LogOutput::Write(const std::string& text) {
  MutexLock lock(&mu_);
  if (!draining_) {
    Look();
    const size_t done = Try(text.data(), text.size());
    if (done == text.size()) return;
    waiting_.push_back(text.substr(done));
  } else if (dropped_ > 0 || waiting_bytes_ + text.size() > limit_) {
    ++dropped_;
    return;
  } else {
    waiting_.push_back(text);
  }
  waiting_bytes_ += waiting_.back().size();
  if (draining_) return;
  draining_ = true;
  try {
    std::thread(&LogOutput::Drain, this).detach();
  } catch (const std::system_error&) {  // no thread available
    draining_ = false;
    waiting_.clear();
    waiting_bytes_ = 0;
    ++dropped_;
  }
}

void LogOutput::Drain() {
  pthread_setname_np(pthread_self(), "bps-log");
  MutexLock lock(&mu_);
  while (true) {
    while (!waiting_.empty()) {
      Look();
      std::string& text = waiting_.front();
      const size_t done = Try(text.data(), text.size());
      waiting_bytes_ -= done;
      if (done == text.size()) {
        waiting_.pop_front();
        continue;
      }
      text.erase(0, done);
      const int fd = kind_ == Kind::kReopened ? reopened_ : fd_;
      lock.Unlock();
      // Pauses: a descriptor may report room although there is too little. The wait is ended by the
      // time; deadline: a millisecond.
      if (HasRoom(fd, kLookMs)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.Lock();
    }
    if (dropped_ == 0) break;
    const uint64_t dropped = std::exchange(dropped_, 0);
    lock.Unlock();
    std::string text = notice_(dropped);
    lock.Lock();
    waiting_bytes_ += text.size();
    waiting_.push_front(std::move(text));
  }
  draining_ = false;
  empty_.NotifyAll();
}

void LogOutput::Flush(double seconds) {
  MutexLock lock(&mu_);
  // The wait is ended by an empty queue; deadline: the caller's.
  empty_.WaitFor(&mu_, std::chrono::duration<double>(seconds),
                 [this]() PS_REQUIRES(mu_) { return !draining_; });
}

// The lock is held between the two calls.
void LogOutput::BeforeFork() PS_NO_THREAD_SAFETY_ANALYSIS { mu_.Lock(); }

void LogOutput::AfterFork(bool in_child) PS_NO_THREAD_SAFETY_ANALYSIS {
  if (in_child) {
    waiting_.clear();
    waiting_bytes_ = dropped_ = 0;
    draining_ = false;
  }
  mu_.Unlock();
}

}  // namespace ps

namespace byteps {
namespace core {

std::string Seconds(double s) {
  char text[32];
  snprintf(text, sizeof(text), "%.1f s", s);
  return text;
}

std::string Hex(uint64_t x) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

}  // namespace core
}  // namespace byteps

namespace ps {

std::string UtcText(time_t seconds) {
  tm parts;
  gmtime_r(&seconds, &parts);
  char text[32];
  strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  return text;
}

std::string CutText(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  // `end` moves back to the first byte of a character. A character has at most four bytes.
  while (end > 0 && most - end < 4 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) {
    const size_t size = CharacterAt(text, at);
    if (size == 0) {
      out += "\\ufffd";
    } else if (text[at] == '"' || text[at] == '\\') {
      out += std::string("\\") + text[at];
    } else if (static_cast<unsigned char>(text[at]) < 0x20 || text[at] == 0x7f) {
      char code[8];
      snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned>(text[at]));
      out += code;
    } else {
      out.append(text, at, size);
    }
    at += size == 0 ? 1 : size;
  }
  return out + "\"";
}

std::string ForeignText(const std::string& text, size_t most) {
  std::string shown = "\"";
  for (const char c : text.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte < 127 && c != '"' && c != '\\') {
      shown += c;
      continue;
    }
    char escaped[8];
    snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
    shown += escaped;
  }
  return shown + (text.size() > most ? "\"..." : "\"");
}

std::string RefusedBecause(const std::string& text, bool authenticated) {
  return std::string("it refused the connection") +
         (authenticated ? ": " : "; it has not authenticated, and says: ") + ForeignText(text);
}

}  // namespace ps
