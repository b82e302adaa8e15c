// What byteps/common/logging.h declares, over base/log_line.h.  Upstream's logging.cc is not
// compiled: its lines name neither the process nor the host.
#include "byteps/base/log.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "byteps/base/log_line.h"
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
  static const LogLevel least = MinLogLevelFromEnv();
  if (severity_ >= least) GenerateLogMessage(false);
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

}  // namespace core
}  // namespace byteps
