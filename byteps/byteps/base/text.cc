#include "byteps/base/text.h"

#include <cstdio>

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
namespace {

// How many bytes at text[at] are one character in UTF-8; 0 when they are none.
size_t CharacterAt(const std::string& text, size_t at) {
  const auto byte = [&text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return 1;
  const size_t size = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (size == 0 || at + size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  }
  // Longer than need be, halves of a pair, and past the last character.
  const unsigned char second = byte(at + 1);
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return wrong ? 0 : size;
}

}  // namespace

std::string UtcText(time_t seconds) {
  tm parts;
  gmtime_r(&seconds, &parts);
  char text[32];
  strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  return text;
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
