#include "byteps/base/foreign_text.h"

#include <cstdio>

namespace ps {

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
