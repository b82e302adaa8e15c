// The lines of the log: one form for ps-lite, the engine and the server.
//
//   2026-01-31T12:29:46.330324Z WARNING server 0 host-a sum_server.cc:135: workers disagree ...
//   {"time":"2026-01-31T12:29:46.330324Z","severity":"WARNING","role":"server","rank":0,
//    "host":"host-a","source":"sum_server.cc:135","message":"workers disagree ..."}
//
// BYTEPS_LOG_FORMAT chooses: text, or json (one object a line).  Time is UTC.  An unknown rank is
// "-" in text and null in JSON.  BYTEPS_LOG_HIDE_TIME=1 leaves the time out.
#ifndef BYTEPS_BASE_LOG_LINE_H_
#define BYTEPS_BASE_LOG_LINE_H_

#include <cstdint>
#include <string>

namespace ps {

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

}  // namespace ps
#endif  // BYTEPS_BASE_LOG_LINE_H_
