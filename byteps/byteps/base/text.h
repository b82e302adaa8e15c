// Numbers, moments and foreign bytes as text.
#ifndef BYTEPS_BASE_TEXT_H_
#define BYTEPS_BASE_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>

namespace byteps {
namespace core {

// "2.5 s"
std::string Seconds(double s);

// "0x1f"
std::string Hex(uint64_t x);

}  // namespace core
}  // namespace byteps

namespace ps {

// RFC 3339 without fraction and zone: "2025-03-01T12:00:00", in UTC.
std::string UtcText(time_t seconds);

// `text` in quotes, with everything escaped that JSON does not allow inside.  Bytes that are no
// UTF-8 become U+FFFD: other processes may have sent them.
std::string JsonText(const std::string& text);

// `text`, which came from the network and which nobody vouches for, as a log or a terminal may show
// it: in quotes, of printable ASCII alone, and no longer than `most` bytes of it.  So it can
// neither begin a line of its own nor end its quotes.
std::string ForeignText(const std::string& text, size_t most = 400);

// What is said of a refusal for the reason `text`.  `authenticated`: the peer has proved that it is
// of this job.
std::string RefusedBecause(const std::string& text, bool authenticated);

}  // namespace ps
#endif  // BYTEPS_BASE_TEXT_H_
