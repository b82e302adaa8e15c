// Text as JSON has it.
#ifndef BYTEPS_BASE_JSON_TEXT_H_
#define BYTEPS_BASE_JSON_TEXT_H_

#include <string>

namespace ps {

// `text` in quotes, with everything escaped that JSON does not allow inside.  Bytes that are no
// UTF-8 become U+FFFD: other processes may have sent them.
std::string JsonText(const std::string& text);

}  // namespace ps
#endif  // BYTEPS_BASE_JSON_TEXT_H_
