#include "ps/log_line.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "ps/json_text.h"
#include "ps/mutex.h"
#include "ps/utc_text.h"

namespace ps {
namespace {

std::string HostName() {
  char name[256];
  if (gethostname(name, sizeof(name)) != 0) return "-";
  name[sizeof(name) - 1] = '\0';
  return name;
}

bool Says(const char* variable, const char* value) {
  const char* text = getenv(variable);
  return text != nullptr && strcmp(text, value) == 0;
}

// Never destroyed: threads may write while the process ends.
struct Log {
  const bool json = Says("BYTEPS_LOG_FORMAT", "json");
  const bool hide_time = Says("BYTEPS_LOG_HIDE_TIME", "1");
  const std::string host = HostName();
  Mutex mu;
  std::string role PS_GUARDED_BY(mu) = "-";
  int rank PS_GUARDED_BY(mu) = -1;
  LoggedProblem problem PS_GUARDED_BY(mu);
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

void WriteAll(const std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = write(STDERR_FILENO, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno != EINTR) return;  // nobody reads: there is nobody to tell
    if (n > 0) done += n;
  }
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
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  const std::string time = log->hide_time ? "" : TimeText(us);
  const char* slash = strrchr(file, '/');
  const std::string source =
      std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line);

  MutexLock lock(&log->mu);
  if (severity == 'W' || severity == 'E' || severity == 'F') {
    ++log->problem.count;
    log->problem.unix_ms = us / 1000;
    log->problem.text = text;
  }
  const std::string rank = std::to_string(log->rank);
  std::string out;
  if (log->json) {
    out = "{";
    if (!time.empty()) out += "\"time\":\"" + time + "\",";
    out += std::string("\"severity\":\"") + NameOf(severity) +
           "\",\"role\":" + JsonText(log->role) + ",\"rank\":" + (log->rank < 0 ? "null" : rank) +
           ",\"host\":" + JsonText(log->host) + ",\"source\":" + JsonText(source) +
           ",\"message\":" + JsonText(text) + "}\n";
    return WriteAll(out);
  }
  const std::string head = (time.empty() ? "" : time + " ") + NameOf(severity) + " " + log->role +
                           " " + (log->rank < 0 ? "-" : rank) + " " + log->host + " " + source +
                           ": ";
  std::istringstream lines(text);
  for (std::string part; std::getline(lines, part);) out += head + part + "\n";
  WriteAll(out.empty() ? head + "\n" : out);
}

LoggedProblem LastLoggedProblem() {
  Log* log = TheLog();
  MutexLock lock(&log->mu);
  return log->problem;
}

}  // namespace ps
