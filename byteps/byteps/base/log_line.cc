#include "byteps/base/log_line.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "byteps/base/log_output.h"
#include "byteps/base/mutex.h"
#include "byteps/base/text.h"

namespace ps {
namespace {

std::string HostName() {
  char name[256];
  if (gethostname(name, sizeof(name)) != 0) return "-";
  name[sizeof(name) - 1] = '\0';
  return name;
}

// What waits for a reader of the error output, at most.
constexpr size_t kWaitingBytes = 1 << 20;
// What the end of the process waits for such a reader.
constexpr double kLastWordsSeconds = 0.5;

std::string NoticeOf(uint64_t dropped);

bool Says(const char* variable, const char* value) {
  const char* text = getenv(variable);
  return text != nullptr && strcmp(text, value) == 0;
}

// Never destroyed: threads may write while the process ends.
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

// A fork waits until no thread is in the middle of a line.
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

// `text` as it stands in the log: a line for each of its own, or an object.
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
  for (std::string part; std::getline(lines, part);) out += head + part + "\n";
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

}  // namespace ps
