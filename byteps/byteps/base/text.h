// Numbers as errors state them.
#ifndef BYTEPS_BASE_TEXT_H_
#define BYTEPS_BASE_TEXT_H_

#include <cstdint>
#include <cstdio>
#include <string>

namespace byteps {
namespace core {

// "2.5 s"
inline std::string Seconds(double s) {
  char text[32];
  snprintf(text, sizeof(text), "%.1f s", s);
  return text;
}

// "0x1f"
inline std::string Hex(uint64_t x) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_TEXT_H_
