// A moment as text.
#ifndef BYTEPS_BASE_UTC_TEXT_H_
#define BYTEPS_BASE_UTC_TEXT_H_

#include <ctime>
#include <string>

namespace ps {

// RFC 3339 without fraction and zone: "2025-03-01T12:00:00", in UTC.
inline std::string UtcText(time_t seconds) {
  tm parts;
  gmtime_r(&seconds, &parts);
  char text[32];
  strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  return text;
}

}  // namespace ps
#endif  // BYTEPS_BASE_UTC_TEXT_H_
