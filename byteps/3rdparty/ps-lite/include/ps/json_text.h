// Text as JSON has it.
#ifndef PS_JSON_TEXT_H_
#define PS_JSON_TEXT_H_

#include <string>

namespace ps {

// `text` in quotes, with everything escaped that JSON does not allow inside.  Bytes that are no
// UTF-8 become U+FFFD: other processes may have sent them.
std::string JsonText(const std::string& text);

}  // namespace ps
#endif  // PS_JSON_TEXT_H_
